"""What GPUs can do at most: dense matrix products a second, from NVIDIA's data sheets.

Sheets give bf16 with sparsity; dense is half of it. fp32 is the rate without TF32, which the trainer leaves off.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """A GPU's peak rates.

    Attributes:
        words: What the names of such devices hold, as CUDA or Ray gives them.
        bf16: TFLOP/s of dense bf16 products.
        fp32: TFLOP/s of fp32.
        source: The data sheet.
    """

    words: tuple[str, ...]
    bf16: float
    fp32: float
    source: str


# The first that fits a name counts, so what is said of a form stands before the kind.
PEAKS = (
    Peak(("GB200",), 2500, 80, "NVIDIA GB200 NVL72 data sheet"),
    Peak(("B200",), 2250, 75, "NVIDIA HGX B200 data sheet"),
    Peak(("H200", "NVL"), 835.5, 60, "NVIDIA H200 NVL data sheet"),
    Peak(("H200",), 989, 67, "NVIDIA H200 data sheet"),
    Peak(("H100", "NVL"), 835.5, 60, "NVIDIA H100 NVL data sheet"),
    Peak(("H100", "PCIe"), 756.5, 51, "NVIDIA H100 PCIe data sheet"),
    Peak(("H100",), 989, 67, "NVIDIA H100 SXM data sheet"),
    Peak(("L40S",), 362, 91.6, "NVIDIA L40S data sheet"),
    Peak(("A100",), 312, 19.5, "NVIDIA A100 data sheet"),
)


def peak_of(device_name: str) -> Peak | None:
    """The peak of a device by its name, for example ``NVIDIA H100 80GB HBM3``; ``None`` of one that is not listed."""
    words = device_name.upper()
    return next((peak for peak in PEAKS if all(word.upper() in words for word in peak.words)), None)


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """Dense FLOPs a second at ``bf16`` or ``fp32``; ``None`` of a device that is not listed."""
    peak = peak_of(device_name)
    if peak is None:
        return None
    return {"bf16": peak.bf16, "fp32": peak.fp32}[precision] * 1e12
