"""The layouts of a job that leaves them to the service: ``elasticity.layouts: auto``.

All legal layouts of as many GPUs as the job allows are timed, and those that do not fit their GPU with 4 % to spare are
left out. Of the others, one is kept unless another takes no more GPUs, fits wherever it fits (the ranks that share a
node divide into groups of the other's), and is as fast. So whatever nodes there are, the fastest layout kept that fits
them is as fast as the fastest of all that do.

If more are kept than a job may allow, those go that gain least: each is to be faster by a share than all kept that
could stand in for it, and the share is raised until few enough are.

The micro-batch, the schedule, ZeRO's stage, the strategy and the batch are the job's: losses do not depend on which
layout the scheduler takes. Seconds are those by which it chooses among them.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.elasticity import MOST_LAYOUTS, GpuRange
from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.legality import layout_problems, numbers_of_replicas
from boost_core.hardware import DEVICE_BYTES
from boost_core.messages.reports import PROVENANCE, Provenance
from boost_core.plan.devices import SPARE, at, device_bytes, remedies
from boost_core.plan.machine import NODE_GPUS, Machine
from boost_core.plan.measured import NOMINAL, Basis
from boost_core.plan.memory import rank_memory
from boost_core.plan.resize import units
from boost_core.plan.search import Choice, largest_part, longer
from boost_core.plan.throughput import step_parts

MOST_TIMED = 5000  # layouts, some milliseconds each
_NAMED = 12  # numbers of replicas
_MOST_TENSOR, _MOST_PIPELINE = 1024, 32  # ``ParallelismConfig``
_GAINS = (*(percent / 100 for percent in range(1, 101)), inf)  # that a layout is kept for, where many are kept


class NothingFits(ValueError):
    """No layout of as many GPUs as the job allows is legal and fits them."""


class ChosenLayout(Config):
    """One of the layouts that were chosen for a job."""

    layout: str = Field(description="In words, for example tp 2 × pp 1 × dp 4.")
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int = 1
    world_size: int
    recompute: str = Field(
        description="What parallelism.recompute comes to: a mode, or how many blocks of each stage have which."
    )
    memory_bytes: int = Field(description="Of the rank that needs most.")
    step_seconds: float = Field(description="Predicted.")
    step_seconds_range: tuple[float, float] = Field(description="Between which eight of ten steps are expected.")
    why: tuple[str, ...] = Field(description="Deciding term, the next best, and the nearest that does not fit.")


class ChosenLayouts(Config):
    """The layouts that were chosen for a job with layouts=auto."""

    layouts: tuple[ChosenLayout, ...] = Field(description="The fewest ranks first.")
    timed: int = Field(description="How many legal layouts were timed.")
    device_memory_bytes: int | None = Field(description="Of the requested GPU model; null on CPUs.")
    provenance: Provenance = Field("assumed", description=PROVENANCE)

    @property
    def sizes(self) -> tuple[Layout, ...]:
        """They themselves."""
        return tuple(Layout.of(layout) for layout in self.layouts)


def choose_layouts(spec: JobSpec, basis: Basis = NOMINAL) -> ChosenLayouts:
    """Choose layouts for a job with ``layouts: auto``.

    Args:
        spec: The job.
        basis: What its seconds are predicted by.

    Raises:
        NothingFits: There is none; says what lacks, and what to change.
        ValueError: It is not known how much memory the GPUs have, there are too many layouts, or the profile is of
            another precision.
    """
    gpus = spec.elasticity.gpus if spec.elasticity else None
    if gpus is None:
        raise ValueError("the job lists its layouts; only layouts=auto leaves them to be chosen")
    device, machine = device_bytes(spec.resources), basis.machine(spec)
    if device is None and spec.resources.gpus_per_worker:
        raise ValueError(
            "layouts=auto goes by the memory of the GPU; set resources.accelerator_type to one of "
            f"{', '.join(DEVICE_BYTES)}, or list layouts"
        )
    timed = [_timed(spec, layout, machine) for layout in _legal(spec, gpus, machine)]
    limit = inf if device is None else device * (1 - SPARE)
    fitting = sorted((choice for choice in timed if choice.needed <= limit), key=_rank)
    if device is not None and not fitting:
        raise NothingFits(_too_large(spec, gpus, timed, device))
    unfit = [choice for choice in timed if choice.needed > limit]
    kept = sorted(_kept(spec, fitting), key=lambda choice: (choice.layout.world_size, choice.layout))
    reports = (_reported(spec, choice, fitting, unfit, limit, machine) for choice in kept)
    return ChosenLayouts(
        layouts=tuple(reports),
        timed=len(timed),
        device_memory_bytes=device,
        provenance=machine.provenance,
    )


def _legal(spec: JobSpec, gpus: GpuRange, machine: Machine) -> list[Layout]:
    """All layouts in the range that the job's model, batch and optimizer allow, and that go into a node.

    A node may be larger than most are that there are now.
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
    job = at(spec, layout)
    return Choice(job, step_parts(job, layout, machine), rank_memory(job, layout).total)


