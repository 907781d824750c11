"""A job's plan: what it leaves open at a layout resolved, what it then needs and takes, and the report on each layout.

``recompute: auto`` (``at``): every layout gets the least costly recompute mix that fits (``recompute_mix``). With
``layouts: auto``, a layout that fits in no other way has the optimizer's state in the host's memory, if that suffices.

A rank's planned memory is what torch's allocator hands out, without CUDA's context, NCCL's buffers and the allocator's
fragmentation. For these remains the difference between the gigabytes of data sheets (``hardware``) and what drivers
report, about 6 % more.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf
from typing import Any, get_args

from pydantic import Field

from boost_core import architecture
from boost_core.architecture import model_flops_per_token, parameter_count, saved_latents
from boost_core.config.base import Config, Frozen, counted
from boost_core.config.job import JobSpec, ResourcesConfig, layout_problems, numbers_of_replicas, tokens_by_part
from boost_core.config.model import PRESETS, FamilyName, ModelConfig
from boost_core.config.parallelism import MOST_CONTEXT, TRAITS, Layout, LayoutSizes, cannot_send_latents, divisors
from boost_core.context.plan import Exchange, Figures
from boost_core.context.selection import STAGES, ContextPlanner, attention_layer, most_moved, sent_between_nodes, wire
from boost_core.hardware import BYTES, DEVICE_BYTES
from boost_core.messages import PROVENANCE, Provenance
from boost_core.plan.machine import SPARE, Machine, PredictedCommunication, Work, device_bytes, kind_of_gpu, machine_of
from boost_core.plan.memory import GIB, Memory, host_remedies, lack_in_words, lacking, node_bytes, on_hosts, rank_memory
from boost_core.plan.recompute_mix import RecomputeMixes, legal_modes
from boost_core.plan.run_cost import CONDITIONS, LostNode, PlannedRun, RunConditions, planned_run
from boost_core.plan.throughput import Step, StepParts
from boost_core.terminal import rounded, size_in_words

# A job at a layout, with nothing left open, and what it needs.


def at(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> JobSpec:
    """Return the job as a gang of one layout trains it.

    ``recompute: auto`` is replaced by the least costly mix of modes with which every rank fits its GPU, or else by the
    mode with which the fullest rank holds least. With ``layouts: auto``, a layout that fits in no other way has all of
    the optimizer's state on the host, if that makes it fit. Losses are bit-identical in any case.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        machine: What it runs on, whose corrections do not matter; by default what ``machine_of`` returns. Blocks keep
            tensors in the host's memory only if the machine has a known amount of it.
    """
    if spec.parallelism.recompute != "auto" and not spec.leaves_layouts:
        return spec.at(layout)
    return spec.model_copy(update={"parallelism": _resolved(_Inputs.of(spec, layout, machine))[0].parallelism})


def needed_bytes(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> int:
    """Return the device memory needed by the rank that needs most in a layout. Arguments as for ``at``."""
    if spec.parallelism.recompute != "auto" and not spec.leaves_layouts:
        return rank_memory(spec, layout).total
    return _resolved(_Inputs.of(spec, layout, machine))[1]


# Fields of ``training`` and ``optimizer`` on which neither memory nor time depends, so jobs that differ in them share a
# plan. Of ``weight_decay``, it matters whether there is any: weights that decay are in groups of their own.
_IGNORED = frozenset({
    "tokens", "steps", "seed", "z_loss", "evaluate_every_steps", "evaluate_at_start", "evaluate_sequences", "sample",
    "muon", "learning_rate", "betas", "epsilon", "weight_decay", "clip_norm", "schedule", "decay_steps", "warmup_steps",
    "final_learning_rate_ratio",
})  # fmt: skip


def planned_values(spec: JobSpec) -> tuple[Hashable, ...]:
    """Return what a job's memory and time depend on in its ``training`` and ``optimizer``."""
    fields = (*spec.training, *spec.optimizer)
    return (spec.optimizer.weight_decay > 0, *(value for name, value in fields if name not in _IGNORED))


@dataclass(frozen=True)
class _Inputs:
    """A job at a layout, compared by the parts that affect its memory and time, as others cannot be hashed."""

    parts: tuple[Hashable, ...]
    machine: Machine
    job: JobSpec = field(compare=False)
    layout: Layout = field(compare=False)
    limit: float = field(compare=False)

    @classmethod
    def of(cls, spec: JobSpec, layout: Layout, machine: Machine | None) -> "_Inputs":
        job, device = spec.at(layout), device_bytes(spec.resources, machine) or inf
        on_gpu, apart = job.resources.gpus_per_worker, job.data.documents_apart
        kind, copies = kind_of_gpu(job.resources), job.fault_tolerance.memory_copy_every_steps is not None
        facts = apart, on_gpu, device, kind, copies, job.leaves_layouts
        parts = job.model, job.parallelism, *planned_values(job), *facts
        # Each job has corrections of its own, which say little about modes compared with each other.
        return cls(parts, replace(machine or machine_of(job), fitted=None), job, layout, device * (1 - SPARE))


