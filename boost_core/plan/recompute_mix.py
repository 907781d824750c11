"""Recompute mixes: the modes in which blocks keep their activations, where memory decides (``recompute: auto``).

Each pipeline rank has its own mix, as the first ranks have the most micro-batches in flight. A mix combines two modes
and at most one block of a third; the least costly one that fits is found by bisection, as a rank holds less the more of
its blocks use the leaner mode. Blocks that recompute most come first, also across a rank's two stages, of which the
first has more in flight.

Where the memory of the nodes' hosts is known, some blocks may keep their tensors there (``offload``): the fewest with
which all others can have the same mode, or, if the host has too little room for that, as many as it has room for, with
a mix of the others. Then single blocks get cheaper modes, as long as the rank fits.
``tests/unit/test_mixes.py`` compares the mixes with an exhaustive search.

A search chooses the number of blocks of each pipeline stage together with the mixes (``Cuts``). Where memory is short,
the first ranks recompute more, which makes them the slowest; with fewer blocks they need not. So blocks are moved one
at a time, from a rank that does not fit, or else from one of the two slowest ranks, to any other stage, as long as the
simulated step gets shorter; each rank uses the least costly mix that fits with its blocks. Only the few moves that are
best by the formula (``throughput``) are simulated. ``tests/planning_truth.py`` compares the result with an exhaustive
search of all cuts.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from heapq import nlargest, nsmallest
from itertools import combinations, product
from math import inf
from typing import NamedTuple

from boost_core.architecture import Stage, layers_per_stage, stages_of
from boost_core.config.job import JobSpec
from boost_core.config.parallelism import MODES, TRAITS, Layout, ModeRuns, RecomputeMode, StageModes, strategy_problems
from boost_core.plan.machine import Machine, captures_steps
from boost_core.plan.memory import Memory, PipelineRank, lacking, most_of, node_bytes, pipeline_ranks, room_of_a_rank
from boost_core.plan.throughput import ORDER, Step

MIXED_LESS = 0.03  # most that a mix can save over every single mode, whose backward pass may take more

_ON_HOST: RecomputeMode = "offload"

Counts = Mapping[RecomputeMode, int]


def legal_modes(job: JobSpec, machine: Machine) -> list[RecomputeMode]:
    """Return the modes that blocks may have, those that keep more first.

    ``shared`` only with several ranks; ``offload`` only on GPUs whose hosts' memory is known, without captured steps;
    of halves of one sequence only what recomputes nothing (``config.job.layout_problems``).
    """
    left_out: set[RecomputeMode] = {"shared"} if job.parallelism.tensor_parallel_size == 1 else set()
    if job.parallelism.split_micro_batch and job.training.micro_batch_size == 1:
        left_out.update(mode for mode in MODES if TRAITS[mode].again != "nothing")
    knows_hosts = job.resources.gpus_per_worker > 0 and machine.node_memory_bytes is not None
    if not knows_hosts or job.training.cuda_graphs == "on":
        left_out.add(_ON_HOST)
    possible = {mode: job.with_parallelism(recompute=mode).parallelism for mode in MODES if mode not in left_out}
    return [mode for mode, parallelism in possible.items() if not strategy_problems(job.model, parallelism)]


class RecomputeMixes:
    """The recompute mixes that a job may have at a layout.

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
        ranks = pipeline_ranks(self._job.at(layout), layout)
        self._memory = {
            mode: most_of([rank.keeping([((mode, size),) for size in rank.sizes]).memory() for rank in ranks])
            for mode in self._modes
        }
        self.lightest = min(self._memory.values(), key=lambda memory: memory.total)

    def leanest(self) -> tuple[JobSpec, Memory]:
        """Return the job with all blocks in the mode that minimizes the fullest rank's memory, and that memory.

        A mode for which hosts have too little memory comes last.
        """
        layout, machine = self._layout, self._machine
        lacks = {mode: lacking(node_bytes(memory, layout, machine), machine) for mode, memory in self._memory.items()}
        mode = min(self._modes, key=lambda mode: (lacks[mode], self._memory[mode].total))
        return self._job.with_parallelism(recompute=mode), self._memory[mode]

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
        if self.lightest.total > limit * (1 + MIXED_LESS):  # judged by single modes, which is quicker
            return [self.leanest()[0]]
        job, launched = self._job, None  # in the mode that keeps most
        if _ON_HOST in self._modes and captures_steps(job):
            off = job.model_copy(update={"training": job.training.model_copy(update={"cuda_graphs": "off"})})
            launched = BlockCosts(Step(off, self._layout, self._machine, ORDER, self._modes), self._modes)
        costs = BlockCosts(Step(job, self._layout, self._machine, ORDER, self._modes), self._modes, launched)
        room, mixes = room_of_a_rank(self._memory[self._modes[0]].copies, self._machine), list[LeastCostly]()
        for rank in pipeline_ranks(self._job, self._layout, range(self._layout.pp)):
            mixes.append(RankMix(rank, costs, limit, room).least_costly())
            if mixes[-1].least is None:
                return [self.leanest()[0]]
        ways = in_each_way(mixes, self._job.parallelism.stages)
        return [self._job.with_parallelism(recompute=in_one(stages)) for stages in ways]


