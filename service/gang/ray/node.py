"""Ray's processes on this machine: a node without resources, and what an embedded Ray has left behind.

Ray lets a process talk to a cluster only through a node of the cluster on the same machine. A service outside the
cluster, for example in its own container, has none, so it starts one.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from boost_core.temporary import TemporaryFolder
from service.gang.ray.private_api import nodes_here

START_SECONDS = 120.0
STOP_SECONDS = 15.0
END_SECONDS = 5.0
OBJECT_STORE_BYTES = 80 * 2**20  # about Ray's minimum; nothing large passes through here
# The path of a socket may have 107 bytes, and those of Ray have up to 94 below this folder:
# /boost-ray.xxxxxxxx/ray/session_2026-11-27_12-00-00_123456_1234567/sockets/dash_TaskEventsHead
_LONGEST_PARENT = 13
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)


class JoinedNode:
    """A node without CPUs and GPUs; it ends when it is closed, or when the thread that made it ends.

    Args:
        address: The cluster's ``host:port``.

    Raises:
        ConnectionError: The cluster does not accept it.
    """

    def __init__(self, address: str) -> None:
        self._folder = ray_folder()
        self._log = self._folder.path / "start.log"
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=0",
            "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-log-monitor=false",
            f"--temp-dir={self.folder}", "--block",
        ]  # fmt: skip
        with self._log.open("w") as log:
            # In its own session, because the service must leave the cluster before its node ends, even on ^C.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=_end_with_parent
            )
        try:
            self._wait(address)
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> str:
        """Ray's folder for temporary files, which distinguishes this node from others on the machine."""
        return f"{self._folder.path}/ray"  # Ray opens it to everybody, but not the one around it

    @property
    def runs(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def close(self) -> None:
        """End it with all its processes."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.close()

    def _wait(self, address: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.folder not in nodes_here(address):
            if not self.runs or time.monotonic() > deadline:
                raise ConnectionError(
                    f"this machine could not join the Ray cluster at {address}; Ray's output:\n"
                    f"{self._log.read_text()[-2000:]}"
                )
            time.sleep(0.1)


def _end_with_parent() -> None:
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def ray_folder() -> TemporaryFolder:
    """A folder for Ray. Those that killed services have left go, with what still runs of their Ray.

    It is in the system's folder for temporary files (``TMPDIR``), or in /tmp if the paths of Ray's sockets would be too
    long there.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _LONGEST_PARENT:
        parent = Path("/tmp")
    return TemporaryFolder("boost-ray.", parent, end_users=end_processes_of)


def end_processes_of(folder: Path) -> None:
    """End all other processes that write to files in a folder, as all of Ray's do, and wait for them."""
    found = [process for process in psutil.process_iter() if process.pid != os.getpid() and _writes_to(process, folder)]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=END_SECONDS)


def _writes_to(process: psutil.Process, folder: Path) -> bool:
    """Whether a process has a file in a folder open for writing; false if access is denied."""
    with suppress(psutil.Error):
        return any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in process.open_files())
    return False
