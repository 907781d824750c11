"""How long a collective takes: α + n/β over a ring, for links by name or as measured.

=============  =====================  ==========================
collective     steps over the ring    bytes through a link
=============  =====================  ==========================
all_reduce     2 (p − 1)              2 (p − 1)/p of the payload
all_gather     p − 1                  p − 1 payloads
reduce_scatter p − 1                  (p − 1)/p of the payload
all_to_all     p − 1                  (p − 1)/p of the payload
=============  =====================  ==========================

The payload is what a rank hands over (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass

# What large messages reach of a link's nominal rate: an assumption, which a fit to a live group replaces.
EFFICIENCY = 0.8


@dataclass(frozen=True)
class Interconnect:
    """A link that every rank has to its neighbours in the ring.

    Attributes:
        base_seconds: Of a collective, however small and among however few ranks.
        hop_seconds: Of each step over the ring.
        bytes_per_second: That a link carries in one direction.
        description: What it stands for and where its figures are from.
    """

    base_seconds: float
    hop_seconds: float
    bytes_per_second: float
    description: str

    def seconds(self, collective: str, ranks: int, payload_bytes: float, calls: int = 1) -> float:
        """Time of ``calls`` collectives one after the other whose payloads are ``payload_bytes`` together.

        Raises:
            ValueError: The collective is not one of the table's.
        """
        if ranks == 1:
            return 0.0
        steps = (2 if collective == "all_reduce" else 1) * (ranks - 1)
        start = self.base_seconds + steps * self.hop_seconds
        return calls * start + link_bytes(collective, ranks, payload_bytes) / self.bytes_per_second


def link_bytes(collective: str, ranks: int, payload_bytes: float) -> float:
    """Bytes that a collective puts through each link of the ring.

    Raises:
        ValueError: The collective is not one of the table's.
    """
    shares = {"all_reduce": 2 / ranks, "all_gather": 1.0, "reduce_scatter": 1 / ranks, "all_to_all": 1 / ranks}
    if collective not in shares:
        raise ValueError(f"there is no model of {collective!r}; there is one of {', '.join(shares)}")
    return shares[collective] * (ranks - 1) * payload_bytes


_NCCL = "NCCL's tuning table for a ring under its Simple protocol (8.4 µs, and {hop} µs a step)"
_NVLINK = "{rate} GB/s a direction (NVIDIA's data sheet) at 80 %; " + _NCCL.format(hop=3.4)

INTERCONNECTS = {
    "nvlink-a100": Interconnect(8.4e-6, 3.4e-6, EFFICIENCY * 300e9, "NVLink 3, " + _NVLINK.format(rate=300)),
    "nvlink-h200": Interconnect(8.4e-6, 3.4e-6, EFFICIENCY * 450e9, "NVLink 4, " + _NVLINK.format(rate=450)),
    "fabric-200g": Interconnect(
        8.4e-6, 14e-6, EFFICIENCY * 25e9, "a 200 Gb/s adapter a GPU at 80 %; " + _NCCL.format(hop=14)
    ),
}


def fit(ranks: int, payload_bytes: Sequence[int], seconds: Sequence[float]) -> Interconnect:
    """α and β of all-reduces as they were measured, by least squares of the relative errors.

    Args:
        ranks: Ranks of the group; α is of this many.
        payload_bytes: Payload of each all-reduce.
        seconds: What it took.

    Raises:
        ValueError: There are not two different payloads, or a time is not above 0.
    """
    if len(set(payload_bytes)) < 2 or min(seconds) <= 0:
        raise ValueError("a fit needs all-reduces of two or more sizes, and the time that each took")
    sent = [link_bytes("all_reduce", ranks, payload) for payload in payload_bytes]
    weights = [1 / second**2 for second in seconds]
    total = sum(weights)
    mean_sent, mean_seconds = (
        sum(weight * value for weight, value in zip(weights, values, strict=True)) / total for values in (sent, seconds)
    )
    covariance = sum(
        weight * (x - mean_sent) * (y - mean_seconds) for weight, x, y in zip(weights, sent, seconds, strict=True)
    )
    slope = covariance / sum(weight * (x - mean_sent) ** 2 for weight, x in zip(weights, sent, strict=True))
    start = mean_seconds - slope * mean_sent
    return Interconnect(start, 0.0, 1 / slope, f"fitted to {len(seconds)} all-reduces among {ranks} ranks")