class LeastCostly(NamedTuple):
    """A rank's least costly mixes; ``None`` where none fits.

    Attributes:
        on_device: Without the host's memory.
        least: Of all.
    """

    on_device: list[StageModes] | None
    least: list[StageModes] | None


def in_each_way(ranks: Sequence[LeastCostly], stages: int) -> Iterator[list[StageModes]]:
    """Yield all stages' modes: with each rank's mix on its device, and with the host's memory if any differs."""
    size = len(ranks)
    on_device, least = [rank.on_device for rank in ranks], [rank.least for rank in ranks]
    for way in [on_device] if on_device == least else [on_device, least]:
        mixes = [mix for mix in way if mix is not None]
        if len(mixes) == size:
            yield [mixes[index % size][index // size] for index in range(stages)]


def in_one(stages: Sequence[StageModes]) -> RecomputeMode | tuple[StageModes, ...]:
    """Return the mode of all blocks if they share one, or else those of each stage."""
    used = {mode for stage in stages for mode, _ in stage.runs}
    return used.pop() if len(used) == 1 else tuple(stages)


class BlockCosts:
    """Seconds that a micro-batch takes in a block of each mode, corrected as in shapes that have not run.

    Args:
        step: The job's step, with these modes.
        modes: The legal modes, those that keep more first.
        launched: The same where steps are not captured as graphs, as with blocks on the host; ``None`` if none are.

    Attributes:
        of_block: Seconds of one block in each mode.
        modes: The modes, the cheapest first.
        on_device: Those that keep nothing on the host, the cheapest first.
        with_host: The costs where some blocks are on the host.
    """

    def __init__(self, step: Step, modes: Sequence[RecomputeMode], launched: "BlockCosts | None" = None) -> None:
        self.of_block = {mode: step.blocks[mode].total(step.usual) for mode in modes}
        self.modes = sorted(modes, key=lambda mode: (self.of_block[mode], modes.index(mode)))
        self.on_device = [mode for mode in self.modes if mode != _ON_HOST]
        sliced = [mode for mode in modes if TRAITS[mode].slices]
        self._first_gather = step.usual.communication * step.blocks[sliced[0]].first_gather if sliced else 0.0
        self._first_copy = step.usual.rest * step.blocks[_ON_HOST].copy if _ON_HOST in modes else 0.0
        self.with_host = launched or self

    def of(self, stages: Sequence[StageModes], last: bool) -> float:
        """Return the seconds of a rank's stages.

        Args:
            stages: What their blocks keep.
            last: Whether the last of them is the model's last, whose backward pass waits for no copy.
        """
        offloads = [stage.offload > 0 for stage in stages]
        if any(offloads) and self.with_host is not self:
            return self.with_host.of(stages, last)
        blocks = sum(count * self.of_block[mode] for stage in stages for mode, count in stage.runs)
        blocks += self._first_copy * sum(offloads[:-1] if last else offloads)
        return blocks + self._first_gather * sum(stage.shared + stage.offload > 0 for stage in stages)


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
        self._mix_on_device(0)
        on_device = self._best
        if _ON_HOST not in self._costs.modes or self._cheapest_with(1) >= self._least:
            return LeastCostly(on_device, on_device)

        # The most blocks for which the host has room; first whether there is room for all.
        def too_many(count: int) -> bool:
            offloading: Counts = {_ON_HOST: count, self._costs.on_device[0]: self._blocks - count}
            return self._rank.keeping(self._runs(offloading)).memory().host > self._room

        blocks = self._blocks
        most = bisect_left(range(1, blocks), True, key=too_many) if too_many(blocks) else blocks
        if not most:
            return LeastCostly(on_device, on_device)
        captured, self._costs = self._costs.with_host is not self._costs, self._costs.with_host
        # With each other mode, and perhaps one block of a third: the mix with the fewest blocks on the host.
        costs = self._costs
        for mode in costs.on_device:
            if self._at_least(0, mode, _ON_HOST) >= self._least or self._fits({mode: self._blocks}):
                break  # those that are costlier are not needed either
            pair = self._fewest({}, mode, _ON_HOST, most)
            if pair is None:
                continue
            self._consider(pair)
            for third in costs.on_device:
                if third != mode and costs.of_block[third] < costs.of_block[_ON_HOST]:
                    mixed = {**pair, _ON_HOST: pair[_ON_HOST] - 1, third: 1}
                    if pair[_ON_HOST] and self._fits(mixed):
                        self._consider(mixed)
        if captured:
            self._mix_on_device(1)  # enough to spare the memory of a graph
        if most < self._blocks:
            self._mix_on_device(most)
        counts: Counts | None = None if self._best is on_device else self._counts
        while counts is not None:  # one block after the other gets a cheaper mode, beginning with those that save most
            before, counts = counts, None
            saving = sorted(
                (self._costs.of_block[after] - self._costs.of_block[mode], mode, after)
                for mode, after in product(before, self._costs.modes)
                if before[mode] and (after != _ON_HOST or before.get(_ON_HOST, 0) < most)
            )
            for seconds, mode, after in saving:
                mix: Counts = {**before, mode: before[mode] - 1, after: before.get(after, 0) + 1}
                if seconds < 0 and self._fits(mix):
                    self._consider(mix)
                    counts = mix
                    break
        return LeastCostly(on_device, self._best)

    def _mix_on_device(self, on_host: int) -> None:
        """For each pair of modes, and perhaps one block of a third: consider the mix with the fewest of the costlier.

        Args:
            on_host: Blocks on the host besides.
        """
        costs, modes, blocks = self._costs, self._costs.on_device, self._blocks - on_host
        fixed: Counts = {_ON_HOST: on_host} if on_host else {}
        if on_host and self._cheapest_with(on_host) >= self._least:
            return
        fitting = [mode for mode in modes if self._fits({**fixed, mode: blocks})]
        if modes[0] in fitting:
            self._consider({**fixed, modes[0]: blocks})
            return
        for cheaper, dearer in combinations(modes, 2):
            if cheaper in fitting or self._at_least(on_host, cheaper, dearer) >= self._least:
                continue  # alone the cheaper costs less than with the other, or both cost more than the best
            pair = self._fewest(fixed, cheaper, dearer, blocks)
            if pair is not None:
                self._consider(pair)
            for third in (mode for mode in modes if mode not in (cheaper, dearer)):
                one: Counts = {**fixed, third: 1}
                if pair is None:
                    mixed = self._fewest(one, cheaper, dearer, blocks - 1)
                elif costs.of_block[third] < costs.of_block[dearer]:  # in place of a block of the dearer
                    counts = {**one, cheaper: pair[cheaper], dearer: pair[dearer] - 1}
                    mixed = counts if pair[dearer] and self._fits(counts) else None
                else:
                    mixed = self._fewest(one, cheaper, dearer, pair[dearer] - 1)
                if mixed is not None:
                    self._consider(mixed)

    def _cheapest_with(self, on_host: int) -> float:
        """Return a lower bound on the seconds with ``on_host`` blocks on the host."""
        costs = self._costs.with_host
        return on_host * costs.of_block[_ON_HOST] + (self._blocks - on_host) * costs.of_block[costs.on_device[0]]

    def _at_least(self, on_host: int, cheaper: RecomputeMode, dearer: RecomputeMode) -> float:
        """Lower bound on the seconds of a pair with one block of the dearer, and perhaps one of the cheapest mode."""
        costs, others = self._costs, self._blocks - on_host - 2
        pair = costs.of_block[dearer] + costs.of_block[costs.on_device[0]] + others * costs.of_block[cheaper]
        return pair + (on_host * costs.of_block[_ON_HOST] if on_host else 0.0)

    def _fewest(self, fixed: Counts, cheaper: RecomputeMode, dearer: RecomputeMode, most: int) -> Counts | None:
        """Return the mix of two modes, besides fixed blocks, with the fewest of the dearer that fits, or ``most``."""
        rest = self._blocks - sum(fixed.values())
        if most < 0 or not self._fits({**fixed, dearer: most, cheaper: rest - most}):
            return None

        def fits(count: int) -> bool:
            return self._fits({**fixed, dearer: count, cheaper: rest - count})

        enough = bisect_left(range(most), True, key=fits)
        return {**fixed, dearer: enough, cheaper: rest - enough}

    def _consider(self, counts: Counts) -> None:
        """Make this mix the best if it costs less."""
        stages = [StageModes(**dict(runs)) for runs in self._runs(counts)]
        if (cost := self._costs.of(stages, self._rank.ends)) < self._least:
            self._best, self._least, self._counts = stages, cost, counts

    def _fits(self, counts: Counts) -> bool:
        return self._rank.keeping(self._runs(counts)).memory().total <= self._limit

    def _runs(self, counts: Counts) -> list[ModeRuns]:
        """Distribute modes over the rank's stages: those that keep least go to the first."""
        rest, stages = dict(counts), []
        for size in self._rank.sizes:
            runs: list[tuple[RecomputeMode, int]] = []
            for mode in reversed(MODES):
                if count := min(rest.get(mode, 0), size):
                    runs.append((mode, count))
                    rest[mode] -= count
                    size -= count
            stages.append(tuple(runs))
        return stages


_SIMULATED = 3  # moves of a block in each round


class CutPlan(NamedTuple):
    """A cut into stages that fits.

    Attributes:
        step: The step of the job with this cut and the modes of its blocks.
        seconds: Simulated time of the step.
    """

    step: Step
    seconds: float


# What a rank's blocks keep, ``None`` if nothing fits; and its least seconds, or else the bytes that it lacks.
_RankPlan = tuple[LeastCostly | None, float]


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
        self._job, self._machine = job.with_parallelism(recompute=modes[0]), machine
        self._size, self._limit, self._modes = layout.pp, limit, modes
        self._step = Step(self._job, layout, machine, order, modes)
        self._costs = BlockCosts(self._step, modes)
        self._ranks: dict[tuple[int, Sequence[Stage] | Sequence[int]], _RankPlan] = {}

    def best(self) -> CutPlan | None:
        """Return the best cut found by moving blocks; ``None`` if none fits."""
        sizes = self.start
        best, lacks = self.plan(sizes), self._lacks(sizes)
        while best is None:
            sizes = min(self._moves(sizes), key=lambda each: (self._lacks(each), each), default=sizes)
            if self._lacks(sizes) >= lacks:
                return None
            best, lacks = self.plan(sizes), self._lacks(sizes)
        while True:
            # By the formula, assuming that the moved block is the costliest of both stages.
            estimates = set[tuple[float, Sequence[int]]]()
            for moved in self._moves(sizes):
                counts = [dict(best.step.job.parallelism.modes(stage, size)) for stage, size in enumerate(sizes)]
                source = next(stage for stage, size in enumerate(sizes) if moved[stage] < size)
                target = next(stage for stage, size in enumerate(sizes) if moved[stage] > size)
                costliest = [max(counts[stage], key=self._costs.of_block.__getitem__) for stage in (source, target)]
                counts[source][costliest[0]] -= 1
                counts[target][costliest[1]] += 1
                modes = in_one([StageModes(**count) for count in counts])
                job = self._job.with_parallelism(pipeline_layers_per_stage=moved, recompute=modes)
                estimates.add((self._step.keeping(job).parts().total, moved))
            likely = nsmallest(_SIMULATED, estimates)
            simulated = [(plan.seconds, each, plan) for _, each in likely if (plan := self.plan(each))]
            shortest = min(simulated, key=lambda each: each[:2], default=None)
            if shortest is None or shortest[0] >= best.seconds:
                return best
            _, sizes, best = shortest

    @cached_property
    def start(self) -> Sequence[int]:
        """What ``best`` begins with: the default cut, or the one with its larger stages last, whichever is faster.

        The first ranks finish the step last and only then reduce their gradients. The last stage, which has the head,
        stays as it is.
        """
        job = self._job
        default = layers_per_stage(job.model, job.parallelism, job.training.sequence_length)
        late = *sorted(default[:-1]), default[-1]
        return min((default, late), key=lambda sizes: plan.seconds if (plan := self.plan(sizes)) else inf)

    def _moves(self, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Cuts with one block moved from a stage of the limiting ranks to any other stage."""
        plans = self._rank_plans(sizes)
        unfit = [rank for rank, (mixes, _) in enumerate(plans) if mixes is None]
        for rank in unfit or nlargest(2, range(self._size), key=lambda rank: plans[rank][1]):
            for source in range(rank, len(sizes), self._size):
                for target in range(len(sizes)):
                    if sizes[source] > 1 and target != source:
                        yield tuple(size + (stage == target) - (stage == source) for stage, size in enumerate(sizes))

    def _lacks(self, sizes: Sequence[int]) -> float:
        """Bytes lacking on the ranks that do not fit."""
        return sum(cost for mixes, cost in self._rank_plans(sizes) if mixes is None)

    def plan(self, sizes: Sequence[int]) -> CutPlan | None:
        """Return a cut into stages of these sizes; ``None`` if it does not fit."""
        mixes = [each for each, _ in self._rank_plans(sizes) if each is not None]
        if len(mixes) < self._size:
            return None
        plans = []
        for modes in in_each_way(mixes, len(sizes)):
            job = self._job.with_parallelism(pipeline_layers_per_stage=tuple(sizes), recompute=in_one(modes))
            step = self._step.keeping(job)
            plans.append(CutPlan(step, step.played()))
        return min(plans, key=lambda plan: plan.seconds)

    def _rank_plans(self, sizes: Sequence[int]) -> list[_RankPlan]:
        all_stages, plans = stages_of(tuple(sizes)), []
        for number in range(self._size):
            stages = all_stages[number :: self._size]
            key = number, stages if self._job.model.lax else tuple(len(stage.layers) for stage in stages)
            if key not in self._ranks:
                rank = PipelineRank(self._job, number, stages)
                modes = self._modes if rank.memory().total > self._limit else self._modes[:1]
                by_mode = [rank.keeping([((mode, size),) for size in rank.sizes]).memory() for mode in modes]
                room = room_of_a_rank(by_mode[0].copies, self._machine)
                may_fit = min(memory.total for memory in by_mode) <= self._limit * (1 + MIXED_LESS)
                mixes = RankMix(rank, self._costs, self._limit, room).least_costly() if may_fit else None
                if mixes is not None and mixes.least is not None:
                    head = self._step.of_the_head(self._step.usual) if rank.ends else 0.0
                    self._ranks[key] = mixes, self._costs.of(mixes.least, rank.ends) + head
                else:
                    in_room = [memory.total for memory in by_mode if memory.host <= max(room, by_mode[0].host)]
                    self._ranks[key] = None, min(in_room) - self._limit
            plans.append(self._ranks[key])
        return plans
