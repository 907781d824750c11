"""Plans by the service: its price of a GPU-hour, and what it has measured of the checkpoints' store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boost_core.messages import CheckpointReport
from boost_core.plan.run_cost import RunConditions
from boost_core.plan.search import PlanSearch
from service.client import ApiError, Client
from service.jobs.store import JobStore
from service.settings import Settings
from tests.service.conftest import RunningApi
from tests.service.records import a_spec, numbered, start

GIB = 1 << 30
ON_GPUS: dict[str, Any] = {
    "name": "priced", "model": {"preset": "tiny"}, "parallelism": {"tensor_parallel_size": 2},
    "training": {"steps": 1000, "sequence_length": 128, "global_batch_size": 16, "micro_batch_size": 2},
    "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"}, "checkpoint": {"url": "s3://bucket/mine"},
}  # fmt: skip


def save(store: JobStore, folder: str, size: int, seconds: float) -> None:
    """Record a job whose newest checkpoint took this long to write."""
    job = store.create(a_spec(checkpoint={"url": folder}), folder)
    start(store, job.id)
    report = CheckpointReport(step=1, url=f"{folder}/step-1", bytes=size, seconds=0.1, commit_seconds=seconds)
    store.append_reports(job.id, 1, numbered(report))


def test_the_largest_of_the_newest_checkpoints_tells_a_stores_bandwidth(store: JobStore) -> None:
    tenant = store.create(a_spec(), "/ckpt").tenant
    save(store, "s3://bucket/some", GIB // 8, 5.0)
    assert store.checkpoint_bandwidth(tenant, "s3://bucket/other") is None, "too small to tell it from latency"
    save(store, "s3://bucket/some", 8 * GIB, 4.0)
    save(store, "s3://bucket/some", 2 * GIB, 4.0)
    save(store, "file:///disk", 4 * GIB, 8.0)
    assert store.checkpoint_bandwidth(tenant, "s3://bucket/other") == 2 * GIB
    assert store.checkpoint_bandwidth(tenant, "/disk/other") == GIB / 2
    assert store.checkpoint_bandwidth(tenant, "s3://elsewhere") is None
    assert store.checkpoint_bandwidth("another", "s3://bucket/other") is None


@pytest.fixture
def priced(store: JobStore, database_url: str, tmp_path: Path) -> Iterator[Client]:
    settings = Settings(home=tmp_path / "home", database_url=database_url, auth=False, gpu_hour_price=2.5)
    running = RunningApi(store, settings)
    with Client(running.url) as client:
        yield client
    running.stop()


def test_plans_have_the_operators_price_and_the_measured_bandwidth(priced: Client, store: JobStore) -> None:
    assumed = priced.plan(ON_GPUS).shapes[0]
    assert assumed.checkpoint is not None
    assert assumed.checkpoint.gigabytes_per_second == pytest.approx(0.98, rel=0.01)
    save(store, "s3://bucket/some", 8 * GIB, 4.0)
    planned = priced.plan(ON_GPUS, PlanSearch(gpus=2))
    assert planned.search is not None
    for run in (
        planned.shapes[0],
        planned.search.choices[0],
        priced.dry_run(ON_GPUS | {"resources": {}}).plan.shapes[0],
    ):
        assert run.checkpoint is not None
        assert run.checkpoint.gigabytes_per_second == pytest.approx(2 * GIB / 1e9)
        assert run.price == pytest.approx(2.5 * run.gpu_hours)
    # What the request says comes first.
    asked = RunConditions(gpu_hour_price=4, mtbf_hours=10, store_gigabytes_per_second=0.5)
    own = priced.plan(ON_GPUS, conditions=asked).shapes[0]
    assert own.checkpoint is not None
    assert own.goodput is not None
    assert own.price == pytest.approx(4 * own.gpu_hours)
    assert own.checkpoint.gigabytes_per_second == 0.5
    assert own.goodput.hours_between_failures == pytest.approx(5)
    assert any(line.endswith("4 a GPU-hour, at most " + line.rpartition("at most ")[2]) for line in own.words)


def test_a_layout_that_submissions_are_refused_for_has_no_plan(priced: Client) -> None:
    training = ON_GPUS["training"] | {"sequence_length": 127}
    odd = ON_GPUS | {"model": {"preset": "tiny", "family": "dense"}, "training": training}
    for refused in (priced.plan, priced.dry_run):
        with pytest.raises(ApiError, match="2 does not divide the 127 tokens of a sequence on a rank"):
            refused(odd)
