"""What a real Prometheus has seen of a real job that lost a worker, by the dashboards' own queries."""

import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import httpx
import pytest

from deploy.grafana.source.panels import Need
from tests.deploy.dashboards import Query, need_of, queries
from tests.deploy.scenario import Seen, lived_through
from tests.prometheus import Series, promtool

pytestmark = pytest.mark.nightly

# What queries ask for that have no data here: there is no GPU, no known peak of a CPU, no sequence over ranks, no alert
# and no time.
MISSING = {
    Need.GPU: "boost_rank_gpu_",
    Need.DCGM: "DCGM_",
    Need.NODE: "node_",
    Need.KUBERNETES: "kube",
    Need.RAY: "ray_",
    Need.PEAK: "_flops_utilization_ratio",
    Need.CONTEXT: "_context_imbalance_ratio",
    Need.ALERT: "ALERTS",
    Need.HALF_AN_HOUR: "job:boost_job_goodput:ratio1h",
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with lived_through(tmp_path_factory.mktemp("seen")) as seen:
        yield seen


def asked(seen: Seen, rate_seconds: int = 5) -> list[Query]:
    """All queries, as Grafana asks them for this job."""
    return queries({"job_id": seen.job.id, "__rate_interval": f"{rate_seconds}s", "__interval": "5s", "__range": "2m"})


def over_time(seen: Seen, dashboard: str, panel: str, rate_seconds: int = 5) -> list[list[Series]]:
    """What a panel's queries give from the first steps on."""
    exprs = [query.expr for query in asked(seen, rate_seconds) if (query.dashboard, query.panel) == (dashboard, panel)]
    assert exprs, f"{dashboard} has no panel {panel}"
    return [seen.prometheus.query_range(expr, seen.began, seen.window[1]) for expr in exprs]


def at_the_end(seen: Seen, dashboard: str, panel: str, **labels: str) -> list[float]:
    """What a panel shows of the whole window at its end: a number for each of its queries."""
    rate_seconds = round(seen.window[1] - seen.window[0])
    exprs = [query.expr for query in asked(seen, rate_seconds) if (query.dashboard, query.panel) == (dashboard, panel)]
    assert exprs, f"{dashboard} has no panel {panel}"
    found = [seen.prometheus.query(expr, seen.window[1]) for expr in exprs]
    return [next(one.value for one in series if one.labels.items() >= labels.items()) for series in found]


def ledger_share(seen: Seen) -> float:
    """The part of the window's steps that rank 0 waited for collectives, by the job's events."""
    begin, end = (datetime.fromtimestamp(time, UTC) for time in seen.window)
    steps = [event.data for event in seen.job.events if event.kind == "progress" and begin < event.time <= end]
    assert len(steps) > 20
    return sum(step["exposed_communication_seconds"] for step in steps) / sum(step["step_seconds"] for step in steps)


def test_the_throughput_falls_and_comes_back(seen: Seen) -> None:
    (newest,) = over_time(seen, "boost-job", "Tokens")[0]
    before = [value for at, value in newest.points.items() if at < seen.lost]
    after = [value for at, value in newest.points.items() if at >= seen.lost]
    assert min(before) > 0
    assert min(after) == 0
    undisturbed = [value for at, value in newest.points.items() if at > seen.window[0]]
    assert min(undisturbed) > 0
    (growth,) = over_time(seen, "boost-job", "Tokens")[1]
    usual = max(value for at, value in growth.points.items() if at < seen.lost)
    fallen = min(value for at, value in growth.points.items() if at >= seen.lost)
    assert fallen < usual / 2


def test_the_restart_is_there_with_its_cause(seen: Seen) -> None:
    ((number,),) = over_time(seen, "boost-job", "Interruptions")
    assert number.value == 1
    (by_cause,) = over_time(seen, "boost-job", "Restarts")
    assert {one.labels["cause"]: one.value for one in by_cause if one.value} == {"WORKER_LOST": 1}
    (marks,) = over_time(seen, "boost-job", "annotation Restarts")
    (mark,) = marks
    assert mark.labels["cause"] == "WORKER_LOST"
    assert min(mark.points) > seen.lost
    assert seen.job.of("restart")[0]["cause"] == "WORKER_LOST"


def test_the_share_of_communication_is_the_ledgers(seen: Seen) -> None:
    (exposed,) = at_the_end(seen, "boost-ranks", "Exposed communication", rank="0")
    (own,) = at_the_end(seen, "boost-ranks", "Own time in a step", rank="0")
    share = ledger_share(seen)
    assert 0 < share < 1
    assert exposed / (exposed + own) == pytest.approx(share, rel=0.05)
    of_the_gang, hidden = at_the_end(seen, "boost-job", "Share of the step")
    assert of_the_gang == pytest.approx(share, abs=0.05)  # rank 1 also waits while rank 0 reports
    assert 0 <= hidden < 1


def test_every_query_of_every_panel_returns_data(seen: Seen) -> None:
    # Some tell of what happens when a job starts, and some have a value at each full minute.
    begin, end = seen.submitted, max(seen.window[1], seen.submitted + 65)
    time.sleep(max(end - time.time(), 0))
    empty = {query for query in asked(seen) if not has_data(seen.prometheus.query_range(query.expr, begin, end))}
    needs = {query: need for query in asked(seen) if (need := need_of(query))}
    assert empty == set(needs)
    assert all(MISSING[need] in query.expr for query, need in needs.items())
    of_gpus = {query for query in asked(seen) if MISSING[Need.GPU] in query.expr}
    assert {query for query, need in needs.items() if need in (Need.GPU, Need.DCGM)} == of_gpus


def has_data(series: list[Series]) -> bool:
    return any(not math.isnan(value) for one in series for value in one.points.values())


def test_prometheus_reaches_the_api_and_each_rank(seen: Seen) -> None:
    targets = seen.prometheus.targets()
    assert [target["lastError"] for target in targets] == [""] * 3
    ranks = [target["labels"] for target in targets if target["labels"]["job"] == "boost-ranks"]
    assert sorted(labels["rank"] for labels in ranks) == ["0", "1"]
    assert {labels["job_id"] for labels in ranks} == {seen.job.id}


def test_promtool_finds_nothing_wrong_with_any_endpoint(seen: Seen) -> None:
    promtool("check", "metrics", given=seen.operator.metrics())
    ranks = [target for target in seen.prometheus.targets() if target["labels"]["job"] == "boost-ranks"]
    for target in ranks:
        promtool("check", "metrics", given=httpx.get(target["scrapeUrl"]).raise_for_status().text)


def test_no_alert_fires_for_a_job_that_is_well_again(seen: Seen) -> None:
    assert [alert["labels"] for alert in seen.prometheus.alerts() if alert["state"] == "firing"] == []


def test_an_alert_fires_when_the_store_takes_no_checkpoint(seen: Seen) -> None:
    seen.operator.client.drill(seen.job.id, {"kind": "fill_store", "seconds": 60})

    def fires() -> list[dict[str, str]]:
        return [alert["labels"] for alert in seen.prometheus.alerts() if alert["state"] == "firing"]

    seen.prometheus.until(fires, "an alert", 180)
    assert [(labels["alertname"], labels["job_id"]) for labels in fires()] == [("BoostStoreFailing", seen.job.id)]
