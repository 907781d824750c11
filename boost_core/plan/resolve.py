"""Resolves what a job leaves open: what its blocks recompute, which layouts it may take, and which of them is best.

``recompute: auto`` (``at``): every layout gets the least costly recompute mix that fits (``recompute_mix``). With
``layouts: auto``, a layout that fits in no other way has the optimizer's state in the host's memory, if that suffices.

A rank's planned memory is what torch's allocator hands out, without CUDA's context, NCCL's buffers and the allocator's
fragmentation. For these remains the difference between the gigabytes of data sheets (``hardware``) and what drivers
report, about 6 % more.

``layouts: auto`` (``choose_layouts``): every legal layout within the job's range of GPUs is timed. Layouts that do not
fit their GPU with 4 % to spare, or do not fit the host memory of their nodes, are dropped. Of the rest, a layout is
selected unless another needs no more GPUs, is as fast, and fits wherever it fits (its ranks that share a node divide
into groups of the other's size). So whatever nodes there are, the fastest selected layout that fits them is as fast as
the fastest of all that do. If more are selected than a job may allow, those that gain least are dropped: each must be
faster by some share than every selected layout that could replace it, and the share is raised until few enough remain.
The micro-batch, the schedule, ZeRO's stage, the strategy and the batch stay as the job sets them, so losses do not
depend on the layout that the scheduler takes.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import inf

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.config.legality import layout_problems, numbers_of_replicas
from boost_core.config.parallelism import MOST_LAYOUTS, GpuRange, Layout, ParallelismConfig
from boost_core.hardware import DEVICE_BYTES
from boost_core.messages import PROVENANCE, Provenance
from boost_core.plan.machine import (
    NODE_GPUS,
    NOMINAL,
    SPARE,
    Basis,
    Machine,
    PredictedCommunication,
    device_bytes,
    kind_of_gpu,
    machine_for,
    refuse_unknown_gpu,
)
from boost_core.plan.memory import GIB, host_contents, host_remedies, lack_in_words, lacking, node_bytes, rank_memory
from boost_core.plan.recompute_mix import RecomputeMixes, legal_modes
from boost_core.plan.search import Choice, because_of_hosts, largest_part, longer
from boost_core.plan.throughput import Step, StepSeconds
from boost_core.plan.work import miscounted

# A job at a layout, with nothing left open, and what it needs.


def at(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> JobSpec:
    """Return the job as a gang of one layout trains it.

    ``recompute: auto`` is replaced by the least costly mix of modes with which every rank fits its GPU, or else by the
    mode with which the fullest rank holds least. With ``layouts: auto``, a layout that fits in no other way has all of
    the optimizer's state on the host, if that makes it fit. Losses are bit-identical in any case.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        machine: What it runs on, whose corrections do not matter; by default what ``machine_for`` returns. Blocks keep
            tensors in the host's memory only if the machine has a known amount of it.
    """
    if spec.parallelism.recompute != "auto" and not spec.leaves_layouts:
        return spec.at(layout)
    return spec.model_copy(update={"parallelism": _resolved(_Inputs.of(spec, layout, machine))[0]})


def needed_bytes(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> int:
    """Return the device memory needed by the rank that needs most in a layout. Arguments as for ``at``."""
    if spec.parallelism.recompute != "auto" and not spec.leaves_layouts:
        return rank_memory(spec, layout).total
    return _resolved(_Inputs.of(spec, layout, machine))[1]


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
        parts = job.model, job.parallelism, job.training, job.optimizer, *facts
        on = machine or machine_for(job.resources, job.training.precision)
        # Each job has corrections of its own, which say little about modes compared with each other.
        return cls(parts, replace(on, fitted=None), job, layout, device * (1 - SPARE))


@lru_cache(4096)  # shared by plans, admission and the scheduler
def _resolved(inputs: _Inputs) -> tuple[ParallelismConfig, int]:
    """Return what replaces what is left open, and the bytes that a rank then needs."""
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
            return offloaded.parallelism, less
    return job.parallelism, needed


def node_host_bytes(spec: JobSpec, layout: Layout, machine: Machine) -> int:
    """Return the host memory that a node's ranks need in one layout."""
    return node_bytes(rank_memory(at(spec, layout, machine), layout), layout, machine)


