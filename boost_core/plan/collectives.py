"""Time of a collective: α + n/β over a ring, by the link; and over several levels of a network.

=============  =====================  ==========================
collective     steps around the ring  bytes through a link
=============  =====================  ==========================
all_reduce     2 (p − 1)              2 (p − 1)/p of the payload
all_gather     p − 1                  p − 1 payloads
reduce_scatter p − 1                  (p − 1)/p of the payload
all_to_all     p − 1                  (p − 1)/p of the payload
=============  =====================  ==========================

The payload is what a rank passes in (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005).

Over several levels (``cluster``) ranks scatter inside, reduce outside and gather inside: one ring per level, whose
payload is that of the level inside divided by the ranks there, or multiplied for an all-gather. Alternatively a single
ring goes through all levels at the pace of the slowest. The faster of the two is taken.
"""

import math
from collections.abc import Sequence

from boost_core.hardware import Link
from boost_core.plan.cluster import Cluster, Row


def collective_seconds(link: Link, collective: str, ranks: int, payload_bytes: float, calls: int = 1) -> float:
    """Return the time of ``calls`` consecutive collectives with ``payload_bytes`` in total.

    Raises:
        ValueError: The collective is not one of the table's.
    """
    if ranks == 1:
        return 0.0
    steps = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    start = link.base_seconds + steps * link.hop_seconds
    return calls * start + link_bytes(collective, ranks, payload_bytes) / link.bytes_per_second


def group_seconds(cluster: Cluster, row: Row, collective: str, payload_bytes: float, calls: int = 1) -> float:
    """Like ``collective_seconds``, for groups spread over several levels that all send at once.

    Args:
        cluster: The network.
        row: Number of ranks of each group at each level.
        collective: A collective of the table.
        payload_bytes: Payload of all calls together.
        calls: Number of calls.

    Raises:
        ValueError: The collective is not in the table.
    """
    spread = [(level.among(ranks), ranks) for level, ranks in zip(cluster.levels, row, strict=True) if ranks > 1]
    if not spread:
        return 0.0
    flat = collective_seconds(_slowest(spread), collective, math.prod(row), payload_bytes, calls)
    if len(spread) == 1:
        return flat
    nested, payload = 0.0, payload_bytes
    for link, ranks in reversed(spread) if collective == "all_gather" else spread:
        nested += collective_seconds(link, collective, ranks, payload, calls)
        payload *= {"all_gather": ranks, "all_to_all": 1}.get(collective, 1 / ranks)
    return min(nested, flat)


def _slowest(spread: Sequence[tuple[Link, int]]) -> Link:
    """Return the link of a ring through all levels: in each step some rank waits for the slowest."""
    links = [link for link, _ in spread]
    return Link(
        max(link.base_seconds for link in links),
        max(link.hop_seconds for link in links),
        min(link.bytes_per_second for link in links),
        "the slowest of several levels",
    )


def link_bytes(collective: str, ranks: int, payload_bytes: float) -> float:
    """Return the bytes that a collective sends through each link of the ring.

    Raises:
        ValueError: The collective is not in the table.
    """
    shares = {"all_reduce": 2 / ranks, "all_gather": 1.0, "reduce_scatter": 1 / ranks, "all_to_all": 1 / ranks}
    if collective not in shares:
        raise ValueError(f"there is no model of {collective!r}; choose one of {', '.join(shares)}")
    return shares[collective] * (ranks - 1) * payload_bytes


def fit(ranks: int, payload_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit α and β to measured all-reduces by least squares of the relative errors.

    Neither is negative: times proportional to the payload give an α of 0, and if larger payloads took no longer, β is
    infinite.

    Args:
        ranks: Ranks of the group; α holds for this many.
        payload_bytes: Payload of each all-reduce.
        seconds: Time of each all-reduce.

    Raises:
        ValueError: There are fewer than two different payloads, or a time is not positive.
    """
    if len(set(payload_bytes)) < 2 or min(seconds) <= 0:
        raise ValueError("a fit needs all-reduces of two or more sizes, each with a positive time")
    sent = [link_bytes("all_reduce", ranks, payload) for payload in payload_bytes]
    weights = [1 / second**2 for second in seconds]
    total = sum(weights)
    mean_sent, mean_seconds = (
        sum(weight * value for weight, value in zip(weights, values, strict=True)) / total for values in (sent, seconds)
    )
    covariance = sum(
        weight * (x - mean_sent) * (y - mean_seconds) for weight, x, y in zip(weights, sent, seconds, strict=True)
    )
    slope = max(covariance / sum(weight * (x - mean_sent) ** 2 for weight, x in zip(weights, sent, strict=True)), 0.0)
    start = mean_seconds - slope * mean_sent
    if start < 0:
        start, slope = 0.0, _proportional(weights, sent, seconds)
    rate = 1 / slope if slope else math.inf
    return Link(start, 0.0, rate, f"fitted to {len(seconds)} all-reduces among {ranks} ranks")


def _proportional(weights: Sequence[float], sent: Sequence[float], seconds: Sequence[float]) -> float:
    """Seconds per byte of the best-fitting line through the origin."""
    along = sum(weight * x * y for weight, x, y in zip(weights, sent, seconds, strict=True))
    return along / sum(weight * x**2 for weight, x in zip(weights, sent, strict=True))
