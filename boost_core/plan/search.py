"""The best ways to train a job on some GPUs: layouts, micro-batches, schedules, ZeRO's stage and recomputation.

Candidates are all legal combinations of sizes, micro-batch and schedule, with any number of replicas that splits the
batch, each without recomputation or, where that does not fit, with the least costly recompute mix that does
(``recompute_mix``). The ZeRO stage is 1: a plan with stage 2 holds no less. Candidates are examined in the order of a
lower bound on their step time: what a replica computes, divided evenly over its stages; then
``throughput.Step.at_least``. Those that fit are simulated (``replay``) and ranked by the result. The search ends once
none of the rest can be faster than the best so far. So no candidate is missed, and few are simulated.

A candidate that does not fit without recomputation is also tried with all of the optimizer's masters and moments in
the host's memory, if the job is for GPUs and the memory of their hosts is known.

All of this assumes stages of about equal work. Then other cuts (``recompute_mix.Cuts``) are tried for examined
pipelines that some cut may make faster than the best so far (``throughput.Step.at_least_however_cut``): one for each of
the most promising, and more for the best of these. The more blocks and stages there are, the fewer pipelines are tried,
as cuts take longer.

Tensor parallel groups stay on a node, and so do replicas under ``placement: STRICT_PACK``. Choices fit according to
``memory.rank_memory``, with 4 % of the device to spare for what that does not count. The model, the batch, the
precision and the strategy are those of the job.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush, nsmallest
from itertools import count, product
from math import inf, prod
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from boost_core.architecture import parameter_count
from boost_core.config.base import Config, counted
from boost_core.config.job import JobSpec
from boost_core.config.parallelism import MOST_CONTEXT, Layout, divisors, strategy_problems
from boost_core.hardware import BYTES
from boost_core.messages import PROVENANCE, Provenance
from boost_core.plan import machine as machines
from boost_core.plan import report
from boost_core.plan.machine import SPARE, Basis, Fitted, Machine, MeasuredProfile, NetworkConfig, device_bytes
from boost_core.plan.memory import GIB, Memory, lack_in_words, lacking, node_bytes, rank_memory
from boost_core.plan.recompute_mix import MIXED_LESS, CutPlan, Cuts, RecomputeMixes
from boost_core.plan.run_cost import CONDITIONS, PlannedRun, RunConditions
from boost_core.plan.throughput import ORDER, HostCopies, Step, StepParts
from boost_core.terminal import rounded

_FEWEST_TOKENS = 4096  # of a sequence on each context parallel rank
_MOST_STAGES = 32  # ``ParallelismConfig.pipeline_parallel_size``
_MOST_SEQUENCES = 32  # of a micro-batch, unless the job's own has more
_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
_OTHER_ORDER = ("tp", "cp", "dp", "pp")
_MOST_EFFORT = 30_000  # limit for further cuts; a pipeline takes about the square of its stages times its blocks
_MOST_BEGUN = 16  # pipelines for which other cuts are tried
_WORTH_SAYING = 0.01  # share of a step
_CHANGE = 0.2  # share by which inputs are changed to find those that matter
_NO_COPIES = HostCopies()


class Choice(NamedTuple):
    """One way to train the job.

    Attributes:
        job: The job with this choice.
        seconds: Seconds of a step.
        needed: Device bytes of the rank that needs most.
        host: Bytes of host memory that a node's ranks need.
        copies: Copies over the bus to that memory.
    """

    job: JobSpec
    seconds: StepParts
    needed: int
    host: int = 0
    copies: HostCopies = _NO_COPIES

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part, with those that only the bus takes apart from the rest."""
        parts = dict(self.seconds)
        exposed = min(self.copies.exposed, parts["arithmetic"])
        parts["arithmetic"] -= exposed
        parts["update"] -= self.copies.state
        return parts | {"copies over the bus": exposed + self.copies.state}

    @property
    def layout(self) -> Layout:
        """The layout of this choice."""
        return Layout.of(self.job.parallelism)

    @property
    def patch(self) -> dict[str, Any]:
        """JSON merge patch that turns the job into this choice."""
        parallelism = self.job.parallelism
        fields = {"pipeline_schedule", "pipeline_layers_per_stage", "zero_stage", "optimizer_offload"}
        recompute = parallelism.model_dump(mode="json", exclude_defaults=True).get("recompute", "none")
        changes = parallelism.model_dump(mode="json", include=fields) | {"recompute": recompute}
        return {
            "parallelism": self.layout.sizes | changes,
            "training": {"micro_batch_size": self.job.training.micro_batch_size},
            "elasticity": None,
        }

    def __str__(self) -> str:
        parallelism = self.job.parallelism
        schedule = f", {parallelism.pipeline_schedule}" if parallelism.pipeline_parallel_size > 1 else ""
        if layers := parallelism.pipeline_layers_per_stage:
            schedule += f", layers {' | '.join(map(str, layers))}"
        share = parallelism.optimizer_offload
        offload = f", {'' if share == 1 else f'{share:.0%} of '}optimizer state on the host" if share else ""
        return (
            f"{self.layout}, micro-batch {self.job.training.micro_batch_size}{schedule}, "
            f"ZeRO {parallelism.zero_stage}, recompute {parallelism.recompute_text}{offload}"
        )