@lru_cache(4096)  # shared by plans, admission and the scheduler
def _resolved(inputs: _Inputs) -> tuple[JobSpec, int]:
    """Return the job with nothing left open, and the bytes that a rank then needs."""
    layout, machine = inputs.layout, inputs.machine

    def with_recompute(job: JobSpec) -> tuple[JobSpec, int]:
        """The job without ``recompute: auto``, and the bytes that a rank then needs."""
        if job.parallelism.recompute != "auto":
            return job, rank_memory(job, layout).total
        whole = job.with_parallelism(recompute=legal_modes(job, machine)[0])
        needed = rank_memory(whole, layout).total
        if needed <= inputs.limit:
            return whole, needed
        mixed = RecomputeMixes(job, layout, machine).least_costly(inputs.limit)
        return mixed, rank_memory(mixed, layout).total

    job, needed = with_recompute(inputs.job)
    knows_hosts = job.resources.gpus_per_worker > 0 and machine.node_memory_bytes is not None
    if needed > inputs.limit and job.leaves_layouts and knows_hosts and job.parallelism.optimizer_offload < 1:
        offloaded, less = with_recompute(inputs.job.with_parallelism(optimizer_offload=1.0))
        if less <= inputs.limit and not lacking(node_bytes(rank_memory(offloaded, layout), layout, machine), machine):
            return offloaded, less
    return job, needed


def node_host_bytes(spec: JobSpec, layout: Layout, machine: Machine) -> int:
    """Return the host memory that a node's ranks need in one layout."""
    return node_bytes(rank_memory(at(spec, layout, machine), layout), layout, machine)


