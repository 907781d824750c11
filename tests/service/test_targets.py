"""Prometheus' service discovery over the API."""

from boost_core.messages import ShapeReport
from service.jobs.model import Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from tests.service.conftest import With
from tests.service.records import a_spec, finish, numbered, start

TARGETS = "/v1/metrics/targets"


def a_running_job(store: JobStore, tenant: str, host: str) -> str:
    job_id = store.create(a_spec(name=f"job of {tenant}"), "file:///checkpoints", Owner(tenant, "ci")).id
    start(store, job_id)
    shape = ShapeReport(
        tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, nodes=["node-a", "node-a"],
        metrics_endpoints=[f"{host}:9400", f"{host}:9401"],
    )  # fmt: skip
    store.append_reports(job_id, 1, numbered(shape))
    return job_id


def test_targets_are_what_prometheus_reads(client_with: With, store: JobStore) -> None:
    job_id = a_running_job(store, "lab", "10.0.0.5")
    answer = client_with(Scope.READ, tenant="lab").get(TARGETS)
    assert answer.headers["content-type"] == "application/json"
    labels = {
        "job_id": job_id, "job_name": "job of lab", "tenant": "lab", "pipeline_parallel_rank": "0",
        "data_parallel_rank": "0", "context_parallel_rank": "0", "node": "node-a",
    }  # fmt: skip
    assert answer.json() == [
        {
            "targets": [f"10.0.0.5:{9400 + rank}"],
            "labels": labels | {"rank": f"{rank}", "tensor_parallel_rank": f"{rank}"},
        }
        for rank in range(2)
    ]


def test_targets_are_of_the_tenants_own_jobs_and_an_operator_sees_all(client_with: With, store: JobStore) -> None:
    for tenant, host in (("lab", "10.0.0.5"), ("birds", "10.0.0.6")):
        a_running_job(store, tenant, host)
    seen = {
        tenant: {group["labels"]["tenant"] for group in client_with(scope, tenant=tenant).get(TARGETS).json()}
        for scope, tenant in ((Scope.READ, "lab"), (Scope.READ, "birds"), (Scope.READ, "fish"), (Scope.ADMIN, "ops"))
    }
    assert seen == {"lab": {"lab"}, "birds": {"birds"}, "fish": set(), "ops": {"lab", "birds"}}


def test_an_ended_jobs_ranks_are_no_targets(client_with: With, store: JobStore) -> None:
    http = client_with(Scope.ADMIN)
    job_id = a_running_job(store, "lab", "10.0.0.5")
    assert len(http.get(TARGETS).json()) == 2
    finish(store, job_id)
    assert http.get(TARGETS).json() == []
