"""Explains a job's context parallelism: its size, its chunks, and what the ranks send each other."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.legality import cannot_send_latents, layout_problems
from boost_core.plan.context.between import attention_layer, sent_between_nodes
from boost_core.plan.context.cost import Exchange
from boost_core.plan.context.dealt import STAGES, Dealing, most_moved
from boost_core.plan.context.figures import Figures
from boost_core.plan.context.wire import wire
from boost_core.plan.devices import at, device_bytes
from boost_core.plan.machine import Machine
from boost_core.plan.memory import rank_memory
from boost_core.plan.throughput import step_seconds
from boost_core.plan.work import Work, dealt_tokens

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
    dealing = Dealing.of(job, machine)
    sizes = tuple(_size(spec, each, machine) for each in (layout, *_beside(spec, layout, machine)))
    chunk_sizes = tuple(_chunks(job, dealing, _MOST_CHUNKS // _sizes(spec)))
    exchanges = tuple(_exchanges(job, layout, machine))
    return PlannedContext(
        chunk_tokens=dealing.chunk,
        chunks=job.training.sequence_length // layout.cp // dealing.chunk,
        stages=STAGES,
        exchange=dealing.exchange,
        moved_chunks=_moved_chunks(job, dealing),
        sizes=sizes,
        chunk_sizes=chunk_sizes,
        exchanges=exchanges,
        why=(
            _why_size(job, sizes),
            _why_chunk(dealing, chunk_sizes),
            _why_exchange(job, dealing, exchanges),
            *_why_moved(job, dealing),
        ),
    )


def _beside(spec: JobSpec, layout: Layout, machine: Machine) -> Iterator[Layout]:
    """Half and twice the size, with twice and half the replicas where possible."""
    for size, replicas in ((layout.cp // 2, layout.dp * 2), (layout.cp * 2, max(layout.dp // 2, 1))):
        other = replace(layout, cp=size, dp=replicas)
        parallelism = spec.parallelism.at(other)
        on_gpu = spec.resources.gpus_per_worker
        legal = not layout_problems(spec.model, parallelism, spec.training, spec.optimizer, on_gpu)
        if legal and other.world_size <= machine.cluster.size:
            yield other


def _size(spec: JobSpec, layout: Layout, machine: Machine) -> PlannedSize:
    needed, device = rank_memory(at(spec, layout, machine), layout).total, device_bytes(spec.resources)
    return PlannedSize(
        context_parallel_size=layout.cp,
        world_size=layout.world_size,
        memory_bytes=needed,
        fits_device=None if device is None else needed <= device,
        step_seconds=step_seconds(spec, layout, machine),
    )


def _sizes(spec: JobSpec) -> int:
    """The number of a job's layouts whose sequences are dealt differently."""
    return len({(layout.tp, layout.cp) for layout in spec.layouts() if layout.cp > 1}) or 1


