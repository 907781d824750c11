"""The ledger: what every collective of a rank sent and how long it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Entry:
    """What distinguishes one line of the ledger.

    Attributes:
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        group: The mesh dimension it runs over, ``tp`` or ``dp``.
        purpose: What it is for, for example ``latent`` or ``latent gradient``.
    """

    kind: str
    group: str
    purpose: str


@dataclass
class Totals:
    """Sums of one line: payload elements and bytes are those of the tensor handed over on this rank."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CommunicationLedger:
    """Counts and times the collectives of one rank.

    On CPU the time is the wall time of the call. On CUDA it is the time between two events on the stream,
    read only when :meth:`totals` is called, so that counting never waits for the GPU.
    """

    def __init__(self) -> None:
        self._totals: dict[Entry, Totals] = {}
        self._pending: list[tuple[Totals, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def record(self, entry: Entry, payload: torch.Tensor) -> Iterator[None]:
        """Count ``payload`` on the line ``entry`` and time the collective that the block runs."""
        totals = self._totals.setdefault(entry, Totals())
        totals.calls += 1
        totals.elements += payload.numel()
        totals.bytes += payload.numel() * payload.element_size()
        if payload.is_cuda:
            begin, end = _timing_event(), _timing_event()
            begin.record()
            yield
            end.record()
            self._pending.append((totals, begin, end))
        else:
            started = time.perf_counter()
            yield
            totals.seconds += time.perf_counter() - started

    def totals(self) -> dict[Entry, Totals]:
        """All lines since the last :meth:`clear`; waits for the GPU events that are still open."""
        for totals, begin, end in self._pending:
            end.synchronize()
            totals.seconds += begin.elapsed_time(end) / 1000
        self._pending.clear()
        return dict(self._totals)

    def sum(self) -> Totals:
        """One line for everything."""
        lines = self.totals().values()
        return Totals(
            calls=sum(line.calls for line in lines),
            elements=sum(line.elements for line in lines),
            bytes=sum(line.bytes for line in lines),
            seconds=sum(line.seconds for line in lines),
        )

    def clear(self) -> None:
        """Start from zero."""
        self._totals.clear()
        self._pending.clear()


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
