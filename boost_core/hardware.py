"""Peak rates of devices and links, and the size of an element of each type: stated here and nowhere else.

Rates are the data sheets' peaks; the plan estimates what fraction of them is reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

# Bytes of an element that is stored or sent at each precision; in fp8 only the operands of products are in 8 bits.
BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}

ACCELERATOR_LABEL = "ray.io/accelerator-type"  # set by Ray on nodes with GPUs


@dataclass(frozen=True)
class Shares:
    """What training reaches of a data sheet's peaks.

    Attributes:
        products: Share of the dense peak in large matrix products.
        attention: The same in torch's flash attention, forward and backward, of the pairs that a causal mask leaves.
        source: Where they come from.
    """

    products: float
    attention: float
    source: str


# Products were fitted to every second of the runs in ``tests/benchmarks/published_runs.csv``, and on an A100 also to
# BOOST's 1B and 3B rows (``tests/unit/test_published_times.py``). An H100's peak is further away as its power limit
# lowers the clock in long products.
_AMPERE = Shares(
    0.80, 0.45, "fitted to published runs on A100s; FlashAttention-2 alone reaches 0.5 to 0.73 (arXiv 2307.08691)"
)  # fmt: skip
_HOPPER = Shares(
    0.66, 0.30, "products fitted to published runs on H100s; FlashAttention-2's 262 to 335 TFLOP/s with a causal mask "
    "(arXiv 2407.08608, figure 5), of 989"
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A kind of GPU.

    Attributes:
        words: Words that occur in the names that CUDA or Ray gives to such devices.
        tflops: TFLOP/s of dense products at each precision. Data sheets give bf16 with sparsity; dense is half of it.
            fp32 is the rate without TF32, which the trainer leaves off. Devices without fp8 have bf16's rate,
            since the trainer then computes in bf16.
        source: The data sheet.
        bandwidth: Memory bandwidth, in bytes per second.
        host_bandwidth: Bandwidth of the link to the host's memory in one direction, in bytes per second.
        fp8_speedup: Speed of products in fp8 relative to bf16.
        shares: What training reaches of its peaks.
        memory: Bytes of memory by Ray's name of each variant, where known. Gigabytes as in NVIDIA's data sheets,
            which are some 6 % less than what drivers report.
    """

    words: tuple[str, ...]
    tflops: Mapping[str, float]
    source: str
    bandwidth: float
    host_bandwidth: float
    fp8_speedup: float
    shares: Shares
    memory: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


# GB/s in one direction, over sixteen lanes; data sheets give both directions together, also for NVLink-C2C.
_PCIE_4, _PCIE_5, _C2C = 32, 64, 450


# NVIDIA's, by data sheet: TFLOP/s in fp8, bf16 and fp32, TB/s of memory, GB/s to the host, words if not the first of
# the sheet's name, and GB of memory by Ray's names.
_SHEETS: tuple[tuple[str, float, float, float, float, float, tuple[str, ...], dict[str, int]], ...] = (
    ("GB200 NVL72", 5000, 2500, 80, 8.0, _C2C, (), {}),
    ("HGX B200", 4500, 2250, 75, 8.0, _PCIE_5, ("B200",), {}),
    ("H200 NVL", 1671, 835.5, 60, 4.8, _PCIE_5, ("H200", "NVL"), {}),
    ("H200", 1979, 989, 67, 4.8, _PCIE_5, (), {"H200": 141}),
    ("H100 NVL", 1671, 835.5, 60, 3.9, _PCIE_5, ("H100", "NVL"), {}),
    ("H100 PCIe", 1513, 756.5, 51, 2.0, _PCIE_5, ("H100", "PCIe"), {}),
    ("H100 SXM", 1979, 989, 67, 3.35, _PCIE_5, (), {"H100": 80}),
    ("L40S", 733, 362, 91.6, 0.864, _PCIE_4, (), {}),
    ("A100", 312, 312, 19.5, 2.039, _PCIE_4, (), {"A100": 80, "A100-40G": 40, "A100-80G": 80}),
)

# The first match for a name wins, so variants come before the general kind.
DEVICES = tuple(
    Device(
        words or (sheet.split()[0],), {"fp8": fp8, "bf16": bf16, "fp32": fp32}, f"NVIDIA {sheet} data sheet",
        terabytes * 1e12, host * 1e9, fp8 / bf16, _AMPERE if sheet == "A100" else _HOPPER,
        {name: gigabytes * 10**9 for name, gigabytes in memory.items()},
    )
    for sheet, fp8, bf16, fp32, terabytes, host, words, memory in _SHEETS
)  # fmt: skip

# Memory in bytes, where known, by Ray's names.
DEVICE_BYTES = dict(sorted((name, size) for device in DEVICES for name, size in device.memory.items()))


def device_named(name: str) -> Device | None:
    """Look up a device by its name, for example ``NVIDIA H100 80GB HBM3``; ``None`` if it is not listed."""
    upper = name.upper()
    return next((device for device in DEVICES if all(word.upper() in upper for word in device.words)), None)


def peak_flops_per_second(device_name: str, precision: str) -> float | None:
    """Dense FLOPs per second at ``fp8``, ``bf16`` or ``fp32``; ``None`` if the device is not listed."""
    device = device_named(device_name)
    return None if device is None else device.tflops[precision] * 1e12


@dataclass(frozen=True)
class Link:
    """A rank's link to its neighbours in a ring.

    Attributes:
        base_seconds: Fixed latency of a collective of any size among any number of ranks.
        hop_seconds: Latency of each step around the ring.
        bytes_per_second: Bandwidth in one direction.
        description: What kind of link it is and where its figures come from.
    """

    base_seconds: float
    hop_seconds: float
    bytes_per_second: float
    description: str


LINK_EFFICIENCY = 0.8  # fraction of the nominal rate that large messages reach: assumed until fitted to a live group
_NCCL = "NCCL's tuning table for a ring under its Simple protocol (8.4 µs, and {hop} µs a step)"
_NVLINK = "{rate} GB/s a direction (NVIDIA's data sheet) at 80 %; " + _NCCL.format(hop=3.4)

LINKS = {
    "nvlink-a100": Link(8.4e-6, 3.4e-6, LINK_EFFICIENCY * 300e9, "NVLink 3, " + _NVLINK.format(rate=300)),
    "nvlink-h200": Link(8.4e-6, 3.4e-6, LINK_EFFICIENCY * 450e9, "NVLink 4, " + _NVLINK.format(rate=450)),
    "fabric-200g": Link(
        8.4e-6, 14e-6, LINK_EFFICIENCY * 25e9, "a 200 Gb/s adapter a GPU at 80 %; " + _NCCL.format(hop=14)
    ),
}
# 5 ms for 256 KiB and 62 ms for 32 MiB among four processes on two cores: six steps of 0.76 ms, and 0.88 GB/s.
LOOPBACK = Link(0.0, 7.6e-4, 8.8e8, "gloo over loopback, measured among four processes")
