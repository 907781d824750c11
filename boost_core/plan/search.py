"""The best ways to train a job on some GPUs: layouts, micro-batches, schedules, ZeRO's stage and recomputation.

Every legal combination of sizes, micro-batch and schedule is timed in its fastest mode, without recomputation. From the
fastest on, each is then given the cheapest mode that fits: less recomputation first, then ZeRO's first stage before its
second. As no mode is faster than the first, the search ends where that alone is slower than the best found so far.
Tensor parallel groups stay on a node; replicas are as many as the GPUs and the batch allow.

What is found fits by ``memory.rank_memory``, with 4 % of the device to spare for what that leaves out. The model, the
batch, the precision and the strategy are the user's.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from heapq import nsmallest
from itertools import product
from math import gcd, inf
from typing import Any

from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.legality import layout_problems
from boost_core.plan.devices import SPARE
from boost_core.plan.machine import Machine
from boost_core.plan.memory import rank_memory
from boost_core.plan.throughput import StepSeconds, step_parts

_MOST_CONTEXT = 64  # ``ParallelismConfig.context_parallel_size``
_FEWEST_TOKENS = 4096  # of a sequence on each of them
_MOST_STAGES = 32  # ``ParallelismConfig.pipeline_parallel_size``
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
_MODES = (("none", 1), ("none", 2), ("latent", 1), ("latent", 2), ("full", 1), ("full", 2))  # recompute, zero_stage


@dataclass(frozen=True)
class Choice:
    """One way to train the job.

    Attributes:
        job: The job with it.
        seconds: Of a step.
        needed: Bytes of the rank that needs most.
    """

    job: JobSpec
    seconds: StepSeconds
    needed: int

    @property
    def layout(self) -> Layout:
        """Its sizes."""
        return Layout.of(self.job.parallelism)

    @property
    def patch(self) -> dict[str, Any]:
        """What makes it of the job, as a JSON merge patch."""
        parallelism = self.job.parallelism
        return {
            "parallelism": {
                **self.layout.sizes,
                "pipeline_schedule": parallelism.pipeline_schedule,
                "zero_stage": parallelism.zero_stage,
                "recompute": parallelism.recompute,
            },
            "training": {"micro_batch_size": self.job.training.micro_batch_size},
            "elasticity": None,
        }

    def __str__(self) -> str:
        parallelism = self.job.parallelism
        schedule = f", {parallelism.pipeline_schedule}" if parallelism.pipeline_parallel_size > 1 else ""
        return (
            f"{self.layout}, micro-batch {self.job.training.micro_batch_size}{schedule}, "
            f"ZeRO {parallelism.zero_stage}, recompute {parallelism.recompute}"
        )


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        choices: The fastest first; none if nothing fits.
        misfit: Of those faster than the first choice that do not fit, the one that lacks least; of all if nothing does.
        timed: How many combinations were timed.
    """

    choices: Sequence[Choice]
    misfit: Choice | None
    timed: int


def search(spec: JobSpec, gpus: int, machine: Machine, device_bytes: float = inf, top: int = 5) -> Found:
    """The best ways to train a job.

    Args:
        spec: The job; its own sizes, micro-batch, schedule, ZeRO stage and recomputation do not matter.
        gpus: How many there are at most.
        machine: What they are.
        device_bytes: Memory of each.
        top: How many to give.
    """
    fast = sorted(
        ((step_parts(job, Layout.of(job.parallelism), machine), job) for job in combinations(spec, gpus, machine)),
        key=lambda timed: (timed[0].total, timed[1].parallelism.world_size),
    )
    found: list[Choice] = []
    unfit: list[Choice] = []
    for seconds, job in fast:
        best = nsmallest(top, (choice.seconds.total for choice in found))
        if len(best) == top and seconds.total > best[-1]:
            break
        for choice in _modes(job, machine):
            if choice.needed <= device_bytes * (1 - SPARE):
                found.append(choice)
                break
            unfit.append(choice)
    found.sort(key=lambda choice: (choice.seconds.total, choice.layout.world_size, choice.needed))
    faster = (choice for choice in unfit if not found or choice.seconds.total < found[0].seconds.total)
    return Found(found[:top], min(faster, key=lambda choice: choice.needed, default=None), len(fast))