def step_parts(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> StepSeconds:
    """Return the predicted seconds of one optimizer step by parts.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        machine: What it runs on; by default what ``machine_for`` returns.

    Raises:
        ValueError: The layout's groups do not fit into the machine's network.
    """
    return _step(spec, layout, machine).parts()


def step_seconds(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> float:
    """Return the predicted seconds of one optimizer step. Arguments as in ``step_parts``."""
    return step_parts(spec, layout, machine).total


def predicted_communication(spec: JobSpec, layout: Layout, machine: Machine) -> PredictedCommunication:
    """Return the exposed collectives of a step as predicted for the first pipeline rank, without a correction.

    Arguments and errors as in ``step_parts``.
    """
    return _step(spec, layout, machine).communication()


def offload_seconds(spec: JobSpec, layout: Layout, machine: Machine) -> float:
    """Return a step's seconds of exposed copies to and from the host's memory, with the correction.

    Arguments as in ``step_parts``.
    """
    job = at(spec, layout, machine)
    if job.parallelism.optimizer_offload == 0 and not job.parallelism.keeps_on_host:
        return 0.0
    copies = _step(job, layout, machine).host_copies
    return copies.state + copies.exposed


def _step(spec: JobSpec, layout: Layout, machine: Machine | None) -> Step:
    machine = machine or machine_for(spec.resources, spec.training.precision)
    return Step(at(spec, layout, machine), layout, machine)


# Whether any layout fits, and why not.


def nothing_fits(spec: JobSpec, machine: Machine | None = None) -> str | None:
    """Explain why none of a job's layouts fits the GPUs it requests, and what to change; ``None`` if one fits.

    Also checks that listed modes match the number of stages of each layout, and that a network could hold its ranks.

    Args:
        spec: The job.
        machine: What it runs on; the memory of its nodes' hosts is checked if known. By default it is not checked.
    """
    if isinstance(spec.parallelism.recompute, tuple):
        for job in map(spec.at, spec.layouts()):
            if problem := miscounted(job.model, job.parallelism, job.training.sequence_length):
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
        f"{host_contents(spec)}, and "
        f"{lack_in_words(needed[layout], machine)}; {', '.join(host_remedies(spec, layout))}"
    )


def device_remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """List changes that would reduce a layout's device memory and are not made yet."""
    parallelism, training = spec.parallelism, spec.training
    sizes = f"parallelism.tensor_parallel_size or {'pipeline' if layout.cp == 1 else 'context'}_parallel_size"
    remedies = [f"raise {'elasticity.gpus.max' if spec.leaves_layouts else sizes}"]
    if training.micro_batch_size > 1:
        remedies.append(f"lower training.micro_batch_size={training.micro_batch_size}")
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


# Which of a job's layouts fit on the available nodes, and which of those is best.
#
# A node is just a number here: the ranks that it could take now. A tensor parallel group always stays on one node; so
# does a whole replica under ``placement: STRICT_PACK``. ``PACK`` and ``SPREAD`` are preferences and only decide which
# nodes are taken first.


def units(layout: Layout, placement: str = "PACK") -> tuple[int, int]:
    """Return the number of ranks that share a node, and the number of such groups. Arguments as in ``fits``."""
    if placement == "STRICT_PACK":
        return layout.per_replica.world_size, layout.dp
    return layout.tp, layout.world_size // layout.tp


def fits(layout: Layout, slots: Iterable[int], placement: str = "PACK") -> bool:
    """Whether a gang of a layout can be placed.

    Args:
        layout: The gang's layout.
        slots: Ranks that each node can take.
        placement: ``PACK``, ``STRICT_PACK`` or ``SPREAD``, as in ``resources.placement``.
    """
    size, count = units(layout, placement)
    return sum(slot // size for slot in slots) >= count


def place(layout: Layout, slots: Sequence[int], placement: str = "PACK") -> list[int] | None:
    """Return the number of ranks on each node; ``None`` if they do not fit. Arguments as in ``fits``."""
    size, count = units(layout, placement)
    room = [slot // size for slot in slots]
    if sum(room) < count:
        return None
    allocated = [0] * len(room)
    while count:
        open_nodes = [node for node in range(len(room)) if room[node] > allocated[node]]
        if placement == "SPREAD":  # over many nodes, about evenly
            share = max(1, count // len(open_nodes))
            for node in open_nodes:
                more = min(share, room[node] - allocated[node], count)
                allocated[node] += more
                count -= more
        else:  # onto few nodes: the smallest that holds all of the rest, or else the largest
            enough = [node for node in open_nodes if room[node] >= count]
            node = min(enough, key=lambda node: room[node]) if enough else max(open_nodes, key=lambda node: room[node])
            allocated[node] = min(room[node], count)
            count -= allocated[node]
    return [groups * size for groups in allocated]


def own_slots(layout: Layout, placement: str = "PACK") -> list[int]:
    """Return the slots that a gang certainly has, knowing only its layout: one group per node."""
    size, count = units(layout, placement)
    return [size] * count


def legal(spec: JobSpec, slots: Sequence[int]) -> list[Layout]:
    """Return all layouts that a job allows and that fit, fewest ranks first."""
    return [layout for layout in spec.layouts() if fits(layout, slots, spec.resources.placement)]


def best(spec: JobSpec, slots: Sequence[int], allowed: Iterable[Layout] | None = None) -> Layout | None:
    """Return the layout with the highest predicted throughput; ties go to fewest ranks, then to the job's own layout.

    Args:
        spec: The job.
        slots: Ranks that each node can take.
        allowed: The layouts to choose from; by default all that the job allows.

    Returns:
        ``None`` if none fits.
    """
    choice = spec.layouts() if allowed is None else allowed
    return fastest(spec, (layout for layout in choice if fits(layout, slots, spec.resources.placement)))


def fastest(
    spec: JobSpec, layouts: Iterable[Layout], seconds: Callable[[Layout], float] | None = None
) -> Layout | None:
    """Return the best of some layouts of a job by the order of ``best``; ``None`` if there are none.

    Args:
        spec: The job.
        layouts: The layouts.
        seconds: Step time of a layout; predicted here by default.
    """
    own = Layout.of(spec.parallelism).per_replica
    predicted = seconds or partial(step_seconds, spec)
    return min(
        layouts,
        key=lambda layout: (predicted(layout), layout.world_size, layout.per_replica != own, layout),
        default=None,
    )


def why_not(spec: JobSpec, slots: Sequence[int], allowed: Iterable[Layout] | None = None) -> str:
    """Explain why none of a job's layouts fits, by what the one that needs least of a single node lacks."""
    placement = spec.resources.placement
    layouts = list(spec.layouts() if allowed is None else allowed)
    layout = min(layouts, key=lambda layout: (units(layout, placement)[0], layout.world_size))
    size, count = units(layout, placement)
    ranks, largest = "GPUs" if spec.resources.gpus_per_worker else "workers", max(slots, default=0)
    if largest < size:
        whole = f"a replica of {layout.replica_text}" if size > layout.tp else f"tp {size}"
        return f"{whole} needs {size} {ranks} on one node; the largest has {largest}"
    groups = sum(slot // size for slot in slots)
    together = f" in groups of {size}" if size > 1 else ""
    return f"{layout} needs {size * count} {ranks}{together}; there is room for {groups * size}"


# Choosing the layouts of a job with ``layouts: auto``. Times are the predictions by which the scheduler chooses.

MOST_TIMED = 5000  # layouts, a few milliseconds each
_NAMED = 12  # numbers of replicas
_MOST_TENSOR, _MOST_PIPELINE = 1024, 32  # ``ParallelismConfig``
# Shares by which a layout must be faster than those that could replace it, raised where too many are selected. With 0,
# the first of several that take equally long is selected.
_GAINS = (*(percent / 100 for percent in range(101)), inf)


class NothingFits(ValueError):
    """No layout within the job's range of GPUs is legal and fits."""


class ChosenLayout(Config):
    """One of the layouts chosen for a job."""

    layout: str = Field(description="The layout in words, for example tp 2 × pp 1 × dp 4.")
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int = 1
    world_size: int
    recompute: str = Field(
        description="The resulting parallelism.recompute: a mode, or the number of blocks in each mode per stage."
    )
    optimizer_offload: float = Field(
        0, description="The resulting parallelism.optimizer_offload: 1 where the layout fits in no other way."
    )
    memory_bytes: int = Field(description="Device memory of the rank that needs most.")
    node_host_bytes: int = Field(
        0, description="The most host memory that a node's ranks need for their state and copies."
    )
    step_seconds: float = Field(description="Predicted seconds per step.")
    step_seconds_range: tuple[float, float] = Field(description="Range expected to contain 80 % of step times.")
    why: tuple[str, ...] = Field(
        description="Reasons: the largest part of a step, the next best layout, and the nearest that does not fit."
    )


class ChosenLayouts(Config):
    """The layouts chosen for a job with layouts=auto."""

    layouts: tuple[ChosenLayout, ...] = Field(description="The chosen layouts, fewest ranks first.")
    timed: int = Field(description="Number of legal layouts that were timed.")
    device_memory_bytes: int | None = Field(description="Memory of the requested GPU model; null on CPUs.")
    node_memory_bytes: int | None = Field(
        None, description="Memory of a node's host; null if unknown, in which case it is not checked."
    )
    provenance: Provenance = Field("assumed", description=PROVENANCE)

    @property
    def sizes(self) -> tuple[Layout, ...]:
        """The layouts themselves."""
        return tuple(Layout.of(layout) for layout in self.layouts)


def choose_layouts(spec: JobSpec, basis: Basis = NOMINAL) -> ChosenLayouts:
    """Choose layouts for a job with ``layouts: auto``.

    Args:
        spec: The job.
        basis: What predictions are based on.

    Raises:
        NothingFits: No layout fits; says what is lacking and what to change.
        ValueError: The GPUs' memory is unknown, there are too many layouts, or the profile is of another precision.
    """
    gpus = spec.elasticity.gpus if spec.elasticity else None
    if gpus is None:
        raise ValueError("the job lists its layouts; they are only chosen with layouts=auto")
    refuse_unknown_gpu(spec.resources)
    device, machine = device_bytes(spec.resources), basis.machine(spec)
    if device is None and spec.resources.gpus_per_worker:
        raise ValueError(
            "layouts=auto needs to know the GPU's memory; set resources.accelerator_type to one of "
            f"{', '.join(DEVICE_BYTES)}, or list layouts"
        )

    legal: list[Layout] = []
    for layout in _layouts_in_range(spec, gpus, machine):
        legal.append(layout)
        if len(legal) > MOST_TIMED:
            raise ValueError(f"{gpus.min} to {gpus.max} GPUs allow more than {MOST_TIMED:,} layouts; narrow the range")
    if not legal:
        training, model = spec.training, spec.model
        numbers = numbers_of_replicas(training, 1, training.global_batch_size)
        listed = ", ".join(map(str, numbers[:_NAMED])) + (", …" if len(numbers) > _NAMED else "")
        raise NothingFits(
            f"no layout of {gpus.min} to {gpus.max} GPUs is legal: the number of GPUs must be a number of replicas "
            f"over which the batch splits ({listed}), times a tensor parallel size that divides "
            f"hidden_size={model.hidden_size} and the heads, times a number of pipeline stages, at most "
            f"{model.num_hidden_layers} and no more than each replica has micro-batches; widen elasticity.gpus"
        )

    timed = []
    for layout in legal:
        job = at(spec, layout, machine)
        memory, step = rank_memory(job, layout), Step(job, layout, machine)
        host = node_bytes(memory, layout, machine)
        timed.append(Choice(job, step.parts(), memory.total, host, step.host_copies))
    limit = inf if device is None else device * (1 - SPARE)
    on_gpu = [choice for choice in timed if choice.needed <= limit]
    fitting = sorted((choice for choice in on_gpu if not lacking(choice.host, machine)), key=_speed_order)
    if device is not None and not on_gpu:
        least = min(timed, key=lambda choice: (choice.needed, choice.layout))
        raise NothingFits(
            f"no layout of {gpus.min} to {gpus.max} GPUs fits: {least.layout} needs the least, "
            f"{least.needed / GIB:.1f} GiB, {(least.needed - limit) / GIB:.1f} GiB more than a GPU of "
            f"{device / GIB:.1f} GiB has ({SPARE:.0%} is kept free); {', '.join(device_remedies(spec, least.layout))}"
        )
    if not fitting:
        raise NothingFits(too_large_for_hosts(spec, {each.layout: each.host for each in on_gpu}, machine))
    unfit = [choice for choice in timed if choice.needed > limit or lacking(choice.host, machine)]

    return ChosenLayouts(
        layouts=tuple(
            ChosenLayout(
                layout=str(choice.layout),
                **choice.layout.sizes,
                world_size=choice.layout.world_size,
                recompute=choice.job.parallelism.recompute_text,
                optimizer_offload=choice.job.parallelism.optimizer_offload,
                memory_bytes=choice.needed,
                node_host_bytes=choice.host,
                step_seconds=choice.seconds.total,
                step_seconds_range=machine.range_of(choice.job, choice.seconds.total, choice.seconds.communication),
                why=tuple(_reasons(spec, choice, fitting, unfit, limit, machine)),
            )
            for choice in _selected(spec, fitting)
        ),
        timed=len(timed),
        device_memory_bytes=device,
        node_memory_bytes=machine.node_memory_bytes,
        provenance=machine.provenance,
    )


def _layouts_in_range(spec: JobSpec, gpus: GpuRange, machine: Machine) -> Iterator[Layout]:
    """All layouts in a range of GPUs that the job allows and whose units fit into a node.

    A node may be larger than most that there are now.
    """
    node = min(max(machine.cluster.levels[0].fan_out, NODE_GPUS), gpus.max)
    numbers = numbers_of_replicas(spec.training, 1, gpus.max)
    for tensor in range(1, min(node, _MOST_TENSOR) + 1):
        if spec.model.hidden_size % tensor:
            continue
        for pipeline in range(1, min(_MOST_PIPELINE, spec.model.num_hidden_layers, gpus.max // tensor) + 1):
            for replicas in numbers:
                layout = Layout(tensor, pipeline, replicas)
                whole = units(layout, spec.resources.placement)[0] <= node
                if not whole or not gpus.min <= layout.world_size <= gpus.max:
                    continue
                parallelism, on_gpu = spec.parallelism.at(layout), spec.resources.gpus_per_worker
                if not layout_problems(spec.model, parallelism, spec.training, spec.optimizer, on_gpu):
                    yield layout


def _speed_order(choice: Choice) -> tuple[float, int, Layout]:
    """Order by speed, then by fewer ranks, then by smaller groups."""
    return choice.seconds.total, choice.layout.world_size, choice.layout


def _selected(spec: JobSpec, fitting: Sequence[Choice]) -> list[Choice]:
    """The layouts that are worth allowing, no more than a job may allow, fewest ranks first."""
    placement = spec.resources.placement
    candidates = sorted(fitting, key=lambda choice: (choice.layout.world_size, *_speed_order(choice)))
    for gain in _GAINS:
        selected: list[Choice] = []
        for choice in candidates:
            unit = units(choice.layout, placement)[0]
            # Those that fit on all nodes on which it fits; they need no more ranks.
            rivals = [other for other in selected if unit % units(other.layout, placement)[0] == 0]
            if all(choice.seconds.total * (1 + gain) < other.seconds.total for other in rivals):
                selected.append(choice)
        if len(selected) <= MOST_LAYOUTS:
            break
        candidates = selected if gain == 0 else candidates
    return sorted(selected[:MOST_LAYOUTS], key=lambda choice: (choice.layout.world_size, choice.layout))


def _reasons(
    spec: JobSpec, choice: Choice, fitting: Sequence[Choice], unfit: Sequence[Choice], limit: float, machine: Machine
) -> Iterator[str]:
    """Explain why a layout was chosen, compared with those that need no more GPUs."""
    layout, ranks = choice.layout, choice.layout.world_size
    yield f"most of its step is {largest_part(choice)}"
    others = (other for other in fitting if other.layout.world_size <= ranks and other.layout != layout)
    if other := next(others, None):
        own, its = (units(each, spec.resources.placement)[0] for each in (layout, other.layout))
        if _speed_order(other) < _speed_order(choice):
            yield f"{other.layout} is faster, but needs {its} free GPUs on one node at a time, not {own}"
        else:
            yield f"the next best with no more GPUs, {other.layout}, takes {longer(other, choice)}"
    if choice.job.parallelism.optimizer_offload > spec.parallelism.optimizer_offload:
        lacks = needed_bytes(spec.model_copy(update={"elasticity": None}), layout, machine) - limit
        yield (
            f"the optimizer's state is in the host's memory, which takes {choice.copies.state:.3g} s of the bus; "
            f"without that it lacks {lacks / GIB:.1f} GiB per GPU"
        )
    yield from because_of_hosts(choice, limit, machine, lambda step: step.parts().total)
    faster = [each for each in unfit if each.layout.world_size <= ranks and _speed_order(each) < _speed_order(choice)]
    if misfit := min(faster, key=lambda each: (each.needed, each.layout), default=None):
        lacks = (misfit.needed - limit) / GIB
        what = f"lacks {lacks:.1f} GiB per GPU" if lacks > 0 else lack_in_words(misfit.host, machine)
        yield f"{misfit.layout} would take {misfit.seconds.total:.3g} s, but {what}"
