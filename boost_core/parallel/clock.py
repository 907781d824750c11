"""The clock of a step: how its seconds divide among its parts.

A rank says which part begins, and the clock notes when. What the ledger says was waited for collectives in a part is
taken out of it and stands on its own, so that all parts add up to the step.

On CPU the notes are wall times. On CUDA the host runs ahead of the device, so that between the batch's arrival and the
step's own synchronisation they are events, of a captured step those that it was captured with. These are read when that
synchronisation has passed, and set on the host's clock by it: measuring never makes the host wait. After it the device
is at the update while the host goes on, and what of that is not done when the next step has its batch is that step's.

In a pipeline forward and backward take turns. Time in the stages counts as theirs. What is between them, the schedule
and waiting for what other stages send, counts as other. A stage's collectives are exposed communication as always.
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
        backward: Computing gradients, and what is computed again for them.
        optimizer: From the last gradient to the new weights: reductions, norm, update.
        exposed_communication: Waiting for collectives, wherever that was.
        other: All else.
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
    """Notes when the parts of a rank's steps begin.

    Args:
        ledger: Told which part it is, and asked what was waited for in it.
        device: Where this rank computes.
    """

    def __init__(self, ledger: CommunicationLedger, device: torch.device) -> None:
        self._ledger, self._on_cuda = ledger, device.type == "cuda"
        self._marks: list[tuple[Part, float]] = []  # when each part began, on the host's clock
        self._events: list[tuple[Part, torch.cuda.Event]] = []  # the same of those after them, until they can be read
        self._host_is_ahead = False  # of the device, so that notes are events
        self._updated: torch.cuda.Event | None = None  # by the step before

    def begin(self) -> None:
        """A step begins, with waiting for its batch."""
        self._marks, self._events, self._host_is_ahead = [], [], False
        self.enter(Part.DATA)

    def has_batch(self) -> None:
        """The batch is there."""
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
        """A part that has others around it."""
        self.enter(part)
        yield
        self.enter(Part.OTHER)

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[Part, torch.cuda.Event]]]:
        """Parts that begin within do so at each ``replay`` of what this gives, and not now."""
        before, self._events = self._events, []
        try:
            yield self._events
        finally:
            self._events = before

    def replay(self, recorded: list[tuple[Part, torch.cuda.Event]]) -> None:
        """The device does again what was recorded; it is in the last of its parts now."""
        self._events += recorded
        if recorded:
            self._ledger.part = recorded[-1][0]

    def values(self, tensor: torch.Tensor) -> list[float]:
        """The values of a tensor, which the host waits for: the step's own synchronisation."""
        reached = timed_event() if self._host_is_ahead else None
        values: list[float] = tensor.tolist()
        if reached is not None:
            now = time.perf_counter()
            self._marks += [(part, now - event.elapsed_time(reached) / 1000) for part, event in self._events]
            self._events, self._host_is_ahead = [], False
        return values

    def end(self) -> StepParts:
        """The step is over; its parts. Waits for the collectives that are under way, as the ledger's totals do."""
        self._ledger.totals()
        exposed, seconds = self._ledger.exposed_seconds, defaultdict[Part, float](float)
        began = latest = self._marks[0][1]
        for (part, _), (_, ended) in pairwise([*self._marks, (Part.OTHER, time.perf_counter())]):
            # The update of the step before may have been done long before this step had its batch.
            seconds[part] += max(0.0, ended - latest)
            latest = max(latest, ended)
        if self._on_cuda:
            self._updated = timed_event()
        computed = {part: max(0.0, seconds[part] - exposed[part]) for part in Part if part is not Part.OTHER}
        waited = sum(exposed.values())
        other = max(0.0, latest - began - waited - sum(computed.values()))
        return StepParts(**computed, exposed_communication=waited, other=other)
