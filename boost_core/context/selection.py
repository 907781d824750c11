"""How the trainer partitions the tokens of a micro-batch over the ranks of a context parallel group.

It uses the one of three placements with which attention is predicted to be fastest: ``near``, the locality placement,
which is balanced; ``loose``, which sends less; ``contiguous``, which sends least. Which one that is depends on the
documents, whose lengths no job knows in advance, so it is decided for each micro-batch;
``docs/figures/context_rule.md`` compares this with a choice at the job's start. If a job lets tasks move, each
placement is considered with and without offloaded tasks. All ranks find the same one: the seconds come from nominal
figures, by sums, products and quotients in a fixed order, which are identical on every machine.

With sparse attention the keys that long documents need are known only once their heads have chosen, in each layer. Work
then grows from a document's start to its end, or in steps where slashes begin, and ``heap``, which places neighbours on
different ranks, balances both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from boost_core.architecture import chosen_sharding
from boost_core.config.job import JobSpec, rank_tokens, tokens_by_part
from boost_core.config.parallelism import cannot_send_latents, chunk_tokens
from boost_core.context.placement import Window, local_tasks, moved_tasks, place
from boost_core.context.plan import AttentionLayer, ContextPlan, Exchange, Figures, Rates, figures
from boost_core.hardware import BYTES, Link
from boost_core.plan.machine import Cluster, Machine, Row

# What context parallel ranks send each other: keys and values, or latents; and the same for moved queries.


def attention_layer(job: JobSpec) -> AttentionLayer:
    """A layer's attention on each rank, which has all heads where its tensor parallel strategy does not split them."""
    model, parallelism, size = job.model, job.parallelism, BYTES[job.training.precision]
    ranks = parallelism.tensor_parallel_size if chosen_sharding(model, parallelism).wide else 1
    return AttentionLayer(model.hidden_size, model.key_value_size, model.num_attention_heads, model.rank, ranks, size)


def _outermost(job: JobSpec, cluster: Cluster) -> Link:
    """The link of the outermost level that a context parallel group spans, of those outside of a node."""
    _, row = cluster.rows([job.parallelism.tensor_parallel_size, job.parallelism.context_parallel_size])
    return cluster.levels[max((level for level, ranks in enumerate(row) if level and ranks > 1), default=-1)].link


def sent_between_nodes(job: JobSpec, cluster: Cluster, moved: bool = False) -> Exchange:
    """What a job's ranks send to other nodes; if the job chooses ``latents``, within a node, too.

    Latents if a rank's share of them over the outermost links, plus the other ranks' shares over the innermost, takes
    less time than keys and values over the outermost. Computing keys from them costs little compared with attention.

    Args:
        job: The job at a layout.
        cluster: The network of its ranks.
        moved: Whether to compare all that moves with a task (``moved_as``), instead of a token's keys and values.
    """
    chosen = job.parallelism.context.exchange
    if chosen != "auto":
        return chosen
    if len(cluster.levels) == 1 or cannot_send_latents(job.model, job.parallelism, job.training):
        return "keys"
    node, fabric = cluster.levels[0].link, _outermost(job, cluster)
    layer = attention_layer(job)  # a token's bytes wide, as latents, and within the node for these
    wide, latents, in_node = layer.key_bytes, layer.latent_bytes, layer.gathered_bytes
    if moved:
        wide = sum(layer.moved_bytes(False) + layer.moved_bytes(True))
        latents = sum(layer.moved_bytes(False, "latents") + layer.moved_bytes(True, "latents"))
        in_node = sum(layer.moved_gathered_bytes(False) + layer.moved_gathered_bytes(True))
    by_latents = latents / fabric.bytes_per_second + in_node / node.bytes_per_second
    return "latents" if by_latents < wide / fabric.bytes_per_second else "keys"


def moved_as(job: JobSpec, cluster: Cluster) -> Exchange:
    """What the queries and outputs of a job's offloaded tasks travel as: latents, or ``keys`` for what they are.

    By the same rule, for all that is sent for a token, forward and backward. It may differ from what is sent of keys:
    with few heads of keys, these are no wider than latents, but queries are.

    Args:
        job: The job at a layout.
        cluster: The network of its ranks.
    """
    return sent_between_nodes(job, cluster, moved=True)


STAGES = 4
_PLACEMENTS = ("near", "loose", "contiguous")
_SPARSE_PLACEMENTS = ("heap",)
_MOVED = 4  # at most one in this many of a rank's chunks is computed elsewhere, and as many of others' chunks by it


