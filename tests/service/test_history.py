"""Curves thinned out by the database, against the same done by hand."""

import math
from statistics import fmean

import pytest
from sqlalchemy.orm import Session

from boost_core.messages import EvaluationReport, RankTimesReport
from service.jobs import queries
from service.jobs.model import JobRecord
from service.jobs.queries import history
from service.jobs.store import JobStore
from service.models.jobs import MetricsHistory
from tests.service.records import a_spec, a_step, an_evaluation, numbered, start

STEPS = 100


@pytest.fixture
def job(store: JobStore) -> JobRecord:
    job = store.create(a_spec(training={"steps": STEPS, "sequence_length": 64}), "file:///checkpoints")
    start(store, job.id)
    steps = [a_step(step, steps=STEPS, loss=loss(step)) for step in range(1, STEPS + 1)]
    steps[41] = steps[41].model_copy(update={"loss": math.nan})
    ranks = [RankTimesReport(step=step, busy_seconds=[0.1, step / 100]) for step in range(5, STEPS, 5)]
    others: list[EvaluationReport] = [
        an_evaluation(0, 9.0),
        an_evaluation(50, 4.0, ("books",)),
        an_evaluation(100, math.inf),
    ]
    return store.append_reports(job.id, 1, numbered(*steps, *ranks, *others))


def loss(step: int) -> float:
    return 10 - step / 16


def read(store: JobStore, job: JobRecord, first: int = 1, last: int = STEPS, points: int = STEPS) -> MetricsHistory:
    with Session(store.engine) as session:
        return history(session, job.id, first, last, points)


def test_every_step_is_a_point_where_there_is_room(store: JobStore, job: JobRecord) -> None:
    found = read(store, job)
    assert (found.bucket_steps, [sample.step for sample in found.samples]) == (1, list(range(1, STEPS + 1)))
    assert found.samples[2].loss == found.samples[2].loss_min == found.samples[2].loss_max == loss(3)
    assert found.samples[41].loss is None
    assert found.samples[41].tokens_per_second == 2048.0
    assert [(point.step, point.loss) for point in found.evaluations] == [(0, 9.0), (50, 4.0), (100, None)]
    _, first, last = found.evaluations
    assert first.perplexity == pytest.approx(math.exp(4))
    (books,) = first.sets
    assert (books.name, books.loss, books.bits_per_byte) == ("books", 4.5, 1.25)
    assert (last.perplexity, last.bits_per_byte, last.sets) == (None, None, [])
    assert [(times.step, times.busy_seconds) for times in found.ranks] == [
        (step, [0.1, step / 100]) for step in range(5, STEPS, 5)
    ]


def test_many_steps_become_few_points(store: JobStore, job: JobRecord) -> None:
    found = read(store, job, first=11, last=90, points=8)
    assert (found.bucket_steps, len(found.samples)) == (10, 8)
    assert [sample.step for sample in found.samples] == list(range(20, 100, 10))
    first = found.samples[0]
    assert first.loss == pytest.approx(fmean(loss(step) for step in range(11, 21)), rel=1e-12)
    assert (first.loss_min, first.loss_max) == (loss(20), loss(11))
    assert found.samples[3].loss == pytest.approx(fmean(loss(step) for step in range(41, 51) if step != 42), rel=1e-12)
    assert [times.step for times in found.ranks] == list(range(20, 91, 10))


def test_times_of_many_ranks_are_fewer_rows(store: JobStore, job: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MOST_RANK_TIMES", 20)  # two ranks' at ten points
    found = read(store, job)
    assert (found.bucket_steps, len(found.samples), len(found.evaluations)) == (1, STEPS, 3)
    assert [times.step for times in found.ranks] == [*range(10, 91, 10), 95]
    assert [times.step for times in read(store, job, points=20).ranks] == [*range(10, 91, 10), 95]
    assert [times.step for times in read(store, job, first=51, last=60).ranks] == [55, 60]
    with Session(store.engine) as session:
        assert history(session, job.id, 1, STEPS, STEPS, ranks=False) == found.model_copy(update={"ranks": []})


def test_a_job_without_steps_has_no_points(store: JobStore) -> None:
    job = store.create(a_spec(), "file:///checkpoints")
    found = read(store, job, first=1, last=1)
    assert (found.samples, found.evaluations, found.ranks) == ([], [], [])
