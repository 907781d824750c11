"""What Prometheus finds at the API: a real server over a real record."""

import math
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from sqlalchemy import update

from boost_core.messages import Cause, Fault, FaultReport
from service.accounts.tenants_and_queues import QuotaStore
from service.jobs.model import NODES, Owner
from service.jobs.outlook import Outlook
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.jobs.tables import JobRow
from service.models.access import Scope
from service.models.jobs import QueueSettings, TenantSettings
from tests.postgres import PostgresServer
from tests.service.conftest import RunningApi, With
from tests.service.records import (
    a_checkpoint,
    a_comparison,
    a_fault,
    a_restart,
    a_shape,
    a_spare,
    a_spec,
    a_step,
    an_evaluation,
    an_interruption,
    finish,
    numbered,
    start,
)
from tests.service.sample_jobs import show_nodes
from tests.service.scraping import Scrape

ROOT = "file:///checkpoints"
ON_GPUS = {"resources": {"gpus_per_worker": 1}}


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=10) as opened:
        yield opened


# Jobs


@pytest.mark.full
def test_a_job_from_its_first_wait_to_its_end(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    first = Scrape(http)
    assert first.value("boost_jobs", state="QUEUED") == 1
    of_job = [sample for sample in first.samples() if sample.labels.get("job_id") == job.id]
    assert {sample.name for sample in of_job} == {"boost_job_info", "boost_job_waiting_seconds"}
    assert all(sample.labels.items() >= {"job_name": "tiny", "tenant": "default"}.items() for sample in of_job)
    (info,) = first.find("boost_job_info")
    assert info.labels | {"state": "QUEUED", "queue": "default", "family": "cola"} == info.labels
    start(store, job.id)
    started = Scrape(http)
    assert started.value("boost_job_workers") == 2
    assert started.find("boost_job_loss_nats") == []
    before = time.time()
    newest = a_step(2, forward_seconds=0.125, backward_seconds=0.25, optimizer_seconds=0.0625)
    store.append_reports(job.id, 1, numbered(a_step(1), newest, a_checkpoint(2), an_evaluation(2)))
    found = Scrape(http)
    expected = {
        "attempts_total": 1, "target_steps": 10, "step": 2, "loss_nats": 4.8, "gradient_norm": 1,
        "learning_rate": 1e-3, "tokens": 2048, "tokens_per_second": 2048, "samples_per_second": 32,
        "tokens_per_second_per_worker": 1024, "step_seconds": 0.5, "data_seconds": 0,
        "forward_seconds": 0.125, "backward_seconds": 0.25, "optimizer_seconds": 0.0625, "communication_seconds": 0.25,
        "exposed_communication_seconds": 0.125, "communication_bytes": 4096, "model_flops_per_second": 1e9,
        "validation_loss_nats": 2.5, "checkpoint_seconds": 0.25, "checkpoint_commit_seconds": 0,
        "checkpoint_bytes": 2**20, "checkpoint_step": 2,
    }  # fmt: skip
    assert {name: found.value(f"boost_job_{name}", job_id=job.id) for name in expected} == expected
    assert found.find("boost_job_model_flops_utilization_ratio") == [], "the peak is not known"
    for name in ("progress", "checkpoint"):
        assert before <= found.value(f"boost_job_{name}_timestamp_seconds") <= time.time()
    finish(store, job.id)
    last = Scrape(http)
    assert not [sample for sample in last.samples() if "job_id" in sample.labels]
    assert (last.value("boost_jobs", state="SUCCEEDED"), last.value("boost_jobs", state="RUNNING")) == (1, 0)


@pytest.mark.full
def test_shape_restarts_faults_and_goodput(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    before = Scrape(http)
    assert before.find("boost_job_data_parallel_size") == []
    restarts, faults = before.by("cause", "boost_job_restarts_total"), before.by("what", "boost_job_faults_total")
    assert set(restarts.values()) | set(faults.values()) == {0}, "the first increase is seen"
    full = FaultReport(what=Fault.STORE, step=1, message="the store is full")
    reports = [a_shape(2), a_step(1), full, an_interruption(), a_restart(), a_step(1), a_fault(), a_fault(), a_spare(1)]
    reports.append(a_comparison())
    store.append_reports(job.id, 1, numbered(*reports))
    found = Scrape(http)
    sizes = [found.value(f"boost_job_{name}_parallel_size") for name in ("tensor", "pipeline", "data")]
    assert (sizes, found.value("boost_job_workers")) == ([2, 1, 2], 4)
    assert found.by("cause", "boost_job_restarts_total") == restarts | {"WORKER_LOST": 1}
    assert found.by("what", "boost_job_faults_total") == faults | {"slow_rank": 2, "store": 1}
    assert found.value("boost_job_spare_copy_step") == 1
    assert found.value("boost_job_median_step_seconds") == 0.5
    assert found.value("boost_job_predicted_step_seconds") == 0.4
    assert found.value("boost_job_peak_memory_bytes") == 3.75e9
    assert found.value("boost_job_planned_memory_bytes") == 4e9
    goodput = found.by("kind", "boost_job_goodput_seconds")
    assert goodput.keys() == {"productive", "recomputed", "checkpoint", "restart", "waiting", "data_stall", "compile"}
    store.request_pause(job.id)
    store.change(job.id, Reason.PAUSED_BY_USER, "its state is saved")
    paused = Scrape(http)
    assert paused.value("boost_job_workers") == 0
    assert paused.find("boost_job_spare_copy_step") == []
    time.sleep(0.01)
    waiting = paused.by("kind", "boost_job_goodput_seconds")["waiting"]
    assert Scrape(http).by("kind", "boost_job_goodput_seconds")["waiting"] >= waiting + 0.01, "time goes on"


@pytest.mark.full
def test_throughput_falls_to_zero_while_a_gang_does_not_step(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    rates = (
        "tokens_per_second", "samples_per_second", "tokens_per_second_per_worker", "model_flops_per_second",
        "model_flops_utilization_ratio", "hardware_flops_utilization_ratio",
    )  # fmt: skip
    step = a_step(2, model_flops_utilization=0.25, hardware_flops_utilization=0.5)

    def seen() -> list[bool]:
        scrape = Scrape(http)
        assert scrape.value("boost_job_loss_nats") == 4.8
        return [scrape.value(f"boost_job_{rate}") > 0 for rate in rates]

    store.append_reports(job.id, 1, numbered(step))
    assert seen() == [True] * 6
    store.append_reports(job.id, 1, numbered(an_interruption(2), first=2))
    assert seen() == [False] * 6
    store.append_reports(job.id, 1, numbered(a_restart(2), step, first=3))
    assert seen() == [True] * 6
    store.request_pause(job.id)
    store.change(job.id, Reason.PAUSED_BY_USER, "its state is saved")
    assert seen() == [False] * 6


@pytest.mark.full
def test_before_the_first_step_progress_is_dated_by_the_start(http: httpx.Client, store: JobStore) -> None:
    job = start(store, store.create(a_spec(), ROOT).id)
    assert job.started_at
    assert Scrape(http).value("boost_job_progress_timestamp_seconds") == job.started_at.timestamp()


def test_a_loss_that_is_no_number_is_none(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_step(1, loss=math.nan, gradient_norm=math.inf)))
    found = Scrape(http)
    assert math.isnan(found.value("boost_job_loss_nats"))
    assert found.value("boost_job_gradient_norm") == math.inf


def test_waiting_begins_anew_when_a_job_comes_back(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    time.sleep(0.05)
    waited = Scrape(http).value("boost_job_waiting_seconds")
    assert waited >= 0.05
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    assert Scrape(http).value("boost_job_waiting_seconds") > waited, "SCHEDULING goes on with the wait"
    store.request_pause(job.id)
    assert Scrape(http).find("boost_job_waiting_seconds") == []
    store.resume(job.id)
    resumed = store.get(job.id)
    assert resumed.waiting_since and resumed.waiting_since > resumed.queued_at + timedelta(seconds=0.05)
    start(store, job.id)
    assert store.get(job.id).waiting_since is None


# Queues, tenants, the cluster


@pytest.mark.full
def test_queues_and_tenants(http: httpx.Client, store: JobStore) -> None:
    quotas = QuotaStore(store)
    quotas.put_queue("night", QueueSettings(gpus=8))
    quotas.put_tenant("lab", TenantSettings(gpus=4))
    store.create(a_spec(queue="night"), ROOT, Owner("lab", "ci"))
    time.sleep(0.05)
    store.create(a_spec(queue="night"), ROOT, Owner("birds", "ci"))
    running = store.create(a_spec(queue="night", **ON_GPUS), ROOT, Owner("birds", "ci"))
    start(store, running.id)
    found = Scrape(http)
    assert found.by("state", "boost_queue_jobs", queue="night") == {"QUEUED": 2, "SCHEDULING": 0, "RUNNING": 1}
    assert found.by("state", "boost_queue_jobs", queue="default") == {"QUEUED": 0, "SCHEDULING": 0, "RUNNING": 0}
    oldest = found.by("queue", "boost_queue_oldest_wait_seconds")
    assert oldest["night"] == max(found.by("tenant", "boost_job_waiting_seconds").values()) >= 0.05
    assert oldest["default"] == 0
    assert found.by("queue", "boost_queue_gpus_held") == {"night": 2, "default": 0}
    assert found.by("queue", "boost_queue_gpus_limit") == {"night": 8}
    assert found.by("tenant", "boost_tenant_gpus_held") == {"lab": 0, "birds": 2}
    assert found.by("tenant", "boost_tenant_gpus_limit") == {"lab": 4}
    store.change(running.id, Reason.WAITING_FOR_RESOURCES, "its node was lost; waits for 2 × {GPU: 1}")
    waits = Scrape(http)
    assert set(waits.by("queue", "boost_queue_gpus_held").values()) == {0}
    assert set(waits.by("tenant", "boost_tenant_gpus_held").values()) == {0}


@pytest.mark.full
def test_the_cluster_as_it_was_seen_last(http: httpx.Client, store: JobStore) -> None:
    assert Scrape(http).find("boost_cluster_nodes") == [], "nobody has looked yet"
    show_nodes(store)
    found = Scrape(http)
    assert found.by("condition", "boost_cluster_nodes") == {"alive": 1, "draining": 1}
    assert found.by("condition", "boost_cluster_resources", resource="GPU") == {"total": 8, "free": 6}
    assert found.by("condition", "boost_cluster_resources", resource="CPU") == {"total": 16, "free": 12}
    seen = store.snapshot(NODES)
    assert seen and found.value("boost_cluster_seen_timestamp_seconds") == pytest.approx(seen[0].timestamp())


# Who sees what


@pytest.mark.full
def test_a_tenant_sees_its_own(client_with: With, store: JobStore) -> None:
    QuotaStore(store).put_tenant("lab", TenantSettings(gpus=4))
    QuotaStore(store).put_tenant("birds", TenantSettings(gpus=2))
    show_nodes(store)
    for tenant in ("lab", "birds", "birds"):
        start(store, store.create(a_spec(name=f"job of {tenant}", **ON_GPUS), ROOT, Owner(tenant, "ci")).id)
    own, all_of_them = Scrape(client_with(Scope.READ, tenant="lab")), Scrape(client_with(Scope.ADMIN))
    assert "birds" not in own.text
    assert own.value("boost_queue_jobs", state="RUNNING") == 1
    assert own.by("tenant", "boost_tenant_gpus_held") == {"lab": 2}
    assert own.by("tenant", "boost_tenant_gpus_limit") == {"lab": 4}
    assert all_of_them.value("boost_queue_jobs", state="RUNNING") == 3
    held = all_of_them.by("tenant", "boost_tenant_gpus_held")
    assert (held["lab"], held["birds"]) == (2, 4)
    hidden = {family.name for family in all_of_them.families} - {family.name for family in own.families}
    prefixes = ("boost_cluster_", "boost_http_", "boost_scheduler_", "boost_queue_gpus_", "boost_build", "process_")
    assert {prefix for prefix in prefixes if any(name.startswith(prefix) for name in hidden)} == set(prefixes)
    assert all(name.startswith(prefixes) for name in hidden)


@pytest.mark.full
def test_what_alerts_need_of_gangs_that_fail_or_do_not_start(
    http: httpx.Client, api: RunningApi, store: JobStore
) -> None:
    spec = a_spec(fault_tolerance={"max_restarts": 7, "restart_window_seconds": 60})
    job = store.create(spec, ROOT)
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    store.change(job.id, Reason.GANG_STARTING, "starting", attempt=1)
    time.sleep(0.05)
    store.change(job.id, Reason.GANG_STARTING, "waiting for the gang's supervisor to answer")
    assert Scrape(http).value("boost_job_starting_seconds") >= 0.05, "from the first of these on"
    store.change(job.id, Reason.GANG_LOST, "gone")
    assert Scrape(http).find("boost_job_starting_seconds") == []
    assert Scrape(http).by("what", "boost_job_faults_total")["gang_lost"] == 1
    start(store, job.id)
    long_ago = datetime.now(UTC) - timedelta(seconds=90)
    restarts = [a_restart(), a_restart(cause=Cause.NODE_LOST), a_restart(cause=Cause.NODE_JOINED), a_restart()]
    old, *recent = numbered(*restarts)
    store.append_reports(job.id, 1, [(old[0], long_ago, old[2]), *recent])
    found = Scrape(http)
    assert found.by("kind", "boost_job_recent_restarts") == {"fault": 1, "node_lost": 1}
    assert found.by("kind", "boost_job_recent_restarts_limit") == {"fault": 7, "node_lost": 10}
    store.append_reports(job.id, 1, numbered(a_checkpoint(), first=5))
    assert Scrape(http).by("kind", "boost_job_recent_restarts") == {"fault": 1, "node_lost": 0}, "it made progress"
    assert found.find("boost_job_failed_timestamp_seconds") == []
    store.change(job.id, Reason.TRAINING_FAILED, "no more")
    failed = {"job_id": job.id, "job_name": "tiny", "tenant": "default", "reason": "TRAINING_FAILED"}
    assert abs(Scrape(http).value("boost_job_failed_timestamp_seconds", **failed) - time.time()) < 30
    theirs = store.create(a_spec(), "/c", Owner("other", "bob"))
    start(store, theirs.id)
    store.change(theirs.id, Reason.TRAINING_FAILED, "no more")
    assert [each.id for each in store.failed_since(long_ago, 1)] == [theirs.id]
    assert [each.id for each in store.failed_since(long_ago, 1, "default")] == [job.id], "others crowd nobody out"
    with store.engine.begin() as connection:
        connection.execute(update(JobRow).values(finished_at=datetime.now(UTC) - timedelta(hours=2)))
    assert Scrape(http).find("boost_job_failed_timestamp_seconds") == []


def test_metrics_are_there_while_ray_is_away(http: httpx.Client, api: RunningApi, store: JobStore) -> None:
    api.outlook = Outlook(problem="Ray cannot be reached")
    store.create(a_spec(), ROOT)
    assert http.get("/readyz").status_code == 503
    assert Scrape(http).value("boost_jobs", state="QUEUED") == 1


@pytest.mark.full
@pytest.mark.parametrize("database", ["postgresql"])
def test_without_its_database_the_service_says_so(http: httpx.Client, postgres: PostgresServer) -> None:
    Scrape(http)
    postgres.stop()
    try:
        answer = http.get("/metrics")
    finally:
        postgres.start()
    assert (answer.status_code, answer.json()["code"]) == (503, "database-unavailable")
    assert Scrape(http).value("boost_http_requests_total", route="/metrics", status="503") == 1


# The format


@pytest.mark.full
def test_what_is_exported_follows_the_conventions(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_shape(), a_step(1), a_checkpoint(1), an_evaluation(1)))
    show_nodes(store)
    http.get("/v1/jobs")
    scrape = Scrape(http)
    assert all(family.documentation for family in scrape.families)
    checked = subprocess.run(["promtool", "check", "metrics"], input=scrape.text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert not [sample.name for sample in scrape.samples() if sample.name.endswith("_created")]
    newer = http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert newer.headers["content-type"].startswith("application/openmetrics-text")
    assert "# UNIT boost_job_step_seconds seconds" in newer.text
    assert newer.text.endswith("# EOF\n")
