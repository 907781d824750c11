"""Choosing what blocks keep where memory decides (``recompute: auto``): the least costly mix of modes that fits.

Each pipeline rank has its own mix, as the first ranks have the most micro-batches in flight. A mix combines two modes
and at most one block of a third; the least costly one that fits is found by bisection, as a rank holds less the more of
its blocks use the leaner mode. Blocks that recompute most come first, also across a rank's two stages, of which the
first has more in flight.

Where the memory of the nodes' hosts is known, some blocks may keep their tensors there (``offload``): the fewest with
which all others can have the same mode, or, if the host has too little room for that, as many as it has room for, with
a mix of the others. Then single blocks get cheaper modes, as long as the rank fits.
``tests/unit/test_mixes.py`` compares the mixes with an exhaustive search.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest, nsmallest
from itertools import combinations, product
from math import inf
from typing import NamedTuple

from boost_core.config.job import JobSpec
from boost_core.config.legality import strategy_problems
from boost_core.config.parallelism import MODES, TRAITS, Layout, ModeRuns, RecomputeMode, StageModes
from boost_core.plan.machine import Machine, captures_steps
from boost_core.plan.memory import (
    PipelineRank,
    RankMemory,
    lacking,
    memory_in_each,
    node_bytes,
    pipeline_ranks,
    room_of_a_rank,
)
from boost_core.plan.throughput import ORDER, Step
from boost_core.plan.work import Stage, layers_per_stage, stages_of

MIXED_LESS = 0.03  # most that a mix can save over every single mode, whose backward pass may take more

_ON_HOST: RecomputeMode = "offload"

Counts = Mapping[RecomputeMode, int]


def legal_modes(job: JobSpec, machine: Machine) -> list[RecomputeMode]:
    """Return the modes that blocks may have, those that keep more first.

    ``shared`` only with several ranks; ``offload`` only on GPUs whose hosts' memory is known, without captured steps.
    """
    left_out: set[RecomputeMode] = {"shared"} if job.parallelism.tensor_parallel_size == 1 else set()
    knows_hosts = job.resources.gpus_per_worker > 0 and machine.node_memory_bytes is not None
    if not knows_hosts or job.training.cuda_graphs == "on":
        left_out.add(_ON_HOST)
    return [
        mode
        for mode in MODES
        if mode not in left_out and not strategy_problems(job.model, job.with_parallelism(recompute=mode).parallelism)
    ]


class Mixes:
    """What the blocks of a job at a layout may keep.

    Args:
        job: The job; what it recomputes does not matter.
        layout: The layout.
        machine: What it runs on.

    Attributes:
        lightest: The least memory that the fullest rank needs with one mode, as though hosts had room for anything.
    """

    def __init__(self, job: JobSpec, layout: Layout, machine: Machine) -> None:
        self._layout, self._machine = layout, machine
        self._modes = legal_modes(job, machine)
        self._job = job.with_parallelism(recompute=self._modes[0])
        self._memory = memory_in_each(self._job, layout, self._modes)
        self.lightest = min(self._memory.values(), key=lambda memory: memory.total)

    def leanest(self) -> tuple[JobSpec, RankMemory]:
        """Return the job with all blocks in the mode that minimizes the fullest rank's memory, and that memory.

        A mode for which hosts have too little memory comes last.
        """

        def lacks(mode: RecomputeMode) -> tuple[int, int]:
            memory = self._memory[mode]
            return lacking(node_bytes(memory, self._layout, self._machine), self._machine), memory.total

        mode = min(self._modes, key=lacks)
        return self._job.with_parallelism(recompute=mode), self._memory[mode]

    def may_fit(self, limit: float) -> bool:
        """Whether some mix may keep every rank within ``limit`` bytes, judged by single modes, which is quicker."""
        return self.lightest.total <= limit * (1 + MIXED_LESS)

    def least_costly(self, limit: float) -> JobSpec:
        """Return the job with the mix that keeps ranks within a limit in bytes and is fastest by the formula."""
        ways = self.ways(limit)
        if len(ways) == 1:
            return ways[0]
        return min(ways, key=lambda way: Step(way, self._layout, self._machine).parts().total)

    def ways(self, limit: float) -> list[JobSpec]:
        """Return the job with each rank's least costly mix: on its device, and with the host's memory if that differs.

        If nothing fits, as ``leanest``. What costs a rank less may still lengthen the step, where others wait for it.
        """
        found = self._mixed(limit) if self.may_fit(limit) else []
        return [self._job.with_parallelism(recompute=in_one(stages)) for stages in found] or [self.leanest()[0]]

    def _mixed(self, limit: float) -> list[list[StageModes]]:
        costs = BlockCosts.of_job(self._job, self._layout, self._machine)
        room = room_of_a_rank(self._memory[self._modes[0]].copies, self._machine)
        both = []
        for rank in pipeline_ranks(self._job, self._layout, range(self._layout.pp)):
            both.append(RankMix(rank, costs, limit, room).least_costly())
            if both[-1].least is None:
                return []
        return list(in_each_way(both, self._job.parallelism.stages))


def in_each_way(ranks: "Sequence[LeastCostly]", stages: int) -> Iterator[list[StageModes]]:
    """Yield all stages' modes: with each rank's mix on its device, and with the host's memory if any differs."""
    size = len(ranks)
    alone = [rank.on_device for rank in ranks]
    least = [rank.least for rank in ranks]
    for mixes in [alone] if alone == least else [alone, least]:
        found = [mix for mix in mixes if mix is not None]
        if len(found) == size:
            yield [found[index % size][index // size] for index in range(stages)]


def in_one(stages: Sequence[StageModes]) -> RecomputeMode | tuple[StageModes, ...]:
    """Return the mode of all blocks if they share one, or else those of each stage."""
    used = {mode for stage in stages for mode, _ in stage.runs}
    return used.pop() if len(used) == 1 else tuple(stages)


class BlockCosts:
    """Seconds that a micro-batch takes in a block of each mode.

    Args:
        step: The job's step, with these modes.
        modes: The legal modes, those that keep more first.
        launched: The same where steps are not captured as graphs, as with blocks on the host; ``None`` if none are.
    """

    def __init__(self, step: Step, modes: Sequence[RecomputeMode], launched: "BlockCosts | None" = None) -> None:
        self._of_block = {mode: step.of_a_block(mode) for mode in modes}
        self.modes = sorted(modes, key=lambda mode: (self._of_block[mode], modes.index(mode)))
        sliced = [mode for mode in modes if TRAITS[mode].slices]
        self._first_gather = step.first_gather(sliced[0]) if sliced else 0.0
        self._first_copy = step.first_copy(_ON_HOST) if _ON_HOST in modes else 0.0
        self.with_host = launched or self

    @classmethod
    def of_job(cls, job: JobSpec, layout: Layout, machine: Machine) -> "BlockCosts":
        """Return those of all modes that a job may have at a layout; it is in the one that keeps most."""
        modes = legal_modes(job, machine)
        launched = None
        if _ON_HOST in modes and captures_steps(job):
            off = job.model_copy(update={"training": job.training.model_copy(update={"cuda_graphs": "off"})})
            launched = cls(Step(off, layout, machine, ORDER, modes), modes)
        return cls(Step(job, layout, machine, ORDER, modes), modes, launched)

    def of_block(self, mode: RecomputeMode) -> float:
        """Return the seconds of one block."""
        return self._of_block[mode]

    def of(self, stages: Sequence[StageModes], last: bool) -> float:
        """Return the seconds of a rank's stages.

        Args:
            stages: What their blocks keep.
            last: Whether the last of them is the model's last, whose backward pass waits for no copy.
        """
        away = [stage.offload > 0 for stage in stages]
        if any(away) and self.with_host is not self:
            return self.with_host.of(stages, last)
        blocks = sum(count * self._of_block[mode] for stage in stages for mode, count in stage.runs)
        blocks += self._first_copy * sum(away[:-1] if last else away)
        return blocks + self._first_gather * sum(stage.shared + stage.offload > 0 for stage in stages)


class LeastCostly(NamedTuple):
    """A rank's least costly mixes; ``None`` where none fits.

    Attributes:
        on_device: Without the host's memory.
        least: Of all.
    """

    on_device: list[StageModes] | None
    least: list[StageModes] | None


class RankMix:
    """The mixes of one rank that stay within a limit.

    Args:
        rank: The rank.
        costs: What its blocks take.
        limit: Bytes of its device.
        room: Bytes of the host's memory for state and what blocks keep.
    """

    def __init__(self, rank: PipelineRank, costs: BlockCosts, limit: float, room: float) -> None:
        self._rank, self._costs, self._limit, self._room = rank, costs, limit, room
        self._blocks = sum(rank.sizes)
        self._best: list[StageModes] | None = None
        self._least = inf
        self._counts: Counts = {}

    def least_costly(self) -> LeastCostly:
        """Return the least costly mixes that fit."""
        self._mix_others(self._costs, 0)
        on_device = self._best
        if _ON_HOST in self._costs.modes and (most := self._most_away()):
            captured, self._costs = self._costs.with_host is not self._costs, self._costs.with_host
            self._mix_with_host(most)
            if captured:
                self._mix_others(self._costs, 1)  # enough to spare the memory of a graph
            if most < self._blocks:
                self._mix_others(self._costs, most)
            if self._best is not on_device:
                self._exchange(most)
        return LeastCostly(on_device, self._best)

    def _most_away(self) -> int:
        """Most blocks for which the host has room."""
        other = self._others(self._costs)[0]
        if self._cheapest_with(1) >= self._least:
            return 0

        def has_room(count: int) -> bool:
            return self._memory({_ON_HOST: count, other: self._blocks - count}).host <= self._room

        if has_room(self._blocks):
            return self._blocks
        enough, too_many = 0, self._blocks
        while too_many - enough > 1:
            count = (enough + too_many) // 2
            enough, too_many = (count, too_many) if has_room(count) else (enough, count)
        return enough

    def _mix_with_host(self, most: int) -> None:
        """For each other mode, and perhaps one block of a third: take the mix with the fewest blocks on the host."""
        costs, others = self._costs, self._others(self._costs)
        for mode in others:
            if self._at_least(costs, 0, mode, _ON_HOST) >= self._least or self._fits({mode: self._blocks}):
                break  # those that are costlier are not needed either
            pair = self._fewest({}, mode, _ON_HOST, most)
            if pair is None:
                continue
            self._take(pair)
            for third in others:
                if third != mode and costs.of_block(third) < costs.of_block(_ON_HOST):
                    mixed = {**pair, _ON_HOST: pair[_ON_HOST] - 1, third: 1}
                    if pair[_ON_HOST] and self._fits(mixed):
                        self._take(mixed)

    def _exchange(self, most: int) -> None:
        """Give one block of the best mix after the other a cheaper mode, with at most ``most`` on the host."""
        counts: Counts | None = self._counts
        while counts is not None:
            counts = next(filter(self._fits, self._one_cheaper(counts, most)), None)
            if counts is not None:
                self._take(counts)

    def _one_cheaper(self, counts: Counts, most: int) -> Iterator[Counts]:
        """Mixes in which one block has a cheaper mode, beginning with those that save most."""
        saving = sorted(
            (self._costs.of_block(after) - self._costs.of_block(before), before, after)
            for before, after in product(counts, self._costs.modes)
            if counts[before] and (after != _ON_HOST or counts.get(_ON_HOST, 0) < most)
        )
        for saved, before, after in saving:
            if saved < 0:
                yield {**counts, before: counts[before] - 1, after: counts.get(after, 0) + 1}

    @staticmethod
    def _others(costs: BlockCosts) -> list[RecomputeMode]:
        return [mode for mode in costs.modes if mode != _ON_HOST]

    def _cheapest_with(self, away: int) -> float:
        """Return a lower bound on the seconds with ``away`` blocks on the host."""
        costs, others = self._costs.with_host, self._others(self._costs.with_host)
        return away * costs.of_block(_ON_HOST) + (self._blocks - away) * costs.of_block(others[0])

    def _take(self, counts: Counts) -> None:
        stages = [StageModes(**dict(runs)) for runs in self._runs(counts)]
        if (cost := self._costs.of(stages, self._rank.ends)) < self._least:
            self._best, self._least, self._counts = stages, cost, counts

    def _mix_others(self, costs: BlockCosts, away: int) -> None:
        """For each pair of modes, and perhaps one block of a third: take the mix with the fewest of the costlier.

        Args:
            costs: What blocks take.
            away: Blocks on the host besides.
        """
        modes, blocks = self._others(costs), self._blocks - away
        fixed: Counts = {_ON_HOST: away} if away else {}
        if away and self._cheapest_with(away) >= self._least:
            return
        fitting = [mode for mode in modes if self._fits({**fixed, mode: blocks})]
        if modes[0] in fitting:
            self._take({**fixed, modes[0]: blocks})
            return
        for cheaper, dearer in combinations(modes, 2):
            if cheaper in fitting:
                continue  # alone it costs less than with the other
            if self._at_least(costs, away, cheaper, dearer) >= self._least:
                continue
            pair = self._fewest(fixed, cheaper, dearer, blocks)
            if pair is not None:
                self._take(pair)
            for third in modes:
                if third in (cheaper, dearer):
                    continue
                one: Counts = {**fixed, third: 1}
                if pair is None:
                    mixed = self._fewest(one, cheaper, dearer, blocks - 1)
                elif costs.of_block(third) < costs.of_block(dearer):  # in place of a block of the dearer
                    counts = {**one, cheaper: pair[cheaper], dearer: pair[dearer] - 1}
                    mixed = counts if pair[dearer] and self._fits(counts) else None
                else:
                    mixed = self._fewest(one, cheaper, dearer, pair[dearer] - 1)
                if mixed is not None:
                    self._take(mixed)

    def _at_least(self, costs: BlockCosts, away: int, cheaper: RecomputeMode, dearer: RecomputeMode) -> float:
        """Lower bound on the seconds of a pair with one block of the dearer, and perhaps one of the cheapest mode."""
        others = self._blocks - away - 2
        pair = costs.of_block(dearer) + costs.of_block(self._others(costs)[0]) + others * costs.of_block(cheaper)
        return pair + (away * costs.of_block(_ON_HOST) if away else 0.0)

    def _fewest(self, fixed: Counts, cheaper: RecomputeMode, dearer: RecomputeMode, most: int) -> Counts | None:
        """Return the mix of two modes, besides fixed blocks, with the fewest of the dearer that fits, or ``most``."""
        rest = self._blocks - sum(fixed.values())

        def mix(count: int) -> Counts:
            return {**fixed, dearer: count, cheaper: rest - count}

        if most < 0 or not self._fits(mix(most)):
            return None
        too_few, enough = -1, most
        while enough - too_few > 1:
            count = (too_few + enough) // 2
            if self._fits(mix(count)):
                enough = count
            else:
                too_few = count
        return mix(enough)

    def _fits(self, counts: Counts) -> bool:
        return self._memory(counts).total <= self._limit

    def _memory(self, counts: Counts) -> RankMemory:
        return self._rank.keeping(self._runs(counts)).memory()

    def _runs(self, counts: Counts) -> list[ModeRuns]:
        """Distribute modes over the rank's stages: those that keep least go to the first."""
        left, stages = dict(counts), []
        for size in self._rank.sizes:
            runs: list[tuple[RecomputeMode, int]] = []
            for mode in reversed(MODES):
                if taken := min(left.get(mode, 0), size):
                    runs.append((mode, taken))
                    left[mode] -= taken
                    size -= taken
            stages.append(tuple(runs))
        return stages


# Choosing the number of blocks of each pipeline stage together with what the blocks keep.
#
# The first ranks have the most micro-batches in flight. Where memory is short they recompute more, which makes them the
# slowest; with fewer blocks they need not. So blocks are moved one at a time, from a rank that does not fit, or else
# from
# one of the two slowest ranks, to any other stage, as long as the simulated step gets shorter; each rank uses the least
# costly mix of modes that fits with its blocks (``mixes``). Only the few moves that are best by the formula
# (``throughput``) are simulated. ``tests/planning_truth.py`` compares the result with an exhaustive search of all cuts.

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