def combinations(spec: JobSpec, gpus: int, machine: Machine) -> Iterator[JobSpec]:
    """The job in every legal combination of sizes, micro-batch and schedule, in its fastest mode."""
    node, training = machine.cluster.levels[0].fan_out, spec.training
    batch = gcd(training.global_batch_size, *(stage.global_batch_size for stage in training.batch_size_warmup))
    for tensor, pipeline in product(range(1, min(node, gpus) + 1), range(1, _MOST_STAGES + 1)):
        if tensor * pipeline > gpus or spec.model.hidden_size % tensor or pipeline > spec.model.num_hidden_layers:
            continue
        contexts = _contexts(training.sequence_length, gpus // tensor) if pipeline == 1 else [1]
        for micro_batch, context in product(_MICRO_BATCHES, contexts):
            if batch % micro_batch:
                continue
            replicas = _replicas(batch // micro_batch, gpus // (tensor * pipeline * context))
            for schedule in _SCHEDULES if pipeline > 1 else _SCHEDULES[:1]:
                layout = Layout(tensor, pipeline, replicas, context)
                job = _with(
                    spec, **layout.sizes, pipeline_schedule=schedule, micro_batch_size=micro_batch, recompute="none",
                    zero_stage=1,
                )  # fmt: skip
                if not _problems(job):
                    yield job


def _contexts(sequence_length: int, ranks: int) -> list[int]:
    """Context parallel sizes that leave each rank enough tokens to be worth a chunk's exchange."""
    most = min(ranks, _MOST_CONTEXT, max(1, sequence_length // _FEWEST_TOKENS))
    return [1 << power for power in range(most.bit_length())]


def _modes(job: JobSpec, machine: Machine) -> Iterator[Choice]:
    """The job in all its modes, those first that cost less."""
    for recompute, zero_stage in _MODES:
        mode = _with(job, recompute=recompute, zero_stage=zero_stage)
        if not _problems(mode):
            layout = Layout.of(mode.parallelism)
            yield Choice(mode, step_parts(mode, layout, machine), rank_memory(mode, layout).total)


def _problems(job: JobSpec) -> Iterable[object]:
    on_gpu = job.resources.gpus_per_worker
    return layout_problems(job.model, job.parallelism, job.training, job.optimizer, on_gpu)


def _replicas(portions: int, most: int) -> int:
    """The most replicas that a number of micro-batches splits over."""
    return next(number for number in range(min(portions, most), 0, -1) if portions % number == 0)


def _with(job: JobSpec, micro_batch_size: int | None = None, **parallelism: object) -> JobSpec:
    training = job.training
    if micro_batch_size is not None:
        training = training.model_copy(update={"micro_batch_size": micro_batch_size})
    return job.model_copy(
        update={
            "parallelism": job.parallelism.model_copy(update=parallelism),
            "training": training,
            "elasticity": None,
        }
    )


def reasons(found: Found, device_bytes: float) -> Iterator[str]:
    """Why the first choice is the first, for people."""
    if found.choices:
        first, *others = found.choices
        yield f"most of its step is {largest_part(first.seconds)}"
        if others:
            yield f"the next best, {others[0]}, takes {longer(others[0], first)}"
    if found.misfit is not None:
        lacks = found.misfit.needed - device_bytes * (1 - SPARE)
        yield (
            f"{found.misfit} would take {found.misfit.seconds.total:.3g} s, and lacks {lacks / 1e9:.1f} GB of "
            f"{device_bytes / 1e9:g} GB a GPU ({SPARE:.0%} are spared)"
        )


def largest_part(seconds: StepSeconds) -> str:
    """What most of a step is, and how much of it."""
    name = max(fields(seconds), key=lambda field: getattr(seconds, field.name)).name
    return f"{name} ({getattr(seconds, name) / seconds.total:.0%})"


def longer(other: Choice, first: Choice) -> str:
    """By how much one is slower, and by what most of all."""
    more = {
        field.name: there - here
        for field, there, here in zip(fields(StepSeconds), astuple(other.seconds), astuple(first.seconds), strict=True)
    }
    name = max(more, key=lambda name: more[name])
    ratio = other.seconds.total / first.seconds.total - 1
    return f"{ratio:.1%} longer: {more[name]:.3g} s more of {name}" if more[name] > 0 else "as long"


def sensitivities(
    spec: JobSpec, gpus: int, machine: Machine, device_bytes: float, change: float = 0.2
) -> Iterator[str]:
    """Which inputs, changed by so much, would change the first choice, and to what."""
    first = _first(search(spec, gpus, machine, device_bytes, 1))
    for name, sign in product(_inputs(machine), (-1, 1)):
        scaled, memory = _scaled(machine, device_bytes, name, 1 + sign * change)
        other = _first(search(spec, gpus, scaled, memory, 1))
        if other != first:
            yield f"with {name} {sign * change:+.0%}: {other or 'nothing would fit'}"


def _first(found: Found) -> str | None:
    return str(found.choices[0]) if found.choices else None


def _inputs(machine: Machine) -> list[str]:
    links = [f"the link of a {level.name}" for level in machine.cluster.levels]
    return ["the rate of arithmetic", "the memory's bandwidth", *links, "the memory's size"]


def _scaled(machine: Machine, device_bytes: float, name: str, factor: float) -> tuple[Machine, float]:
    profile, levels = machine.profile, list(machine.cluster.levels)
    match _inputs(machine).index(name):
        case 0:
            profile = replace(
                profile,
                product_flops=profile.product_flops * factor,
                attention_flops=profile.attention_flops * factor,
            )
        case 1:
            profile = replace(profile, bandwidth=profile.bandwidth * factor)
        case index if index < 2 + len(levels):
            level = levels[index - 2]
            link = replace(level.link, bytes_per_second=level.link.bytes_per_second * factor)
            levels[index - 2] = replace(level, link=link)
        case _:
            return machine, device_bytes * factor
    return Machine(profile, replace(machine.cluster, levels=tuple(levels))), device_bytes
