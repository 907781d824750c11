"""The clock of a step: how its time is divided among its parts.

A rank tells the clock which part begins, and the clock records when. The time that a part waited for collectives,
according to the ledger, is subtracted from it and counted separately, so that all parts add up to the step.

On CPU the records are wall times. On CUDA the host runs ahead of the device, so between the batch's arrival and the
step's own synchronisation they are events; for a captured step, those captured with it. They are read after that
synchronisation, which also places them on the host's clock: measuring never makes the host wait. Afterwards the device
still performs the update while the host goes on; what is unfinished when the next step has its batch counts for that
step.

In a pipeline, forward and backward alternate. Time in the stages counts as theirs. The time between them, which is the
schedule and waiting for other stages, counts as other. A stage's collectives are exposed communication as always.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from boost_core.parallel.ledger import CommunicationLedger, Part, timed_event


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step by part.

    Attributes:
        data: Waiting for the batch.
        forward: Computing losses.
        backward: Computing gradients, recomputation included.
        optimizer: From the last gradient to the new weights: reductions, norm, update.
        exposed_communication: Waiting for collectives, in whichever part.
        other: Everything else.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    exposed_communication: float = 0.0
    other: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        seconds: float = sum(vars(self).values())
        return seconds


class StepClock:
    """Records when the parts of a rank's steps begin.

    Args:
        ledger: Told the current part, and asked how long it waited for collectives.
        device: Where this rank computes.
    """

    def __init__(self, ledger: CommunicationLedger, device: torch.device) -> None:
        self._ledger, self._on_cuda = ledger, device.type == "cuda"
        self._marks: list[tuple[Part, float]] = []  # when each part began, on the host's clock
        self._events: list[tuple[Part, torch.cuda.Event]] = []  # likewise for later parts, until they can be read
        self._host_is_ahead = False  # of the device, so that records are events
        self._updated: torch.cuda.Event | None = None  # by the step before

    def begin(self) -> None:
        """A step begins by waiting for its batch."""
        self._marks, self._events, self._host_is_ahead = [], [], False
        self.enter(Part.DATA)

    def has_batch(self) -> None:
        """The batch has arrived."""
        self.enter(Part.OTHER if self._updated is None else Part.OPTIMIZER)
        self._host_is_ahead = self._on_cuda
        if self._updated is not None:
            self._events.append((Part.OTHER, self._updated))
        self._ledger.part = Part.OTHER

    def enter(self, part: Part) -> None:
        """Another part begins."""
        self._ledger.part = part
        if self._host_is_ahead:
            self._events.append((part, timed_event()))
        else:
            self._marks.append((part, time.perf_counter()))

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """A part between two stretches of ``OTHER``."""
        self.enter(part)
        yield
        self.enter(Part.OTHER)

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[Part, torch.cuda.Event]]]:
        """Parts that begin inside are recorded at each ``replay`` of the yielded events, not now."""
        before, self._events = self._events, []
        try:
            yield self._events
        finally:
            self._events = before

    def replay(self, recorded: list[tuple[Part, torch.cuda.Event]]) -> None:
        """The device repeats what was recorded; the current part is now its last."""
        self._events += recorded
        if recorded:
            self._ledger.part = recorded[-1][0]

    def values(self, tensor: torch.Tensor) -> list[float]:
        """Read a tensor's values, for which the host waits: the step's own synchronisation."""
        reached = timed_event() if self._host_is_ahead else None
        values: list[float] = tensor.tolist()
        if reached is not None:
            now = time.perf_counter()
            self._marks += [(part, now - event.elapsed_time(reached) / 1000) for part, event in self._events]
            self._events, self._host_is_ahead = [], False
        return values

    def end(self) -> StepParts:
        """End the step and return its parts. Waits for the collectives under way, as the ledger's totals do."""
        self._ledger.totals()
        exposed, seconds = self._ledger.exposed_seconds, defaultdict[Part, float](float)
        began = latest = self._marks[0][1]
        for (part, _), (_, ended) in pairwise([*self._marks, (Part.OTHER, time.perf_counter())]):
            # The previous step's update may have ended long before this step had its batch.
            seconds[part] += max(0.0, ended - latest)
            latest = max(latest, ended)
        if self._on_cuda:
            self._updated = timed_event()
        computed = {part: max(0.0, seconds[part] - exposed[part]) for part in Part if part is not Part.OTHER}
        waited = sum(exposed.values())
        other = max(0.0, latest - began - waited - sum(computed.values()))
        return StepParts(**computed, exposed_communication=waited, other=other)
