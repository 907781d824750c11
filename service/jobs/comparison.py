"""Jobs side by side: their results, and the fields in which their specs differ."""

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from boost_core.config import JobSpec
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.models.jobs import ComparedJob, Comparison, DifferingField, Result

if TYPE_CHECKING:  # the command line compares specs without the database
    from service.jobs.queries import Course

MOST_COMPARED = 200
_SHOWN_ANYWAY = ("name", "notes")


def compared(
    jobs: Sequence[JobRecord], losses: Mapping[str, float | None], ranks: Mapping[str, Sequence[tuple[datetime, int]]],
    courses: "Mapping[str, Course | None]", now: datetime, sort: Result | None = None, descending: bool = False,
) -> Comparison:  # fmt: skip
    """Compare jobs.

    Args:
        jobs: The jobs.
        losses: The lowest validation loss of each, in nats per token.
        ranks: How many ranks of each have held resources since when, in order.
        courses: What the steps of each say.
        now: Until when jobs that have not ended are counted.
        sort: The result to sort them by, the lowest first; ``None`` leaves their order.
        descending: Whether the highest comes first.
    """
    rows = []
    for job in jobs:
        end, course, tokens = job.finished_at or now, courses.get(job.id), None
        if course is not None and job.progress is not None:
            training = job.spec.training
            of_first = training.samples(course.first) - training.samples(course.first - 1)
            tokens = job.progress.tokens - course.tokens + of_first * training.sequence_length
        trained = job.goodput.productive + job.goodput.data_stall
        result = ComparedJob(
            id=job.id,
            name=job.name,
            state=job.state,
            message=job.message if job.state in (JobState.FAILED, JobState.CANCELLED) else None,
            final_loss=course.loss if course and math.isfinite(course.loss) else None,
            best_validation_loss=losses.get(job.id),
            tokens_per_second=tokens / trained if tokens is not None and trained else None,
            tokens=tokens,
            seconds=(end - job.started_at).total_seconds() if job.started_at else None,
            gpu_hours=gpu_hours_of(job, ranks.get(job.id, ()), now),
            validation_sets=[each.name for each in job.spec.data.validation],
        )
        rows.append((result, job.spec))
    if sort is not None:
        known = [row for row in rows if getattr(row[0], sort) is not None]
        known.sort(key=lambda row: getattr(row[0], sort), reverse=descending)
        rows = known + [row for row in rows if getattr(row[0], sort) is None]
    differing = differing_fields([spec for _, spec in rows])
    fields = [each for each in differing if each.submitted and each.field not in _SHOWN_ANYWAY]
    return Comparison(jobs=[result for result, _ in rows], fields=fields)


def gpu_hours_of(job: JobRecord, ranks: Sequence[tuple[datetime, int]], now: datetime) -> float:
    """GPU-hours of a job.

    Args:
        job: The job.
        ranks: How many ranks have held resources since when, in order.
        now: Until when a job that has not ended is counted.
    """
    gpus, since, gpu_seconds = 0, job.submitted_at, 0.0
    for at, number in ranks:
        gpu_seconds += gpus * max(0.0, (at - since).total_seconds())
        gpus, since = number * job.spec.resources.gpus_per_worker, at
    return (gpu_seconds + gpus * max(0.0, ((job.finished_at or now) - since).total_seconds())) / 3600


def differing_fields(specs: Sequence[JobSpec]) -> list[DifferingField]:
    """The fields in which some specs differ, in the order of the job file.

    Args:
        specs: The specs, with all defaults, presets and chosen layouts filled in.
    """
    # A dataset's kind and shards are the service's, and what held before a job was steered is history.
    resolved, original = (
        [dict(_fields(_without(spec.model_dump(mode="json", exclude={"steered"}), "kind"))) for spec in each]
        for each in (specs, [spec.at_step(1) for spec in specs])
    )
    # What their users decided; the rest of a model with a preset, for example, follows from that.
    submitted = [dict(_fields(_without(spec.with_layouts(None).as_written(), "kind", "paths"))) for spec in specs]
    differing = []
    for field in dict.fromkeys(field for fields in (*resolved, *original) for field in fields):
        values, first, written = ([fields.get(field) for fields in forms] for forms in (resolved, original, submitted))
        if any(value != each[0] for each in (values, first) for value in each):
            differs = first != values or any(value != written[0] for value in written)
            at_first = first if first != values else None
            differing.append(DifferingField(field=field, values=values, values_at_first=at_first, submitted=differs))
    return differing


def _without(form: dict[str, Any], *names: str) -> dict[str, Any]:
    """A spec's form without some fields of the sources that are datasets."""
    data = form["data"]
    sources = [each for part in ("mixture", "validation") for each in data[part] if each["dataset"] is not None]
    if data["dataset"] is not None and data["source"] is not None:
        sources.append(data["source"])
    for source in sources:
        for name in names:
            del source[name]
    return form


def _fields(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a spec with their paths and values; a list of plain values is one value, an empty one none."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield from _fields(value, f"{path}.{name}" if path else name)
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        for number, value in enumerate(content):
            yield from _fields(value, f"{path}[{number}]")
    elif content is not None and content != []:
        yield path, content