class SearchResult(NamedTuple):
    """Result of a search.

    Attributes:
        choices: The best choices, fastest first; empty if nothing fits.
        misfit: The combination that lacks least among those that do not fit but are faster than the first choice; among
            all if nothing fits.
        timed: Number of combinations that were examined one by one.
    """

    choices: Sequence[Choice]
    misfit: Choice | None
    timed: int


def search(
    spec: JobSpec, gpus: int, machine: Machine, device_bytes: float = inf, top: int = 5, order: Sequence[str] = ORDER,
    near: float = 0.0, lean: bool = False,
) -> SearchResult:  # fmt: skip
    """Search for the best ways to train a job.

    Args:
        spec: The job; its own sizes, schedule, ZeRO stage and recomputation do not matter, and its micro-batch is only
            one more to try.
        gpus: Most GPUs to use.
        machine: The machine that they form.
        device_bytes: Memory of each GPU.
        top: Number of choices to return.
        order: Order in which groups are placed on the network, innermost first. Gangs only use the default.
        near: Also return all that take at most this share longer than the fastest.
        lean: Whether to look at nothing but what needs least memory: micro-batches of one sequence under 1f1b.

    Raises:
        ValueError: The network has no room for this many GPUs.
    """
    machine.cluster.rows([gpus])
    return _Search(spec, gpus, machine, device_bytes * (1 - SPARE), top, order, near, lean).run()


class _Shape(NamedTuple):
    """A combination, regardless of the number of replicas."""

    tensor: int
    context: int
    pipeline: int
    micro_batch: int
    schedule: str
    optimizer_offload: float


@dataclass
class _Pipeline:
    """A combination with a number of replicas, for which other cuts may be tried.

    Attributes:
        step: The step of the job with it, with the default cut and without recomputation.
        bound: Lower bound on its seconds with the recomputation that it needs.
        fits: Whether it is known to fit, or that it may with recomputation.
        played: The least of its seconds that were simulated.
    """

    step: Step
    bound: float
    fits: bool = False
    played: float = inf


