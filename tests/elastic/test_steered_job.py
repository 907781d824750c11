"""A job of the real service that is changed while it trains, on real Ray nodes."""

from pathlib import Path

import pytest

from tests.elastic.curve import replayed
from tests.elastic.ray_cluster import Job, elastic_job, world
from tests.jobs import write_corpus
from tests.ranks import Ranks

pytestmark = pytest.mark.nightly


def test_a_job_of_the_service_is_steered_through_its_death_and_that_of_a_worker(ranks: Ranks, tmp_path: Path) -> None:
    spec = elastic_job(write_corpus(tmp_path / "corpus"), (1, 1))
    with world(tmp_path, nodes=1) as (_, service):
        running = Job(service, spec)
        running.trains(1)
        service.client.patch(running.id, {"optimizer": {"learning_rate": 1e-3}, "training": {"steps": 50_000}})
        service.kill()
        service.start()
        service.wait()
        running.until(lambda: running.of("steered"), "steered")
        (steered,) = running.of("steered")
        running.until(lambda: running.step >= steered["step"] + 2, "goes on")
        running.processes()[1].kill()
        running.until(lambda: running.of("restart"), "a restart after a killed worker")
        running.trains(1)
        service.client.patch(running.id, {"optimizer": {"schedule": "constant"}})
        running.until(lambda: len(running.of("steered")) == 2, "steered again")
        running.until(lambda: running.step >= running.of("steered")[1]["step"] + 2, "goes on again")
        service.client.cancel(running.id)
        running.until(lambda: running.record.finished, "cancelled")
        record = running.record
    assert [stage.until_step for stage in record.spec.steered] == [each["step"] for each in running.of("steered")]
    rates = {each["step"]: each["learning_rate"] for each in running.of("progress")}
    last = max(rates)
    assert (rates[last], record.spec.optimizer.schedule, record.steers) == (1e-3, "constant", [])
    losses_of_job = running.losses()
    assert sorted(losses_of_job) == list(range(1, last + 1))
    expected = replayed(ranks, record.spec, running.layouts(), tmp_path / "replay")
    assert expected == [losses_of_job[step] for step in sorted(losses_of_job)]
