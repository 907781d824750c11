"""Speed of a kind of device: rates that convert work (``work``) into seconds.

    seconds = FLOPs of products / rate + FLOPs of attention / rate + bytes / bandwidth + starts of kernels

Reading and writing a product's operands is added rather than hidden, so small sizes come out slow without further
terms: at 234 TFLOP/s and 1.4 TB/s a product of 16,384 × 1,024 by 1,024 × 1,024 reaches 176, one with widths of 4,096
reaches 215. Nominal figures are the same shares of the data sheets' peaks on every GPU. They were fitted to the 1B and
3B rows of BOOST's table (arXiv 2512.12131, A100); its 7B rows were held out
(``tests/unit/test_published_times.py``).
"""

from dataclasses import dataclass
from math import exp

from boost_core.hardware import LINK_EFFICIENCY, Device
from boost_core.plan.work import Work

PRODUCT_SHARE, ATTENTION_SHARE, BANDWIDTH_SHARE = 0.75, 0.5, 0.7
_ASSUMED_SPREAD = 0.2  # the nine published times are within 0.1, of one kind of GPU and one trainer
_TENTH = 1.2816  # standard deviations from the middle of a normal distribution to its lowest and its highest tenth
_UPDATE_BYTES = 28  # of a weight: its gradient, master and moments read, master and moments written, in fp32


@dataclass(frozen=True)
class Profile:
    """One kind of device, as used by one rank.

    Attributes:
        product_flops: FLOPs per second of large matrix products.
        attention_flops: FLOPs per second of attention.
        bandwidth: Bytes per second at which passes and operands are read and written.
        start_seconds: Launch overhead of each product.
        block_seconds: Time to launch a block's kernels for a micro-batch; does not apply where steps are captured as
            CUDA graphs.
        overlap: Share hidden of the shorter of an exchange and the work that may run meanwhile; 0 if not measured.
        spread: Standard deviation of the logarithm of measured over predicted step time.
        measured: Whether it was measured on such a device, rather than assumed.
        description: The device and the source of its figures.
        fp8_speedup: Speedup of 8-bit products, by data sheets.
        host_bandwidth: Bytes per second to or from the host's memory.
        launches_in_turn: Whether each kernel is launched once the one before has ended, as on a CPU, rather than while
            it runs.
    """

    product_flops: float
    attention_flops: float
    bandwidth: float
    start_seconds: float
    block_seconds: float
    overlap: float
    spread: float
    measured: bool
    description: str
    fp8_speedup: float = 1.0
    host_bandwidth: float = LINK_EFFICIENCY * 32e9  # of a device that is not known: PCIe 4
    launches_in_turn: bool = False

    @classmethod
    def nominal(cls, device: Device, precision: str) -> "Profile":
        """Return the profile to expect from a data sheet."""
        precision = "bf16" if precision == "fp8" else precision
        peak = device.tflops[precision] * 1e12
        shares = f"products at {PRODUCT_SHARE:.0%}, attention at {ATTENTION_SHARE:.0%}"
        return cls(
            PRODUCT_SHARE * peak, ATTENTION_SHARE * peak, BANDWIDTH_SHARE * device.bandwidth, 0.0, 5e-4, 0.0,
            _ASSUMED_SPREAD, False,
            f"{peak / 1e12:g} TFLOP/s of dense {precision} and {device.bandwidth / 1e12:g} TB/s ({device.source}), "
            f"{shares}, bytes at {BANDWIDTH_SHARE:.0%}; 0.5 ms per block; assumed",
            device.fp8_speedup, LINK_EFFICIENCY * device.host_bandwidth,
        )  # fmt: skip

    def seconds(self, work: Work) -> float:
        """Return the time of some work."""
        return (
            (work.product_flops + work.fp8_flops / self.fp8_speedup) / self.product_flops
            + work.attention_flops / self.attention_flops
            + work.moved_bytes / self.bandwidth
            + work.starts * self.start_seconds
        )

    def of_a_block(self, work: Work, captured: bool = False) -> float:
        """Return the time of a block's work for a micro-batch, with launching it.

        Args:
            work: The work.
            captured: Whether it is replayed from a CUDA graph, which needs no launches.
        """
        computing, launching = self.seconds(work), 0.0 if captured else self.block_seconds
        return computing + launching if self.launches_in_turn else max(computing, launching)

    def exposed(self, exchange_seconds: float, work_seconds: float) -> float:
        """Return the time that an exchange adds to the work that runs meanwhile."""
        return exchange_seconds - self.overlap * min(exchange_seconds, work_seconds)

    def update_seconds(self, weights: float, element_bytes: int) -> float:
        """Return the time of the optimizer's pass over this many weights of a rank."""
        return weights * (_UPDATE_BYTES + element_bytes) / self.bandwidth


def range_of(seconds: float, spread: float) -> tuple[float, float]:
    """Return the range expected to contain 80 % of step times, given the prediction and its spread."""
    return seconds * exp(-_TENTH * spread), seconds * exp(_TENTH * spread)


def of_cores(cores: float) -> Profile:
    """Return the profile of CPU cores: the rates of one core times their number."""
    return Profile(
        2e10 * cores, 2e10 * cores, 5e9 * cores, 0.0, 2e-3, 0.0, _ASSUMED_SPREAD, False,
        "20 GFLOP/s and 5 GB/s per core and 2 ms per block, all assumed", host_bandwidth=5e9 * cores,
        launches_in_turn=True,
    )  # fmt: skip
