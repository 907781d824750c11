"""A sweep on the real service, which is killed, and loses a worker, while it goes on."""

import signal
from pathlib import Path
from typing import Any

import pytest

from service.client import Client
from service.jobs.states import JobState
from service.models.sweeps import SweepState
from tests.jobs import tiny_job, write_corpus
from tests.service.serving import Server, short_folder

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

TRIALS = 24
RESTARTS = (6, 12, 18)  # after so many trials have begun


def sweep(name: str, folder: Path) -> dict[str, Any]:
    job = tiny_job(
        folder / "corpus", folder / "checkpoints", parallelism={"tensor_parallel_size": 1},
        training={"steps": 18, "evaluate_every_steps": 18}, checkpoint={"every_steps": 18},
        resources={"cpus_per_worker": 0.5},
    )  # fmt: skip
    return {
        "name": name,
        "job": job.as_written(),
        "space": {"optimizer.learning_rate": {"log_uniform": [1e-4, 1.0]}, "model.rank": {"choices": [4, 8, 16]}},
        "search": "tpe",
        "seed": 7,
        "budget": {"trials": TRIALS},
        "parallel": 4,
        "stop_early": {"kind": "successive_halving", "first_step": 2},
    }


def choices(client: Client, name: str) -> list[dict[str, Any]]:
    return [trial.model_dump(exclude={"job_id"}) for trial in client.sweep_trials(name).trials]


def test_a_sweep_chooses_the_same_through_restarts_and_a_killed_worker(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    with short_folder() as folder:  # Ray puts sockets there
        server = Server(tmp_path / "home", BOOST_AUTH="false", TMPDIR=folder)
        try:
            with Client(server.url, retry_seconds=120) as client:
                client.create_sweep(sweep("calm", tmp_path))
                server.until(lambda: client.sweep("calm").state is not SweepState.RUNNING, 600)
                client.create_sweep(sweep("stormy", tmp_path))
                killed = False
                for begun in RESTARTS:
                    server.until(lambda begun=begun: len(client.sweep_trials("stormy").trials) >= begun, 600)
                    while not killed and client.sweep("stormy").state is SweepState.RUNNING:
                        for worker in server.running("RankWorker")[:1]:
                            worker.kill()
                            killed = True
                    server.end(signal.SIGKILL)
                    server.start()
                server.until(lambda: client.sweep("stormy").state is not SweepState.RUNNING, 600)

                assert killed and client.sweep("stormy").state is SweepState.FINISHED
                assert choices(client, "stormy") == choices(client, "calm")
                best = [client.sweep(name).best for name in ("calm", "stormy")]
                assert best[0].model_dump(exclude={"job_id"}) == best[1].model_dump(exclude={"job_id"})
                jobs = client.list(group="stormy", limit=100).jobs
                assert len(jobs) == TRIALS and all(job.finished for job in jobs)
                assert len({job.name for job in jobs}) == TRIALS
                assert any(job.restart_counts or job.attempt > 1 for job in jobs)
                continued = client.clone(best[1].job_id, {"training": {"steps": 24}}, from_checkpoint=True)
                server.until(lambda: client.get(continued.id).finished)
                assert client.get(continued.id).state is JobState.SUCCEEDED
        finally:
            server.end(signal.SIGTERM)
