"""The ledger: what each of a rank's collectives sent, how long it took, and how long it was waited for."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol

import torch


class Part(StrEnum):
    """The parts of a step in which collectives may be waited for."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


@dataclass(frozen=True)
class Entry:
    """What distinguishes one line of the ledger.

    Attributes:
        kind: ``all_reduce``, ``symmetric_all_reduce`` (one through symmetric memory), ``all_gather``,
            ``reduce_scatter``, ``all_to_all`` or ``send``.
        group: The mesh dimension it runs over, ``tp``, ``pp``, ``cp`` or ``dp``; ``all`` for the whole gang.
        purpose: What it is for, for example ``latent`` or ``latent gradient``.
    """

    kind: str
    group: str
    purpose: str


@dataclass
class Totals:
    """Sums of one line: elements and bytes are those of the tensor passed in on this rank.

    ``seconds`` runs from the start of a collective to its end, or to the wait if it had ended by then.
    ``exposed_seconds`` is the part spent waiting, which no computation has hidden.
    """

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        """The sum of both."""
        return Totals(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class Launched(Protocol):
    """What launching a collective returns: torch's ``Work``, or the like."""

    def wait(self) -> object:
        """Wait for it; on CUDA, have the current stream do so."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when its result may be used: on CUDA, by work queued afterwards on the current stream."""


class CommunicationLedger:
    """Counts and times the collectives of one rank.

    On CPU, times are wall times. On CUDA they are times between events on the computing stream, read only when
    :meth:`totals` is called, so that counting never waits for the GPU.

    Attributes:
        part: The part of the step that is running; set from outside.
        exposed_seconds: Seconds waited in each part, as far as they have been read.
    """

    def __init__(self) -> None:
        self.part = Part.OTHER
        self.exposed_seconds: defaultdict[Part, float] = defaultdict(float)
        self._totals: dict[Entry, Totals] = {}
        self._unread: list[_Times] = []

    def start(self, entry: Entry, payload: torch.Tensor, launch: Callable[[], Launched]) -> Pending:
        """Launch a collective and count ``payload`` on the line ``entry``."""
        totals = self.count(entry, payload)
        if not payload.is_cuda:
            return _OnCpu(launch, totals, self)
        return _OnCuda(launch, payload, entry, self)

    def count(self, entry: Entry, payload: torch.Tensor) -> Totals:
        """Count ``payload`` without its time, and return the line."""
        totals = self._totals.setdefault(entry, Totals())
        totals.calls += 1
        totals.elements += payload.numel()
        totals.bytes += payload.numel() * payload.element_size()
        return totals

    def totals(self) -> dict[Entry, Totals]:
        """All lines since the last :meth:`clear`; waits for the GPU events that are still open."""
        for times in self._unread:
            seconds, exposed_seconds = times.read()
            totals = self._totals.setdefault(times.entry, Totals())
            totals.seconds += seconds
            self.waited(totals, times.part, exposed_seconds)
        self._unread.clear()
        return dict(self._totals)

    def sum(self) -> Totals:
        """One line for all collectives."""
        return sum(self.totals().values(), start=Totals())

    def by_group(self) -> dict[tuple[str, str], Totals]:
        """One line for each kind and group, over all purposes."""
        lines: dict[tuple[str, str], Totals] = {}
        for entry, totals in self.totals().items():
            of = entry.kind, entry.group
            lines[of] = lines.get(of, Totals()) + totals
        return lines

    def waited(self, totals: Totals, part: Part, seconds: float) -> None:
        """Count ``seconds`` of waiting for a collective of the line ``totals`` in a part of the step."""
        totals.exposed_seconds += seconds
        self.exposed_seconds[part] += seconds

    def waited_on_cuda(self, times: "_Times") -> None:
        """Count a collective that was waited for; its times are read with the totals."""
        self._unread.append(times)

    @contextmanager
    def recorded(self) -> Iterator["Recording"]:
        """Collectives started and waited for inside count at each ``replay`` of the yielded recording, not now."""
        before, recording = (self._totals, self._unread), Recording({}, [])
        self._totals, self._unread = recording.totals, recording.times
        try:
            yield recording
        finally:
            self._totals, self._unread = before

    def replay(self, recording: "Recording") -> None:
        """Count a recording that the device repeats."""
        for entry, totals in recording.totals.items():
            self._totals[entry] = self._totals.get(entry, Totals()) + totals
        self._unread += recording.times

    def clear(self) -> None:
        """Start from zero."""
        self._totals.clear()
        self._unread.clear()
        self.exposed_seconds.clear()


@dataclass(frozen=True)
class Recording:
    """Collectives of captured work: their lines, and the events that each replay records again."""

    totals: dict[Entry, Totals]
    times: list["_Times"]


class _OnCpu:
    def __init__(self, launch: Callable[[], Launched], totals: Totals, ledger: CommunicationLedger) -> None:
        self._totals, self._ledger, self._started = totals, ledger, time.perf_counter()
        self._work = launch()

    def wait(self) -> None:
        # gloo's threads could tell when it ended, but would take the interpreter from the step each time. Asking if it
        # has can hang under torch's profiler: that holds the interpreter while it waits for a lock of gloo's thread,
        # which waits for the interpreter with the lock.
        begun = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        self._ledger.waited(self._totals, self._ledger.part, now - begun)
        self._totals.seconds += now - self._started


@dataclass(frozen=True)
class _Times:
    """When the computing stream reached a collective's start, the wait for it, and its result."""

    entry: Entry
    part: Part
    started: torch.cuda.Event
    begun: torch.cuda.Event
    resumed: torch.cuda.Event

    def read(self) -> tuple[float, float]:
        """Seconds of the collective, and seconds spent waiting for it."""
        self.resumed.synchronize()
        return self.started.elapsed_time(self.resumed) / 1000, self.begun.elapsed_time(self.resumed) / 1000


class _OnCuda:
    def __init__(
        self, launch: Callable[[], Launched], payload: torch.Tensor, entry: Entry, ledger: CommunicationLedger
    ) -> None:
        self._entry, self._ledger, self._started = entry, ledger, timed_event()
        # NCCL reads the payload until the work is waited for, and its work object holds the output. Only the first wait
        # is the caller's own: after a wait on any other stream, torch would free the payload's memory too early.
        self._held: tuple[Launched, torch.Tensor] | None = (launch(), payload)

    def wait(self) -> None:
        if self._held is None:
            raise AssertionError("waited for already")
        begun = timed_event()
        self._held[0].wait()
        self._held = None
        self._ledger.waited_on_cuda(_Times(self._entry, self._ledger.part, self._started, begun, timed_event()))


def timed_event() -> torch.cuda.Event:
    """A timed event on the current stream; in captured work, each replay records it again."""
    event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
