"""A Ray whose GCS hangs or dies, embedded or joined: it is noticed, nothing is left of it, the next one is taken."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from ray.util import get_node_ip_address

from boost_core import __version__
from service.client import Client
from service.jobs.states import JobState
from tests.jobs import tiny_job, write_corpus
from tests.processes import name_of
from tests.service.conftest import free_port
from tests.service.serving import BOOST, PATIENCE_SECONDS, Server, command_line

pytestmark = pytest.mark.nightly
logger = logging.getLogger(__name__)

_PROGRAM = """
import sys
import time
from pathlib import Path
import psutil
from service.gang.ray.gangs import RayGangs

gangs = RayGangs(None, 1, Path(sys.argv[1]))
gangs.connect()
gangs.check()
folder, started = gangs._folder.path, psutil.Process().children(recursive=True)
next(process for process in started if process.name() == sys.argv[2]).kill()
time.sleep(1)
try:
    gangs.check()
except ConnectionError as error:
    print(error)
gangs.close()
_, alive = psutil.wait_procs(started, timeout=10)
print(alive, folder.exists())
gangs.connect()
gangs.check()
print(len(gangs.nodes()))
gangs.close()
"""

_STOPPED = """
import sys
import time
from pathlib import Path
import psutil
from service.gang.ray import private_api as ray_private
from service.gang.ray.gangs import RayGangs

gangs = RayGangs(None, 1, Path(sys.argv[1]))
gangs.connect()
ray_private.ANSWER_SECONDS = 0.5
calls = [gangs.check, gangs.nodes, gangs.alive, gangs.refused, lambda: gangs.request_nodes([])]
for call in calls:
    call()
gcs = next(process for process in psutil.Process().children(recursive=True) if process.name() == "gcs_server")
gcs.suspend()
while gcs.status() != psutil.STATUS_STOPPED:  # it may answer until all of its threads have stopped
    time.sleep(0.1)
time.sleep(0.5)
for call in calls:
    begun = time.monotonic()
    try:
        call()
    except ConnectionError as error:
        print(error, time.monotonic() - begun < 10)
gcs.resume()
gangs.check()
print(len(gangs.nodes()))
gangs.close()
"""


@pytest.mark.nightly
def test_a_gcs_that_hangs_is_waited_for_no_longer_than_it_may_take(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _STOPPED, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [*["Ray's head does not answer True"] * 5, "1"], done.stderr[-3000:]


def as_by_systemd(*command: object) -> list[str]:
    """A command that runs another one with process 1 as its parent, and with the pipes that it is given itself."""
    leave = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:]); os._exit(0)"
    return [sys.executable, "-c", leave, *map(str, command)]


@pytest.mark.parametrize(
    ("part", "name"), [("gcs_server", "GCS"), pytest.param("raylet", "raylet", marks=pytest.mark.nightly)]
)
def test_a_part_that_dies_is_noticed_and_nothing_is_left_of_its_ray(tmp_path: Path, part: str, name: str) -> None:
    assert len(str(tmp_path)) > 13, "a folder for temporary files in which Ray's sockets would have too long paths"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    program = as_by_systemd(sys.executable, "-c", _PROGRAM, tmp_path, part)
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, env=environment)
    assert done.stdout.splitlines() == [f"the embedded Ray's {name} has ended", "[] False", "1"], done.stderr[-3000:]


_JOINS = """
import sys
from pathlib import Path
from service.gang.ray.gangs import RayGangs

gangs = RayGangs(sys.argv[2], None, Path(sys.argv[1]))
for _ in "the first head", "the second":
    gangs.connect()
    gangs.check()
    print(len(gangs.nodes()), flush=True)
    sys.stdin.readline()
    try:
        gangs.check()
    except ConnectionError as error:
        print(error, flush=True)
    gangs.close()
    sys.stdin.readline()
print("left", flush=True)
"""


@contextmanager
def head(port: int, folder: str, **variables: str) -> Iterator[psutil.Process]:
    """A cluster of one node; gives its GCS."""
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=1",
        "--include-dashboard=false", f"--temp-dir={folder}", "--block",
    ]  # fmt: skip
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"} | variables
    ray = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, start_new_session=True, text=True)
    processes: list[psutil.Process] = []
    try:
        assert ray.stdout
        assert any("Ray runtime started" in line for line in ray.stdout)
        processes = psutil.Process(ray.pid).children(recursive=True)
        yield next(process for process in processes if name_of(process) == "gcs_server")
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        os.killpg(ray.pid, signal.SIGKILL)
        ray.wait()


def test_a_head_that_dies_is_noticed_and_the_next_one_is_joined(tmp_path: Path) -> None:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, contextlib.ExitStack() as service:
        command = as_by_systemd(sys.executable, "-c", _JOINS, tmp_path, f"{get_node_ip_address()}:{port}")
        for number in ("1", "2"):
            with head(port, f"{folder}/{number}") as gcs:
                if number == "1":
                    joined = service.enter_context(
                        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                    )
                    assert joined.stdin and joined.stdout
                else:
                    print(file=joined.stdin, flush=True)
                assert joined.stdout.readline() == "1\n"
                gcs.kill()
                gcs.wait()
                print(file=joined.stdin, flush=True)
                assert joined.stdout.readline() == "Ray's head does not answer\n"
        print(file=joined.stdin, flush=True)
        assert joined.stdout.read() == "left\n"


_MEETS = """
import sys
from pathlib import Path
from service.gang.ray.gangs import RayGangs

