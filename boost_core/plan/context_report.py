"""Explains a job's context parallelism: its size, its chunks, and what the ranks send each other."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.config.legality import cannot_send_latents, layout_problems
from boost_core.config.parallelism import Layout
from boost_core.context.plan import Exchange, Figures
from boost_core.context.selection import STAGES, ContextPlanner, attention_layer, most_moved, sent_between_nodes, wire
from boost_core.plan.machine import Machine, device_bytes
from boost_core.plan.memory import rank_memory
from boost_core.plan.resolve import at, step_seconds
from boost_core.plan.work import Work, tokens_by_part

_MOST_CHUNKS = 512  # of the windows of all sizes that a job may take; planning more takes long
_GIGA = 1e9


class PlannedSize(Config):
    """The job at another context parallel size, on the same number of ranks if its replicas can change to match."""

    context_parallel_size: int
    world_size: int
    memory_bytes: int = Field(description="Device memory of the rank that needs most.")
    fits_device: bool | None = Field(description="Whether it fits the device; null if unknown.")
    step_seconds: float


class PlannedChunk(Config):
    """A layer's attention with a given chunk size, for a sequence that is one document; overlap is accounted for."""

    chunk_tokens: int
    seconds: float = Field(description="Seconds of forward and backward.")
    imbalance: float = Field(description="Attention of the most loaded rank divided by the mean.")


class LevelBytes(Config):
    """Bytes sent over the links of one level of the network."""

    level: str
    bytes: int


class PlannedExchange(Config):
    """Forward transfers per layer and micro-batch to the rank that receives most, for one-document sequences."""

    exchange: Exchange = Field(description="What is sent between nodes.")
    links: tuple[LevelBytes, ...] = Field(description="Bytes by level, innermost first.")
    seconds: float = Field(description="Seconds on these links.")
    projection_seconds: float = Field(description="Seconds to compute keys and values from latents.")


class PlannedContext(Config):
    """A layout's context parallelism, and the cost of other sizes, chunks and exchanges."""

    chunk_tokens: int
    chunks: int = Field(description="Chunks per rank and sequence.")
    stages: int = Field(description="Number of stages in which keys arrive.")
    exchange: Exchange = Field(description="What is sent between nodes.")
    moved_chunks: int = Field(
        0, description="Most of a rank's chunks whose attention others may compute, and most of others' it may compute."
    )
    sizes: tuple[PlannedSize, ...] = Field(description="This size, and half and twice this size where legal.")
    chunk_sizes: tuple[PlannedChunk, ...] = Field(
        description="This chunk size, half and twice this size; omitted where planning would take long."
    )
    exchanges: tuple[PlannedExchange, ...] = Field(description="Keys, and latents where they can be sent.")
    why: tuple[str, ...] = Field(description="The same as explanations for people.")


