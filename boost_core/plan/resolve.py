"""Which of a job's layouts fit the nodes and which is the best of these, and the choice for ``layouts: auto``.

``layouts: auto`` (``choose_layouts``): every legal layout within the job's range of GPUs is timed. Layouts that do not
fit their GPU with 4 % to spare, or do not fit the host memory of their nodes, are dropped. Of the rest, a layout is
selected unless another needs no more GPUs, is as fast, and fits wherever it fits (its ranks that share a node divide
into groups of the other's size). So whatever nodes there are, the fastest selected layout that fits them is as fast as
the fastest of all that do. If more are selected than a job may allow, those that gain least are dropped: each must be
faster by some share than every selected layout that could replace it, and the share is raised until few enough remain.
The micro-batch, the schedule, ZeRO's stage, the strategy and the batch stay as the job sets them, so losses do not
depend on the layout that the scheduler takes.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec, numbers_of_replicas
from boost_core.config.parallelism import MOST_LAYOUTS, Layout, LayoutSizes
from boost_core.hardware import DEVICE_BYTES
from boost_core.messages import PROVENANCE, Provenance
from boost_core.plan import report
from boost_core.plan.machine import NODE_HOST, NOMINAL, SPARE, Basis, Machine, device_bytes, refuse_unfit_gpu
from boost_core.plan.memory import GIB, lack_in_words, lacking, node_bytes, rank_memory
from boost_core.plan.recompute_mix import legal_modes
from boost_core.plan.report import device_remedies, smaller_batches
from boost_core.plan.search import Choice, because_of_hosts, largest_part, longer
from boost_core.plan.throughput import Step
from boost_core.terminal import rounded


def out_of_memory(spec: JobSpec, requested: int, allocated: int, reserved: int, free: int, total: int) -> str:
    """Explain why a rank's GPU had no memory left, and what would fit.

    Args:
        spec: The job at the rank's layout.
        requested: Bytes that could not be allocated.
        allocated: Bytes that tensors had by then.
        reserved: Bytes that torch had for them.
        free: Bytes that nobody had.
        total: Bytes of the GPU.
    """
    layout = Layout.of(spec.parallelism)
    planned = rank_memory(spec, layout).total
    # A plan that was too low is too low for the alternatives, too.
    limit, factor = free + reserved, max(1.0, (allocated + requested) / planned)
    batches, modes = smaller_batches(spec, layout), legal_modes(spec, NOMINAL.machine(spec))
    smaller = {f"training.micro_batch_size={job.training.micro_batch_size}": job for job in batches}
    leaner = {f"parallelism.recompute={mode}": spec.with_parallelism(recompute=mode) for mode in modes}
    fitting = []
    for changes in (smaller, leaner):  # those that save least come first
        for change, job in changes.items():
            needed = factor * rank_memory(job, layout).total
            if needed <= limit and needed < factor * planned:
                fitting.append(f"{change} ({needed / GIB:.1f} GiB)")
                break
    advice = f"By the plan, {' or '.join(fitting)} would fit" if fitting else ", ".join(device_remedies(spec, layout))
    return (
        f"out of GPU memory: {requested / GIB:.2f} GiB were requested. Planned were {planned / GIB:.1f} GiB for the "
        f"fullest rank; torch had allocated {allocated / GIB:.1f} GiB and reserved {reserved / GIB:.1f} GiB of "
        f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB were free, and other processes and libraries had "
        f"{max(0, total - free - reserved) / GIB:.1f} GiB. {advice}"
    )


# Which of a job's layouts fit on the available nodes, and which of those is best.
#
# A node is just a number here: the ranks that it could take now. What stays on one node is ``Layout.units``.
# ``PACK`` and ``SPREAD`` are preferences and only decide which nodes are taken first.


def fits(layout: Layout, slots: Iterable[int], placement: str = "PACK") -> bool:
    """Whether a gang of a layout can be placed.

    Args:
        layout: The gang's layout.
        slots: Ranks that each node can take.
        placement: ``PACK``, ``STRICT_PACK`` or ``SPREAD``, as in ``resources.placement``.
    """
    size, count = layout.units(placement)
    return sum(slot // size for slot in slots) >= count


def place(layout: Layout, slots: Sequence[int], placement: str = "PACK") -> list[int] | None:
    """Return the number of ranks on each node; ``None`` if they do not fit. Arguments as in ``fits``."""
    size, count = layout.units(placement)
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
    size, count = layout.units(placement)
    return [size] * count


def why_not(spec: JobSpec, slots: Sequence[int], layouts: Iterable[Layout]) -> str:
    """Explain why none of a job's layouts fits, by what the one that needs least of a single node lacks."""
    placement = spec.resources.placement
    layout = min(layouts, key=lambda layout: (layout.units(placement)[0], layout.world_size))
    size, count = layout.units(placement)
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


class ChosenLayout(LayoutSizes, report.PlannedStep):
    """One of the layouts chosen for a job."""

    layout: str = Field(description="The layout in words, for example tp 2 × pp 1 × dp 4.")
    recompute: str = Field(description=report.RESOLVED_RECOMPUTE)
    optimizer_offload: float = Field(
        0, description="The resulting parallelism.optimizer_offload: 1 where the layout fits in no other way."
    )
    memory_bytes: int = Field(description="Device memory of the rank that needs most.")
    why: tuple[str, ...] = Field(
        description="Reasons: the largest part of a step, the next best layout, and the nearest that does not fit."
    )


