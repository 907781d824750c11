"""Choosing what blocks keep where memory decides (``recompute: auto``): the least costly mix of modes that fits.

Each pipeline rank has its own mix, as the first ranks have the most micro-batches in flight. A mix combines two modes
and at most one block of a third; the least costly one that fits is found by bisection, as a rank holds less the more of
its blocks use the leaner mode. Blocks that recompute most come first, also across a rank's two stages, of which the
first has more in flight. ``tests/unit/test_mixes.py`` compares the mixes with an exhaustive search.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.parallelism import MODES, TRAITS, ModeRuns, RecomputeMode, StageModes
from boost_core.config.strategy import strategy_problems
from boost_core.plan.machine import Machine, machine_for
from boost_core.plan.memory import PipelineRank, RankMemory, pipeline_ranks, rank_memory
from boost_core.plan.throughput import ORDER, Step

MIXED_LESS = 0.03  # most that a mix can save over every single mode, whose backward pass may take more

# Whether copies to the host are hidden has not been measured, so they are left for people to choose.
_MODES: tuple[RecomputeMode, ...] = tuple(mode for mode in MODES if not TRAITS[mode].on_host)

Counts = Mapping[RecomputeMode, int]


def legal_modes(job: JobSpec) -> list[RecomputeMode]:
    """Return the modes that blocks may have, those that keep more first; ``shared`` only with several ranks."""
    alone = job.parallelism.tensor_parallel_size == 1
    return [
        mode
        for mode in _MODES
        if not (alone and mode == "shared")
        and not strategy_problems(job.model, job.with_parallelism(recompute=mode).parallelism)
    ]


def least_costly(job: JobSpec, layout: Layout, limit: float, machine: Machine | None = None) -> JobSpec:
    """Return the job with the least costly mix that keeps every rank within a limit; as ``leanest`` if none does.

    Args:
        job: The job at its layout; what it recomputes does not matter.
        layout: The layout.
        limit: Bytes per rank.
        machine: What it runs on; by default what ``machine_for`` returns.
    """
    modes = legal_modes(job)
    lean, memory = leanest(job, layout)
    if memory.total > limit * (1 + MIXED_LESS):
        return lean
    whole = job.with_parallelism(recompute=modes[0])
    machine = machine or machine_for(job.resources, job.training.precision)
    costs = BlockCosts(Step(whole, layout, machine, ORDER, modes), modes)
    ranks = pipeline_ranks(whole, layout, range(layout.pp))
    mixes = [RankMix(rank, costs, limit).least_costly() for rank in ranks]
    stages: list[StageModes] = []
    for index in range(job.parallelism.stages):
        mix = mixes[index % layout.pp]
        if mix is None:
            return lean
        stages.append(mix[index // layout.pp])
    return job.with_parallelism(recompute=in_one(stages))


def in_one(stages: Sequence[StageModes]) -> RecomputeMode | tuple[StageModes, ...]:
    """Return the mode of all blocks if they share one, or else those of each stage."""
    used = {mode for stage in stages for mode, _ in stage.runs}
    return used.pop() if len(used) == 1 else tuple(stages)


def leanest(job: JobSpec, layout: Layout) -> tuple[JobSpec, RankMemory]:
    """Return the job with all blocks in the mode that minimizes the fullest rank's memory, and that memory."""
    jobs = [job.with_parallelism(recompute=mode) for mode in legal_modes(job)]
    return min(((each, rank_memory(each, layout)) for each in jobs), key=lambda found: found[1].total)


class BlockCosts:
    """Seconds that a micro-batch takes in a block of each mode.

    Args:
        step: The job's step, with these modes.
        modes: The legal modes, those that keep more first.
    """

    def __init__(self, step: Step, modes: Sequence[RecomputeMode]) -> None:
        self._of_block = {mode: step.of_a_block(mode) for mode in modes}
        self.modes = sorted(modes, key=lambda mode: (self._of_block[mode], modes.index(mode)))
        self._first_gather = step.first_gather("shared") if "shared" in modes else 0.0

    def of_block(self, mode: RecomputeMode) -> float:
        """Return the seconds of one block."""
        return self._of_block[mode]

    def of(self, stages: Sequence[StageModes]) -> float:
        """Return the seconds of a rank's stages."""
        blocks = sum(count * self._of_block[mode] for stage in stages for mode, count in stage.runs)
        return blocks + self._first_gather * sum(stage.shared > 0 for stage in stages)


class RankMix:
    """The mixes of one rank that stay within a limit."""

    def __init__(self, rank: PipelineRank, costs: BlockCosts, limit: float) -> None:
        self._rank, self._costs, self._limit = rank, costs, limit
        self._blocks = sum(rank.sizes)

    def least_costly(self) -> list[StageModes] | None:
        """Return the least costly mix that fits; ``None`` if none does."""
        found = [self._stages(counts) for counts in self._candidates()]
        return min(found, key=self._costs.of, default=None)

    def _candidates(self) -> Iterator[Counts]:
        """For each pair of modes, and perhaps one block of a third: the mix with the fewest blocks of the costlier."""
        modes = self._costs.modes
        fitting = [mode for mode in modes if self._fits({mode: self._blocks})]
        if modes[0] in fitting:
            yield {modes[0]: self._blocks}
            return
        for cheaper, dearer in combinations(modes, 2):
            if cheaper in fitting:
                continue  # alone it costs less than with the other
            pair = self._fewest(cheaper, dearer, None, self._blocks)
            if pair is not None:
                yield pair
            for third in modes:
                if third in (cheaper, dearer):
                    continue
                if pair is None:
                    mixed = self._fewest(cheaper, dearer, third, self._blocks - 1)
                elif self._costs.of_block(third) < self._costs.of_block(dearer):  # in place of a block of the dearer
                    counts = {cheaper: pair[cheaper], dearer: pair[dearer] - 1, third: 1}
                    mixed = counts if pair[dearer] and self._fits(counts) else None
                else:
                    mixed = self._fewest(cheaper, dearer, third, pair[dearer] - 1)
                if mixed is not None:
                    yield mixed

    def _fewest(
        self, cheaper: RecomputeMode, dearer: RecomputeMode, third: RecomputeMode | None, most: int
    ) -> Counts | None:
        """Return the mix with the fewest blocks of the dearer mode that fits, at most ``most``."""
        rest = self._blocks - (third is not None)
        more: Counts = {} if third is None else {third: 1}

        def mix(count: int) -> Counts:
            return {**more, dearer: count, cheaper: rest - count}

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
        return self._rank.keeping(self._runs(counts)).memory().total <= self._limit

    def _stages(self, counts: Counts) -> list[StageModes]:
        return [StageModes(**dict(runs)) for runs in self._runs(counts)]

    def _runs(self, counts: Counts) -> list[ModeRuns]:
        """Distribute modes over the rank's stages: those that keep least go to the first."""
        left, stages = dict(counts), []
        for size in self._rank.sizes:
            runs: list[tuple[RecomputeMode, int]] = []
            for mode in reversed(_MODES):
                if taken := min(left.get(mode, 0), size):
                    runs.append((mode, taken))
                    left[mode] -= taken
                    size -= taken
            stages.append(tuple(runs))
        return stages