def step_parts(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> StepParts:
    """Return the predicted seconds of one optimizer step by parts.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        machine: What it runs on; by default what ``machine_of`` returns.

    Raises:
        ValueError: The layout's groups do not fit into the machine's network.
    """
    machine = machine or machine_of(spec)
    return Step(at(spec, layout, machine), layout, machine).parts()


def step_seconds(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> float:
    """Return the predicted seconds of one optimizer step. Arguments as in ``step_parts``."""
    return step_parts(spec, layout, machine).total


def predicted_communication(spec: JobSpec, layout: Layout, machine: Machine) -> PredictedCommunication:
    """Return the exposed collectives of a step as predicted for the first pipeline rank, without a correction.

    Arguments and errors as in ``step_parts``.
    """
    return Step(at(spec, layout, machine), layout, machine).communication()


# Whether any layout fits, and why not.


def nothing_fits(spec: JobSpec, machine: Machine | None = None) -> str | None:
    """Explain why none of a job's layouts fits the GPUs it requests, and what to change; ``None`` if one fits.

    Also checks that listed modes match the number of stages of each layout, and that a network could hold its ranks.

    Args:
        spec: The job.
        machine: What it runs on; the memory of its nodes' hosts is checked if known. By default it is not checked.
    """
    for job in map(spec.at, spec.layouts()):
        if problem := architecture.miscounted(job.model, job.parallelism, job.training.sequence_length):
            return problem
    if machine is not None:
        largest = max(spec.layouts(), key=lambda layout: layout.world_size)
        try:
            machine.cluster.rows([largest.world_size])
        except ValueError as error:
            return f"{largest}: {error}"
    device = device_bytes(spec.resources, machine)
    if device is None and spec.parallelism.recompute == "auto" and spec.resources.gpus_per_worker:
        return (
            "recompute=auto needs to know the GPU's memory; set resources.accelerator_type to one of "
            f"{', '.join(DEVICE_BYTES)}, or recompute to another mode"
        )
    checks_hosts = machine is not None and machine.node_memory_bytes is not None
    if device is None and not checks_hosts:
        return None
    needed, of_hosts = {}, {}
    for layout in reversed(spec.layouts()):  # usually the largest fits if any does
        needed[layout] = 0 if device is None else needed_bytes(spec, layout, machine)
        if needed[layout] <= (device or 0):
            if machine is None or not checks_hosts:
                return None
            of_hosts[layout] = node_host_bytes(spec, layout, machine)
            if not lacking(of_hosts[layout], machine):
                return None
    if machine is not None and of_hosts:
        return too_large_for_hosts(spec, of_hosts, machine)
    return too_large(spec, needed, device or 0)


def too_large(spec: JobSpec, needed: Mapping[Layout, int], device: int) -> str:
    """Explain that no layout fits, and what to change.

    Args:
        spec: The job.
        needed: Bytes that each of its layouts needs.
        device: Bytes that a GPU has.
    """
    layout = min(needed, key=lambda layout: needed[layout])
    sizes = f"{needed[layout] / GIB:.1f} GiB of {device / GIB:.1f} GiB"
    return f"no layout fits: {layout} needs the least, {sizes}; {', '.join(device_remedies(spec, layout))}"


def too_large_for_hosts(spec: JobSpec, needed: Mapping[Layout, int], machine: Machine) -> str:
    """Explain why no layout fits the host memory of its nodes, and what to change.

    Args:
        spec: The job.
        needed: Bytes of host memory that a node's ranks need, by layout, for the layouts that fit their GPU.
        machine: What it runs on.
    """
    layout = min(needed, key=lambda layout: (needed[layout], layout))
    return (
        f"no layout fits the nodes: {layout} needs the least, {needed[layout] / GIB:.1f} GiB per node for "
        f"{on_hosts(spec)}, and {lack_in_words(needed[layout], machine)}; {', '.join(host_remedies(spec, layout))}"
    )


def legal_at(spec: JobSpec, layout: Layout, accepted: bool = False) -> bool:
    """Whether a job could have a layout, whether or not it allows it; ``accepted`` as for ``layout_problems``."""
    parallelism, on_gpu = spec.parallelism.at(layout), spec.resources.gpus_per_worker
    return not layout_problems(spec.model, parallelism, spec.training, spec.optimizer, on_gpu, accepted)


def smaller_batches(spec: JobSpec, layout: Layout) -> list[JobSpec]:
    """Return the job with each smaller size of micro-batches that its layout allows, the largest first."""
    changed = ({"micro_batch_size": size} for size in divisors(spec.training.micro_batch_size)[-2::-1])
    jobs = [spec.model_copy(update={"training": spec.training.model_copy(update=each)}) for each in changed]
    return [job for job in jobs if legal_at(job, layout, accepted=True)]


def device_remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """List changes that would reduce a layout's device memory and are not made yet."""
    parallelism, training = spec.parallelism, spec.training
    sizes = f"parallelism.tensor_parallel_size or {'pipeline' if layout.cp == 1 else 'context'}_parallel_size"
    remedies = [f"raise {'elasticity.gpus.max' if spec.leaves_layouts else sizes}"]
    if smaller_batches(spec, layout):
        remedies.append(f"lower training.micro_batch_size={training.micro_batch_size}")
    elif parallelism.split_micro_batch:  # without it, blocks may recompute
        remedies.append("leave parallelism.split_micro_batch out")
    if parallelism.recompute not in ("full", "auto") and not parallelism.keeps_on_host:
        remedies.append("set parallelism.recompute=auto")
    if parallelism.zero_stage == 0 and layout.same_weights > 1:
        remedies.append("set parallelism.zero_stage=1")
    if parallelism.zero_stage > 0 and spec.optimizer.kind == "adamw" and not spec.leaves_layouts:
        remedies.append("use more replicas, which share the optimizer's state")
    if training.precision == "fp32":
        remedies.append("set training.precision=bf16")
    if parallelism.optimizer_offload < 1:
        remedies.append("set parallelism.optimizer_offload=1 as a last resort")
    return remedies


def fastest(spec: JobSpec, layouts: Iterable[Layout], seconds: Callable[[Layout], float]) -> Layout | None:
    """Return the fastest of some layouts; ties go to fewest ranks, then to the job's own; ``None`` if there are none.

    Args:
        spec: The job.
        layouts: The layouts.
        seconds: Step time of a layout.
    """
    own = Layout.of(spec.parallelism).per_replica
    return min(layouts, key=lambda each: (seconds(each), each.world_size, each.per_replica != own, each), default=None)


# The plan of a job.

_PRESET_VOCABULARY = 32_000  # the CoLA paper's, so that counts are comparable with it

# Context parallelism: its size, its chunks, and what the ranks send each other.


_MOST_CHUNKS = 512  # of the windows of all sizes that a job may take; planning more takes long


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

    sizes, texts = [], []  # of this one, and half and twice the size, with twice and half the replicas where possible
    others = ((layout.cp // 2, layout.dp * 2), (layout.cp * 2, max(layout.dp // 2, 1)))
    device = device_bytes(spec.resources, machine)
    for each in (layout, *(replace(layout, cp=size, dp=replicas) for size, replicas in others)):
        possible = legal_at(spec, each) and each.cp <= MOST_CONTEXT and each.world_size <= machine.cluster.size
        if each != layout and not possible:
            continue
        needed, seconds = rank_memory(at(spec, each, machine), each).total, step_seconds(spec, each, machine)
        fits = None if device is None else needed <= device
        sizes.append(PlannedSize(
            context_parallel_size=each.cp, world_size=each.world_size, memory_bytes=needed, fits_device=fits,
            step_seconds=seconds,
        ))  # fmt: skip
        gives = f"gives each rank {length // layout.cp:,} tokens of a sequence:"
        if each != layout:
            gives = f"with dp {each.dp} and the same tp, pp, micro-batch and schedule would take"
        lacks = ", more than it has" if fits is False else ""
        texts.append(
            f"cp {each.cp} {gives} {needed / GIB:.1f} GiB per rank{lacks}, and {rounded(seconds)} s per step on "
            f"{each.world_size:,} ranks"
        )
    why = ["; ".join(texts)]

    chunk_sizes, texts = [], []
    of_layouts = len({(each.tp, each.cp) for each in spec.layouts() if each.cp > 1}) or 1  # each partitions differently
    most = _MOST_CHUNKS // of_layouts
    if length // planner.chunk <= most:
        half = () if planner.chunk % 2 else (planner.chunk // 2,)
        for size in (planner.chunk, *half, planner.chunk * 2):
            if length % (size * planner.ranks) == 0 and length // size <= most:
                cost = _of_one_document(replace(planner, chunk=size), length)
                chunk_sizes.append(PlannedChunk(chunk_tokens=size, seconds=cost.seconds, imbalance=cost.imbalance))
                with_it = f"with chunks of {size:,} " if texts else ""
                imbalance = f"{cost.imbalance:.2f} times the mean on the most loaded rank"
                texts.append(f"{with_it}{rounded(1000 * cost.seconds)} ms, {imbalance}")
    text = f"chunks have {planner.chunk:,} tokens, and their keys arrive in {STAGES} stages"
    if planner.sparse_from is not None:
        text += f" (with sparse attention only the keys seen, some heads' in each of up to {STAGES})"
    if texts:
        alone = "" if planner.sparse_from is None else ", without transfers,"
        text += f": one document's attention takes a layer{alone} {'; '.join(texts)}"
    why.append(text)

    exchanges, text = _exchanges(job, planner, machine)
    why.append(text)
    if moved_chunks:
        layer, tokens = attention_layer(job), moved_chunks * planner.chunk
        ways = [sum(layer.moved_bytes(backward, planner.moved)) for backward in (False, True)]
        what = "latents of their queries and outputs" if planner.moves_latents else "their queries and results"
        why.append(
            f"the attention of up to {moved_chunks} of a rank's chunks is computed by other ranks where that is "
            f"faster; {what} are {size_in_words(tokens * ways[0])} per layer forward and "
            f"{size_in_words(tokens * ways[1])} backward"
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


def _exchanges(job: JobSpec, planner: ContextPlanner, machine: Machine) -> tuple[tuple[PlannedExchange, ...], str]:
    """What is sent, and then what may be sent instead; and that in words."""
    cluster, layer, context = machine.cluster, attention_layer(job), job.parallelism.context
    _, row = cluster.rows([job.parallelism.tensor_parallel_size, planner.ranks])
    apart = any(size > 1 for size in row[1:])  # otherwise there are no other nodes to send to
    chosen: Exchange = sent_between_nodes(job, cluster) if apart or context.exchange != "auto" else "keys"
    able = not cannot_send_latents(job.model, job.parallelism, job.training)
    legal: tuple[Exchange, ...] = ("keys", "latents") if able else ("keys",)
    where = "everywhere" if planner.node_ranks == 1 or chosen == "keys" else "between nodes"
    requested = ", as the job requests" if context.exchange != "auto" else ""
    at_most = " at most, as each head is sent only what it sees" if job.training.attention else ""
    planned, texts = [], []
    for kind in (chosen, *(other for other in legal if other != chosen)):
        requesting = job.with_parallelism(context=context.model_copy(update={"exchange": kind}))
        sent = wire(job if kind == chosen else requesting, cluster, row, kind)
        computing = machine.profile.seconds(Work(product_flops=sent.projected_tokens * layer.projection_flops))
        levels = zip(cluster.levels, sent.level_bytes, strict=True)
        links = tuple(LevelBytes(level=level.name, bytes=size) for level, size in levels if size)
        planned.append(PlannedExchange(exchange=kind, links=links, seconds=sent.seconds, projection_seconds=computing))
        over = " and ".join(f"{size_in_words(link.bytes)} over the {link.level}" for link in links)
        keys = f", plus {rounded(1000 * computing)} ms to compute keys" if computing else ""
        cost = f"{over} in {rounded(1000 * sent.seconds)} ms{keys}"
        first = f"{chosen} are sent {where}{requested}: a layer's forward pass takes {cost}{at_most}"
        texts.append(first if kind == chosen else f"{kind} would take {cost}")
    return tuple(planned), "; ".join(texts)


class Communication(Config):
    """What tensor parallel ranks exchange for one micro-batch, forward and backward, on the pipeline rank with most."""

    all_reduces: int = Field(description="Number of collectives; of dense models reduce-scatters and all-gathers.")
    elements_per_token: int = Field(description="Elements per token that a rank passes to them.")
    gathered_elements_per_token: int = Field(
        0,
        description="Elements per token of the kept latents that a rank passes to all-gathers: recompute=shared or "
        "offload.",
    )


class PlannedStep(Frozen):
    """How many ranks take a step, what they need of the hosts, and how long it takes."""

    world_size: int
    node_host_bytes: int = Field(0, description="The most host memory that a node's ranks need for state and copies.")
    step_seconds: float = Field(description="Predicted seconds per step, for ranking layouts.")
    step_seconds_range: tuple[float, float] = Field(description="Range expected to contain 80 % of step times.")


RESOLVED_RECOMPUTE = "The resulting parallelism.recompute: a mode, or the number of blocks in each mode per stage."


class PlannedShape(PlannedRun, LayoutSizes, PlannedStep):
    """The job in one layout."""

    recompute: str = Field(description=RESOLVED_RECOMPUTE)
    optimizer_offload: float = Field(0, description="The resulting parallelism.optimizer_offload.")
    layers_per_stage: tuple[int, ...] = Field((), description="Number of blocks in each pipeline stage.")
    memory: Memory
    device_memory_bytes: int | None = Field(
        description="Memory of the requested GPU model; null for CPUs and unknown models."
    )
    fits_device: bool | None = Field(description="Whether memory.total fits; null if unknown.")
    node_memory_bytes: int | None = Field(None, description="Memory of a node's host; null if unknown, and for CPUs.")
    fits_host: bool | None = Field(None, description="Whether node_host_bytes fits; null if unknown and not checked.")
    offload_seconds: float = Field(
        0,
        description="Part of step_seconds spent on exposed copies to and from the host's memory: "
        "parallelism.optimizer_offload, and recompute=offload.",
    )
    observed_jobs: int = Field(
        0,
        description="Number of jobs that have run in this shape and correct its prediction; 0: corrected by all jobs "
        "on its kind of GPU.",
    )
    step_parts: StepParts = Field(description="Breakdown of step_seconds.")
    tokens_per_second: float
    communication: Communication
    context: PlannedContext | None = Field(
        None, description="Context parallelism, and the cost of other sizes, chunks and exchanges; null without it."
    )


class PublishedRun(Config):
    """Hyperparameters that a model's authors trained it with."""

    model: str
    global_batch_size: int = Field(512, description="Sequences per step.")
    sequence_length: int = Field(256, description="Tokens per sequence.")
    learning_rate: float
    steps: int
    warmup_steps: int
    source: str


PUBLISHED_RUN = "What the authors of its family trained this preset with; null if that is not known."
PUBLISHED = {  # by family, optimizer and preset; those of LaX are not known
    (family, optimizer, preset): PublishedRun(
        model=f"{name} {preset.upper()}", learning_rate=rate, steps=steps, warmup_steps=warmup, source=source
    )
    for family, optimizer, name, source, runs in (
        ("cola", "adamw", "CoLA", "arXiv 2502.10940", (
            ("60m", 0.006, 10_000, 2_000), ("130m", 0.003, 20_000, 2_000), ("350m", 0.003, 60_000, 6_000),
            ("1b", 0.002, 100_000, 10_000), ("7b", 0.001, 150_000, 15_000),
        )),
        ("svd", "loro", "LORO", "github.com/mzf666/LORO-main, scripts/loro_c4", (
            ("60m", 0.01, 10_000, 1_000), ("130m", 0.01, 20_000, 2_000), ("350m", 0.01, 60_000, 2_000),
            ("1b", 0.005, 100_000, 10_000),
        )),
    )
    for preset, rate, steps, warmup in runs
}  # fmt: skip


class Plan(Config):
    """What a job will need."""

    parameters: int
    trainable_bytes_per_parameter: int = Field(
        description="Bytes of weights, gradients and optimizer state per parameter, without sharding across replicas; "
        "rounded where the optimizer keeps fewer moments for some."
    )
    flops_per_token: int = Field(description="FLOPs of forward and backward, without recomputation.")
    tokens_per_step: int
    shapes: tuple[PlannedShape, ...] = Field(description="Layouts that the gang may take, fewest ranks first.")
    fastest: int | None = Field(
        description="Index of the layout with the highest predicted throughput among those that fit GPU and host; null "
        "if none does."
    )
    published: PublishedRun | None = Field(None, description=PUBLISHED_RUN)
    provenance: Provenance = Field(description=PROVENANCE)
    notes: tuple[str, ...] = Field(description="Notes for people.")


class Preset(Config):
    """A published model."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    rank: int
    vocab_size: int = Field(description="Vocabulary size used to count parameters; presets do not set one.")
    parameters: dict[str, int] = Field(description="Parameters by family.")


class PresetList(Config):
    """All presets, from the smallest to the largest."""

    presets: tuple[Preset, ...]


def plan(spec: JobSpec, machine: Machine | None = None, conditions: RunConditions = CONDITIONS) -> Plan:
    """Plan a job in each of its layouts.

    Args:
        spec: The job.
        machine: What it will run on; by default what ``machine_of`` derives from the job alone.
        conditions: Prices, failures and the checkpoints' store.

    Raises:
        ValueError: A layout does not fit into the machine's network, or its stages do not match the listed modes.
    """
    machine = machine or machine_of(spec)
    jobs = {layout: at(spec, layout, machine) for layout in spec.layouts()}
    for job in jobs.values():
        if problem := architecture.miscounted(job.model, job.parallelism, job.training.sequence_length):
            raise ValueError(problem)
    steps = {layout: Step(job, layout, machine) for layout, job in jobs.items()}  # refuses misfits by all ranks
    device, host = device_bytes(spec.resources, machine), machine.node_memory_bytes
    shapes = dict[Layout, PlannedShape]()
    for layout, step in steps.items():
        job, context, copies = step.job, context_report(spec, layout, machine), step.host_copies
        model, parallelism, memory = job.model, job.parallelism, rank_memory(job, layout)
        of_host = node_bytes(memory, layout, machine)

        # What tensor parallel ranks exchange, and kept latents of which a rank passes its slice to all-gathers.
        forward, backward, gathered = architecture.block_exchanges(model, parallelism)
        exchanged = [[0, 0, 0] for _ in range(layout.pp)]  # collectives, elements, latents
        stages = architecture.cut(model, parallelism, job.training.sequence_length)
        for stage in stages if layout.tp > 1 else ():
            sums, modes = exchanged[stage.index % layout.pp], architecture.block_modes(parallelism, stage)
            for mode, blocks in Counter(modes.values()).items():
                payloads = [*forward, *backward, *gathered, *(forward if TRAITS[mode].again == "all" else ())]
                sums[0] += blocks * len(payloads)
                sums[1] += blocks * sum(payload.passed(layout.tp) for payload in payloads)
            for layer, mode in modes.items():
                if TRAITS[mode].slices:
                    sums[2] += sum(saved_latents(model, parallelism, model.crosses_into(layer)))
        all_reduces, elements, latents = max(exchanged, key=lambda sums: layout.tp * sums[1] + sums[2])
        shapes[layout] = PlannedShape(
            **layout.sizes,
            recompute=parallelism.recompute_text,
            optimizer_offload=parallelism.optimizer_offload,
            layers_per_stage=tuple(len(stage.layers) for stage in stages),
            memory=memory,
            device_memory_bytes=device,
            fits_device=None if device is None else memory.total <= device,
            node_memory_bytes=host,
            fits_host=None if host is None else not lacking(of_host, machine),
            offload_seconds=copies.state + copies.exposed,
            observed_jobs=machine.correction(job).jobs,
            **step_and_run(job, layout, step.parts(), of_host, memory.copies, machine, conditions),
            communication=Communication(
                all_reduces=all_reduces, elements_per_token=elements, gathered_elements_per_token=latents // layout.tp
            ),
            context=context,
        )
    fitting = [layout for layout, each in shapes.items() if False not in (each.fits_device, each.fits_host)]
    # A master, its gradient and its moments in fp32; the weights are separate from the masters if rounded. Muon's
    # factors have one moment.
    parameters, precise, rounded = parameter_count(spec.model), BYTES["fp32"], BYTES[spec.training.precision]
    bytes_per_parameter = 4 * precise + (rounded if rounded < precise else 0)
    if spec.optimizer.muon is not None:
        factors = spec.model.num_hidden_layers * architecture.block_matrix_parameters(spec.model)
        bytes_per_parameter = round(bytes_per_parameter - precise * factors / parameters)
    best = fastest(spec, fitting, lambda layout: shapes[layout].step_seconds)
    return Plan(
        parameters=parameters,
        trainable_bytes_per_parameter=bytes_per_parameter,
        flops_per_token=model_flops_per_token(spec.model, spec.training.sequence_length, spec.training.attended_share),
        tokens_per_step=spec.training.global_batch_size * spec.training.sequence_length,
        shapes=tuple(shapes.values()),
        fastest=None if best is None else list(shapes).index(best),
        published=published_run(spec),
        provenance=machine.provenance,
        notes=tuple(_notes(spec, machine, jobs, shapes)),
    )


def presets() -> PresetList:
    """Return all presets with their parameter counts in each family."""
    listed = []
    for name, sizes in PRESETS.items():
        given, families = {"preset": name, "vocab_size": _PRESET_VOCABULARY}, get_args(FamilyName)
        models = {family: ModelConfig.model_validate(given | {"family": family}) for family in families}
        counts = {family: parameter_count(model) for family, model in models.items()}
        shown = {field: size for field, size in sizes.items() if field in Preset.model_fields}
        listed.append(Preset(name=name, **shown, vocab_size=_PRESET_VOCABULARY, parameters=counts))
    return PresetList(presets=tuple(sorted(listed, key=lambda preset: preset.parameters["dense"])))


def step_and_run(
    job: JobSpec, layout: Layout, seconds: StepParts, of_host: int, copies: int, machine: Machine,
    conditions: RunConditions,
) -> dict[str, Any]:  # fmt: skip
    """Return what plans and searches report alike: fields of ``PlannedStep`` and of ``PlannedRun``, and the parts.

    Args:
        job: The job in its layout, with nothing left open.
        layout: The layout.
        seconds: Its step.
        of_host: Bytes of host memory that a node's ranks need.
        copies: As in ``Memory``.
        machine: What it runs on.
        conditions: Prices, failures and the checkpoints' store.
    """
    return {
        **dict(planned_run(job, layout, seconds, copies, machine, conditions, without_a_node)),
        "world_size": layout.world_size,
        "node_host_bytes": of_host,
        "step_seconds": seconds.total,
        "step_seconds_range": machine.range_of(job, seconds.total, seconds.communication),
        "step_parts": seconds,
        "tokens_per_second": job.training.global_batch_size * job.training.sequence_length / seconds.total,
    }


def without_a_node(job: JobSpec, layout: Layout, step: float, machine: Machine) -> LostNode | None:
    """Return how a job whose step takes ``step`` seconds goes on after it has lost a node, if any layout is left."""
    size, count = layout.units(job.resources.placement)  # which lie on nodes as a whole
    most = size * (count - max(1, machine.cluster.levels[0].fan_out // size)) // layout.per_replica.world_size
    layouts = (replace(layout, dp=replicas) for replicas in reversed(numbers_of_replicas(job.training, 1, most)))
    largest = next((each for each in layouts if legal_at(job, each)), None)
    device = device_bytes(job.resources, machine)
    if largest is None or (device is not None and needed_bytes(job, largest, machine) > device):
        return None  # even fewer replicas would share the optimizer's state among fewer ranks
    return LostNode(world_size=largest.world_size, share=step / step_seconds(job, largest, machine))


def network_in_words(machine: Machine) -> str:
    """Say how a machine's ranks are joined, and by which figures."""
    links, outermost = [], machine.cluster.levels[-1]
    for level in machine.cluster.levels:
        joined = f"the {level.name}" if level is outermost else f"{level.fan_out:,} in a {level.name}"
        source = level.link.description.partition(";")[0]
        rate = f" at {rounded(level.link.bytes_per_second / 1e9)} GB/s a rank ({source})"
        links.append(joined + (rate if level.fan_out > 1 else ""))
    return f"network: {', '.join(links)}"


def published_run(spec: JobSpec) -> PublishedRun | None:
    """Return what the authors of a job's family trained its preset with; ``None`` if that is not known."""
    return PUBLISHED.get((spec.model.family, spec.optimizer.kind, spec.model.preset or ""))


def published_in_words(spec: JobSpec) -> Iterator[str]:
    """Compare a job's learning rate, batch and warm-up with the published ones, if these are known."""
    if published := published_run(spec):
        training, optimizer, said = spec.training, spec.optimizer, list[str]()
        for batch, schedule in ((published, published), (training, optimizer)):
            sequences, length = batch.global_batch_size, batch.sequence_length
            said.append(
                f"learning rate {schedule.learning_rate:g} at {sequences * length:,} tokens per step ({sequences:,} "
                f"sequences of {length:,}), warm-up over {schedule.warmup_steps:,} of {batch.steps:,} steps"
            )
        yield f"published for {published.model} ({published.source}): {said[0]}; this job: {said[1]}"


def unknown_memory(resources: ResourcesConfig) -> str:
    """Say what a plan leaves out for GPUs of unknown memory, and how to get it."""
    kind = kind_of_gpu(resources)
    named = "no kind of GPU is named" if kind is None else f"the memory of a {kind} is unknown"
    return (
        f"{named}, so nothing is said of what fits; set resources.accelerator_type, for example to A100, H100 or H200, "
        "to know that and the energy of all steps"
    )


_LARGE_SHARE = 0.05  # of training time
_ACCESS_BYTES = 16  # of a thread at once; also what cuBLAS's kernels for tensor cores want rows to be multiples of


def _notes(
    spec: JobSpec, machine: Machine, jobs: Mapping[Layout, JobSpec], shapes: Mapping[Layout, PlannedShape]
) -> Iterator[str]:
    """Notes for people."""
    yield "times are estimates for comparing layouts; a running job shows its measured times beside them"
    yield f"device: {machine.profile.description}"
    yield network_in_words(machine)
    yield from published_in_words(spec)
    if fitted := machine.fitted:
        factors = fitted.factors
        yield (
            f"corrected by {counted(fitted.jobs, 'job')} that ran in {fitted.precision} on {fitted.kind}: steps are "
            f"expected to take {factors.rest:.2f} times as long as these figures predict, and collectives in them that "
            f"nothing hides {factors.communication:.2f} times"
        )
    device, on_gpu = device_bytes(spec.resources, machine), spec.resources.gpus_per_worker > 0
    if on_gpu and device is None:
        yield unknown_memory(spec.resources)
    if device is not None:
        needed = {layout: each.memory.total for layout, each in shapes.items()}
        too_many = sum(total > device for total in needed.values())
        if too_many == len(needed):
            yield too_large(spec, needed, device)
        elif too_many:
            yield f"{too_many} of {len(needed)} layouts need more memory than a GPU has"

    # What the layout that needs most keeps in the host's memory, what that costs, and whether it fits.
    layout, most = max(shapes.items(), key=lambda each: each[1].node_host_bytes)
    if most.memory.host > 0:
        yield (
            f"{layout}: the host's memory holds {most.memory.host / GIB:.1f} GiB of each rank's state and activations, "
            f"which costs {rounded(most.offload_seconds, 2)} s per step"
        )
    if not on_gpu:
        return
    quickest = min(shapes, key=lambda each: shapes[each].step_seconds)
    seconds, step = shapes[quickest].step_seconds, Step(jobs[quickest], quickest, machine)
    if quickest.pp > 1:
        played = f"{rounded(step.played())} s where its passes are simulated, as in searches"
        yield f"{quickest}: a step takes {rounded(seconds)} s by a formula for pipelines, and {played}"
    exact = step.exact_seconds
    large = exact > _LARGE_SHARE * seconds
    if large and spec.optimizer.loro is None:
        yield (
            f"{quickest}: Muon takes at least {rounded(exact, 2)} s of each step in fp64, which is "
            f"{exact / seconds:.0%}: use larger batches, or GPUs that are faster in fp64"
        )
    elif large and spec.optimizer.loro is not None:
        every = spec.optimizer.loro.exact_every_steps
        yield (
            f"{quickest}: an exact step of LORO takes at least {rounded(every * exact, 2)} s in fp64, which is "
            f"{exact / seconds:.0%} of all training time or more: raise optimizer.loro.exact_every_steps={every}, or "
            "use GPUs that are faster in fp64"
        )
    if not spec.parallelism.split_micro_batch:
        changed = spec.model_dump(mode="json")
        changed["parallelism"]["split_micro_batch"] = True
        with suppress(ValueError):  # where it is not legal
            saved = seconds - step_seconds(JobSpec.model_validate(changed), quickest, machine)
            if saved > _LARGE_SHARE * seconds:
                yield (
                    f"parallelism.split_micro_batch=true would take {saved / seconds:.0%} off a step of {quickest}, by "
                    "the same estimate; it is off by default, as losses then round differently"
                )
    # Rows of matrices begin at multiples of what a thread reads at once, or it reads one element at a time, and
    # matrix products have slower kernels.
    aligned = _ACCESS_BYTES // (1 if spec.training.precision == "fp8" else BYTES[spec.training.precision])
    tensor = max(layout.tp for layout in jobs)
    for name in ("hidden_size", "intermediate_size", "rank", "vocab_size"):
        size, unit = getattr(spec.model, name) or 0, aligned * (1 if name == "rank" else tensor)
        if size % unit:
            nearest = max(unit, round(size / unit) * unit)
            yield (
                f"model.{name}={size} leaves rows on a GPU that are no multiple of {_ACCESS_BYTES} bytes, which makes "
                f"products and all that reads them slower; the nearest size without that is {nearest}"
            )
    needs = f"{most.node_host_bytes / GIB:.1f} GiB of host memory for {on_hosts(jobs[layout])}"
    too_many = sum(each.fits_host is False for each in shapes.values())
    if most.node_memory_bytes is None:
        yield f"{layout}: a node needs {needs}; the memory of the nodes is unknown and not checked"
    elif too_many:
        yield (
            f"{too_many} of {len(shapes)} layouts need more host memory than a node has, "
            f"{most.node_memory_bytes / GIB:.1f} GiB; {layout} needs the most, {needs}; "
            f"{', '.join(host_remedies(jobs[layout], layout))}"
        )
