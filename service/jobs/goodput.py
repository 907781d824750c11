"""How a job's time was spent. ``service.jobs.ledger`` books it."""

from datetime import datetime, timedelta
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

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
    waiting: float = Field(
        0.0, description="Seconds in the queue, waiting for resources, paused, or ended until retried."
    )
    data_stall: float = Field(0.0, description="Seconds in which steps waited for data.")
    compile: float = Field(0.0, description="Seconds by which the first step after a start exceeded the second.")
    since: datetime = Field(
        description="Start of the ledger: when the job was submitted, or later for jobs older than the ledger."
    )
    booked_until: datetime = Field(description="End of the booked time.")
    phase: Phase = Phase.WAITING
    highest_step: int = Field(0, description="Highest step reached.")
    first_step: FirstStep | None = Field(None, description="The newest step, if it is the first after a start.")
    cut_short: float = Field(0.0, description="Seconds of recomputed right before the newest interruption.")

    @classmethod
    def begin(cls, time: datetime) -> "Goodput":
        """The ledger of a job submitted at ``time``."""
        return cls(since=time, booked_until=time)

    @property
    def seconds(self) -> dict[TimeKind, float]:
        """Seconds of each kind, zeros included."""
        return {kind: getattr(self, kind) for kind in TimeKind}

    @property
    def total(self) -> timedelta:
        """All booked time: exactly ``booked_until - since``."""
        return timedelta(microseconds=sum(map(microseconds, self.seconds.values())))

    def plus(self, amounts: dict[TimeKind, int]) -> dict[str, float]:
        """The seconds of some kinds after adding microseconds to each."""
        return {kind: in_seconds(microseconds(getattr(self, kind)) + more) for kind, more in amounts.items()}


def microseconds(seconds: float) -> int:
    """The same as a whole number of microseconds."""
    return round(seconds * _A_SECOND)


def in_seconds(microseconds: int) -> float:
    """The same in seconds."""
    return microseconds / _A_SECOND
