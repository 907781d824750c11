"""What a rank receives of a layer's keys, over which links, and how long that takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from boost_core.config.job import JobSpec
from boost_core.plan.cluster import Cluster, Row
from boost_core.plan.context.between import attention_layer
from boost_core.plan.context.cost import Exchange
from boost_core.plan.context.dealt import STAGES
from boost_core.plan.work import dealt_tokens, rank_tokens


@dataclass(frozen=True)
class Wire:
    """What the rank that receives most gets for one layer and micro-batch, forward.

    Attributes:
        level_bytes: Bytes over the links of each level of the network, innermost first.
        seconds: Total time, one level after the other.
        made_tokens: Tokens whose latents arrive, and whose keys and values the rank computes itself.
    """

    level_bytes: Sequence[int]
    seconds: float
    made_tokens: int


def wire(job: JobSpec, cluster: Cluster, row: Row, exchange: Exchange) -> Wire:
    """What a rank receives from all others, each of which sends to it separately.

    With one document over all ranks, each rank has a chunk near its end and needs all keys; separate documents need
    fewer.

    Args:
        job: The job at a layout.
        cluster: The network.
        row: Number of context parallel ranks at each of its levels.
        exchange: What is sent to other nodes; and within nodes, too, if the job asks for latents.
    """
    layer, tokens = attention_layer(job), rank_tokens(job)
    others = [tokens * (outer - inner) for inner, outer in pairwise(accumulate(row, mul, initial=1))]
    within = exchange == "latents" and job.parallelism.context.exchange == "latents"
    sizes = [layer.sent_bytes(exchange if level or within else "keys") for level in range(len(others))]
    made = 0 if exchange == "keys" else sum(others) - (0 if within else others[0])
    level_bytes = [came * size for came, size in zip(others, sizes, strict=True)]
    if made:
        level_bytes[0] += made * layer.gathered_bytes
    seconds = 0.0
    for level, came, size in zip(cluster.levels, others, level_bytes, strict=True):
        starts = STAGES * len(dealt_tokens(job)) * (level.link.base_seconds + level.link.hop_seconds) if came else 0.0
        seconds += starts + size / level.link.bytes_per_second
    return Wire(level_bytes, seconds, made)
