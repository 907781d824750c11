"""One job through everything that can happen to a gang, on real Ray nodes behind the real service."""

import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from boost_core.config import JobSpec, Layout
from boost_core.optim.build import COMPUTE_TYPES
from tests.elastic.curve import TENSOR, Story, live_through_it, replayed, trained_on
from tests.elastic.ray_cluster import Job, Nodes, Service, elastic_job, world
from tests.jobs import write_corpus
from tests.ranks import Ranks

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    return elastic_job(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus"))


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, spec: JobSpec) -> Iterator[tuple[Nodes, Service, Job, Story]]:
    with world(tmp_path_factory.mktemp("world"), nodes=3) as (nodes, service):
        job, story = live_through_it(nodes, service, spec)
        yield nodes, service, job, story


@pytest.fixture(scope="module")
def story(lived: tuple[Nodes, Service, Job, Story]) -> Story:
    return lived[3]


def in_float64(spec: JobSpec, steps: int) -> list[float]:
    with patch.dict(COMPUTE_TYPES, {spec.training.precision: torch.float64}):
        return trained_on(spec, steps)


def test_the_gang_goes_on_when_the_service_is_killed_and_is_adopted_by_the_next(
    lived: tuple[Nodes, Service, Job, Story],
) -> None:
    _, service, job, _ = lived
    processes, step = job.processes(), job.step
    service.kill()
    time.sleep(3)
    service.start()
    service.wait()
    job.until(lambda: job.step >= step + 20, "goes on")
    assert job.record.attempt == 2  # one before it was paused, one since
    assert job.processes().items() == processes.items()
    assert all(process.is_running() for process in processes.values())


def test_a_cancelled_job_leaves_nothing(lived: tuple[Nodes, Service, Job, Story]) -> None:
    nodes, service, job, _ = lived
    processes, began = job.processes(), time.monotonic()
    service.client.cancel(job.id)
    while nodes.taken() or any(process.is_running() for process in processes.values()):
        assert time.monotonic() < began + 60, nodes.taken()
        time.sleep(0.05)
    job.until(lambda: job.record.finished, "cancelled")


def test_each_interruption_has_its_cause_and_planned_ones_lose_no_step(
    lived: tuple[Nodes, Service, Job, Story],
) -> None:
    _, _, job, _ = lived
    restarts = job.of("restart")
    causes = [restart["cause"] for restart in restarts]
    # Whether a node that joins replaces one that was lost, or is more room, depends on how soon it comes.
    assert {"WORKER_LOST", "WORKER_BACK", "NODE_LOST", "NODE_DRAINED", "LIMITS_CHANGED"} <= set(causes), causes
    for restart in restarts:
        assert restart["recovered_from"] == "memory", restart
        lost = restart["step"] - restart["resumed_step"]
        assert lost == 0 if restart["cause"] not in ("WORKER_LOST", "NODE_LOST") else 0 <= lost <= 10, restart
        assert sum(restart["parts"].values()) == pytest.approx(restart["seconds"])
    assert "PAUSED" in [event["cause"] for event in job.of("interruption")]


def test_every_second_of_its_life_is_booked(lived: tuple[Nodes, Service, Job, Story]) -> None:
    record = lived[2].record
    assert record.finished_at is not None
    assert record.goodput.total == record.finished_at - record.submitted_at
    assert record.goodput.productive > 0
    assert record.goodput.restart > 0


def test_no_sample_is_repeated_or_skipped(story: Story) -> None:
    steps = sorted(story.losses)
    assert steps == list(range(1, steps[-1] + 1))
    a_step = story.spec.training.global_batch_size * story.spec.training.sequence_length
    assert [story.tokens[step] for step in steps] == [step * a_step for step in steps]


def test_every_loss_is_bit_equal_to_that_without_a_fault_at_the_same_shapes(
    ranks: Ranks, story: Story, tmp_path: Path
) -> None:
    assert len(set(story.layouts.values())) == 3
    assert replayed(ranks, story.spec, story.layouts, tmp_path / "replay") == list(story.losses.values())


def test_every_loss_is_within_rounding_of_the_uninterrupted_run(ranks: Ranks, story: Story, tmp_path: Path) -> None:
    # As far as the first forty steps at another shape: the test above replays all of them.
    first = story.layouts[1]
    changed = next(step for step, layout in story.layouts.items() if layout != first)
    count = min(changed + 39, len(story.losses))  # a slow machine may not get so far
    assert count > changed + 20
    steps = range(1, count + 1)
    steady = {
        data: replayed(ranks, story.spec, dict.fromkeys(steps, Layout(TENSOR, 1, data)), tmp_path / f"steady-{data}")
        for data in (1, 3)
    }
    folder = {"url": str(tmp_path / "exact"), "every_steps": 10**6}
    exact_spec = JobSpec.model_validate(story.spec.model_dump() | {"checkpoint": folder})
    exact = ranks.run(TENSOR, in_float64, exact_spec, count)[0]
    # What fp32 itself is off from float64 by then, at the worse of the smallest and the largest shape; a mixture may be
    # off by as much on the other side.
    off = [max(abs(steady[data][step] - exact[step]) for data in steady) for step in range(count)]
    so_far = [max(off[: step + 1]) for step in range(count)]
    for step, loss, bound in zip(steps, steady[1], so_far, strict=True):
        assert abs(story.losses[step] - loss) <= 2 * bound + 1e-12, (step, story.losses[step], loss, bound)
    assert so_far[-1] < 0.01
    assert steady[1] != steady[3]
