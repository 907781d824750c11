"""A job's curves, read from its events and downsampled by the database."""

import math
from collections.abc import Mapping
from typing import Any

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
