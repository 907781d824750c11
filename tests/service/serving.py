"""``boost serve`` as a process of its own, for tests of the whole service."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from tests.processes import name_of, started_by
from tests.service.conftest import free_port

BOOST = Path(sys.executable).parent / "boost"
PATIENCE_SECONDS = 300


@contextmanager
def short_folder() -> Iterator[str]:
    """A new folder whose path is short enough for the sockets of an embedded Ray."""
    folder = Path(f"/tmp/b{secrets.token_hex(3)}")
    folder.mkdir()
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Server:
    """``boost serve`` on a free port, with a home of its own."""

    def __init__(self, home: Path, **settings: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = {"BOOST_HOME": str(home), "BOOST_CPUS": "2", "BOOST_PORT": str(self.port)}
        self.environment = os.environ | own | settings
        self.log = home.parent / "serve.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([BOOST, "serve"], env=self.environment, stdout=log, stderr=log)

    def tree(self) -> list[psutil.Process]:
        return started_by(self.process.pid)

    def running(self, name: str) -> list[psutil.Process]:
        """Its processes with ``name`` in their command lines."""
        return [process for process in self.tree() if name in command_line(process)]

    def answers(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(self.url + path)
        except httpx.TransportError:
            return None

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.logged()
            time.sleep(0.1)

    def logged(self) -> str:
        """The end of its log, without the requests it has answered, and where its threads are."""
        lines = [line for line in self.log.read_text().splitlines() if "uvicorn" not in line and "request " not in line]
        dump = [Path(sys.executable).with_name("py-spy"), "dump", "--pid", str(self.process.pid)]  # comes with Ray
        stacks = subprocess.run(dump, capture_output=True, text=True).stdout
        return "\n".join([*lines, stacks])[-10_000:]

    def end(self, how: signal.Signals) -> None:
        """End it, and see to it that nothing it started lives on."""
        started = self.tree()
        if how is signal.SIGKILL:  # two agents of Ray's then tell a head that is gone for a minute, and end
            started = [process for process in started if not name_of(process).endswith("Agent")]
        self.process.send_signal(how)
        self.process.wait(120)
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive, alive


def command_line(process: psutil.Process) -> str:
    """The command line of a process; empty once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
