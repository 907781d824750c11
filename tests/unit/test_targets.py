"""Where Prometheus finds ranks, and the place of a rank in its gang."""

from datetime import UTC, datetime

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.config import Layout, ParallelismConfig
from boost_core.messages import ShapeReport
from boost_core.parallel.mesh import ParallelMesh
from service.jobs.outlook import cpus_without_rank
from service.jobs.states import JobState, Reason
from service.telemetry.exporter import targets
from service.telemetry.jobs import OF_STARTED, Seen, families
from tests.service.canned import a_record
from tests.service.records import a_shape, a_spec


@pytest.mark.parametrize("layout", [Layout(2, 3, 2), Layout(2, 1, 2, cp=3)], ids=str)
@pytest.mark.parametrize("rank", range(12))
def test_a_ranks_place_is_the_meshs(rank: int, layout: Layout) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        mesh = ParallelMesh.build(ParallelismConfig().at(layout), torch.device("cpu")).mesh
        context = mesh["cp"].get_local_rank() if layout.cp > 1 else 0
        tensor, pipeline, replica = (mesh[along].get_local_rank() for along in ("tp", "pp", "dp"))
        assert layout.coordinates(rank) == Layout(tensor, pipeline, replica, context)
    finally:
        dist.destroy_process_group()


def a_gang(endpoints: list[str | None]) -> ShapeReport:
    nodes = ["node-a"] * 4 + ["node-b"] * 4
    return ShapeReport(
        tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2, nodes=nodes, metrics_endpoints=endpoints
    )


def test_a_rank_is_labelled_with_its_job_and_its_place() -> None:
    job = a_record(JobState.RUNNING, shape=a_gang([f"10.0.0.{5 + rank // 4}:{9400 + rank % 4}" for rank in range(8)]))
    groups = [group.model_dump() for group in targets([job])]
    assert len(groups) == 8
    assert groups[6] == {
        "targets": ["10.0.0.6:9402"],
        "labels": {
            "job_id": "job-1", "job_name": "tiny", "tenant": "acme", "rank": "6", "tensor_parallel_rank": "0",
            "pipeline_parallel_rank": "1", "data_parallel_rank": "1", "context_parallel_rank": "0",
            "node": "node-b",
        },
    }  # fmt: skip


def test_a_rank_without_an_endpoint_is_left_out() -> None:
    job = a_record(JobState.RUNNING, shape=a_gang([None] * 7 + ["10.0.0.6:9400"]))
    assert [group.labels.rank for group in targets([job])] == ["7"]


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.RUNNING}))
def test_only_running_jobs_have_targets(state: JobState) -> None:
    assert targets([a_record(state, shape=a_gang(["10.0.0.6:9400"] * 8))]) == []


@pytest.mark.parametrize(("reason", "ranks"), [(Reason.GANG_RECOVERING, 8), (Reason.WAITING_FOR_RESOURCES, 0)])
def test_a_gang_that_waits_without_workers_has_neither_targets_nor_gpus(reason: Reason, ranks: int) -> None:
    """One that recovers may have most of its workers still."""
    spec, shape = a_spec(resources={"gpus_per_worker": 1}), a_gang(["10.0.0.6:9400"] * 8)
    job = a_record(JobState.RUNNING, reason=reason, spec=spec, shape=shape, attempt=1)
    (workers,) = (each for each in OF_STARTED if each.name == "boost_job_workers")
    ((_, shown),) = next(families([workers], [(("job-1", "tiny", "acme"), Seen(job, datetime.now(UTC)))])).rows
    cpus = cpus_without_rank("node-a", {"CPU": 8.0}, {"CPU": 0.0}, [job])
    assert (len(targets([job])), shown, job.allocated.get("GPU", 0), 8 - cpus) == (ranks, ranks, ranks, ranks / 2)


def test_a_record_of_old_knows_no_endpoints() -> None:
    assert targets([a_record(JobState.RUNNING, shape=a_shape()), a_record(JobState.RUNNING)]) == []