class _Search:
    """What has been examined, and what is left. Arguments as for ``search``, with the usable bytes of a device."""

    def __init__(
        self, spec: JobSpec, gpus: int, machine: Machine, limit: float, top: int, order: Sequence[str], near: float,
        lean: bool = False,
    ) -> None:  # fmt: skip
        # Halves of one sequence recompute nothing, so that two sequences may need less.
        leanest, own = 2 if spec.parallelism.split_micro_batch else 1, spec.training.micro_batch_size
        legal = [each for each in divisors(spec.training.common_batch) if each <= _MOST_SEQUENCES or each == own]
        self._micro_batches = legal[:leanest] if lean else legal
        self._schedules = _SCHEDULES[:1] if lean else _SCHEDULES
        self._spec, self._gpus, self._machine, self._near = spec, gpus, machine, near
        self._limit, self._top, self._order = limit, top, order
        self._offloads = spec.resources.gpus_per_worker > 0 and machine.node_memory_bytes is not None
        self._numbers = count()
        self._queue: list[tuple[float, int, Any]] = []  # what to call with its least seconds
        self._steps: dict[_Shape, Step] = {}
        self._too_large: set[_Shape] = set()  # without recomputation; then also with any fewer replicas
        self._hopeless: set[_Shape] = set()  # the same, with any recomputation
        self._fastest: dict[tuple[_Shape, int], tuple[float, Step, Memory]] = {}
        self._unfit: list[tuple[float, float, Step, Memory]] = []
        self._timed = 0
        self._pipelines: dict[tuple[_Shape, int], _Pipeline] = {}

    def run(self) -> SearchResult:
        for each in self._shapes():
            self._push_shape(*each)
        while self._queue:
            bound, _, look = heappop(self._queue)
            if bound > self._slowest_returned():
                break
            look(bound)

        # Other cuts of the examined pipelines that some cut may make the fastest: first one cut of each of the most
        # promising, whose times decide which of them to pursue.
        begun = list[tuple[float, tuple[_Shape, int], Cuts]]()
        # Most of those that do not fit with the default cut do not fit with any.
        expected = {
            key: (not each.fits, each.bound if each.played == inf else each.played)
            for key, each in self._pipelines.items()
        }
        for key in sorted(expected, key=expected.__getitem__):
            step = self._pipelines[key].step
            if len(begun) < _MOST_BEGUN and step.at_least_however_cut() <= self._slowest_returned():
                cuts = Cuts(step.job, step.layout, self._limit, self._machine, self._order)
                begun.append((self._record(key[0], cuts.plan(cuts.start)), key, cuts))
        effort = 0
        for _, key, cuts in sorted(begun, key=lambda each: each[:2]):
            step = self._pipelines[key].step
            if effort < _MOST_EFFORT and step.at_least_however_cut() <= self._slowest_returned():
                effort += step.job.parallelism.stages * step.job.model.num_hidden_layers**2
                self._record(key[0], cuts.best())
        most = self._slowest_returned() * (1 + 1e-9)  # simulated and replayed seconds are sums in different orders
        choices = [self._choice(step, memory) for took, step, memory in self._fastest.values() if took <= most]
        choices.sort(key=lambda choice: (choice.seconds.total, choice.layout.world_size, choice.needed))
        fastest, misfit = choices[0].seconds.total if choices else inf, None
        for _, bound, step, memory in sorted(self._unfit, key=lambda unfit: unfit[:2]):
            if bound < fastest and (not choices or step.played() < fastest):
                misfit = self._choice(step, memory)
                break
        near = sum(choice.seconds.total <= fastest * (1 + self._near) for choice in choices) if self._near else 0
        return SearchResult(choices[: max(self._top, near)], misfit, self._timed)

    def _slowest_returned(self) -> float:
        """Seconds of the last choice that would be returned now; anything slower is not among them."""
        best = nsmallest(self._top, (total for total, *_ in self._fastest.values()))
        return max(best[-1], best[0] * (1 + self._near)) if len(best) == self._top else inf

    def _record(self, shape: _Shape, plan: CutPlan | None) -> float:
        """Record a cut if it is its layout's fastest yet; return its seconds, infinite if there is none."""
        if plan is None:
            return inf
        step = plan.step
        key = shape._replace(optimizer_offload=0.0), step.layout.dp  # a choice is the fastest, wherever the state is
        if plan.seconds < self._fastest.get(key, (inf,))[0]:
            memory = rank_memory(step.job, step.layout)
            if not self._lacks(step, memory):
                self._fastest[key] = plan.seconds, step, memory
        return plan.seconds

    def _choice(self, step: Step, memory: Memory) -> Choice:
        of_node = node_bytes(memory, step.layout, self._machine)
        return Choice(step.job, step.replayed(), memory.total, of_node, step.host_copies)

    def _lacks(self, step: Step, memory: Memory) -> float:
        """Bytes that a rank lacks on its device, plus those that its node's host lacks; 0 if it fits."""
        of_host = lacking(node_bytes(memory, step.layout, self._machine), self._machine)
        return max(0.0, memory.total - self._limit) + of_host

    def _shapes(self) -> Iterator[tuple[_Shape, Sequence[int], float, float]]:
        """All combinations, their numbers of replicas, largest first, and bounds.

        A step takes at least some seconds for each micro-batch, and for some more while the pipeline fills and drains
        (``Step.at_least_however_cut``).
        """
        spec, training, gpus = self._spec, self._spec.training, self._gpus
        node, layers = self._machine.cluster.levels[0].fan_out, spec.model.num_hidden_layers
        batch = training.common_batch
        tensors = [size for size in range(1, min(node, gpus) + 1) if spec.model.hidden_size % size == 0]
        for tensor, micro_batch in product(tensors, self._micro_batches):
            # Numbers of replicas over which the micro-batches split, largest first.
            numbers = divisors(batch // micro_batch)[::-1]
            # Context parallel sizes that leave each rank enough tokens to be worth a chunk's exchange.
            most_context = min(gpus // tensor, MOST_CONTEXT, max(1, training.sequence_length // _FEWEST_TOKENS))
            for context in (1 << power for power in range(most_context.bit_length())):
                alone = _Shape(tensor, context, 1, micro_batch, _SCHEDULES[0], spec.parallelism.optimizer_offload)
                whole, behind = self._step(alone).of_a_micro_batch()
                for pipeline in range(1, min(_MOST_STAGES, layers, gpus // (tensor * context)) + 1):
                    replicas = [number for number in numbers if number * tensor * pipeline * context <= gpus]
                    for schedule in self._schedules if pipeline > 1 else _SCHEDULES[:1]:
                        more = behind * (pipeline - 1) if schedule == "1f1b" else 0.0
                        yield alone._replace(pipeline=pipeline, schedule=schedule), replicas, whole / pipeline, more

    def _push_shape(self, shape: _Shape, replicas: Sequence[int], seconds: float, more: float) -> None:
        """Queue a combination with the largest of some numbers of replicas; the others follow later."""
        training = self._spec.training
        while replicas:
            number, *replicas = replicas
            micro_batches = training.global_batch_size // (shape.micro_batch * number)
            if micro_batches >= shape.pipeline and (shape.schedule == "1f1b" or micro_batches % shape.pipeline == 0):
                rest = replicas

                def look(_: float, number: int = number, rest: Sequence[int] = rest) -> None:
                    self._push_shape(shape, rest, seconds, more)
                    self._look_at(shape, number)

                heappush(self._queue, ((micro_batches + more) * seconds, next(self._numbers), look))
                return

    def _look_at(self, shape: _Shape, replicas: int) -> None:
        """Queue a combination without recomputation, or, where that is known not to fit, with some."""
        job, order = self._job(shape, replicas), self._order
        layout = Layout.of(job.parallelism)
        if not report.legal_at(job, layout):
            return
        node, *outer = (level.fan_out for level in self._machine.cluster.levels)
        size, units = layout.units(job.resources.placement)
        if units > node // size * min(prod(outer), -(-self._gpus // node)):
            return  # as many that share a node have no place
        if shape in self._hopeless:
            if self._offloads and shape.optimizer_offload < 1:
                self._look_at(shape._replace(optimizer_offload=1.0), replicas)
            return
        self._timed += 1
        step = self._step(shape).sharing(job, layout) if order == ORDER else Step(job, layout, self._machine, order)
        bound = step.at_least()
        if 1 < job.parallelism.stages < job.model.num_hidden_layers:
            self._pipelines[shape, layout.dp] = _Pipeline(step, bound)
        heappush(self._queue, (bound, next(self._numbers), partial(self._look_closer, shape, step)))

    def _look_closer(self, shape: _Shape, step: Step, bound: float) -> None:
        """Simulate a combination; if it does not fit, queue its least costly mix, and it with the state on the host."""
        if shape not in self._too_large and self._try(shape, step, bound):
            return
        layout = step.layout
        mixes = RecomputeMixes(step.job, layout, self._machine)
        lean, memory = mixes.leanest()
        if self._hosts_lack(shape, layout, memory) or mixes.lightest.total > self._limit * (1 + MIXED_LESS):
            step = Step(lean, layout, self._machine, self._order)
            self._unfit.append((self._lacks(step, memory), bound, step, memory))
            if _with_any_replicas(mixes.lightest, lean) > self._limit * (1 + MIXED_LESS):
                self._hopeless.add(shape)
        else:
            bounds = []
            for mixed in mixes.ways(self._limit):
                step = Step(mixed, layout, self._machine, self._order)
                bounds.append(max(bound, step.at_least()))
                heappush(self._queue, (bounds[-1], next(self._numbers), partial(self._try, shape, step)))
            if each := self._pipelines.get((shape, layout.dp)):
                each.fits, each.bound = True, min(bounds)
        if self._offloads and shape.optimizer_offload < 1:
            self._look_at(shape._replace(optimizer_offload=1.0), layout.dp)

    def _try(self, shape: _Shape, step: Step, bound: float) -> bool:
        """Simulate a job if it fits."""
        job, layout = step.job, step.layout
        memory = rank_memory(job, layout)
        lacks = self._lacks(step, memory)
        if not lacks:
            total = step.played()
            if each := self._pipelines.get((shape, layout.dp)):
                each.fits, each.played = True, min(each.played, total)
            key = shape._replace(optimizer_offload=0.0), layout.dp
            if total < self._fastest.get(key, (inf,))[0]:
                self._fastest[key] = total, step, memory
            return True
        self._unfit.append((lacks, bound, step, memory))
        if self._hosts_lack(shape, layout, memory):
            return True  # no recomputation makes room there
        if job.parallelism.recompute == "none" and _with_any_replicas(memory, job) > self._limit:
            self._too_large.add(shape)
        return False

    def _hosts_lack(self, shape: _Shape, layout: Layout, memory: Memory) -> bool:
        """Whether nodes' hosts have too little memory for a job, which is then dropped.

        With fewer replicas, either fewer ranks share the state or fewer ranks are on a node: so a node needs least
        either with one replica or with the most.
        """
        on = self._machine
        if not lacking(node_bytes(memory, layout, on), on):
            return False
        self._pipelines.pop((shape, layout.dp), None)
        alone = self._job(shape, 1)
        layout = Layout.of(alone.parallelism)
        if lacking(node_bytes(rank_memory(alone, layout), layout, on), on):
            self._hopeless.add(shape)
        return True

    def _step(self, shape: _Shape) -> Step:
        """The memory of one replica without recomputation; its passes do not depend on the number of replicas."""
        if shape not in self._steps:
            job, piped = self._job(shape, 1), shape._replace(pipeline=2, schedule=_SCHEDULES[0])
            if shape.pipeline > 1 and shape != piped:
                self._steps[shape] = self._step(piped).keeping(job)
            else:
                self._steps[shape] = Step(job, Layout.of(job.parallelism), self._machine)
                _ = self._steps[shape].blocks  # computed once for all numbers of stages
        return self._steps[shape]

    def _job(self, shape: _Shape, replicas: int) -> JobSpec:
        layout = Layout(shape.tensor, shape.pipeline, replicas, shape.context)
        job = self._spec.with_parallelism(
            **layout.sizes,
            pipeline_schedule=shape.schedule,
            pipeline_layers_per_stage=None,
            recompute="none",
            zero_stage=1,
            optimizer_offload=shape.optimizer_offload,
        )
        training = job.training.model_copy(update={"micro_batch_size": shape.micro_batch})
        return job.model_copy(update={"training": training, "elasticity": None})


def _with_any_replicas(memory: Memory, job: JobSpec) -> float:
    """Bytes that a job needs at least with its number of replicas, or fewer: these share less of its state."""
    sums = BYTES["fp32"] * memory.weights // BYTES[job.training.precision]
    return memory.weights + sums + memory.activations


NEAR_TIE = 0.05  # of a step: layouts that are closer cannot be told apart, by the errors for published runs


def search_as_reported(
    spec: JobSpec, gpus: int, machine: Machine, device_bytes: float, top: int = 1, order: Sequence[str] = ORDER
) -> SearchResult:
    """Search, with the choice that a report shows first in front, and all that are about as fast as the fastest.

    Arguments as for ``search``.
    """
    result = search(spec, gpus, machine, device_bytes, top, order, NEAR_TIE)
    return result._replace(choices=simplest_first(result.choices, Layout.of(spec.parallelism)))


def simplest_first(choices: Sequence[Choice], own: Layout) -> Sequence[Choice]:
    """Move the best of the choices that are about as fast as the fastest to the front.

    That is the one that ``_drawbacks`` speaks least against, and of those that it does not tell apart the fastest.

    Args:
        choices: The choices, fastest first.
        own: The job's own layout.
    """
    near = [each for each in choices if each.seconds.total <= choices[0].seconds.total * (1 + NEAR_TIE)]
    if not near:
        return choices
    first = min(near, key=lambda choice: (*_drawbacks(choice, own).values(), choice.seconds.total))
    return [first, *(each for each in choices if each is not first)]


def _drawbacks(choice: Choice, own: Layout | None) -> dict[str, float]:
    """What speaks against a choice that is about as fast as others, the most important first."""
    parallelism, layout = choice.job.parallelism, choice.layout
    complications = ["layers by stage"] if parallelism.pipeline_layers_per_stage else []
    if len(parallelism.modes_of_all(choice.job.model.num_hidden_layers)) > 1:
        complications.append("several modes of recomputation")
    complications += ["context parallelism"] if layout.cp > 1 else []
    return {
        "needs more GPUs": layout.world_size,
        "is not the job's own layout": own is not None and layout.per_replica != own.per_replica,
        "uses the hosts' memory": parallelism.keeps_on_host or parallelism.optimizer_offload > 0,
        "has more pipeline stages": 1 if layout.pp == 1 else parallelism.stages,
        f"is less simple ({', '.join(complications)})": len(complications),
    }


def reasons(result: SearchResult, device_bytes: float, machine: Machine, own: Layout | None = None) -> Iterator[str]:
    """Explain why the first choice is the best; ``own`` as for ``simplest_first``."""
    if result.choices:
        first, *others = result.choices
        yield f"most of its step is {largest_part(first)}"
        if others:
            yield f"the next best, {others[0]}, takes {longer(others[0], first, own)}"
        yield from because_of_hosts(first, device_bytes * (1 - SPARE), machine)
    if result.misfit is not None:
        lacks = result.misfit.needed - device_bytes * (1 - SPARE)
        of_gpu = f"lacks {lacks / GIB:.1f} GiB of {device_bytes / GIB:.1f} GiB per GPU ({SPARE:.0%} is kept free)"
        what = of_gpu if lacks > 0 else lack_in_words(result.misfit.host, machine)
        yield f"{result.misfit} would take {rounded(result.misfit.seconds.total)} s, but {what}"


def because_of_hosts(
    choice: Choice, limit: float, machine: Machine, seconds: Callable[[Step], float] = Step.played
) -> Iterator[str]:
    """Explain why blocks are kept in the host's memory, if any are: what the bus takes, and what they would do instead.

    Args:
        choice: The choice.
        limit: Usable bytes of a device.
        machine: What it runs on.
        seconds: How choices are timed.
    """
    if not choice.job.parallelism.keeps_on_host:
        return
    layout, without = choice.layout, replace(machine, node_memory_bytes=None)
    otherwise = RecomputeMixes(choice.job, layout, without).least_costly(limit)
    needed = rank_memory(otherwise, layout).total
    if needed > limit:
        instead = f"with all of it on the GPU, {(needed - limit) / GIB:.1f} GiB per GPU are lacking"
    else:
        takes = seconds(Step(otherwise, layout, machine))
        modes = otherwise.parallelism.recompute_text
        instead = f"with all of it on the GPU, a step takes {rounded(takes)} s, recompute {modes}"
    yield (
        f"what blocks keep in the host's memory crosses the bus in {rounded(choice.copies.crossing)} s, at "
        f"{rounded(machine.profile.host_bandwidth / 1e9)} GB/s, of which passes hide all but "
        f"{rounded(choice.copies.exposed)} s; {instead}"
    )


def largest_part(choice: Choice) -> str:
    """Name the largest part of a step and its share."""
    name, seconds = max(choice.parts.items(), key=itemgetter(1))
    return f"{name} ({seconds / choice.seconds.total:.0%})"


def longer(other: Choice, first: Choice, own: Layout | None = None) -> str:
    """Say by how much one choice is slower, and which part contributes most; if it is faster, why it is not first."""
    more = {name: there - first.parts[name] for name, there in other.parts.items()}
    name = max(more, key=lambda name: more[name])
    ratio = other.seconds.total / first.seconds.total - 1
    if ratio < 0:
        both = zip(_drawbacks(other, own).items(), _drawbacks(first, own).values(), strict=True)
        costs = next((f", but {drawback}" for (drawback, there), here in both if there > here), "")
        less = f"{-ratio:.1%} less, too little for predictions to tell apart" if ratio <= -0.0005 else "as long"
        return less + costs
    return f"{ratio:.1%} longer: {rounded(more[name])} s more of {name}" if ratio >= 0.0005 else "as long"


def sensitivities(spec: JobSpec, gpus: int, machine: Machine, memory: float, first: Choice | None) -> Iterator[str]:
    """List the inputs that, changed by the share ``_CHANGE``, would change the first choice, and to what."""
    for both in zip(*(_scaled(machine, memory, 1 + sign * _CHANGE) for sign in (-1, 1)), strict=True):
        for sign, (name, scaled, scaled_memory) in zip((-1, 1), both, strict=True):
            other = next(iter(search_as_reported(spec, gpus, scaled, scaled_memory).choices), None)
            if str(other) != str(first):
                yield f"with {name} {sign * _CHANGE:+.0%}: {other or 'nothing would fit'}"


def _scaled(machine: Machine, device_bytes: float, factor: float) -> Iterator[tuple[str, Machine, float]]:
    """The inputs, each with the machine and its devices' memory where this one is multiplied by a factor."""
    profile, levels = machine.profile, machine.cluster.levels
    products, attention = profile.product_flops * factor, profile.attention_flops * factor
    cudnn = tuple((length, factor * rate) for length, rate in profile.cudnn)
    scaled = replace(profile, product_flops=products, attention_flops=attention, cudnn=cudnn)
    yield "the rate of arithmetic", replace(machine, profile=scaled), device_bytes
    scaled = replace(profile, bandwidth=profile.bandwidth * factor)
    yield "the memory's bandwidth", replace(machine, profile=scaled), device_bytes
    for index, level in enumerate(levels):
        link = replace(level.link, bytes_per_second=level.link.bytes_per_second * factor)
        cluster = replace(machine.cluster, levels=(*levels[:index], replace(level, link=link), *levels[index + 1 :]))
        yield f"the link of a {level.name}", replace(machine, cluster=cluster), device_bytes
    yield "the memory's size", machine, device_bytes * factor
    if machine.node_memory_bytes is not None:
        scaled = replace(profile, host_bandwidth=profile.host_bandwidth * factor)
        yield "the bandwidth of the bus to hosts", replace(machine, profile=scaled), device_bytes
        hosts = int(machine.node_memory_bytes * factor)
        yield "the size of hosts' memory", replace(machine, node_memory_bytes=hosts), device_bytes


def other_orders(spec: JobSpec, gpus: int, machine: Machine, memory: float, first: Choice | None) -> Iterator[str]:
    """Say what other orders of ranks over the network's levels would gain, though gangs do not support them.

    Tensor parallel ranks stay innermost, and context parallel ones next to them.
    """
    for other in search_as_reported(spec, gpus, machine, memory, order=_OTHER_ORDER).choices[:1]:
        if first and (gain := 1 - other.seconds.total / first.seconds.total) >= _WORTH_SAYING:
            yield (
                f"with ranks in the order {', '.join(_OTHER_ORDER)}, which gangs do not support: {other}, "
                f"{rounded(other.seconds.total)} s, {gain:.1%} less"
            )


# Report of a search, for people and programs.


class PlanSearch(Config):
    """A search for the best ways to train a job."""

    gpus: int = Field(ge=1, le=65_536, description="Most GPUs to use.")
    cluster: NetworkConfig | None = Field(None, description="Network of the GPUs; default: nodes of node_gpus.")
    network_gigabits: Annotated[float, Field(gt=0, le=1e5)] | None = Field(
        None,
        description="Gb/s that each GPU has to other nodes; default: what its kind usually has, or the network that "
        "cluster describes.",
    )
    node_gpus: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None,
        description="GPUs per node, if cluster is omitted; default: that of the nodes that the service sees and that "
        "suit the job, otherwise what their kind usually has.",
    )
    node_memory_bytes: Annotated[int, Field(ge=1, le=10**15)] | None = Field(
        None,
        description="Memory of a node's host, if cluster is omitted; default: that of the nodes that the service sees "
        "and that suit the job, otherwise unknown and not checked.",
    )
    profile: MeasuredProfile | None = Field(
        None,
        description="Profile that `boost bench profile` measured of such GPUs; default: the one that the service "
        "stores for their kind, otherwise data sheets.",
    )
    top: int = Field(5, ge=1, le=100, description="Number of choices to return.")
    explain: bool = Field(
        False,
        description="Find out which inputs, and which orders of ranks, would change the choice: one search for each.",
    )

    def machine(self, spec: JobSpec) -> Machine:
        """Return the machine that the job would run on.

        Raises:
            ValueError: The profile is of another precision, or nothing is known of the job's kind of GPU.
        """
        if self.cluster is None or self.cluster.device is None:
            machines.refuse_unfit_gpu(spec, self.profile)
        basis = Basis(profile=self.profile, node_gpus=self.node_gpus, node_memory_bytes=self.node_memory_bytes)
        machine = basis.machine(spec) if self.cluster is None else self.cluster.machine(spec, self.profile)
        return machine.joined_at(self.network_gigabits)


class PlannedChoice(PlannedRun, report.PlannedStep):
    """One way to train the job."""

    text: str
    patch: dict[str, Any] = Field(description="JSON merge patch that turns the job into this choice.")
    memory_bytes: int = Field(description="Device memory of the rank that needs most.")
    step_parts: StepParts
    tokens_per_second: float


class SearchReport(Config):
    """The best ways to train a job on some GPUs."""

    choices: tuple[PlannedChoice, ...] = Field(
        description="The best choices, fastest first, but for the first: of those that are about as fast, it has the "
        "fewest GPUs, the job's own layout, or is the simplest; empty if nothing fits."
    )
    parameters: int = 0
    tokens_per_step: int = 0
    steps: int = Field(0, description="The job's number of steps.")
    published: report.PublishedRun | None = Field(None, description=report.PUBLISHED_RUN)
    combinations: int = Field(description="Number of combinations of sizes, micro-batches and schedules timed.")
    device_memory_bytes: int | None = Field(description="Memory of the requested GPU model; null if unknown.")
    node_memory_bytes: int | None = Field(None, description=machines.NODE_HOST)
    provenance: Provenance = Field(description=PROVENANCE)
    context: report.PlannedContext | None = Field(
        None, description="Context parallelism of the first choice, as in its plan; null without it."
    )
    why: tuple[str, ...] = Field(
        description="Reasons: the largest part of a step, the next best choice, and the nearest that does not fit; "
        "and where the times are from."
    )
    would_change: tuple[str, ...] = Field(description="Inputs that, changed by 20 %, would change the choice.")
    other_orders: tuple[str, ...] = Field(
        (), description="What other orders of ranks over the network would gain; gangs do not support them."
    )


_MOST_GPUS = 4096  # at which a job for which nothing fits is still tried
_LAST_SECONDS = 0.5  # of a search, after which more GPUs are not tried: each takes up to four times as long


def search_report(
    spec: JobSpec, request: PlanSearch, fitted: Fitted | None = None, conditions: RunConditions = CONDITIONS
) -> SearchReport:
    """Search and report.

    Args:
        spec: The job.
        request: What to search for.
        fitted: Corrections from jobs, for its profile.
        conditions: Prices, failures and the checkpoints' store.

    Raises:
        ValueError: The profile is of another precision.
    """
    machine = replace(request.machine(spec), fitted=fitted)
    device = device_bytes(spec.resources, machine)
    limit = inf if device is None else device
    result = search_as_reported(spec, request.gpus, machine, limit, request.top)
    first = result.choices[0] if result.choices else None
    used = 0 if first is None else first.layout.world_size
    with_more = (choice for choice in result.choices if choice.layout.world_size > used)
    more = min(with_more, key=lambda choice: choice.seconds.total, default=None)
    result = result._replace(choices=result.choices[: request.top])
    why = list(reasons(result, limit, machine, Layout.of(spec.parallelism)))
    if not spec.resources.gpus_per_worker:
        said = f"the job asks for no GPUs: these are {counted(request.gpus, 'CPU rank')}"
        why.insert(0, f"{said}; set resources.gpus_per_worker: 1, and a resources.accelerator_type such as H100")
    if first is None:  # how many GPUs would do, by doubling their number
        gpus, took = request.gpus, 0.0
        while took < _LAST_SECONDS and 2 * gpus <= min(_MOST_GPUS, machine.cluster.size):
            gpus *= 2
            begun = time.thread_time()
            if enough := search(spec, gpus, machine, limit, 1, lean=True).choices:
                why.append(f"{gpus:,} GPUs would do: {enough[0]}, {rounded(enough[0].seconds.total)} s")
                break
            took = time.thread_time() - begun
        else:
            why.append(f"{gpus:,} GPUs would not do")
    elif used < request.gpus:
        batch, replica = spec.training.common_batch, used // first.layout.dp
        whole = batch == spec.training.global_batch_size
        sequences = (
            f"{batch:,} sequences{' per step' if whole else ', the greatest common divisor of all batch sizes,'}"
        )
        numbers, most = divisors(batch), request.gpus // replica
        fewer = sum(number <= request.gpus for number in numbers)
        among = f"among {', '.join(f'{number:,}' for number in numbers[max(fewer - 3, 0) : fewer + 1])}"
        each = f"here of {counted(replica, 'GPU')} each"
        reason = "" if batch % most else "layouts with more take longer; "
        if more is not None and (less := 1 - more.seconds.total / first.seconds.total) > 0:
            takes = f"{less:.1%} less, too little for predictions to tell apart"
            reason = f"with {more.layout.world_size:,} a step takes {takes}"
        else:
            if more is not None:
                takes = f"takes {-less:.1%} longer" if less <= -0.0005 else "takes as long"
                reason = f"with {more.layout.world_size:,}, {more.layout}, a step {takes}; "
            many = f"do not divide among {most:,} replicas, but {among}" if batch % most else f"divide {among} replicas"
            reason += f"{sequences} {many}, {each}"
        why.append(f"{used:,} of {request.gpus:,} GPUs are used: {reason}")
    if used < request.gpus:  # perhaps as the model cannot be split among tensor parallel ranks
        sizes = range(2, min(machine.cluster.levels[0].fan_out, request.gpus) + 1)
        problems = [strategy_problems(spec.model, spec.parallelism.at(Layout(size, 1, 1))) for size in sizes]
        of_sizes = [[each.message for each in of if each.field[-1] == "tensor_parallel_size"] for of in problems]
        if of_sizes and all(of_sizes):
            why.append(f"tensor parallelism is ruled out: {of_sizes[0][0]}")
    why += [f"device: {machine.profile.description}", report.network_in_words(machine)]
    why += report.published_in_words(spec)
    if spec.resources.gpus_per_worker and device is None:
        why.append(report.unknown_memory(spec.resources))
    choices = []
    for choice in result.choices:
        copies = rank_memory(choice.job, choice.layout).copies
        step = report.step_and_run(choice.job, choice.layout, choice.seconds, choice.host, copies, machine, conditions)
        choices.append(PlannedChoice(text=str(choice), patch=choice.patch, memory_bytes=choice.needed, **step))
    return SearchReport(
        choices=tuple(choices),
        parameters=parameter_count(spec.model),
        tokens_per_step=spec.training.global_batch_size * spec.training.sequence_length,
        steps=spec.training.steps,
        published=report.published_run(spec),
        combinations=result.timed,
        device_memory_bytes=device,
        node_memory_bytes=machine.node_memory_bytes,
        # With ``recompute: auto``, each size gets what it needs, as in the search.
        context=first and report.context_report(first.job.with_parallelism(recompute="auto"), first.layout, machine),
        provenance=machine.provenance,
        why=tuple(why),
        would_change=tuple(sensitivities(spec, request.gpus, machine, limit, first)) if request.explain else (),
        other_orders=tuple(other_orders(spec, request.gpus, machine, limit, first)) if request.explain else (),
    )
