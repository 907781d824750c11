"""What a run takes, beside what was planned for it: bytes of each rank, and seconds of a step."""

import statistics
from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch

from boost_core.config import Layout
from boost_core.messages.reports import ComparisonReport
from boost_core.plan.machine import machine_for
from boost_core.plan.memory import pipeline_rank_memory
from boost_core.plan.throughput import step_seconds
from boost_core.train.peak_memory import PeakMemory
from boost_core.train.state import TrainState

WATCHED_STEPS = 2  # of a run; later ones are timed
_FIRST_TIMED = 5  # steps, after which their median is told first
_TOLD_EVERY = 100  # steps, and the most that the median is of


class Comparison:
    """Compares a run with its plan. All ranks have one.

    Args:
        state: What is trained.
        peak: The memory that this rank has taken since it began to make the state.
    """

    def __init__(self, state: TrainState, peak: PeakMemory) -> None:
        self._state, self._peak = state, peak
        self._steps = 0
        self._seconds: deque[float] = deque(maxlen=_TOLD_EVERY)
        self._planned_bytes: list[int] = []
        self._peak_bytes: list[int] = []

    def watched(self) -> AbstractContextManager[object]:
        """Around a step."""
        return self._peak.watched() if self._steps < WATCHED_STEPS else nullcontext()

    def after_step(self, seconds: float) -> ComparisonReport | None:
        """Take a step; all ranks call it after the same one.

        Args:
            seconds: How long it took.

        Returns:
            What there is to tell, if it is time.
        """
        state = self._state
        self._steps += 1
        if self._steps == WATCHED_STEPS:
            self._gather_bytes()
            return self._report()
        if self._steps < WATCHED_STEPS or state.spec.training.batch_size(state.step) < self._planned_batch:
            return None
        self._seconds.append(seconds)
        timed = self._steps - WATCHED_STEPS
        return self._report() if timed == _FIRST_TIMED or timed % _TOLD_EVERY == 0 else None

    @property
    def _planned_batch(self) -> int:
        return self._state.spec.training.global_batch_size

    def _gather_bytes(self) -> None:
        state, layout = self._state, Layout.of(self._state.spec.parallelism)
        groups = state.process_groups
        planned = pipeline_rank_memory(state.spec, layout, groups.pipeline.rank).total
        table = torch.zeros(2, groups.gang.size, dtype=torch.float64, device=state.mesh.device)
        table[:, groups.gang.rank] = torch.tensor([planned, self._peak.bytes()], dtype=torch.float64)
        rows = groups.gang.all_reduce_(table, "memory").tolist()
        self._planned_bytes, self._peak_bytes = (list(map(int, row)) for row in rows)

    def _report(self) -> ComparisonReport:
        spec, layout = self._state.spec, Layout.of(self._state.spec.parallelism)
        machine = machine_for(spec.resources, spec.training.precision)
        predicted = step_seconds(spec, layout, machine)
        return ComparisonReport(
            **layout.sizes,
            step=self._state.step,
            planned_bytes=self._planned_bytes,
            peak_bytes=self._peak_bytes,
            predicted_step_seconds=predicted,
            predicted_step_seconds_range=machine.profile.range_of(predicted),
            step_seconds=statistics.median(self._seconds) if self._seconds else None,
        )
