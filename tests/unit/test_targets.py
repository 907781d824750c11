"""Where Prometheus finds ranks, and the place of a rank in its gang."""

from itertools import product

import pytest

from boost_core.config import Shape
from boost_core.config.reports import ShapeReport
from service.jobs.states import JobState
from service.telemetry.targets import targets
from tests.service.canned import a_record
from tests.service.records import a_shape


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), Shape(2, 1, 3), Shape(2, 3, 4)], ids=str)
def test_ranks_are_counted_as_the_mesh_lays_them_out(shape: Shape) -> None:
    laid_out = product(range(shape.data), range(shape.pipeline), range(shape.tensor))
    assert [shape.place(rank) for rank in range(shape.world_size)] == [(tp, pp, dp) for dp, pp, tp in laid_out]


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
            "pipeline_parallel_rank": "1", "data_parallel_rank": "1", "node": "node-b",
        },
    }  # fmt: skip


def test_a_rank_without_an_endpoint_is_left_out() -> None:
    job = a_record(JobState.RUNNING, shape=a_gang([None] * 7 + ["10.0.0.6:9400"]))
    assert [group.labels.rank for group in targets([job])] == ["7"]


@pytest.mark.parametrize("state", set(JobState) - {JobState.RUNNING})
def test_only_running_jobs_have_targets(state: JobState) -> None:
    assert targets([a_record(state, shape=a_gang(["10.0.0.6:9400"] * 8))]) == []


def test_a_record_of_old_knows_no_endpoints() -> None:
    assert targets([a_record(JobState.RUNNING, shape=a_shape()), a_record(JobState.RUNNING)]) == []