def _chunks(job: JobSpec, dealing: Dealing, most: int) -> Iterator[PlannedChunk]:
    length = job.training.sequence_length
    if length // dealing.chunk > most:
        return
    half = () if dealing.chunk % 2 else (dealing.chunk // 2,)
    for size in (dealing.chunk, *half, dealing.chunk * 2):
        if length % (size * dealing.ranks) == 0 and length // size <= most:
            found = _of_one_document(replace(dealing, chunk=size), length)
            yield PlannedChunk(chunk_tokens=size, seconds=found.seconds, imbalance=found.imbalance)


@lru_cache(256)  # shared by a job's layouts
def _of_one_document(dealing: Dealing, tokens: int) -> Figures:
    plan = dealing.plan((tokens,))
    return dealing.figures(plan)


def _exchanges(job: JobSpec, layout: Layout, machine: Machine) -> Iterator[PlannedExchange]:
    cluster, layer = machine.cluster, attention_layer(job)
    _, row = cluster.rows([layout.tp, layout.cp])
    able = not cannot_send_latents(job.model, job.parallelism, job.training)
    asked = job.parallelism.context.exchange
    apart = any(size > 1 for size in row[1:])  # otherwise there are no other nodes to send to
    chosen: Exchange = sent_between_nodes(job, cluster) if apart or asked != "auto" else "keys"
    kinds: list[Exchange] = [chosen, *(other for other in _KINDS if other != chosen and (able or other == "keys"))]
    for exchange in kinds:
        sent = wire(job if exchange == chosen else _asking_for(job, exchange), cluster, row, exchange)
        made = Work(product_flops=sent.made_tokens * layer.projection_flops)
        yield PlannedExchange(
            exchange=exchange,
            links=tuple(
                LevelBytes(level=level.name, bytes=size)
                for level, size in zip(cluster.levels, sent.level_bytes, strict=True)
                if size
            ),
            seconds=sent.seconds,
            projection_seconds=machine.profile.seconds(made),
        )


_KINDS: tuple[Exchange, ...] = ("keys", "latents")


def _asking_for(job: JobSpec, exchange: Exchange) -> JobSpec:
    context = job.parallelism.context.model_copy(update={"exchange": exchange})
    return job.with_parallelism(context=context)


def _why_size(job: JobSpec, sizes: tuple[PlannedSize, ...]) -> str:
    own, *others = sizes
    tokens = job.training.sequence_length // own.context_parallel_size
    text = f"cp {own.context_parallel_size} gives each rank {tokens:,} tokens of a sequence: {_needs(own)}"
    return "; ".join([text, *(f"cp {other.context_parallel_size} would take {_needs(other)}" for other in others)])


def _needs(size: PlannedSize) -> str:
    lacks = ", more than it has" if size.fits_device is False else ""
    return (
        f"{size.memory_bytes / _GIGA:.1f} GB per rank{lacks}, and {size.step_seconds:.3g} s per step on "
        f"{size.world_size:,} ranks"
    )


def _why_chunk(dealing: Dealing, sizes: tuple[PlannedChunk, ...]) -> str:
    text = f"chunks have {dealing.chunk:,} tokens, and their keys arrive in {STAGES} stages"
    if dealing.sparse_from is not None:
        text += f" (with sparse attention only the keys seen, some heads' in each of up to {STAGES})"
    if not sizes:
        return text
    own, *others = (
        f"{_seconds(each.seconds)}, {each.imbalance:.2f} times the mean on the most loaded rank" for each in sizes
    )
    other_sizes = (
        f"with chunks of {size.chunk_tokens:,} {taken}" for size, taken in zip(sizes[1:], others, strict=True)
    )
    alone = "" if dealing.sparse_from is None else ", without transfers,"
    return "; ".join([f"{text}: one document's attention takes a layer{alone} {own}", *other_sizes])


def _why_exchange(job: JobSpec, dealing: Dealing, exchanges: tuple[PlannedExchange, ...]) -> str:
    own, *others = exchanges
    where = "everywhere" if dealing.node_ranks == 1 or own.exchange == "keys" else "between nodes"
    asked = ", as the job requests" if job.parallelism.context.exchange != "auto" else ""
    would = (f"{other.exchange} would take {_takes(other)}" for other in others)
    at_most = " at most, as each head is sent only what it sees" if job.training.attention else ""
    return "; ".join(
        [f"{own.exchange} are sent {where}{asked}: a layer's forward pass takes {_takes(own)}{at_most}", *would]
    )


def _moved_chunks(job: JobSpec, dealing: Dealing) -> int:
    counts = (most_moved(tokens // dealing.chunk) for tokens in dealt_tokens(job))
    return sum(counts) if dealing.moves_tasks else 0


def _why_moved(job: JobSpec, dealing: Dealing) -> Iterator[str]:
    """Explain what may be computed on other ranks, and what that costs."""
    if count := _moved_chunks(job, dealing):
        layer, tokens = attention_layer(job), count * dealing.chunk
        ways = [sum(layer.moved_bytes(backward, dealing.moved)) for backward in (False, True)]
        what = "latents of their queries and outputs" if dealing.moves_latents else "their queries and results"
        yield (
            f"the attention of up to {count} of a rank's chunks is computed by other ranks where that is faster; "
            f"{what} are {tokens * ways[0] / _GIGA:.3g} GB per layer forward and "
            f"{tokens * ways[1] / _GIGA:.3g} GB backward"
        )


def _takes(exchange: PlannedExchange) -> str:
    links = " and ".join(f"{each.bytes / _GIGA:.3g} GB over the {each.level}" for each in exchange.links)
    made = f", plus {_seconds(exchange.projection_seconds)} to compute keys" if exchange.projection_seconds else ""
    return f"{links} in {_seconds(exchange.seconds)}{made}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
