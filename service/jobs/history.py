"""A job's curves, read from its events and downsampled by the database."""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import ColumnElement, Select, case, func, select
from sqlalchemy.orm import Session

from boost_core.messages import perplexity_of
from service.jobs.tables import EventRow
from service.models.jobs import EvaluationPoint, MetricsHistory, MetricsSample, NamedValidationPoint, RankTimes

_MEANS = (
    "loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "step_seconds",
    "exposed_communication_seconds",
    "model_flops_per_second",
)
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")  # how events store numbers that JSON lacks


def history(session: Session, job_id: str, first: int, last: int, points: int) -> MetricsHistory:
    """A job's steps from ``first`` to ``last`` in at most ``points`` points per curve.

    A repeated step counts both times.

    Args:
        session: The database.
        job_id: The job.
        first: The first step.
        last: The last step.
        points: Maximum number of points; steps are averaged to get there.
    """
    width = max(1, math.ceil((last - first + 1) / points))
    step = EventRow.data["step"].as_integer()
    bucket: ColumnElement[int] = (step - first) // width
    within = EventRow.job_id == job_id, step.between(first, last)
    numbers = {
        name: case((EventRow.data[name].as_string().in_(_NO_NUMBERS), None), else_=EventRow.data[name].as_float())
        for name in _MEANS
    }
    samples = (
        select(
            func.max(step).label("step"),
            func.max(EventRow.time).label("time"),
            func.min(numbers["loss"]).label("loss_min"),
            func.max(numbers["loss"]).label("loss_max"),
            *(func.avg(number).label(name) for name, number in numbers.items()),
        )
        .where(*within, EventRow.kind == "progress")
        .group_by(bucket)
        .order_by(func.max(step))
    )
    # The newest evaluation and the newest times of ranks for each point, in order of steps.
    newest: dict[str, list[dict[str, Any]]] = {}
    for kind in ("evaluation", "ranks"):
        ids = select(func.max(EventRow.id)).where(*within, EventRow.kind == kind).group_by(bucket)
        query: Select[Any] = select(EventRow.data).where(EventRow.id.in_(ids)).order_by(EventRow.id)
        newest[kind] = sorted(session.scalars(query), key=lambda data: int(data["step"]))
    return MetricsHistory(
        job_id=job_id,
        from_step=first,
        to_step=last,
        bucket_steps=width,
        samples=[MetricsSample.model_validate(row._mapping) for row in session.execute(samples)],
        evaluations=[
            EvaluationPoint(
                step=data["step"],
                **_validation(data),
                sets=[NamedValidationPoint(name=each["name"], **_validation(each)) for each in data.get("sets", ())],
            )
            for data in newest["evaluation"]
        ],
        ranks=[
            RankTimes(step=data["step"], busy_seconds=[_number(each) for each in data["busy_seconds"]])
            for data in newest["ranks"]
        ],
    )


def _validation(data: Mapping[str, Any]) -> dict[str, float | None]:
    loss, bits = _number(data["loss"]), data.get("bits_per_byte")
    perplexity = None if loss is None else _number(perplexity_of(loss))
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": None if bits is None else _number(bits)}


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


# How a job's time was spent. ``service.jobs.ledger`` books it.

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
