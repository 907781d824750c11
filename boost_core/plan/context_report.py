"""Why a job's sequences are over as many ranks as they are, in such chunks, and what these send each other."""

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
from boost_core.plan.context.dealt import STAGES, Dealing
from boost_core.plan.context.figures import Figures, figures
from boost_core.plan.context.wire import wire
from boost_core.plan.devices import at, device_bytes
from boost_core.plan.machine import Machine
from boost_core.plan.memory import rank_memory
from boost_core.plan.throughput import step_seconds
from boost_core.plan.work import Work

_MOST_CHUNKS = 512  # of a window, as planning more takes long
_GIGA = 1e9


class PlannedSize(Config):
    """The job with another context parallel size, on as many ranks if its replicas can be more or fewer."""

    context_parallel_size: int
    world_size: int
    memory_bytes: int = Field(description="Of the rank that needs most.")
    fits_device: bool | None = Field(description="Whether that fits; null if unknown.")
    step_seconds: float


class PlannedChunk(Config):
    """Attention of a layer with chunks of a size, where a sequence is one document; what can be hidden is hidden."""

    chunk_tokens: int
    seconds: float = Field(description="Forward and backward.")
    imbalance: float = Field(description="The largest attention of a rank over the mean.")


class LevelBytes(Config):
    """What goes over the links of a level of the network."""

    level: str
    bytes: int


class PlannedExchange(Config):
    """What the rank that is sent most gets of a layer and micro-batch, forward, where a sequence is one document."""

    exchange: Exchange = Field(description="What goes between nodes.")
    links: tuple[LevelBytes, ...] = Field(description="The innermost first.")
    seconds: float = Field(description="On these links.")
    projection_seconds: float = Field(description="Of making keys and values of latents.")


class PlannedContext(Config):
    """Context parallelism of a layout, and what another size, chunk or exchange would take."""

    chunk_tokens: int
    chunks: int = Field(description="Of a rank and sequence.")
    stages: int = Field(description="In which keys come.")
    exchange: Exchange = Field(description="What goes between nodes.")
    sizes: tuple[PlannedSize, ...] = Field(description="This size, and half and twice of it as far as they are legal.")
    chunk_sizes: tuple[PlannedChunk, ...] = Field(
        description="This chunk, half and twice of it, as far as planning does not take long."
    )
    exchanges: tuple[PlannedExchange, ...] = Field(description="Keys, and latents where they can be sent.")
    why: tuple[str, ...] = Field(description="The same for people.")


def context_report(spec: JobSpec, layout: Layout, machine: Machine) -> PlannedContext | None:
    """What a plan says of a layout's context parallelism; ``None`` without any.

    Args:
        spec: The job.
        layout: The layout.
        machine: What it runs on.
    """
    if layout.cp == 1:
        return None
    job = at(spec, layout)
    dealing = Dealing.of(job, machine)
    sizes = tuple(_size(spec, each, machine) for each in (layout, *_beside(spec, layout, machine)))
    chunk_sizes = tuple(_chunks(job, dealing))
    exchanges = tuple(_exchanges(job, layout, machine))
    return PlannedContext(
        chunk_tokens=dealing.chunk,
        chunks=job.training.sequence_length // layout.cp // dealing.chunk,
        stages=STAGES,
        exchange=dealing.exchange,
        sizes=sizes,
        chunk_sizes=chunk_sizes,
        exchanges=exchanges,
        why=(
            _why_size(job, sizes),
            _why_chunk(dealing, chunk_sizes),
            _why_exchange(job, dealing, exchanges),
        ),
    )