class ChosenLayouts(Config):
    """The layouts chosen for a job with layouts=auto."""

    layouts: tuple[ChosenLayout, ...] = Field(description="The chosen layouts, fewest ranks first.")
    timed: int = Field(description="Number of legal layouts that were timed.")
    device_memory_bytes: int | None = Field(description="Memory of the requested GPU model; null on CPUs.")
    node_memory_bytes: int | None = Field(None, description=NODE_HOST)
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
    refuse_unfit_gpu(spec)
    device, machine, placement = device_bytes(spec.resources), basis.machine(spec), spec.resources.placement
    if device is None and spec.resources.gpus_per_worker:
        raise ValueError(
            "layouts=auto needs to know the GPU's memory; set resources.accelerator_type to one of "
            f"{', '.join(DEVICE_BYTES)}, or list layouts"
        )

    # Those that the job allows and whose units fit into a node, which may be larger than most that there are now.
    node = min(max(each.cluster.levels[0].fan_out for each in (machine, NOMINAL.machine(spec))), gpus.max)
    numbers, most_stages = numbers_of_replicas(spec.training, 1, gpus.max), spec.model.num_hidden_layers
    layouts = (
        Layout(tensor, pipeline, replicas)
        for tensor in range(1, min(node, _MOST_TENSOR) + 1)
        if spec.model.hidden_size % tensor == 0
        for pipeline in range(1, min(_MOST_PIPELINE, most_stages, gpus.max // tensor) + 1)
        for replicas in numbers
    )
    within = (each for each in layouts if gpus.min <= each.world_size <= gpus.max and each.units(placement)[0] <= node)
    legal = list(islice((each for each in within if report.legal_at(spec, each)), MOST_TIMED + 1))
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
        job = report.at(spec, layout, machine)
        memory, step = rank_memory(job, layout), Step(job, layout, machine)
        timed.append(Choice(job, step.parts(), memory.total, node_bytes(memory, layout, machine), step.host_copies))
    limit = inf if device is None else device * (1 - SPARE)
    on_gpu = [choice for choice in timed if choice.needed <= limit]
    fitting = sorted((choice for choice in on_gpu if not lacking(choice.host, machine)), key=_speed_order)
    if device is not None and not on_gpu:
        least = min(timed, key=lambda choice: (choice.needed, choice.layout))
        remedies = device_remedies(spec, least.layout)
        raise NothingFits(
            f"no layout of {gpus.min} to {gpus.max} GPUs fits: {least.layout} needs the least, "
            f"{least.needed / GIB:.1f} GiB, {(least.needed - limit) / GIB:.1f} GiB more than a GPU of "
            f"{device / GIB:.1f} GiB has ({SPARE:.0%} is kept free); {', '.join(remedies)}"
        )
    if not fitting:
        raise NothingFits(report.too_large_for_hosts(spec, {each.layout: each.host for each in on_gpu}, machine))
    unfit = [choice for choice in timed if choice.needed > limit or lacking(choice.host, machine)]

    # Those that are worth allowing, no more than a job may allow.
    candidates = sorted(fitting, key=lambda choice: (choice.layout.world_size, *_speed_order(choice)))
    for gain in _GAINS:
        selected: list[Choice] = []
        for choice in candidates:
            unit = choice.layout.units(placement)[0]
            # Those that fit on all nodes on which it fits; they need no more ranks.
            rivals = [other for other in selected if unit % other.layout.units(placement)[0] == 0]
            if all(choice.seconds.total * (1 + gain) < other.seconds.total for other in rivals):
                selected.append(choice)
        if len(selected) <= MOST_LAYOUTS:
            break
        candidates = selected if gain == 0 else candidates
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
            for choice in sorted(selected[:MOST_LAYOUTS], key=lambda each: (each.layout.world_size, each.layout))
        ),
        timed=len(timed),
        device_memory_bytes=device,
        node_memory_bytes=machine.node_memory_bytes,
        provenance=machine.provenance,
    )


def _speed_order(choice: Choice) -> tuple[float, int, Layout]:
    """Order by speed, then by fewer ranks, then by smaller groups."""
    return choice.seconds.total, choice.layout.world_size, choice.layout


def _reasons(
    spec: JobSpec, choice: Choice, fitting: Sequence[Choice], unfit: Sequence[Choice], limit: float, machine: Machine
) -> Iterator[str]:
    """Explain why a layout was chosen, compared with those that need no more GPUs."""
    layout, ranks = choice.layout, choice.layout.world_size
    yield f"most of its step is {largest_part(choice)}"
    others = (other for other in fitting if other.layout.world_size <= ranks and other.layout != layout)
    if other := next(others, None):
        own, its = (each.units(spec.resources.placement)[0] for each in (layout, other.layout))
        if _speed_order(other) < _speed_order(choice):
            yield f"{other.layout} is faster, but needs {its} free GPUs on one node at a time, not {own}"
        else:
            yield f"the next best with no more GPUs, {other.layout}, takes {longer(other, choice)}"
    if choice.job.parallelism.optimizer_offload > spec.parallelism.optimizer_offload:
        lacks = report.needed_bytes(spec.model_copy(update={"elasticity": None}), layout, machine) - limit
        yield (
            f"the optimizer's state is in the host's memory, which takes {rounded(choice.copies.state)} s of the bus; "
            f"without that it lacks {lacks / GIB:.1f} GiB per GPU"
        )
    yield from because_of_hosts(choice, limit, machine, lambda step: step.parts().total)
    faster = [each for each in unfit if each.layout.world_size <= ranks and _speed_order(each) < _speed_order(choice)]
    if misfit := min(faster, key=lambda each: (each.needed, each.layout), default=None):
        lacks = (misfit.needed - limit) / GIB
        what = f"lacks {lacks:.1f} GiB per GPU" if lacks > 0 else lack_in_words(misfit.host, machine)
        yield f"{misfit.layout} would take {rounded(misfit.seconds.total)} s, but {what}"
