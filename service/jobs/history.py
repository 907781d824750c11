"""A job's curves, read from its events and downsampled by the database."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, case, func, select
from sqlalchemy.orm import Session

from boost_core.messages import perplexity_of
from service.jobs.tables import EventRow
from service.models.metrics import EvaluationPoint, MetricsHistory, MetricsSample, NamedValidationPoint, RankTimes

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
        first: The first step wanted.
        last: The last step wanted.
        points: Maximum number of points; steps are averaged to get there.
    """
    width = max(1, math.ceil((last - first + 1) / points))
    return MetricsHistory(
        job_id=job_id,
        from_step=first,
        to_step=last,
        bucket_steps=width,
        samples=_samples(session, job_id, first, last, width),
        evaluations=[
            EvaluationPoint(
                step=data["step"],
                **_validation(data),
                sets=[NamedValidationPoint(name=each["name"], **_validation(each)) for each in data.get("sets", ())],
            )
            for data in _newest(session, job_id, "evaluation", first, last, width)
        ],
        ranks=[
            RankTimes(step=data["step"], busy_seconds=[_number(each) for each in data["busy_seconds"]])
            for data in _newest(session, job_id, "ranks", first, last, width)
        ],
    )


def _samples(session: Session, job_id: str, first: int, last: int, width: int) -> list[MetricsSample]:
    step = EventRow.data["step"].as_integer()
    loss = _json_number("loss")
    columns = [func.avg(_json_number(name)).label(name) for name in _MEANS]
    query = (
        select(
            func.max(step).label("step"),
            func.max(EventRow.time).label("time"),
            func.min(loss).label("loss_min"),
            func.max(loss).label("loss_max"),
            *columns,
        )
        .where(*_between(job_id, "progress", first, last))
        .group_by(_bucket(first, width))
        .order_by(func.max(step))
    )
    return [MetricsSample.model_validate(row._mapping) for row in session.execute(query)]


def _newest(session: Session, job_id: str, kind: str, first: int, last: int, width: int) -> Sequence[dict[str, Any]]:
    """The newest event of a kind for each point, in order of steps."""
    newest = select(func.max(EventRow.id)).where(*_between(job_id, kind, first, last)).group_by(_bucket(first, width))
    query: Select[Any] = select(EventRow.data).where(EventRow.id.in_(newest)).order_by(EventRow.id)
    return sorted(session.scalars(query), key=lambda data: int(data["step"]))


def _between(job_id: str, kind: str, first: int, last: int) -> tuple[ColumnElement[bool], ...]:
    step = EventRow.data["step"].as_integer()
    return EventRow.job_id == job_id, EventRow.kind == kind, step.between(first, last)


def _bucket(first: int, width: int) -> ColumnElement[int]:
    bucket: ColumnElement[int] = (EventRow.data["step"].as_integer() - first) // width
    return bucket


def _json_number(name: str) -> ColumnElement[float]:
    return case((EventRow.data[name].as_string().in_(_NO_NUMBERS), None), else_=EventRow.data[name].as_float())


def _validation(data: Mapping[str, Any]) -> dict[str, float | None]:
    loss, bits = _number(data["loss"]), data.get("bits_per_byte")
    perplexity = None if loss is None else _number(perplexity_of(loss))
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": None if bits is None else _number(bits)}


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
