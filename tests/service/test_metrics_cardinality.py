"""How many series a large service has: bounded by its jobs, and never by what clients send."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import product
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from boost_core.config.training import MOST_VALIDATION_SETS
from boost_core.messages import ComparisonReport, EvaluationReport, Report, StepReport
from boost_core.train import StepParts, StepTimes, Totals
from service.gang.worker.rank_metrics import StepCollector, gauges
from service.jobs.store import JobStore
from tests.service.conftest import RunningApi
from tests.service.records import (
    a_checkpoint,
    a_comparison,
    a_shape,
    a_spare,
    a_spec,
    a_step,
    an_evaluation,
    numbered,
    start,
)
from tests.service.sample_jobs import show_nodes
from tests.service.scraping import Scrape
from tests.unit.test_transport import connected

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
COLLECTIVES = (
    "all_reduce",
    "symmetric_all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
)  # boost_core.parallel.communicator.Entry
GROUPS = ("tp", "pp", "cp", "dp", "all")
TRANSPORTS = b"".join(
    b"NCCL INFO Channel 00 : 0 -> 1 via %s/0\n" % each for each in (b"P2P", b"SHM", b"NET/IB", b"COLLNET/IB")
)
JOBS = 100
SETS = tuple(f"set-{number}" for number in range(MOST_VALIDATION_SETS))
MOST_OF_A_JOB = 76 + 2 * MOST_VALIDATION_SETS
MOST_OF_A_WAITING_JOB = 2
RANKS = 64
MOST_OF_A_RANK = 143


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=60) as opened:
        yield opened


def whole(report: StepReport | EvaluationReport | ComparisonReport) -> Report:
    """A report with a number in each field that may have none."""
    return report.model_copy(update={name: 0.5 for name, value in report if value is None})


def run(store: JobStore) -> None:
    job = start(store, store.create(a_spec(), "/checkpoints").id)
    reports = [whole(each) for each in (a_step(1), an_evaluation(1, sets=SETS), a_comparison(1))]
    reports += [a_shape(32), a_checkpoint(1), a_spare(1)]
    store.append_reports(job.id, 1, numbered(*reports))


@pytest.mark.full
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
    assert running == MOST_OF_A_JOB
    assert waiting == MOST_OF_A_WAITING_JOB
    assert service < 120


def test_series_of_the_ranks_of_a_hundred_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps, registry = StepCollector(), CollectorRegistry()
    everything = {pair: Totals(calls=1) for pair in product(COLLECTIVES, GROUPS)}
    parts = StepParts(**{part.name: 1.0 for part in fields(StepParts)})
    steps.add(StepTimes(step=1, seconds=6.0, busy_seconds=1.0, parts=parts, communication=everything))
    registry.register(steps)
    registry.register(connected(TRANSPORTS, monkeypatch, tmp_path))
    ProcessCollector(registry=registry)
    series = sum(len(family.samples) for family in registry.collect()) + len(gauges(None, ()))
    assert series == MOST_OF_A_RANK
    page = PAGE.read_text()
    assert f"= {MOST_OF_A_RANK} | {JOBS * RANKS * MOST_OF_A_RANK:,}".replace(",", " ") in page
    assert f"| {MOST_OF_A_JOB} | {JOBS * MOST_OF_A_JOB:,}".replace(",", " ") in page


@pytest.mark.full
def test_requests_of_any_kind_make_no_more_series(http: httpx.Client) -> None:
    def kinds() -> int:
        return len(Scrape(http).find("boost_http_requests_total"))

    def ask(number: int) -> None:
        for path in (f"/{number}", f"/v1/jobs/job-{number}", f"/v1/queues/{number}", f"/static/{number}"):
            http.get(path)
        http.request(f"METHOD{number}", "/v1/jobs")

    ask(0)
    kinds()  # itself a request
    before = kinds()
    for number in range(1, 20):
        ask(number)
    assert kinds() == before == len(["unmatched", "job", "queue", "file", "method", "scrape"])