def _beside(spec: JobSpec, layout: Layout, machine: Machine) -> Iterator[Layout]:
    """Half and twice the size, with twice and half the replicas if that can be."""
    for size, replicas in ((layout.cp // 2, layout.dp * 2), (layout.cp * 2, max(layout.dp // 2, 1))):
        other = replace(layout, cp=size, dp=replicas)
        parallelism = spec.parallelism.at(other)
        on_gpu = spec.resources.gpus_per_worker
        legal = not layout_problems(spec.model, parallelism, spec.training, spec.optimizer, on_gpu)
        if legal and other.world_size <= machine.cluster.size:
            yield other


def _size(spec: JobSpec, layout: Layout, machine: Machine) -> PlannedSize:
    needed, device = rank_memory(at(spec, layout), layout).total, device_bytes(spec.resources)
    return PlannedSize(
        context_parallel_size=layout.cp,
        world_size=layout.world_size,
        memory_bytes=needed,
        fits_device=None if device is None else needed <= device,
        step_seconds=step_seconds(spec, layout, machine),
    )


def _chunks(job: JobSpec, dealing: Dealing) -> Iterator[PlannedChunk]:
    length = job.training.sequence_length
    if length // dealing.chunk > _MOST_CHUNKS:
        return
    half = () if dealing.chunk % 2 else (dealing.chunk // 2,)
    for size in (dealing.chunk, *half, dealing.chunk * 2):
        if length % (size * dealing.ranks) == 0 and length // size <= _MOST_CHUNKS:
            found = _of_one_document(replace(dealing, chunk=size), length)
            yield PlannedChunk(chunk_tokens=size, seconds=found.seconds, imbalance=found.imbalance)


@lru_cache(256)  # layouts of a job ask for the same
def _of_one_document(dealing: Dealing, tokens: int) -> Figures:
    plan = dealing.plan((tokens,))
    return figures(plan, dealing.layer, dealing.rates, dealing.exchange, dealing.node_ranks)


def _exchanges(job: JobSpec, layout: Layout, machine: Machine) -> Iterator[PlannedExchange]:
    cluster, layer = machine.cluster, attention_layer(job)
    _, row = cluster.rows([layout.tp, layout.cp])
    able = not cannot_send_latents(job.model, job.parallelism, job.training)
    asked = job.parallelism.context.exchange
    apart = any(size > 1 for size in row[1:])  # else there are no other nodes to send to
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
    return job.model_copy(update={"parallelism": job.parallelism.model_copy(update={"context": context})})


def _why_size(job: JobSpec, sizes: tuple[PlannedSize, ...]) -> str:
    own, *others = sizes
    tokens = job.training.sequence_length // own.context_parallel_size
    text = f"cp {own.context_parallel_size} leaves a rank {tokens:,} tokens of a sequence: {_needs(own)}"
    return "; ".join([text, *(f"cp {other.context_parallel_size} would take {_needs(other)}" for other in others)])


def _needs(size: PlannedSize) -> str:
    lacks = ", more than it has" if size.fits_device is False else ""
    return (
        f"{size.memory_bytes / _GIGA:.1f} GB a rank{lacks}, and {size.step_seconds:.3g} s a step on "
        f"{size.world_size:,} ranks"
    )


def _why_chunk(dealing: Dealing, sizes: tuple[PlannedChunk, ...]) -> str:
    text = f"chunks have {dealing.chunk:,} tokens, and their keys come in {STAGES} stages"
    if dealing.sparse_from is not None:
        text += f", of sparse attention those that are seen, a part of the heads' in each of up to {STAGES}"
    if not sizes:
        return text
    own, *others = (
        f"{_seconds(each.seconds)}, {each.imbalance:.2f} times the mean on the most loaded rank" for each in sizes
    )
    other_sizes = (
        f"with chunks of {size.chunk_tokens:,} {taken}" for size, taken in zip(sizes[1:], others, strict=True)
    )
    alone = "" if dealing.sparse_from is None else ", what is sent apart,"
    return "; ".join([f"{text}: one document's attention takes a layer{alone} {own}", *other_sizes])


def _why_exchange(job: JobSpec, dealing: Dealing, exchanges: tuple[PlannedExchange, ...]) -> str:
    own, *others = exchanges
    where = "everywhere" if dealing.node_ranks == 1 or own.exchange == "keys" else "between nodes"
    asked = ", as the job asks for" if job.parallelism.context.exchange != "auto" else ""
    would = (f"{other.exchange} would take {_takes(other)}" for other in others)
    at_most = " at most, as each head is sent what it sees" if job.training.attention else ""
    return "; ".join([f"{own.exchange} go {where}{asked}: a layer's take {_takes(own)}, forward{at_most}", *would])


def _takes(exchange: PlannedExchange) -> str:
    links = " and ".join(f"{each.bytes / _GIGA:.3g} GB over the {each.level}" for each in exchange.links)
    made = f", and {_seconds(exchange.projection_seconds)} to make keys" if exchange.projection_seconds else ""
    return f"{links} in {_seconds(exchange.seconds)}{made}"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
