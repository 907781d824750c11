"""A run's actual cost compared with the plan: bytes of each rank, seconds of a step and of its exposed collectives."""

import statistics
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from boost_core.config import Layout
from boost_core.messages.reports import ComparisonReport
from boost_core.plan.devices import at
from boost_core.plan.measured import NOMINAL, Basis
from boost_core.plan.memory import pipeline_rank_memory
from boost_core.plan.throughput import predicted_communication, step_parts, step_seconds
from boost_core.train.peak_memory import PeakMemory
from boost_core.train.state import TrainState

WATCHED_STEPS = 2  # at the start of a run; later ones are timed
_FIRST_TIMED = 8  # steps before their median is first reported; then after twice as many, and so on
_MOST_TIMED = 100  # newest steps used for the median


class Comparison:
    """Compares a run with its plan. All ranks have one.

    Args:
        state: The training state.
        peak: The memory that this rank has used since it began to make the state.
        basis: What predicts its step times.
    """

    def __init__(self, state: TrainState, peak: PeakMemory, basis: Basis = NOMINAL) -> None:
        self._state, self._peak, self._basis = state, peak, basis
        self._steps = self._timed = 0
        self._told_next = _FIRST_TIMED
        self._seconds: deque[float] = deque(maxlen=_MOST_TIMED)
        self._communication: deque[float] = deque(maxlen=_MOST_TIMED)
        self._planned_bytes: list[int] = []
        self._peak_bytes: list[int] = []

    def watched(self) -> AbstractContextManager[object]:
        """Context manager around a step."""
        return self._peak.watched() if self._steps < WATCHED_STEPS else nullcontext()

    def after_step(self, seconds: float, communication: float, refuse: Callable[[], None]) -> ComparisonReport | None:
        """Take note of a step; all ranks call it after the same one.

        Args:
            seconds: The step's duration.
            communication: Seconds of it that this rank waited for collectives.
            refuse: Called before values exchanged between ranks are used; raises if they must not be.

        Returns:
            The report, if one is due.
        """
        state = self._state
        self._steps += 1
        if self._steps == WATCHED_STEPS:
            self._gather_bytes(refuse)
            return self._report()
        if self._steps < WATCHED_STEPS or state.spec.training.batch_size(state.step) < self._planned_batch:
            return None
        self._seconds.append(seconds)
        self._communication.append(communication)
        self._timed += 1
        return self._report() if self._timed == self._told_next else None

    @property
    def _planned_batch(self) -> int:
        return self._state.spec.training.global_batch_size

    def _gather_bytes(self, refuse: Callable[[], None]) -> None:
        state, layout = self._state, Layout.of(self._state.spec.parallelism)
        groups, training = state.process_groups, state.spec.training
        # No step has been captured yet, so the plan leaves out a graph's memory as well.
        spec = state.spec.model_copy(update={"training": training.model_copy(update={"cuda_graphs": "off"})})
        needed = pipeline_rank_memory(spec, layout, groups.pipeline.rank)
        # Without a GPU there is only one memory.
        planned = needed.total + (needed.host if state.mesh.device.type == "cpu" else 0)
        table = torch.zeros(2, groups.gang.size, dtype=torch.float64, device=state.mesh.device)
        table[:, groups.gang.rank] = torch.tensor([planned, self._peak.bytes()], dtype=torch.float64)
        rows = groups.gang.all_reduce_(table, "memory").tolist()
        refuse()
        self._planned_bytes, self._peak_bytes = (list(map(int, row)) for row in rows)

    def _report(self) -> ComparisonReport:
        self._told_next = max(_FIRST_TIMED, 2 * self._timed)
        spec, layout = self._state.spec, Layout.of(self._state.spec.parallelism)
        machine = self._basis.machine(spec)
        job = at(spec, layout, machine)
        predicted, communication = step_parts(job, layout, machine), predicted_communication(job, layout, machine)
        factor = machine.correction(job).factors.communication
        return ComparisonReport(
            **layout.sizes,
            step=self._state.step,
            planned_bytes=self._planned_bytes,
            peak_bytes=self._peak_bytes,
            predicted_step_seconds=predicted.total,
            predicted_step_seconds_range=machine.range_of(job, predicted.total, predicted.communication),
            provenance=machine.provenance,
            correction=predicted.total / step_seconds(job, layout, replace(machine, fitted=None)),
            predicted_exposed_communication_seconds=factor * communication.seconds,
            communication_correction=factor,
            communication_share=communication.share,
            step_seconds=statistics.median(self._seconds) if self._seconds else None,
            exposed_communication_seconds=statistics.median(self._communication) if self._communication else None,
        )