def _rank(choice: Choice) -> tuple[float, int, Layout]:
    """The faster first; of equals the one of fewer ranks, then of smaller groups."""
    return choice.seconds.total, choice.layout.world_size, choice.layout


def _kept(spec: JobSpec, fitting: Sequence[Choice]) -> list[Choice]:
    """As many as a job may allow."""
    front = kept = _worthwhile(spec, fitting)
    for gain in _GAINS:
        if len(kept) <= MOST_LAYOUTS:
            break
        kept = _worthwhile(spec, front, gain)
    return kept[:MOST_LAYOUTS]


def _worthwhile(spec: JobSpec, fitting: Sequence[Choice], gain: float = 0.0) -> list[Choice]:
    """Those that are faster, by a share of the time, than any kept one that could stand in for them.

    With a share of 0 the fastest of several that take as long is kept, which comes first in its order.
    """
    kept: list[Choice] = []
    by_size = sorted(fitting, key=lambda choice: (choice.layout.world_size, *_rank(choice)))
    for choice in by_size:
        rivals = [other for other in kept if _stands_in(spec, other.layout, choice.layout)]
        if all(choice.seconds.total * (1 + gain) < other.seconds.total for other in rivals):
            kept.append(choice)
    return kept


def _stands_in(spec: JobSpec, other: Layout, layout: Layout) -> bool:
    """Whether one layout fits on all nodes on which another does."""
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
        memory_bytes=choice.needed,
        step_seconds=choice.seconds.total,
        step_seconds_range=machine.range_of(choice.job, choice.seconds.total),
        why=tuple(_reasons(spec, choice, fitting, unfit, limit)),
    )


def _reasons(
    spec: JobSpec, choice: Choice, fitting: Sequence[Choice], unfit: Sequence[Choice], limit: float
) -> Iterator[str]:
    """Why a layout was chosen, for people, by those that take no more GPUs."""
    layout, ranks = choice.layout, choice.layout.world_size
    yield f"most of its step is {largest_part(choice.seconds)}"
    others = (other for other in fitting if other.layout.world_size <= ranks and other.layout != layout)
    if other := next(others, None):
        own, its = (units(each, spec.resources.placement)[0] for each in (layout, other.layout))
        if _rank(other) < _rank(choice):
            yield f"{other.layout} is faster, and needs {its} free GPUs of a node at a time, not {own}"
        else:
            yield f"the next best with at most as many GPUs, {other.layout}, takes {longer(other, choice)}"
    faster = [each for each in unfit if each.layout.world_size <= ranks and _rank(each) < _rank(choice)]
    if misfit := min(faster, key=lambda each: (each.needed, each.layout), default=None):
        lacks = (misfit.needed - limit) / 1e9
        yield f"{misfit.layout} would take {misfit.seconds.total:.3g} s, and lacks {lacks:.1f} GB a GPU"


def _too_large(spec: JobSpec, gpus: GpuRange, timed: Sequence[Choice], device: int) -> str:
    least = min(timed, key=lambda choice: (choice.needed, choice.layout))
    lacks = least.needed - device * (1 - SPARE)
    return (
        f"no layout of {gpus.min} to {gpus.max} GPUs fits: {least.layout} needs least, {least.needed / 1e9:.1f} GB, "
        f"and lacks {lacks / 1e9:.1f} GB of a GPU's {device / 1e9:g} GB ({SPARE:.0%} are spared); "
        f"{', '.join(remedies(spec, least.layout))}"
    )


def _illegal(spec: JobSpec, gpus: GpuRange) -> str:
    """Why no layout of as many GPUs is legal: what they would have to be a product of."""
    training, model = spec.training, spec.model
    numbers = numbers_of_replicas(training, 1, training.global_batch_size)
    listed = ", ".join(map(str, numbers[:_NAMED])) + (", …" if len(numbers) > _NAMED else "")
    return (
        f"no layout of {gpus.min} to {gpus.max} GPUs is legal: it is a number of replicas over which the batch splits "
        f"({listed}), times a tensor parallel size that divides hidden_size={model.hidden_size} and the heads, times "
        f"pipeline stages, at most {model.num_hidden_layers} and no more than each replica has micro-batches; widen "
        "elasticity.gpus"
    )
