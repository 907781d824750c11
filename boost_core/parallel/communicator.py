"""Every collective of the trainer: the ledger that counts and times them, the groups, and the clock of a step."""

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from itertools import pairwise
from statistics import median_low
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from boost_core.kernels.latent_epilogue import Epilogue
from boost_core.parallel.symmetric_memory import SymmetricMemory


class Part(StrEnum):
    """The parts of a step in which collectives may be waited for."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    OTHER = "other"


class Entry(NamedTuple):
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
        return Totals(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when its result may be used: on CUDA, by work queued afterwards on the current stream."""


Launched = dist.Work | Pending
Launch = Callable[[], Launched]  # launches a collective


@dataclass(eq=False)
class CommunicationLedger:
    """Counts and times the collectives of one rank.

    On CPU, times are wall times. On CUDA they are times between events on the computing stream, read only when
    :meth:`totals` is called, so that counting never waits for the GPU.

    Attributes:
        part: The part of the step that is running; set from outside.
        timed: Whether what is started on CUDA is timed, or counted only; also for the clock of a step.
        exposed_seconds: Seconds waited in each part, as far as they have been read.
        unread: Collectives on CUDA that were waited for, whose times are read with the totals.
    """

    part: Part = Part.OTHER
    timed: bool = True
    exposed_seconds: dict[Part, float] = field(default_factory=lambda: defaultdict(float))
    unread: list["_Times"] = field(default_factory=list)
    _totals: dict[Entry, Totals] = field(default_factory=dict)

    def start(self, entry: Entry, payload: torch.Tensor, launch: Launch) -> Pending:
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
        for times in self.unread:
            times.resumed.synchronize()
            totals = self._totals.setdefault(times.entry, Totals())
            totals.seconds += times.started.elapsed_time(times.resumed) / 1000
            self.waited(totals, times.part, times.begun.elapsed_time(times.resumed) / 1000)
        self.unread.clear()
        return dict(self._totals)

    def sum(self) -> Totals:
        """One line for all collectives."""
        return sum(self.totals().values(), start=Totals())

    def by_group(self) -> dict[tuple[str, str], Totals]:
        """One line for each kind and group, over all purposes."""
        lines = defaultdict[tuple[str, str], Totals](Totals)
        for entry, totals in self.totals().items():
            lines[entry.kind, entry.group] += totals
        return dict(lines)

    def waited(self, totals: Totals, part: Part, seconds: float) -> None:
        """Count ``seconds`` of waiting for a collective of the line ``totals`` in a part of the step."""
        totals.exposed_seconds += seconds
        self.exposed_seconds[part] += seconds

    @contextmanager
    def recorded(self, timed: bool) -> Iterator["Recording"]:
        """Collectives started and waited for inside count at each ``replay`` of the yielded recording, not now."""
        before, recording = (self._totals, self.unread, self.timed), Recording({}, [])
        (self._totals, self.unread), self.timed = recording, timed
        try:
            yield recording
        finally:
            self._totals, self.unread, self.timed = before

    def replay(self, recording: "Recording") -> None:
        """Count a recording that the device repeats; if it does so without the events, with their newest times."""
        for entry, totals in recording.totals.items():
            self._totals[entry] = self._totals.get(entry, Totals()) + totals
        self.unread += recording.times

    def clear(self) -> None:
        """Start from zero."""
        self._totals.clear()
        self.unread.clear()
        self.exposed_seconds.clear()


class _OnCpu:
    def __init__(self, launch: Launch, totals: Totals, ledger: CommunicationLedger) -> None:
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


class _Times(NamedTuple):
    """When the computing stream reached a collective's start, the wait for it, and its result."""

    entry: Entry
    part: Part
    started: torch.cuda.Event
    begun: torch.cuda.Event
    resumed: torch.cuda.Event


class Recording(NamedTuple):
    """Collectives of captured work: their lines, and the events that each replay records again."""

    totals: dict[Entry, Totals]
    times: list[_Times]


class _OnCuda:
    def __init__(self, launch: Launch, payload: torch.Tensor, entry: Entry, ledger: CommunicationLedger) -> None:
        self._entry, self._ledger = entry, ledger
        self._started = timed_event() if ledger.timed else None
        # NCCL reads the payload until the work is waited for, and its work object holds the output. Only the first wait
        # is the caller's own: after a wait on any other stream, torch would free the payload's memory too early.
        self._launched: tuple[Launched, torch.Tensor] | None = (launch(), payload)

    def wait(self) -> None:
        if self._launched is None:
            raise AssertionError("waited for already")
        begun = None if self._started is None else timed_event()
        self._launched[0].wait()
        self._launched = None
        if self._started is not None and begun is not None:
            self._ledger.unread.append(_Times(self._entry, self._ledger.part, self._started, begun, timed_event()))


