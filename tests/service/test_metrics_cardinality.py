"""How many series a large service has: bounded by its jobs, and never by what clients send."""

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from boost_core.config.reports import Cause, Fault
from service.jobs.goodput import Kind
from service.jobs.store import JobStore
from tests.service.conftest import RunningApi
from tests.service.records import a_checkpoint, a_shape, a_spec, a_step, an_evaluation, numbered, start
from tests.service.sample_jobs import show_nodes
from tests.service.scraping import Scrape

JOBS = 100
MOST_OF_A_JOB = 60
MOST_OF_A_WAITING_JOB = 2
MOST_OF_A_ROUTE = 3 + 11 + 3  # statuses that it really answers with, and a histogram


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=60) as opened:
        yield opened


def run(store: JobStore) -> None:
    job = start(store, store.create(a_spec(), "/checkpoints").id)
    reports = [a_shape(32), a_step(1), an_evaluation(1), a_checkpoint(1)]
    store.append_reports(job.id, 1, numbered(*reports))


def test_series_of_a_hundred_jobs(http: httpx.Client, store: JobStore) -> None:
    for _ in range(JOBS):
        run(store)
    for _ in range(JOBS):
        store.create(a_spec(), "/checkpoints")
    show_nodes(store)
    series = Counter(sample.labels.get("job_id", "") for sample in Scrape(http).samples())
    service = series.pop("")
    assert len(series) == 2 * JOBS
    running, waiting = max(series.values()), min(series.values())
    assert len(Cause) + len(Fault) + len(Kind) < running <= MOST_OF_A_JOB
    assert waiting == MOST_OF_A_WAITING_JOB
    assert service < 120