gangs = RayGangs(sys.argv[2], None, Path(sys.argv[1]))
try:
    gangs.connect()
except ValueError as error:
    print(error)
gangs.close()
"""


def test_a_head_of_another_version_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other" / "boost_core"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text('__version__ = "0.0.9"')
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, head(port, folder, PYTHONPATH=str(other.parent)):
        command = [sys.executable, "-c", _MEETS, tmp_path, f"{get_node_ip_address()}:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.stdout.startswith(f"Ray's head has BOOST 0.0.9, but this process has {__version__}; "), done.stderr[
        -3000:
    ]


class ServerOfProcess1(Server):
    """A service that process 1 takes care of."""

    def start(self) -> None:
        file = self.log.with_name("serve.pid")
        shell = as_by_systemd("sh", "-c", 'echo $$ > "$1"; exec "$0" serve', BOOST, file)
        with self.log.open("ab") as log:
            subprocess.run(shell, env=self.environment, stdout=log, stderr=log, check=True)
        while not (file.exists() and file.read_text().strip()):
            time.sleep(0.05)
        self.process = psutil.Process(int(file.read_text()))

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.is_running() and time.monotonic() < deadline, self.logged()
            time.sleep(0.1)

    def ready(self) -> bool:
        answer = self.answers("/readyz")
        return answer is not None and answer.is_success


FAULTS = ("supervisor stopped", "GCS killed", "all of the head killed", "supervisor killed", "raylet killed")
READY_SECONDS = 20  # of a loaded machine; a quiet one needs less than half


def strike(server: Server, fault: str) -> None:
    tree = {process: name_of(process) for process in server.tree()}
    if fault.startswith("supervisor"):
        (victim,) = [process for process in tree if command_line(process).startswith("ray::Supervisor")]
        victim.send_signal(signal.SIGSTOP if fault.endswith("stopped") else signal.SIGKILL)
        return
    names = {"raylet killed": {"raylet"}, "GCS killed": {"gcs_server"}}.get(fault, set(tree.values()))
    for process in [process for process, name in tree.items() if name in names]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def watched(server: Server) -> Iterator[list[str]]:
    """The failures of requests that are made all the time."""
    failures, over = list[str](), threading.Event()

    def ask() -> None:
        while not over.wait(0.2):
            answer = server.answers("/healthz")
            if answer is None or not answer.is_success:
                failures.append(str(answer))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield failures
    finally:
        over.set()
        thread.join()


def survive(folder: Path, rounds: int) -> None:
    """Have a job of a service survive faults in turn, and log how long each took."""
    spec = tiny_job(
        write_corpus(folder / "corpus"), folder / "checkpoints",
        parallelism={"tensor_parallel_size": 1},
        training={"steps": 10_000_000, "evaluate_every_steps": 10_000_000}, checkpoint={"every_steps": 50},
        fault_tolerance={"max_restarts": 0, "restart_window_seconds": 5},  # any that counted would end it
    )  # fmt: skip
    longest = folder / ("tmp" * 40)  # no socket could be there
    longest.mkdir()
    settings = {"BOOST_AUTH": "false", "BOOST_SUPERVISOR_SECONDS": "5", "TMPDIR": str(longest)}
    server = ServerOfProcess1(folder / "home", **settings)
    try:
        server.until(server.ready)
        with Client(server.url) as client, watched(server) as failures:
            job_id = client.submit(spec).id

            def trains(attempt: int = 0, step: int = 0) -> bool:
                """Whether it trains with a later gang, beyond a step, and has a checkpoint."""
                job = client.get(job_id)
                assert not job.finished, job
                further = job.progress is not None and job.checkpoint is not None and job.progress.step > step
                return job.attempt > attempt and job.state is JobState.RUNNING and further

            server.until(trains)
            for number in range(rounds):
                fault, before, begun = FAULTS[number % len(FAULTS)], client.get(job_id), time.monotonic()
                before_it, ready_after = set(server.tree()), 0.0
                strike(server, fault)
                if not fault.startswith("supervisor"):
                    server.until(lambda: not server.ready(), 30)
                    server.until(
                        lambda before_it=before_it: any(
                            name_of(each) == "raylet" for each in {*server.tree()} - before_it
                        )
                    )
                    there = time.monotonic()
                    server.until(server.ready)
                    ready_after = time.monotonic() - there
                server.until(lambda before=before: trains(before.attempt, before.progress.step), 150)
                seconds = time.monotonic() - begun
                logger.info("%s: ready %.1f s after its raylet, trains after %.1f s", fault, ready_after, seconds)
                assert ready_after <= READY_SECONDS, fault
            job = client.get(job_id)
            assert job.restart_counts == {}, "none was counted"
            assert job.attempt == rounds + 1
        assert failures == [], "the API answered throughout"
    finally:
        server.end(signal.SIGTERM)


def test_a_job_survives_faults_of_what_it_runs_on_in_turn(tmp_path: Path) -> None:
    survive(tmp_path, rounds=2)
