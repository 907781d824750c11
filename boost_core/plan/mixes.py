"""What the blocks of a layout keep where a job leaves that to its memory: the least costly mix that fits.

Each pipeline rank has a mix of its own, as the first have the most micro-batches in hand. A rank's mix is of any two
modes, with one block of a third: among these the least costly that fits is found by bisection, as a rank holds the less
the more of its blocks have the mode that keeps less. Blocks that compute most again come first, also of a rank's two
stages, of which the first has more in hand. ``tests/unit/test_mixes.py`` holds the mixes to all that there are.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import get_args

from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.parallelism import ParallelismConfig, RecomputeMode, StageModes
from boost_core.config.strategy import strategy_problems
from boost_core.plan.machine import Machine, machine_for
from boost_core.plan.memory import PipelineRank, pipeline_ranks
from boost_core.plan.throughput import Step

_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)

Counts = Mapping[RecomputeMode, int]


def legal_modes(job: JobSpec) -> list[RecomputeMode]:
    """The modes that blocks may have, those first that keep more; ``shared`` where there is somebody to share with."""
    alone = job.parallelism.tensor_parallel_size == 1
    return [
        mode
        for mode in _MODES
        if not (alone and mode == "shared") and not strategy_problems(job.model, _with(job, mode).parallelism)
    ]


def least_costly(job: JobSpec, layout: Layout, limit: float, machine: Machine | None = None) -> JobSpec:
    """The job with the least costly mix with which no rank holds more than a limit; with its last mode if none is so.

    Args:
        job: The job at its layout; what it recomputes does not matter.
        layout: The layout.
        limit: Bytes.
        machine: What it runs on; by default what ``machine_for`` says.
    """
    modes = legal_modes(job)
    costs = _Costs(job, layout, modes, machine or machine_for(job.resources, job.training.precision))
    ranks = pipeline_ranks(_with(job, modes[0]), layout, range(layout.pp))
    mixes = [_Mix(rank, costs, limit).least_costly() for rank in ranks]
    stages: list[StageModes] = []
    for index in range(job.parallelism.stages):
        mix = mixes[index % layout.pp]
        if mix is None:
            return _with(job, modes[-1])
        stages.append(mix[index // layout.pp])
    used = {mode for stage in stages for mode, _ in stage.runs}
    return _with(job, used.pop() if len(used) == 1 else tuple(stages))


class _Costs:
    """Seconds that a micro-batch takes in a block of each mode."""

    def __init__(self, job: JobSpec, layout: Layout, modes: Sequence[RecomputeMode], machine: Machine) -> None:
        steps = {mode: Step(_with(job, mode), layout, machine) for mode in modes}
        self.modes = sorted(modes, key=lambda mode: (steps[mode].of_a_block(mode), modes.index(mode)))
        self._of_block = {mode: step.of_a_block(mode) for mode, step in steps.items()}
        self._first_gather = steps["shared"].first_gather() if "shared" in modes else 0.0

    def of(self, stages: Sequence[StageModes]) -> float:
        """Of a rank's stages."""
        blocks = sum(count * self._of_block[mode] for stage in stages for mode, count in stage.runs)
        return blocks + self._first_gather * sum(stage.shared > 0 for stage in stages)


class _Mix:
    """The mixes of one rank."""

    def __init__(self, rank: PipelineRank, costs: _Costs, limit: float) -> None:
        self._rank, self._costs, self._limit = rank, costs, limit
        self._blocks = sum(rank.sizes)

    def least_costly(self) -> list[StageModes] | None:
        """Of those that fit; ``None`` if none does."""
        found = [self._stages(counts) for counts in self._candidates()]
        return min(found, key=self._costs.of, default=None)

    def _candidates(self) -> Iterator[Counts]:
        """Of each two modes and perhaps a block of a third, that which has as few of the costlier one as fit."""
        modes = self._costs.modes
        if self._fits({modes[0]: self._blocks}):
            yield {modes[0]: self._blocks}
            return
        for cheaper, dearer in permutations(modes, 2):
            if modes.index(cheaper) > modes.index(dearer):
                continue
            for third in (None, *(mode for mode in modes if mode not in (cheaper, dearer))):
                if (counts := self._fewest(cheaper, dearer, third)) is not None:
                    yield counts

    def _fewest(self, cheaper: RecomputeMode, dearer: RecomputeMode, third: RecomputeMode | None) -> Counts | None:
        rest = self._blocks - (third is not None)
        more: Counts = {} if third is None else {third: 1}

        def mix(count: int) -> Counts:
            return {**more, dearer: count, cheaper: rest - count}

        if rest < 0 or not self._fits(mix(rest)):
            return None
        too_few, enough = -1, rest
        while enough - too_few > 1:
            count = (too_few + enough) // 2
            if self._fits(mix(count)):
                enough = count
            else:
                too_few = count
        return mix(enough)

    def _fits(self, counts: Counts) -> bool:
        runs = [stage.runs for stage in self._stages(counts)]
        return self._rank.keeping(runs).memory().total <= self._limit

    def _stages(self, counts: Counts) -> list[StageModes]:
        """Modes of each of the rank's stages: in the first as many as fit of those that keep least."""
        left, stages = dict(counts), []
        for size in self._rank.sizes:
            taken: dict[RecomputeMode, int] = {}
            for mode in reversed(_MODES):
                taken[mode] = min(left.get(mode, 0), size - sum(taken.values()))
                left[mode] = left.get(mode, 0) - taken[mode]
            stages.append(StageModes(**taken))
        return stages


def _with(job: JobSpec, recompute: RecomputeMode | tuple[StageModes, ...]) -> JobSpec:
    parallelism: ParallelismConfig = job.parallelism.model_copy(update={"recompute": recompute})
    return job.model_copy(update={"parallelism": parallelism})
