"""A sweep on the real service, which is killed, and loses workers, while it goes on."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boost_core.config import JobSpec
from boost_core.messages import Report, StepReport
from boost_core.train import train
from service.client import Client
from service.jobs.model import JobRecord, Owner
from service.jobs.states import JobState
from service.models.sweeps import SweepRequest, SweepState, TrialState
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.service.serving import Server, short_folder
from tests.service.test_sweeps import Lab

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

TRIALS = 24
# After so many trials have begun.
FAULTS = {6: "kill the service", 9: "kill the workers", 12: "kill the service", 18: "kill the service"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks()
    yield pool
    pool.close()


def sweep(folder: Path) -> dict[str, Any]:
    job = tiny_job(
        folder / "corpus", folder / "checkpoints", parallelism={"tensor_parallel_size": 1},
        training={"steps": 18, "evaluate_every_steps": 18}, checkpoint={"every_steps": 18},
        resources={"cpus_per_worker": 0.5},
    )  # fmt: skip
    return {
        "name": "rates",
        "job": job.as_written(),
        "space": {"optimizer.learning_rate": {"log_uniform": [1e-4, 1.0]}, "model.rank": {"choices": [4, 8, 16]}},
        "search": "tpe",
        "seed": 7,
        "budget": {"trials": TRIALS},
        "parallel": 4,
        "stop_early": {"kind": "successive_halving", "first_step": 2},
    }


def losses(spec: JobSpec) -> list[float]:
    """The losses of a job that trains in this process, from its first step to its last."""
    reported: list[float] = []

    class Losses:
        def report(self, report: Report) -> None:
            if isinstance(report, StepReport):
                reported.append(report.loss)

    train(spec, Losses())
    return reported


def undisturbed(folder: Path, ranks: Ranks, file: Path) -> list[dict[str, Any]]:
    """What the same sweep chooses with jobs that train without Ray, one after the other."""
    curves: dict[str, list[float]] = {}

    def loss(job: JobRecord, step: int) -> float:
        if job.name not in curves:
            spec = job.spec.model_copy(
                update={"checkpoint": job.spec.checkpoint.model_copy(update={"url": str(folder / "alone" / job.name)})}
            )
            (curves[job.name],) = ranks.run(1, losses, spec)
        return curves[job.name][step - 1]

    shutil.copyfile(file, folder / "undisturbed.db")
    lab = Lab(f"sqlite:///{folder}/undisturbed.db", loss)
    lab.sweeps.create(SweepRequest.model_validate(sweep(folder)), Owner())
    lab.run()
    return lab.choices()


def test_a_sweep_chooses_the_same_through_restarts_and_killed_workers(
    tmp_path: Path, ranks: Ranks, migrated_file: Path
) -> None:
    write_corpus(tmp_path / "corpus")
    expected = undisturbed(tmp_path, ranks, migrated_file)
    assert {trial["state"] for trial in expected} >= {TrialState.COMPLETE, TrialState.PRUNED}
    with short_folder() as folder:  # Ray puts sockets there
        server = Server(tmp_path / "home", BOOST_AUTH="false", TMPDIR=folder)
        try:
            with Client(server.url, retry_seconds=120) as client:
                client.create_sweep(sweep(tmp_path))
                for begun, fault in FAULTS.items():
                    server.until(lambda begun=begun: len(client.sweep_trials("rates").trials) >= begun, 900)
                    if fault == "kill the service":
                        server.end(signal.SIGKILL)
                        server.start()
                        continue
                    server.until(lambda: server.running("RankWorker"))
                    for worker in server.running("RankWorker"):
                        worker.kill()
                server.until(lambda: client.sweep("rates").state is not SweepState.RUNNING, 900)

                assert client.sweep("rates").state is SweepState.FINISHED
                trials = client.sweep_trials("rates").trials
                assert [trial.model_dump(exclude={"job_id"}) for trial in trials] == expected
                jobs = client.list(group="rates", limit=100).jobs
                assert sorted(job.name for job in jobs) == sorted(f"rates-{number}" for number in range(TRIALS))
                assert all(job.finished for job in jobs)
                assert any(job.restart_counts or job.attempt > 1 for job in jobs)
                best = client.sweep("rates").best
                continued = client.clone(best.job_id, {"training": {"steps": 24}}, from_checkpoint=True)
                server.until(lambda: client.get(continued.id).finished)
                assert client.get(continued.id).state is JobState.SUCCEEDED
        finally:
            server.end(signal.SIGTERM)
