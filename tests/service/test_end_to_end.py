"""The whole service as a process of its own: HTTP in front, a real Ray behind."""

import gzip
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from service.client import Client
from service.jobs.model import JobEvent, JobRecord
from service.jobs.states import JobState
from service.models.datasets import DatasetState
from tests.jobs import tiny_job, write_corpus
from tests.processes import name_of
from tests.service.serving import BOOST, Server, short_folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with short_folder() as folder:  # Ray puts sockets there
        server = Server(tmp_path_factory.mktemp("service") / "home", BOOST_AUTH="false", TMPDIR=folder)
        yield server
        server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as opened:
        server.until(lambda: (answer := server.answers("/healthz")) and answer.is_success)
        yield opened


@pytest.fixture
def submit(client: Client, tmp_path: Path) -> Callable[[int], JobRecord]:
    corpus = write_corpus(tmp_path / "corpus")
    return lambda steps: client.submit(
        tiny_job(corpus, tmp_path / "checkpoints", training={"steps": steps}, checkpoint={"every_steps": 10})
    )


def progress(client: Client, job: JobRecord) -> int:
    newest = client.get(job.id).progress
    return newest.step if newest else 0


def steps_in_tensorboard(server: Server, client: Client, job: JobRecord) -> list[int]:
    server.until(lambda: all(tracker.behind == 0 for tracker in client.trackers(job.id).trackers))
    curves = EventAccumulator(f"{job.checkpoint_url}/tensorboard", size_guidance={"scalars": 0})
    curves.Reload()
    return [point.step for point in curves.Scalars("train/loss")]


@pytest.mark.nightly
def test_answers_before_ray_is_up(server: Server, client: Client) -> None:
    early = server.answers("/readyz")
    assert early is not None
    if not early.is_success:  # Ray may have been quick
        assert (early.status_code, early.json()["detail"]) == (503, "Ray is starting")
    server.until(lambda: server.answers("/readyz").is_success)


def workers_of(server: Server) -> list[psutil.Process]:
    return server.running("RankWorker")


def test_a_job_from_post_to_checkpoint_loses_a_worker_on_the_way(
    server: Server, client: Client, submit: Callable[[int], JobRecord], tmp_path: Path
) -> None:
    job = submit(100)
    events: list[JobEvent] = []
    metrics = ""
    for event in client.events(job.id):
        events.append(event)
        if event.kind == "progress" and event.data["step"] > 10 and not metrics:  # long RUNNING, not just told so
            metrics = server.answers("/metrics").text
        steps = [event.data["step"] for event in events if event.kind == "progress"]
        if event.kind == "progress" and steps.count(15) == 1 and steps[-1] == 15:  # which is trained again after it
            workers_of(server)[0].kill()
    job = client.get(job.id)
    assert (job.state, job.message) == (JobState.SUCCEEDED, "trained up to step 100")
    assert {event.data["step"] for event in events if event.kind == "progress"} == set(range(1, 101))
    (restart,) = [event.data for event in events if event.kind == "restart"]
    assert restart["cause"] == "WORKER_LOST"
    assert restart["resumed_step"] >= 10, "from its peer's memory or the last checkpoint"
    states = [event.data["state"] for event in events if event.kind == "state"]
    assert list(dict.fromkeys(states)) == ["QUEUED", "SCHEDULING", "RUNNING", "SUCCEEDED"]
    assert job.checkpoint.step == 100
    assert (tmp_path / "checkpoints" / job.id / "step-00000100").is_dir()
    assert steps_in_tensorboard(server, client, job) == [*range(1, 101)], "each once"
    assert any(
        line.startswith("boost_job_workers{") and job.id in line and line.endswith(" 2.0")
        for line in metrics.splitlines()
    )


@pytest.mark.nightly
def test_a_profile_over_http(
    server: Server, client: Client, submit: Callable[[int], JobRecord], tmp_path: Path
) -> None:
    job = submit(1_000_000)
    server.until(lambda: progress(client, job) > 5)
    client.profile(job.id, {"steps": 3, "ranks": [0, 1]})
    traces = {event.data["rank"]: event.data for event in islice(client.events(job.id, kinds=["profile"]), 2)}
    for rank in (0, 1):
        first = traces[rank]["step"]
        file = tmp_path / "checkpoints" / job.id / "profiles" / f"step-{first:08}" / f"rank-{rank}.json.gz"
        assert (traces[rank]["url"], traces[rank]["bytes"]) == (str(file), file.stat().st_size)
        trace = json.loads(gzip.decompress(file.read_bytes()))
        spans = Counter(event["name"] for event in trace["traceEvents"] if event.get("ph") == "X")
        assert {name: spans[name] for name in ("data", "forward", "backward", "optimizer")} == {
            # Of two micro-batches a step, whose gradients are brought together before the update.
            "data": 3, "forward": 6, "backward": 6, "optimizer": 6,
        }  # fmt: skip
        assert all(spans[f"ProfilerStep#{first + number}"] == 1 for number in (1, 2, 3))
        assert spans["gloo:all_reduce"] > 0
        assert trace["distributedInfo"]["rank"] == rank
    step = progress(client, job)
    server.until(lambda: progress(client, job) > step)
    found = list(client.events(job.id, follow=False, kinds=["fault", "interruption"]))
    assert {event.data.get("what") for event in found} <= {"slow_rank"}  # what a rank is while it is traced
    steps = [checkpoint.step for checkpoint in client.checkpoints(job.id).checkpoints]
    assert steps and all(step % 10 == 0 for step in steps)
    client.cancel(job.id)
    server.until(lambda: client.get(job.id).state is JobState.CANCELLED)