def head_groups(key_heads: int) -> Sequence[range]:
    """The groups of key heads that arrive together under sparse attention, where each stage is a group of heads."""
    groups = min(STAGES, key_heads)
    ends = [key_heads * number // groups for number in range(groups + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


def most_moved(chunks: int) -> int:
    """The most tasks that a rank with this many chunks may hand over, and may take on."""
    return max(1, chunks // _MOVED)


@dataclass(frozen=True)
class ContextPlanner:
    """Plans the context parallelism of one job's micro-batches.

    Attributes:
        ranks: Number of ranks of the context parallel group.
        chunk: Tokens of a chunk.
        sees: Number of tokens of its document that each token sees; ``None`` for all before it.
        layer: A layer's attention.
        rates: What ranks do per second.
        exchange: What is sent between nodes.
        node_ranks: Number of context parallel ranks per node, and of those that send each other keys.
        sparse_from: Tokens from which documents use sparse attention in training; ``None``: none does.
        sparse_share: Share of their pairs that is expected to be seen.
        moves_tasks: Whether attention may be computed by ranks other than those that hold the tokens.
        moved: What their queries and outputs then travel as.
    """

    ranks: int
    chunk: int
    sees: int | None
    layer: AttentionLayer
    rates: Rates
    exchange: Exchange = "keys"
    node_ranks: int = 1
    sparse_from: int | None = None
    sparse_share: float = 1.0
    moves_tasks: bool = False
    moved: Exchange = "keys"

    @classmethod
    def of(cls, job: JobSpec, machine: Machine) -> "ContextPlanner":
        """Return the planner of a job at its layout, for the machine that its ranks run on."""
        parallelism, levels, length = job.parallelism, machine.cluster.levels, job.training.sequence_length
        ranks, window = parallelism.context_parallel_size, job.model.sliding_window
        _, row = machine.cluster.rows([parallelism.tensor_parallel_size, ranks])
        # Within a kernel's call short pieces lose little, and what does not depend on the placement need not be
        # counted.
        fabric = _outermost(job, machine.cluster).bytes_per_second
        rates = Rates(machine.profile.attention_flops, levels[0].link.bytes_per_second, fabric)
        return cls(
            ranks, chunk_tokens(length, ranks), None if window is None or window >= length else window,
            attention_layer(job), rates, sent_between_nodes(job, machine.cluster),
            1 if parallelism.context.exchange == "latents" else row[0],
            job.training.attention.from_length if job.training.attention else None, job.training.attended_share,
            parallelism.context.pool == "tasks", moved_as(job, machine.cluster),
        )  # fmt: skip

    @property
    def moves_latents(self) -> bool:
        """Whether tasks move, and their queries and outputs travel as latents."""
        return self.moves_tasks and self.moved == "latents"

    def figures(self, plan: ContextPlan) -> Figures:
        """What a plan costs one layer."""
        return figures(plan, self.layer, self.rates, self.exchange, self.node_ranks, self.moved)

    def plan(self, documents: Sequence[int], densely: bool = False) -> ContextPlan:
        """The plan of a micro-batch of these documents, sequence after sequence; the same on all ranks.

        Args:
            documents: Tokens of each.
            densely: Whether all use dense attention, as outside of training.
        """
        sparse_from = None if densely else self.sparse_from
        window = Window(tuple(documents), self.chunk, self.sees, sparse_from, self.sparse_share)
        plans = []
        for how in _SPARSE_PLACEMENTS if window.is_sparse(max(documents)) else _PLACEMENTS:
            placement = place(window, self.ranks, how)
            plans.append(ContextPlan(window, self.ranks, placement, local_tasks(window, placement), STAGES))
            if self.moves_tasks:
                most = most_moved(window.chunks // self.ranks)
                moved = replace(plans[-1], tasks=moved_tasks(window, placement, self.ranks, most=most))
                plans += [moved] if moved.queries else []
        return min(plans, key=lambda plan: self.figures(plan).seconds)


# What a rank receives of a layer's keys, over which links, and how long that takes.


class Wire(NamedTuple):
    """What the rank that receives most gets for one layer and micro-batch, forward.

    Attributes:
        level_bytes: Bytes over the links of each level of the network, innermost first.
        seconds: Total time, one level after the other.
        projected_tokens: Tokens whose latents arrive, and whose keys and values the rank computes itself.
    """

    level_bytes: Sequence[int]
    seconds: float
    projected_tokens: int


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
    projected = 0 if exchange == "keys" else sum(others) - (0 if within else others[0])
    level_bytes = [came * size for came, size in zip(others, sizes, strict=True)]
    if projected:
        level_bytes[0] += projected * layer.gathered_bytes
    seconds = 0.0
    for level, came, size in zip(cluster.levels, others, level_bytes, strict=True):
        starts = STAGES * len(tokens_by_part(job)) * (level.link.base_seconds + level.link.hop_seconds) if came else 0.0
        seconds += starts + size / level.link.bytes_per_second
    return Wire(level_bytes, seconds, projected)
