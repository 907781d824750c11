"""A job's goodput: books how its time was spent. Pure: a ledger and what happened in, the new ledger out.

Time is booked once, when it is known how it was spent: a step when it is done, the recovery from an interruption with
the first step after it. A clock that goes backwards books nothing.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from boost_core import messages
from service.jobs.states import Reason

_A_SECOND = 1_000_000  # microseconds; sums are of whole numbers, so that nothing is lost to rounding


class TimeKind(StrEnum):
    """The ways to spend time; each is a field of ``Goodput``."""

    PRODUCTIVE = "productive"
    RECOMPUTED = "recomputed"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    WAITING = "waiting"
    DATA_STALL = "data_stall"
    COMPILE = "compile"


class Phase(StrEnum):
    """What a job is doing, for booking its time."""

    WAITING = "waiting"  # in the queue, for resources, or paused
    STARTING = "starting"  # until the first step
    STEPPING = "stepping"
    CLOSING = "closing"  # after the last step
    SAVING = "saving"  # the store does not accept the last checkpoint
    INTERRUPTED = "interrupted"
    ENDED = "ended"


class FirstStep(BaseModel):
    """The booking of the first step after a start, until the second shows how much of it was compilation."""

    model_config = ConfigDict(frozen=True)

    kind: TimeKind
    seconds: float


class Goodput(BaseModel):
    """Seconds of each kind, which add up to the time from ``since`` to ``booked_until``, and the state of booking."""

    model_config = ConfigDict(frozen=True)

    productive: float = Field(0.0, description="Seconds in steps and evaluations.")
    recomputed: float = Field(0.0, description="Seconds in steps computed again, and in steps cut short by a fault.")
    checkpoint: float = Field(0.0, description="Seconds for which checkpoints and copies blocked the loop.")
    restart: float = Field(0.0, description="Seconds to start, and to restart after interruptions.")
    waiting: float = Field(0.0, description="Seconds in the queue, waiting for resources, paused, or until retried.")
    data_stall: float = Field(0.0, description="Seconds in which steps waited for data.")
    compile: float = Field(0.0, description="Seconds by which the first step after a start exceeded the second.")
    since: datetime = Field(
        description="Start of the ledger: when the job was submitted, or later for jobs older than the ledger."
    )
    booked_until: datetime = Field(description="End of the booked time.")
    phase: Phase = Phase.WAITING
    highest_step: int = Field(0, description="Highest step reached, that of the checkpoint it began from included.")
    first_step: FirstStep | None = Field(None, description="The newest step, if it is the first after a start.")
    cut_short: float = Field(0.0, description="Seconds of recomputed right before the newest interruption.")

    @property
    def seconds(self) -> dict[TimeKind, float]:
        """Seconds of each kind, zeros included."""
        return {kind: getattr(self, kind) for kind in TimeKind}

    @property
    def total(self) -> timedelta:
        """All booked time: exactly ``booked_until - since``."""
        return timedelta(microseconds=sum(map(microseconds, self.seconds.values())))


def microseconds(seconds: float) -> int:
    """The same as a whole number of microseconds."""
    return round(seconds * _A_SECOND)


_MICROSECOND = timedelta(microseconds=1)

# The phase that follows a change of state, and how time was spent until then after a step, or after the job's end. For
# a gang that recovers or waits, the trainer's reports determine the phase.
_CHANGES = {
    Reason.SUBMITTED: (Phase.WAITING, TimeKind.RECOMPUTED),
    Reason.HEAD_OF_QUEUE: (Phase.WAITING, TimeKind.RECOMPUTED),
    Reason.GANG_LOST: (Phase.WAITING, TimeKind.RECOMPUTED),
    Reason.PAUSED_BY_USER: (Phase.WAITING, TimeKind.RESTART),
    Reason.PAUSED_FOR_PRIORITY: (Phase.WAITING, TimeKind.RESTART),
    Reason.RESUMED_BY_USER: (Phase.WAITING, TimeKind.RESTART),
    Reason.RETRIED_BY_USER: (Phase.WAITING, TimeKind.WAITING),
    Reason.GANG_STARTING: (Phase.STARTING, TimeKind.RECOMPUTED),
    Reason.GANG_STARTED: (Phase.STARTING, TimeKind.RECOMPUTED),
    Reason.WAITING_FOR_STORE: (Phase.SAVING, TimeKind.CHECKPOINT),
    Reason.TRAINING_FINISHED: (Phase.ENDED, TimeKind.PRODUCTIVE),
    Reason.TRAINING_FAILED: (Phase.ENDED, TimeKind.RECOMPUTED),
    Reason.RESTARTS_EXHAUSTED: (Phase.ENDED, TimeKind.RECOMPUTED),
    Reason.CANCELLED_BY_USER: (Phase.ENDED, TimeKind.RECOMPUTED),
}
_IDLE = {Phase.WAITING: TimeKind.WAITING, Phase.SAVING: TimeKind.CHECKPOINT}
_IDLE |= dict.fromkeys((Phase.STARTING, Phase.INTERRUPTED), TimeKind.RESTART)
_IN_STEPS = frozenset({Phase.STEPPING, Phase.CLOSING})


def book(goodput: Goodput, time: datetime, what: messages.Report | Reason) -> Goodput:
    """Book what is known now.

    Args:
        goodput: What is booked so far.
        time: When it happened.
        what: A report of the trainer, or why the job's state changed.
    """
    if goodput.phase is Phase.ENDED and what is not Reason.RETRIED_BY_USER:
        return goodput
    match what:
        case Reason():
            phase, after_step = _CHANGES.get(what, (goodput.phase, TimeKind.RECOMPUTED))
            # Reports come before the change of state that they cause, so a gang that starts may be past that already.
            if phase is goodput.phase or (phase is Phase.STARTING and goodput.phase is not Phase.WAITING):
                return goodput
            return _all(goodput, time, _IDLE.get(goodput.phase, after_step), phase=phase, first_step=None)
        case messages.StepReport():
            kind = TimeKind.PRODUCTIVE if what.step > goodput.highest_step else TimeKind.RECOMPUTED
            phase = Phase.STEPPING if what.step < what.steps else Phase.CLOSING
            state = {"phase": phase, "highest_step": max(goodput.highest_step, what.step)}
            length = _length(goodput, time)
            standing = [(TimeKind.DATA_STALL, what.data_seconds), (TimeKind.CHECKPOINT, what.held_seconds)]
            computing = what.step_seconds - what.data_seconds
            if goodput.phase not in _IN_STEPS:
                amounts = _split(length, [*standing, (kind, computing)], _IDLE[goodput.phase])
                first_step = FirstStep(kind=kind, seconds=amounts[kind] / _A_SECOND)
                return _booked(goodput, time, amounts, **state, first_step=first_step)
            amounts = _split(length, standing, kind)
            if earlier := goodput.first_step:  # the time by which it exceeded this one, the second, was compilation
                took = microseconds(earlier.seconds)
                excess = took - _clamped(computing, took)
                amounts |= {earlier.kind: amounts.get(earlier.kind, 0) - excess, TimeKind.COMPILE: excess}
            return _booked(goodput, time, amounts, **state, first_step=None)
        case messages.StartReport():  # from another job's checkpoint, perhaps
            return goodput.model_copy(update={"highest_step": max(goodput.highest_step, what.step)})
        case messages.InterruptionReport() if goodput.phase is not Phase.INTERRUPTED:  # others change nothing
            # A planned change comes after a whole step; a fault cuts one short, which is lost.
            after_step = TimeKind.RESTART if what.cause in messages.PLANNED_CAUSES else TimeKind.RECOMPUTED
            kind = _IDLE.get(goodput.phase, after_step)
            lost = _length(goodput, time) / _A_SECOND if kind is TimeKind.RECOMPUTED else 0.0
            return _all(goodput, time, kind, phase=Phase.INTERRUPTED, first_step=None, cut_short=lost)
        case messages.RestartReport() if goodput.phase is Phase.INTERRUPTED:
            # Up to the start of the first step, whose own report comes next.
            length = _length(goodput, time)
            first = _clamped(what.parts.get("first_step", 0.0), length)
            amounts = _split(length - first, [(TimeKind.WAITING, what.waiting_seconds)], TimeKind.RESTART)
            # The fault may have come before it was noticed: that time was no lost work, but part of the restart.
            unnoticed = max(0, _clamped(what.seconds, length + microseconds(goodput.cut_short)) - length)
            amounts |= {TimeKind.RESTART: amounts[TimeKind.RESTART] + unnoticed, TimeKind.RECOMPUTED: -unnoticed}
            return _booked(goodput, time - first * _MICROSECOND, amounts, phase=Phase.STARTING, cut_short=0.0)
        case messages.ShapeReport() if goodput.phase is Phase.WAITING:
            return _all(goodput, time, TimeKind.WAITING, phase=Phase.STARTING)
        case messages.EvaluationReport() | messages.SampleReport() if goodput.phase in _IN_STEPS:
            return _all(goodput, time, TimeKind.PRODUCTIVE)
        case messages.CheckpointReport() if goodput.phase is Phase.CLOSING:
            return _all(goodput, time, TimeKind.CHECKPOINT)
        case _:
            return goodput


def as_of(goodput: Goodput, now: datetime) -> Goodput:
    """The ledger as if the current phase ended now, without the step under way."""
    kind = _IDLE.get(goodput.phase)
    return _all(goodput, now, kind) if kind else goodput


def _all(goodput: Goodput, time: datetime, kind: TimeKind, **state: Any) -> Goodput:
    return _booked(goodput, time, {kind: _length(goodput, time)}, **state)


def _booked(goodput: Goodput, time: datetime, amounts: dict[TimeKind, int], **state: Any) -> Goodput:
    """The ledger with microseconds added to some kinds, and the new state of booking."""
    state["booked_until"] = max(goodput.booked_until, time)
    for kind, more in amounts.items():
        state[kind] = (microseconds(getattr(goodput, kind)) + more) / _A_SECOND
    return goodput.model_copy(update=state)


def _length(goodput: Goodput, time: datetime) -> int:
    """Microseconds not booked yet."""
    return max(timedelta(0), time - goodput.booked_until) // _MICROSECOND


def _split(length: int, shares: Sequence[tuple[TimeKind, float]], rest: TimeKind) -> dict[TimeKind, int]:
    """Divide microseconds: to each kind its seconds as long as there are any, and the rest to the last."""
    amounts = {}
    for kind, seconds in shares:
        amounts[kind] = _clamped(seconds, length)
        length -= amounts[kind]
    return {**amounts, rest: amounts.get(rest, 0) + length}


def _clamped(seconds: float, most: int) -> int:
    """Microseconds from 0 to ``most``; a trainer may also send infinities and NaN."""
    return microseconds(min(max(0.0, seconds), most / _A_SECOND))