@pytest.mark.nightly
def test_cancel_over_http(server: Server, client: Client, submit: Callable[[int], JobRecord]) -> None:
    job = submit(1_000_000)
    server.until(lambda: progress(client, job) > 5)
    workers = workers_of(server)
    assert len(workers) == 2
    client.cancel(job.id)
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    server.until(lambda: client.get(job.id).state is JobState.CANCELLED)


@pytest.mark.nightly
def test_a_killed_server_takes_its_jobs_up_again(
    server: Server, client: Client, submit: Callable[[int], JobRecord]
) -> None:
    job = submit(60)
    server.until(lambda: (newest := client.get(job.id).checkpoint) and newest.step >= 10)
    server.end(signal.SIGKILL)
    server.start()
    server.until(lambda: server.answers("/healthz"))
    server.until(lambda: client.get(job.id).finished)
    job = client.get(job.id)
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)
    resumed = [event for event in client.events(job.id) if event.kind == "started"][-1]
    assert resumed.data["step"] >= 10
    assert job.progress.step == 60
    assert steps_in_tensorboard(server, client, job) == [*range(1, 61)], "each once"


@pytest.mark.nightly
def test_an_embedded_ray_whose_raylet_dies_is_started_anew(
    server: Server, client: Client, submit: Callable[[int], JobRecord]
) -> None:
    job = submit(60)
    server.until(lambda: (newest := client.get(job.id).checkpoint) and newest.step >= 10)
    folder = max(rays_folders(server), key=lambda folder: folder.stat().st_mtime)  # a killed service leaves its own
    started = {process: name_of(process) for process in server.tree()}
    next(process for process, name in started.items() if name == "raylet").kill()
    server.until(lambda: not server.answers("/readyz").is_success)
    assert server.answers("/readyz").json()["detail"] == "Ray cannot be reached: the embedded Ray's raylet has ended"
    server.until(lambda: server.answers("/readyz").is_success)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive, "nothing is left of the Ray that died"
    assert folder not in rays_folders(server)
    server.until(lambda: client.get(job.id).finished)
    job = client.get(job.id)
    assert (job.state, job.progress.step) == (JobState.SUCCEEDED, 60)
    resumed = [event for event in client.events(job.id) if event.kind == "started"][-1]
    assert resumed.data["step"] >= 10


def rays_folders(server: Server) -> list[Path]:
    return list(Path(server.environment["TMPDIR"]).glob("boost-ray.*"))


@pytest.mark.full
def test_a_port_in_use_gives_one_line(server: Server, client: Client) -> None:
    done = subprocess.run([BOOST, "serve"], env=server.environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"cannot listen on 127.0.0.1:{server.port}: Address already in use")
    assert line.endswith("; stop what uses it or set BOOST_PORT to another port")


@pytest.mark.nightly
def test_a_job_trains_on_a_dataset_that_the_service_has_made(server: Server, client: Client, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "6.txt").write_bytes((tmp_path / "corpus" / "5.txt").read_bytes())
    source = {"kind": "text", "paths": [str(corpus)]}
    client.create_dataset({"name": "corpus-v3", "source": source, "exact_dedup": True, "validation_fraction": 0.3})
    server.until(lambda: client.dataset("corpus-v3").state != DatasetState.BUILDING)
    dataset = client.dataset("corpus-v3")
    assert (dataset.state, dataset.message) == (DatasetState.READY, "holds 6 documents")
    assert (dataset.counts["exact_duplicates"], dataset.progress.stage) == (1, "done")
    job = client.submit(tiny_job(corpus, tmp_path / "checkpoints", data={"source": None, "dataset": "corpus-v3"}))
    server.until(lambda: client.get(job.id).finished)
    job = client.get(job.id)
    assert (job.state, job.spec.data.source.paths) == (JobState.SUCCEEDED, (dataset.url,))
