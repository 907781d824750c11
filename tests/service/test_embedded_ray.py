"""A Ray whose GCS hangs or dies, embedded or joined: it is noticed, nothing is left of it, the next one is taken."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from ray.util import get_node_ip_address

from boost_core import __version__
from tests.processes import name_of
from tests.service.conftest import free_port

pytestmark = pytest.mark.full

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
from service.gang.ray import gangs as ray_gangs
from service.gang.ray import private_api as ray_private
from service.gang.ray.gangs import RayGangs

gangs = RayGangs(None, 1, Path(sys.argv[1]))
gangs.connect()
ray_gangs.ANSWER_SECONDS = ray_private.ANSWER_SECONDS = 0.5
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


def test_a_gcs_that_hangs_is_waited_for_no_longer_than_it_may_take(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _STOPPED, tmp_path], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines() == [*["Ray's head does not answer True"] * 5, "1"], done.stderr[-3000:]


def as_by_systemd(*command: object) -> list[str]:
    """A command that runs another one with process 1 as its parent, and with the pipes that it is given itself."""
    leave = "import os, subprocess, sys; subprocess.Popen(sys.argv[1:]); os._exit(0)"
    return [sys.executable, "-c", leave, *map(str, command)]


@pytest.mark.parametrize(("part", "name"), [("gcs_server", "GCS"), ("raylet", "raylet")])
def test_a_part_that_dies_is_noticed_and_nothing_is_left_of_its_ray(tmp_path: Path, part: str, name: str) -> None:
    assert len(str(tmp_path)) > 20, "a folder for temporary files in which Ray's sockets would have too long paths"
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
