"""Choosing the number of blocks of each pipeline stage together with what the blocks keep.

The first ranks have the most micro-batches in flight. Where memory is short they recompute more, which makes them the
slowest; with fewer blocks they need not. So blocks are moved one at a time, from a rank that does not fit, or else from
one of the two slowest ranks, to any other stage, as long as the simulated step gets shorter; each rank uses the least
costly mix of modes that fits with its blocks (``mixes``). Only the few moves that are best by the formula
(``throughput``) are simulated. ``tests/planning_truth.py`` compares the result with an exhaustive search of all cuts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest, nsmallest
from math import inf

from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.parallelism import StageModes
from boost_core.plan.host_memory import room_of_a_rank
from boost_core.plan.machine import Machine
from boost_core.plan.memory import PipelineRank
from boost_core.plan.mixes import MIXED_LESS, BlockCosts, LeastCostly, RankMix, in_each_way, in_one, legal_modes
from boost_core.plan.stages import Stage, layers_per_stage, stages_of
from boost_core.plan.throughput import Step

_PLAYED = 3  # moves simulated in each round


@dataclass(frozen=True)
class CutPlan:
    """A cut that fits.

    Attributes:
        job: The job with this cut and the modes of its blocks.
        step: Its step.
        seconds: Simulated time of the step.
    """

    job: JobSpec
    step: Step
    seconds: float


@dataclass(frozen=True)
class _RankPlan:
    """What a rank's blocks keep, ``None`` if nothing fits; and its least seconds, or else the bytes that it lacks."""

    mixes: LeastCostly | None
    cost: float


class Cuts:
    """The cuts of a job at a layout.

    Args:
        job: The job at its layout, with the default cut; what it recomputes does not matter.
        layout: The layout.
        limit: Bytes that a rank may hold.
        machine: What it runs on.
        order: As for ``Step``.
    """

    def __init__(self, job: JobSpec, layout: Layout, limit: float, machine: Machine, order: Sequence[str]) -> None:
        modes = legal_modes(job, machine)
        self._job = job.with_parallelism(recompute=modes[0])
        self._layout, self._machine = layout, machine
        self._size, self._limit, self._modes = layout.pp, limit, modes
        self._step = Step(self._job, layout, machine, order, modes)
        self._costs = BlockCosts(self._step, modes)
        self._ranks: dict[tuple[int, Sequence[Stage] | Sequence[int]], _RankPlan] = {}

    def first(self) -> CutPlan | None:
        """Return the faster of the cuts from which ``best`` starts; ``None`` if neither fits."""
        return self._plan(self._start)

    def best(self) -> CutPlan | None:
        """Return the best cut found by moving blocks; ``None`` if none fits."""
        sizes = self._start
        best, lacks = self._plan(sizes), self._lacks(sizes)
        while best is None:
            sizes = min(self._moves(sizes), key=lambda each: (self._lacks(each), each), default=sizes)
            if self._lacks(sizes) >= lacks:
                return None
            best, lacks = self._plan(sizes), self._lacks(sizes)
        while True:
            estimates = nsmallest(_PLAYED, {(self._estimate(best, sizes, each), each) for each in self._moves(sizes)})
            played = [(plan.seconds, each, plan) for _, each in estimates if (plan := self._plan(each))]
            shortest = min(played, key=lambda each: each[:2], default=None)
            if shortest is None or shortest[0] >= best.seconds:
                return best
            _, sizes, best = shortest

    @cached_property
    def _start(self) -> Sequence[int]:
        """The default cut, or the one with its larger stages last, whichever is faster.

        The first ranks finish the step last and only then reduce their gradients. The last stage, which has the head,
        stays as it is.
        """
        job = self._job
        default = layers_per_stage(job.model, job.parallelism, job.training.sequence_length)
        late = *sorted(default[:-1]), default[-1]
        return min((default, late), key=lambda sizes: plan.seconds if (plan := self._plan(sizes)) else inf)

    def _moves(self, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Cuts with one block moved from a stage of the limiting ranks to any other stage."""
        plans = self._rank_plans(sizes)
        unfit = [rank for rank, plan in enumerate(plans) if plan.mixes is None]
        for rank in unfit or nlargest(2, range(self._size), key=lambda rank: plans[rank].cost):
            for source in range(rank, len(sizes), self._size):
                for target in range(len(sizes)):
                    if sizes[source] > 1 and target != source:
                        yield tuple(size + (stage == target) - (stage == source) for stage, size in enumerate(sizes))

    def _estimate(self, plan: CutPlan, sizes: Sequence[int], moved: Sequence[int]) -> float:
        """Estimate a cut by the formula, assuming that the moved block is the costliest of both stages."""
        counts = [dict(plan.job.parallelism.modes(stage, size)) for stage, size in enumerate(sizes)]
        source = next(stage for stage, size in enumerate(sizes) if moved[stage] < size)
        target = next(stage for stage, size in enumerate(sizes) if moved[stage] > size)
        costliest = [max(counts[stage], key=self._costs.of_block) for stage in (source, target)]
        counts[source][costliest[0]] -= 1
        counts[target][costliest[1]] += 1
        return self._step.keeping(self._with(moved, [StageModes(**count) for count in counts])).parts().total

    def _lacks(self, sizes: Sequence[int]) -> float:
        """Bytes lacking on the ranks that do not fit."""
        return sum(plan.cost for plan in self._rank_plans(sizes) if plan.mixes is None)

    def _plan(self, sizes: Sequence[int]) -> CutPlan | None:
        mixes = [plan.mixes for plan in self._rank_plans(sizes) if plan.mixes is not None]
        if len(mixes) < self._size:
            return None
        plans = []
        for modes in in_each_way(mixes, len(sizes)):
            job = self._with(sizes, modes)
            step = self._step.keeping(job)
            plans.append(CutPlan(job, step, step.played()))
        return min(plans, key=lambda plan: plan.seconds)

    def _with(self, sizes: Sequence[int], modes: Sequence[StageModes]) -> JobSpec:
        return self._job.with_parallelism(pipeline_layers_per_stage=tuple(sizes), recompute=in_one(modes))

    def _rank_plans(self, sizes: Sequence[int]) -> list[_RankPlan]:
        stages = stages_of(tuple(sizes))
        return [self._rank_plan(rank, stages[rank :: self._size]) for rank in range(self._size)]

    def _rank_plan(self, number: int, stages: Sequence[Stage]) -> _RankPlan:
        key = number, stages if self._job.model.lax else tuple(len(stage.layers) for stage in stages)
        if key not in self._ranks:
            self._ranks[key] = self._planned(PipelineRank(self._job, number, stages))
        return self._ranks[key]

    def _planned(self, rank: PipelineRank) -> _RankPlan:
        modes = self._modes if rank.memory().total > self._limit else self._modes[:1]
        found = [rank.in_one_mode(mode).memory() for mode in modes]
        room = room_of_a_rank(found[0].copies, self._machine)
        if min(memory.total for memory in found) <= self._limit * (1 + MIXED_LESS):
            mixes = RankMix(rank, self._costs, self._limit, room).least_costly()
            if mixes.least is not None:
                head = self._step.of_the_head() if rank.ends else 0.0
                return _RankPlan(mixes, self._costs.of(mixes.least, rank.ends) + head)
        in_room = [memory.total for memory in found if memory.host <= max(room, found[0].host)]
        return _RankPlan(None, min(in_room) - self._limit)
