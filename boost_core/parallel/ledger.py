"""The ledger: what every collective of a rank sent, how long it took, and how much of that was waited for."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Entry:
    """What distinguishes one line of the ledger.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all`` or ``send``.
        group: The mesh dimension it runs over, ``tp``, ``pp`` or ``dp``; ``all`` for the whole gang.
        purpose: What it is for, for example ``latent`` or ``latent gradient``.
    """

    kind: str
    group: str
    purpose: str


@dataclass
class Totals:
    """Sums of one line: payload elements and bytes are those of the tensor handed over on this rank.

    ``seconds`` runs from the start of a collective to its end, ``exposed_seconds`` is the part of it that was waited
    for: what no computation has hidden.
    """

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        """Both together."""
        return Totals(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when its result may be used: on CUDA, by what is queued after this on the current stream."""


class CommunicationLedger:
    """Counts and times the collectives of one rank.

    On CPU times are wall times. On CUDA they are times between events on streams, read only when :meth:`totals` is
    called, so that counting never waits for the GPU.
    """

    def __init__(self) -> None:
        self._totals: dict[Entry, Totals] = {}
        self._on_cuda: list[_OnCuda] = []

    def start(self, entry: Entry, payload: torch.Tensor, launch: Callable[[], dist.Work]) -> Pending:
        """Launch a collective and count ``payload`` on the line ``entry``."""
        totals = self.count(entry, payload)
        if not payload.is_cuda:
            return _OnCpu(launch, totals)
        pending = _OnCuda(launch, totals)
        self._on_cuda.append(pending)
        return pending

    def count(self, entry: Entry, payload: torch.Tensor) -> Totals:
        """Count ``payload`` without its time; returns the line."""
        totals = self._totals.setdefault(entry, Totals())
        totals.calls += 1
        totals.elements += payload.numel()
        totals.bytes += payload.numel() * payload.element_size()
        return totals

    def totals(self) -> dict[Entry, Totals]:
        """All lines since the last :meth:`clear`; waits for the GPU events that are still open."""
        for pending in self._on_cuda:
            pending.read()
        self._on_cuda.clear()
        return dict(self._totals)

    def sum(self) -> Totals:
        """One line for everything."""
        return sum(self.totals().values(), start=Totals())

    def clear(self) -> None:
        """Start from zero."""
        self._totals.clear()
        self._on_cuda.clear()


class _OnCpu:
    def __init__(self, launch: Callable[[], dist.Work], totals: Totals) -> None:
        self._totals, self._started = totals, time.perf_counter()
        self._ended: float | None = None
        self._work = launch()
        with suppress(RuntimeError):  # not every collective of gloo tells when it has ended
            self._work.get_future().add_done_callback(self._stamp)

    def _stamp(self, _future: object) -> None:
        self._ended = time.perf_counter()

    def wait(self) -> None:
        begun = time.perf_counter()
        self._work.wait()
        now = time.perf_counter()
        self._totals.exposed_seconds += now - begun
        self._totals.seconds += (self._ended or now) - self._started


class _OnCuda:
    def __init__(self, launch: Callable[[], dist.Work], totals: Totals) -> None:
        self._totals = totals
        self._started = _event()
        self._work = launch()
        # The collective has a stream of its own; another that waits for it sees when it ends.
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            self._work.wait()
            self._ended = _event()

    def wait(self) -> None:
        self._begun = _event()
        self._work.wait()
        self._resumed = _event()

    def read(self) -> None:
        self._resumed.synchronize()
        self._ended.synchronize()
        self._totals.exposed_seconds += self._begun.elapsed_time(self._resumed) / 1000
        self._totals.seconds += self._started.elapsed_time(self._ended) / 1000


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