def context_report(spec: JobSpec, layout: Layout, machine: Machine) -> PlannedContext | None:
    """Report on a layout's context parallelism; ``None`` if it has none.

    Args:
        spec: The job.
        layout: The layout.
        machine: What it runs on.
    """
    if layout.cp == 1:
        return None
    job = at(spec, layout, machine)
    planner, length = ContextPlanner.of(job, machine), job.training.sequence_length
    counts = (most_moved(tokens // planner.chunk) for tokens in tokens_by_part(job))
    moved_chunks = sum(counts) if planner.moves_tasks else 0

    sizes = []  # this one, and half and twice the size, with twice and half the replicas where possible
    others = ((layout.cp // 2, layout.dp * 2), (layout.cp * 2, max(layout.dp // 2, 1)))
    for each in (layout, *(replace(layout, cp=size, dp=replicas) for size, replicas in others)):
        parallelism, on_gpu = spec.parallelism.at(each), spec.resources.gpus_per_worker
        if each != layout and (
            layout_problems(spec.model, parallelism, spec.training, spec.optimizer, on_gpu)
            or each.world_size > machine.cluster.size
        ):
            continue
        needed, device = rank_memory(at(spec, each, machine), each).total, device_bytes(spec.resources)
        sizes.append(
            PlannedSize(
                context_parallel_size=each.cp,
                world_size=each.world_size,
                memory_bytes=needed,
                fits_device=None if device is None else needed <= device,
                step_seconds=step_seconds(spec, each, machine),
            )
        )

    chunk_sizes = []
    of_layouts = len({(each.tp, each.cp) for each in spec.layouts() if each.cp > 1}) or 1  # each partitions differently
    most = _MOST_CHUNKS // of_layouts
    if length // planner.chunk <= most:
        half = () if planner.chunk % 2 else (planner.chunk // 2,)
        for size in (planner.chunk, *half, planner.chunk * 2):
            if length % (size * planner.ranks) == 0 and length // size <= most:
                cost = _of_one_document(replace(planner, chunk=size), length)
                chunk_sizes.append(PlannedChunk(chunk_tokens=size, seconds=cost.seconds, imbalance=cost.imbalance))

    exchanges = _exchanges(job, layout, machine)
    why = [_why_size(job, sizes), _why_chunk(planner, chunk_sizes), _why_exchange(job, planner, exchanges)]
    if moved_chunks:
        layer, tokens = attention_layer(job), moved_chunks * planner.chunk
        ways = [sum(layer.moved_bytes(backward, planner.moved)) for backward in (False, True)]
        what = "latents of their queries and outputs" if planner.moves_latents else "their queries and results"
        why.append(
            f"the attention of up to {moved_chunks} of a rank's chunks is computed by other ranks where that is "
            f"faster; {what} are {tokens * ways[0] / _GIGA:.3g} GB per layer forward and "
            f"{tokens * ways[1] / _GIGA:.3g} GB backward"
        )
    return PlannedContext(
        chunk_tokens=planner.chunk,
        chunks=length // layout.cp // planner.chunk,
        stages=STAGES,
        exchange=planner.exchange,
        moved_chunks=moved_chunks,
        sizes=tuple(sizes),
        chunk_sizes=tuple(chunk_sizes),
        exchanges=exchanges,
        why=tuple(why),
    )


@lru_cache(256)  # shared by a job's layouts
def _of_one_document(planner: ContextPlanner, tokens: int) -> Figures:
    return planner.figures(planner.plan((tokens,)))


def _exchanges(job: JobSpec, layout: Layout, machine: Machine) -> tuple[PlannedExchange, ...]:
    """What is sent, and then what may be sent instead."""
    cluster, layer, context = machine.cluster, attention_layer(job), job.parallelism.context
    _, row = cluster.rows([layout.tp, layout.cp])
    able = not cannot_send_latents(job.model, job.parallelism, job.training)
    apart = any(size > 1 for size in row[1:])  # otherwise there are no other nodes to send to
    chosen: Exchange = sent_between_nodes(job, cluster) if apart or context.exchange != "auto" else "keys"
    kinds: tuple[Exchange, ...] = ("keys", "latents")
    exchanges = []
    for exchange in (chosen, *(other for other in kinds if other != chosen and (able or other == "keys"))):
        requesting = job.with_parallelism(context=context.model_copy(update={"exchange": exchange}))
        sent = wire(job if exchange == chosen else requesting, cluster, row, exchange)
        computed = Work(product_flops=sent.projected_tokens * layer.projection_flops)
        levels = zip(cluster.levels, sent.level_bytes, strict=True)
        exchanges.append(
            PlannedExchange(
                exchange=exchange,
                links=tuple(LevelBytes(level=level.name, bytes=size) for level, size in levels if size),
                seconds=sent.seconds,
                projection_seconds=machine.profile.seconds(computed),
            )
        )
    return tuple(exchanges)


def _why_size(job: JobSpec, sizes: Sequence[PlannedSize]) -> str:
    needs = []
    for size in sizes:
        lacks = ", more than it has" if size.fits_device is False else ""
        needs.append(
            f"{size.memory_bytes / _GIGA:.1f} GB per rank{lacks}, and {size.step_seconds:.3g} s per step on "
            f"{size.world_size:,} ranks"
        )
    own = sizes[0].context_parallel_size
    tokens = job.training.sequence_length // own
    text = f"cp {own} gives each rank {tokens:,} tokens of a sequence: {needs[0]}"
    others = zip(sizes[1:], needs[1:], strict=True)
    return "; ".join([text, *(f"cp {other.context_parallel_size} would take {need}" for other, need in others)])


def _why_chunk(planner: ContextPlanner, sizes: Sequence[PlannedChunk]) -> str:
    text = f"chunks have {planner.chunk:,} tokens, and their keys arrive in {STAGES} stages"
    if planner.sparse_from is not None:
        text += f" (with sparse attention only the keys seen, some heads' in each of up to {STAGES})"
    if not sizes:
        return text
    own, *others = (
        f"{_milliseconds(each.seconds)}, {each.imbalance:.2f} times the mean on the most loaded rank" for each in sizes
    )
    other_sizes = (f"with chunks of {size.chunk_tokens:,} {cost}" for size, cost in zip(sizes[1:], others, strict=True))
    alone = "" if planner.sparse_from is None else ", without transfers,"
    return "; ".join([f"{text}: one document's attention takes a layer{alone} {own}", *other_sizes])


def _why_exchange(job: JobSpec, planner: ContextPlanner, exchanges: Sequence[PlannedExchange]) -> str:
    costs = []
    for each in exchanges:
        links = " and ".join(f"{link.bytes / _GIGA:.3g} GB over the {link.level}" for link in each.links)
        compute = each.projection_seconds
        computing = f", plus {_milliseconds(compute)} to compute keys" if compute else ""
        costs.append(f"{links} in {_milliseconds(each.seconds)}{computing}")
    own = exchanges[0].exchange
    where = "everywhere" if planner.node_ranks == 1 or own == "keys" else "between nodes"
    requested = ", as the job requests" if job.parallelism.context.exchange != "auto" else ""
    at_most = " at most, as each head is sent only what it sees" if job.training.attention else ""
    others = zip(exchanges[1:], costs[1:], strict=True)
    return "; ".join(
        [
            f"{own} are sent {where}{requested}: a layer's forward pass takes {costs[0]}{at_most}",
            *(f"{other.exchange} would take {cost}" for other, cost in others),
        ]
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