def timed_event() -> torch.cuda.Event:
    """A timed event on the current stream; in captured work, each replay records it again."""
    event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


# torch renamed both in 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Communicator:
    """The collectives over one dimension of the mesh.

    Args:
        group: The process group; ``None`` for a group of one.
        dimension: The mesh dimension's name for the ledger: ``tp``, ``pp``, ``cp``, ``dp``, or ``all`` for the
            whole gang.
        ledger: Counts them.

    Attributes:
        size: Number of ranks.
        rank: This one's number among them.
        symmetric: The group's symmetric memory, through which whatever it takes is summed; set from outside.
    """

    def __init__(self, group: dist.ProcessGroup | None, dimension: str, ledger: CommunicationLedger) -> None:
        self._group, self._dimension, self._ledger = group, dimension, ledger
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.symmetric: SymmetricMemory | None = None

    def start_all_reduce_(
        self, tensor: torch.Tensor, purpose: str, operation: Any = dist.ReduceOp.SUM, epilogue: Epilogue | None = None
    ) -> Pending:
        """Start to reduce ``tensor`` in place over a group of several ranks; complete after ``wait``.

        Args:
            tensor: Any shape, contiguous. Latents are sent with the norm's statistics behind them, if there are any.
            purpose: The purpose, for the ledger.
            operation: How the ranks' values are combined. Only sums go through symmetric memory.
            epilogue: What is computed from summed latents next; has the result after ``wait`` if the same pass computes
                both.
        """
        symmetric = self.symmetric if operation == dist.ReduceOp.SUM else None
        if symmetric is not None and symmetric.takes(tensor):
            entry = Entry("symmetric_all_reduce", self._dimension, purpose)
            return self._ledger.start(entry, tensor, lambda: symmetric.start(tensor, epilogue))
        entry = Entry("all_reduce", self._dimension, purpose)
        launch = partial(dist.all_reduce, tensor, operation, group=self._group, async_op=True)
        return self._ledger.start(entry, tensor, launch)

    def all_reduce_(self, tensor: torch.Tensor, purpose: str, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduce ``tensor`` in place over the group and return it."""
        if self.size > 1:
            self.start_all_reduce_(tensor, purpose, operation).wait()
        return tensor

    def start_all_gather(self, gathered: torch.Tensor, shard: torch.Tensor, purpose: str) -> Pending:
        """Start to fill ``gathered``, flat, with every rank's ``shard`` in the order of ranks."""
        return self._start("all_gather", _all_gather, gathered, shard, purpose)

    def start_reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor, purpose: str) -> Pending:
        """Start to fill ``part`` with this rank's part of the sum of every rank's ``whole``, which is flat."""
        return self._start("reduce_scatter", _reduce_scatter, part, whole, purpose)

    def all_gather(self, x_Tc: torch.Tensor, purpose: str) -> torch.Tensor:
        """``[T, c]`` on each of p ranks to ``[p, T, c]`` on all."""
        gathered = x_Tc.new_empty((self.size * x_Tc.shape[0], x_Tc.shape[1]))
        self.start_all_gather(gathered, x_Tc.contiguous(), purpose).wait()
        return gathered.view(self.size, *x_Tc.shape)

    def reduce_scatter(self, x_pTc: torch.Tensor, purpose: str) -> torch.Tensor:
        """``[p, T, c]`` on each of p ranks to this rank's ``[T, c]`` of their sum."""
        scattered = x_pTc.new_empty(x_pTc.shape[1:])
        self.start_reduce_scatter(scattered, x_pTc.flatten(0, 1).contiguous(), purpose).wait()
        return scattered

    def all_to_all(self, x_pac: torch.Tensor, purpose: str) -> torch.Tensor:
        """``[p, a, c]`` on each of p ranks: part i goes to rank i, and part i of the result comes from rank i."""
        received = torch.empty_like(x_pac)
        self._start("all_to_all", dist.all_to_all_single, received, x_pac, purpose).wait()
        return received

    def start_uneven_all_to_all(
        self, received: torch.Tensor, payload: torch.Tensor, rows: tuple[Sequence[int], Sequence[int]], purpose: str
    ) -> Pending:
        """Start to fill ``received`` with the rows that each rank sends this one, in the order of ranks.

        Args:
            received: Receives the rows.
            payload: The rows for each rank, in the order of ranks.
            rows: Numbers of rows that come from each rank and go to each; may be 0, but all ranks have to call this.
            purpose: The purpose, for the ledger.
        """
        comes, goes = map(list, rows)
        launch = partial(dist.all_to_all_single, received, payload, comes, goes, self._group, async_op=True)
        return self._ledger.start(Entry("all_to_all", self._dimension, purpose), payload, launch)

    def send(self, tensor: torch.Tensor, to: int, purpose: str) -> Pending:
        """Start to send ``tensor`` to a rank of the group."""
        launch: Any = partial(dist.isend, tensor, group=self._group, group_dst=to)  # a ``Work``, in its own group
        return self._ledger.start(Entry("send", self._dimension, purpose), tensor, launch)

    def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Fill ``tensor`` with what another rank of the group sends, and return it."""
        dist.recv(tensor, group=self._group, group_src=source)
        return tensor

    def _start(
        self, kind: str, collective: Callable[..., Any], out: torch.Tensor, payload: torch.Tensor, purpose: str
    ) -> Pending:
        launch = partial(collective, out, payload, group=self._group, async_op=True)
        return self._ledger.start(Entry(kind, self._dimension, purpose), payload, launch)


# The clock of a step: how its time is divided among its parts.
#
# A rank tells the clock which part begins, and the clock records when. The time that a part waited for collectives,
# according to the ledger, is subtracted from it and counted separately, so that all parts add up to the step.
#
# On CPU the records are wall times. On CUDA the host runs ahead of the device, so between the batch's arrival and the
# step's own synchronisation they are events; for a captured step, those captured with it. They are read after that
# synchronisation, which also places them on the host's clock: measuring never makes the host wait. A replayed step may
# leave them out; its parts then have the shares of it that they had in the newest one with events. Afterwards the
# device still performs the update while the host goes on; what is unfinished when the next step has its batch counts
# for that step.
#
# In a pipeline, forward and backward alternate. Time in the stages counts as theirs. The time between them, which is
# the schedule and waiting for other stages, counts as other. A stage's collectives are exposed communication as always.


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
        return float(sum(vars(self).values()))


_TIMED_REPLAYS = 3  # the newest, whose median stands for replays without events


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
        self._replayed: int | None = None  # how many of the events a replay has recorded; ``None`` without a replay
        self._shares: list[tuple[Part, float]] = []  # when each part began in the newest timed replay, from 0 to 1
        # What share of the step was waited for collectives in each part, in the newest timed replays.
        self._waits: deque[dict[Part, float]] = deque(maxlen=_TIMED_REPLAYS)

    def begin(self) -> None:
        """A step begins by waiting for its batch."""
        self._marks, self._events, self._host_is_ahead, self._replayed = [], [], False, None
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
            if self._ledger.timed:
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

    def replay(self, recorded: list[tuple[Part, torch.cuda.Event]], timed: bool) -> None:
        """The device repeats what was recorded, with its events if it is timed; the current part is now its last."""
        self._replayed = len(recorded) if timed else 0
        self._events += recorded if timed else []
        if recorded:
            self._ledger.part = recorded[-1][0]

    def values(self, tensor: torch.Tensor) -> list[float]:
        """Read a tensor's values, for which the host waits: the step's own synchronisation."""
        reached = timed_event() if self._host_is_ahead else None
        values: list[float] = tensor.tolist()
        if reached is not None:
            now = time.perf_counter()
            marks = [(part, now - event.elapsed_time(reached) / 1000) for part, event in self._events]
            known = len(marks) - (self._replayed or 0)
            self._marks += marks[:known]
            if self._replayed is not None:
                began = max(at for _, at in self._marks)
                if self._replayed:
                    span = max(now - began, sys.float_info.min)
                    self._shares = [(part, (at - began) / span) for part, at in marks[known:]]
                else:
                    marks, known = [(part, began + share * (now - began)) for part, share in self._shares], 0
            self._marks += marks[known:]
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
        if self._replayed:
            self._waits.append({part: exposed[part] / max(latest - began, sys.float_info.min) for part in Part})
        elif self._replayed == 0 and self._waits:
            # What held another rank up in the newest timed step would otherwise count in all steps until the next one.
            exposed = {part: median_low(each[part] for each in self._waits) * (latest - began) for part in Part}
        computed = {part: max(0.0, seconds[part] - exposed[part]) for part in Part if part is not Part.OTHER}
        waited = sum(exposed.values())
        other = max(0.0, latest - began - waited - sum(computed.values()))
        return StepParts(**computed, exposed_communication=waited, other=other)


# Conjugate pairs of collectives, named after their forward operation; the backward pass runs the conjugate.
#
# ======================  =================  =================
# pair                    forward            backward
# ======================  =================  =================
# ``reduce_from_tp``      all-reduce         identity
# ``copy_to_tp``          identity           all-reduce
# ``all_gather_from_tp``  all-gather         reduce-scatter
# ``all_to_all``          all-to-all         all-to-all
# ======================  =================  =================
#
# In a group of one rank, each is the identity and nothing is counted. A latent's all-reduce, which other work can hide,
# is in ``btp``.


def reduce_from_tp(partial: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """The sum of every rank's ``partial``, on all ranks; ``partial`` itself is overwritten."""
    return _among(communicator, partial, lambda x: communicator.all_reduce_(x, purpose), lambda dx: dx)


