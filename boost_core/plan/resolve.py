"""Choosing the layouts of a job with ``elasticity.layouts: auto``.

Every legal layout within the job's range of GPUs is timed. Layouts that do not fit their GPU with 4 % to spare, or do
not fit the host memory of their nodes, are dropped. Of the rest, a layout is kept unless another needs no more GPUs, is
as fast, and fits wherever it fits (its ranks that share a node divide into groups of the other's size). So whatever
nodes there are, the fastest kept layout that fits them is as fast as the fastest of all that do.

If more are kept than a job may allow, those that gain least are dropped: each must be faster by some share than every
kept layout that could replace it, and the share is raised until few enough remain.

Layouts that otherwise do not fit have the optimizer's state in the host's memory, if that is known and suffices
(``devices.at``). The micro-batch, the schedule, ZeRO's stage, the strategy and the batch stay as the job sets them, so
losses do not depend on the layout that the scheduler takes. Times are the predictions by which the scheduler chooses.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from math import inf

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.config.legality import layout_problems, numbers_of_replicas
from boost_core.config.parallelism import MOST_LAYOUTS, GpuRange, Layout
from boost_core.hardware import DEVICE_BYTES
from boost_core.messages import PROVENANCE, Provenance
from boost_core.plan.devices import SPARE, at, device_bytes, needed_bytes, remedies, too_large_for_hosts
from boost_core.plan.machine import NODE_GPUS, NOMINAL, Basis, Machine
from boost_core.plan.memory import lack_in_words, lacking, node_bytes, rank_memory
from boost_core.plan.search import Choice, because_of_hosts, largest_part, longer
from boost_core.plan.throughput import Step, step_seconds

# Which of a job's layouts fit on the available nodes, and which of those is best.
#
# A node is just a number here: the ranks that it could take now. A tensor parallel group always stays on one node; so
# does a whole replica under ``placement: STRICT_PACK``. ``PACK`` and ``SPREAD`` are preferences and only decide which
# nodes are taken first.


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
    left = [slot // size for slot in slots]
    if sum(left) < count:
        return None
    taken = _spread(left, count) if placement == "SPREAD" else _pack(left, count)
    return [units * size for units in taken]


def own_slots(layout: Layout, placement: str = "PACK") -> list[int]:
    """Return the slots that a gang certainly has, knowing only its layout: one group per node."""
    size, count = units(layout, placement)
    return [size] * count


def units(layout: Layout, placement: str = "PACK") -> tuple[int, int]:
    """Return the number of ranks that share a node, and the number of such groups. Arguments as in ``fits``."""
    if placement == "STRICT_PACK":
        return layout.per_replica.world_size, layout.dp
    return layout.tp, layout.world_size // layout.tp


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


def _pack(left: Sequence[int], count: int) -> list[int]:
    """Pack onto few nodes: take the smallest that holds all of the rest, or else the largest."""
    taken = [0] * len(left)
    while count:
        open_nodes = [node for node in range(len(left)) if left[node] > taken[node]]
        enough = [node for node in open_nodes if left[node] >= count]
        node = min(enough, key=lambda node: left[node]) if enough else max(open_nodes, key=lambda node: left[node])
        taken[node] = min(left[node], count)
        count -= taken[node]
    return taken


def _spread(left: Sequence[int], count: int) -> list[int]:
    """Spread over many nodes, about evenly."""
    taken = [0] * len(left)
    while count:
        open_nodes = [node for node in range(len(left)) if left[node] > taken[node]]
        share = max(1, count // len(open_nodes))
        for node in open_nodes:
            more = min(share, left[node] - taken[node], count)
            taken[node] += more
            count -= more
    return taken


MOST_TIMED = 5000  # layouts, a few milliseconds each
_NAMED = 12  # numbers of replicas
_MOST_TENSOR, _MOST_PIPELINE = 1024, 32  # ``ParallelismConfig``
_GAINS = (
    *(percent / 100 for percent in range(1, 101)),
    inf,
)  # least gains required of a layout where too many are kept


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
    device, machine = device_bytes(spec.resources), basis.machine(spec)
    if device is None and spec.resources.gpus_per_worker:
        raise ValueError(
            "layouts=auto needs to know the GPU's memory; set resources.accelerator_type to one of "
            f"{', '.join(DEVICE_BYTES)}, or list layouts"
        )
    timed = [_timed(spec, layout, machine) for layout in _legal(spec, gpus, machine)]
    limit = inf if device is None else device * (1 - SPARE)
    on_gpu = [choice for choice in timed if choice.needed <= limit]
    fitting = sorted((choice for choice in on_gpu if not lacking(choice.host, machine)), key=_rank)
    if device is not None and not on_gpu:
        raise NothingFits(_too_large(spec, gpus, timed, device))
    if not fitting:
        raise NothingFits(too_large_for_hosts(spec, {each.layout: each.host for each in on_gpu}, machine))
    unfit = [choice for choice in timed if choice.needed > limit or lacking(choice.host, machine)]
    kept = sorted(_kept(spec, fitting), key=lambda choice: (choice.layout.world_size, choice.layout))
    reports = (_reported(spec, choice, fitting, unfit, limit, machine) for choice in kept)
    return ChosenLayouts(
        layouts=tuple(reports),
        timed=len(timed),
        device_memory_bytes=device,
        node_memory_bytes=machine.node_memory_bytes,
        provenance=machine.provenance,
    )


def _legal(spec: JobSpec, gpus: GpuRange, machine: Machine) -> list[Layout]:
    """All layouts in the range that the job's model, batch and optimizer allow and whose units fit into a node.

    A node may be larger than most that there are now.
    """
    node = min(max(machine.cluster.levels[0].fan_out, NODE_GPUS), gpus.max)
    numbers = numbers_of_replicas(spec.training, 1, gpus.max)
    legal = list(
        islice(
            (
                layout
                for layout in _sizes(spec, node, gpus, numbers)
                if not layout_problems(
                    spec.model,
                    spec.parallelism.at(layout),
                    spec.training,
                    spec.optimizer,
                    spec.resources.gpus_per_worker,
                )
            ),
            MOST_TIMED + 1,
        )
    )
    if len(legal) > MOST_TIMED:
        raise ValueError(f"{gpus.min} to {gpus.max} GPUs allow more than {MOST_TIMED:,} layouts; narrow the range")
    if not legal:
        raise NothingFits(_illegal(spec, gpus))
    return legal


def _sizes(spec: JobSpec, node: int, gpus: GpuRange, numbers: Sequence[int]) -> Iterator[Layout]:
    for tensor in range(1, min(node, _MOST_TENSOR) + 1):
        if spec.model.hidden_size % tensor:
            continue
        for pipeline in range(1, min(_MOST_PIPELINE, spec.model.num_hidden_layers, gpus.max // tensor) + 1):
            for replicas in numbers:
                layout = Layout(tensor, pipeline, replicas)
                whole = units(layout, spec.resources.placement)[0] <= node
                if whole and gpus.min <= layout.world_size <= gpus.max:
                    yield layout


def _timed(spec: JobSpec, layout: Layout, machine: Machine) -> Choice:
    job = at(spec, layout, machine)
    memory = rank_memory(job, layout)
    step = Step(job, layout, machine)
    return Choice(job, step.parts(), memory.total, node_bytes(memory, layout, machine), step.host_copies)


def _rank(choice: Choice) -> tuple[float, int, Layout]:
    """Order by speed, then by fewer ranks, then by smaller groups."""
    return choice.seconds.total, choice.layout.world_size, choice.layout


def _kept(spec: JobSpec, fitting: Sequence[Choice]) -> list[Choice]:
    """The layouts to keep: no more than a job may allow."""
    front = kept = _worthwhile(spec, fitting)
    for gain in _GAINS:
        if len(kept) <= MOST_LAYOUTS:
            break
        kept = _worthwhile(spec, front, gain)
    return kept[:MOST_LAYOUTS]


def _worthwhile(spec: JobSpec, fitting: Sequence[Choice], gain: float = 0.0) -> list[Choice]:
    """Layouts that are faster by the share ``gain`` than any kept layout that could replace them.

    With a gain of 0 the first of several that take equally long is kept.
    """
    kept: list[Choice] = []
    by_size = sorted(fitting, key=lambda choice: (choice.layout.world_size, *_rank(choice)))
    for choice in by_size:
        rivals = [other for other in kept if _stands_in(spec, other.layout, choice.layout)]
        if all(choice.seconds.total * (1 + gain) < other.seconds.total for other in rivals):
            kept.append(choice)
    return kept


def _stands_in(spec: JobSpec, other: Layout, layout: Layout) -> bool:
    """Whether ``other`` fits on all nodes on which ``layout`` fits."""
    placement = spec.resources.placement
    return other.world_size <= layout.world_size and units(layout, placement)[0] % units(other, placement)[0] == 0


def _reported(
    spec: JobSpec, choice: Choice, fitting: Sequence[Choice], unfit: Sequence[Choice], limit: float, machine: Machine
) -> ChosenLayout:
    layout = choice.layout
    return ChosenLayout(
        layout=str(layout),
        **layout.sizes,
        world_size=layout.world_size,
        recompute=choice.job.parallelism.recompute_text,
        optimizer_offload=choice.job.parallelism.optimizer_offload,
        memory_bytes=choice.needed,
        node_host_bytes=choice.host,
        step_seconds=choice.seconds.total,
        step_seconds_range=machine.range_of(choice.job, choice.seconds.total, choice.seconds.communication),
        why=tuple(_reasons(spec, choice, fitting, unfit, limit, machine)),
    )


def _reasons(
    spec: JobSpec, choice: Choice, fitting: Sequence[Choice], unfit: Sequence[Choice], limit: float, machine: Machine
) -> Iterator[str]:
    """Explain why a layout was chosen, compared with those that need no more GPUs."""
    layout, ranks = choice.layout, choice.layout.world_size
    yield f"most of its step is {largest_part(choice)}"
    others = (other for other in fitting if other.layout.world_size <= ranks and other.layout != layout)
    if other := next(others, None):
        own, its = (units(each, spec.resources.placement)[0] for each in (layout, other.layout))
        if _rank(other) < _rank(choice):
            yield f"{other.layout} is faster, but needs {its} free GPUs on one node at a time, not {own}"
        else:
            yield f"the next best with no more GPUs, {other.layout}, takes {longer(other, choice)}"
    if choice.job.parallelism.optimizer_offload > spec.parallelism.optimizer_offload:
        lacks = needed_bytes(spec.model_copy(update={"elasticity": None}), layout, machine) - limit
        yield (
            f"the optimizer's state is in the host's memory, which takes {choice.copies.state:.3g} s of the bus; "
            f"without that it lacks {lacks / 1e9:.1f} GB per GPU"
        )
    yield from because_of_hosts(choice, limit, machine, lambda step: step.parts().total)
    faster = [each for each in unfit if each.layout.world_size <= ranks and _rank(each) < _rank(choice)]
    if misfit := min(faster, key=lambda each: (each.needed, each.layout), default=None):
        lacks = (misfit.needed - limit) / 1e9
        what = f"lacks {lacks:.1f} GB per GPU" if lacks > 0 else lack_in_words(misfit.host, machine)
        yield f"{misfit.layout} would take {misfit.seconds.total:.3g} s, but {what}"


def _too_large(spec: JobSpec, gpus: GpuRange, timed: Sequence[Choice], device: int) -> str:
    least = min(timed, key=lambda choice: (choice.needed, choice.layout))
    lacks = least.needed - device * (1 - SPARE)
    return (
        f"no layout of {gpus.min} to {gpus.max} GPUs fits: {least.layout} needs the least, "
        f"{least.needed / 1e9:.1f} GB, {lacks / 1e9:.1f} GB more than a GPU of {device / 1e9:g} GB has "
        f"({SPARE:.0%} is kept free); "
        f"{', '.join(remedies(spec, least.layout))}"
    )


def _illegal(spec: JobSpec, gpus: GpuRange) -> str:
    """Explain why no layout in the range of GPUs is legal: what their number would have to be a product of."""
    training, model = spec.training, spec.model
    numbers = numbers_of_replicas(training, 1, training.global_batch_size)
    listed = ", ".join(map(str, numbers[:_NAMED])) + (", …" if len(numbers) > _NAMED else "")
    return (
        f"no layout of {gpus.min} to {gpus.max} GPUs is legal: the number of GPUs must be a number of replicas over "
        f"which the batch splits ({listed}), times a tensor parallel size that divides "
        f"hidden_size={model.hidden_size} and the heads, times a number of pipeline stages, at most "
        f"{model.num_hidden_layers} and no more than each replica has micro-batches; widen elasticity.gpus"
    )