def copy_to_tp(replicated: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """A replicated tensor on its way into each rank's own shard; gradients of all ranks are summed.

    The sum overwrites the gradient that arrives, so later operations must hand over one of their own: a matrix product
    does; a sum, which passes the same gradient to both of its terms, does not.
    """

    def summed(dx: torch.Tensor) -> torch.Tensor:
        return communicator.all_reduce_(dx.contiguous(), f"{purpose} gradient")

    return _among(communicator, replicated, lambda x: x.view_as(x), summed)


def all_gather_from_tp(x_Tc: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """``[T, c]`` shards to ``[p, T, c]`` on all ranks; gradients are summed and scattered back."""
    if communicator.size == 1:
        return x_Tc.unsqueeze(0)
    gather = partial(communicator.all_gather, purpose=purpose)
    scatter = partial(communicator.reduce_scatter, purpose=f"{purpose} gradient")
    return Conjugate.apply(x_Tc, gather, scatter)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter_from_tp(partial_Tc: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """``[T, c]`` on each of p ranks to this one's ``[T/p, c]`` of their sum; gradients are gathered."""
    return _among(
        communicator,
        partial_Tc,
        lambda x_Tc: communicator.reduce_scatter(x_Tc.view(communicator.size, -1, x_Tc.shape[1]), purpose),
        lambda dx_tc: communicator.all_gather(dx_tc, f"{purpose} gradient").flatten(0, 1),
    )


def all_to_all(x_Ac: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """Turn a matrix split along its columns, ``[A, c/p]``, into the same one split along its rows, ``[A/p, c]``."""

    def to_rows(x_Ac: torch.Tensor) -> torch.Tensor:
        parts_pac = communicator.all_to_all(x_Ac.reshape(communicator.size, -1, x_Ac.shape[1]), purpose)
        return parts_pac.transpose(0, 1).flatten(1)

    def to_columns(dx_ac: torch.Tensor) -> torch.Tensor:
        parts_pac = dx_ac.reshape(len(dx_ac), communicator.size, -1).transpose(0, 1).contiguous()
        return communicator.all_to_all(parts_pac, f"{purpose} gradient").flatten(0, 1)

    return _among(communicator, x_Ac, to_rows, to_columns)


Run = Callable[[torch.Tensor], torch.Tensor]


def _among(communicator: Communicator, x: torch.Tensor, run: Run, conjugate: Run) -> torch.Tensor:
    """What ``run`` makes of a tensor, and ``conjugate`` of its gradient; among one rank both change nothing."""
    if communicator.size == 1:
        return x
    return Conjugate.apply(x, run, conjugate)  # type: ignore[no-any-return, no-untyped-call]


class Conjugate(torch.autograd.Function):
    """One operation forward, which may be in place, and its conjugate for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Run, conjugate: Run) -> torch.Tensor:
        """Run the operation."""
        ctx.conjugate, result = conjugate, run(x)
        if result is x:
            ctx.mark_dirty(x)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Run the conjugate."""
        return ctx.conjugate(gradients[0]), None, None
