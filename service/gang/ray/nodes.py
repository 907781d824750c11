"""Ray's nodes: the one that this machine joins a cluster with, and whether the others have what ranks need.

Ray lets a process talk to a cluster only through a node of the cluster on the same machine. A service outside the
cluster, for example in its own container, has none, so it starts one.

Ray starts ranks on all nodes with the head's command for Python. On a node without that interpreter or the trainer's
packages they would never come up, so each node is asked once, by a process there that takes no CPU. A node that comes
back has another ID, and is asked again.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from boost_core import __version__
from boost_core.temporary import TemporaryFolder
from service.gang.assignment import ON_THE_HEAD, require_version
from service.gang.ray.actors import KILL_SECONDS, ready
from service.gang.ray.private_api import nodes_here

START_SECONDS = 120.0
STOP_SECONDS = 15.0
OBJECT_STORE_BYTES = 80 * 2**20  # about Ray's minimum; nothing large passes through here
# The path of a socket may have 107 bytes, and those of Ray have up to 94 below this folder:
# /boost-ray.xxxxxxxx/ray/session_2026-11-27_12-00-00_123456_1234567/sockets/dash_TaskEventsHead
_LONGEST_PARENT = 13
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)

HEAD_SECONDS = 120.0  # for a process to start on the head
CHECK_SECONDS = 20.0  # for another node to answer before it is used without an answer: it may only be busy
AGAIN_SECONDS = 60.0  # after which a node that cannot be used, or that could not be asked, is asked again

Software = dict[str, str | None]


class JoinedNode:
    """A node without CPUs and GPUs; it ends when it is closed, or when the thread that made it ends.

    Args:
        address: The cluster's ``host:port``.

    Attributes:
        folder: Ray's folder for temporary files, which distinguishes this node from others on the machine.
        process: Its process.

    Raises:
        ConnectionError: The cluster does not accept it.
    """

    def __init__(self, address: str) -> None:
        self._parent = ray_folder()
        self.folder = f"{self._parent.path}/ray"  # Ray opens it to everybody, but not the one around it
        output = self._parent.path / "start.log"
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=0",
            "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-log-monitor=false",
            f"--temp-dir={self.folder}", "--block",
        ]  # fmt: skip
        with output.open("w") as log:
            # In its own session, because the service must leave the cluster before its node ends, even on ^C.
            end_with_parent = partial(_libc.prctl, _SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
            )
        try:
            deadline = time.monotonic() + START_SECONDS
            while self.folder not in nodes_here(address):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    problem = f"this machine could not join the Ray cluster at {address}; Ray's output:"
                    raise ConnectionError(f"{problem}\n{output.read_text()[-2000:]}")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it with all its processes."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._parent.close()


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
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # access is denied, or it has ended
            files = process.open_files() if process.pid != os.getpid() else []
            if any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in files):
                processes.append(process)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=KILL_SECONDS)


# Checks of the other nodes

_PROGRAM = """
import importlib.metadata, importlib.util, json, pathlib, runpy, sys

sys.path += sys.argv[1:]
result = {"interpreter": sys.executable, "python": "%d.%d" % sys.version_info[:2], "torch": None, "problem": None}
needed = ["service.gang.ray_train.rank_worker", "service.gang.worker.worker", "service.gang.ray.fork_client"]
try:
    from boost_core import __version__
    result["boost"] = __version__
    specs = [importlib.util.find_spec(name) for name in needed]
    missing = [name for name, spec in zip(needed, specs) if spec is None]
    result["problem"] = "no module " + missing[0] if missing else None
    result["starter"] = None if missing else specs[-1].origin
    from boost_core.hardware import lacks_compiler
    result["compiler"] = lacks_compiler()
    result["torch"] = importlib.metadata.version("torch")
    # Without importing it, which takes seconds.
    version = pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py")
    result["cuda"] = runpy.run_path(str(version)).get("cuda")
except importlib.metadata.PackageNotFoundError:
    pass
except Exception as error:
    result["problem"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(result))
"""


@dataclass
class _Check:
    """The check of one node.

    Attributes:
        began: When it was first asked, on the monotonic clock.
        answer: Ray's reference to its answer; ``None`` once that is read.
        reason: Why it cannot be used.
        read: Whether it has answered.
        again_at: When it is to be asked, if at all.
    """

    began: float
    answer: Any = None
    reason: str | None = "is being checked"
    read: bool = False
    again_at: float | None = 0.0


class NodeChecks:
    """The checks of a cluster's nodes. For use by one thread.

    Raises:
        ConnectionError: The head starts no process.
        ValueError: The head has no BOOST, or another version than this process.
    """

    def __init__(self) -> None:
        self._checks: dict[str, _Check] = {}

        def software(interpreter: str | None, starter: str | None) -> object:
            # A nested function is sent by value, so that nodes with any version, or none, can run it.
            import json
            import os
            import subprocess
            import sys

            missing = [file for file in (interpreter, starter) if file is not None and not os.access(file, os.R_OK)]
            if missing:
                return {"problem": f"{missing[0]} is not there"}
            # Ranks are forks of a process that knows what is installed; without it they also know what the driver does.
            result: dict[str, object] = {}
            for more in ([], sys.path) if interpreter in (None, sys.executable) else ([],):
                command = [interpreter or sys.executable, "-P", "-c", _PROGRAM, *more]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                if done.returncode:
                    return {"problem": f"{command[0]} fails: {done.stderr[-300:]}"}
                result = json.loads(done.stdout)
                if not result["problem"]:
                    break
            return result

        self._software: Any = ray.remote(num_cpus=0, max_retries=0)(software)
        try:
            answer = self._software.options(resources=ON_THE_HEAD).remote(None, None)
            self._head: Software = ray.get(answer, timeout=HEAD_SECONDS)
        except GetTimeoutError as error:
            raise ConnectionError(f"its head has started no process within {HEAD_SECONDS:.0f} s") from error
        except RayTaskError as error:
            raise ValueError(f"its head cannot be checked: {error.cause}") from error
        if (version := self._head.get("boost")) is not None:
            require_version(version, "Ray's head")
        if problem := self._head.get("problem"):
            raise ValueError(f"its head has no BOOST ({problem}); run it from the trainer's image")

    def unusable(self, nodes: Collection[Mapping[str, Any]], wait_seconds: float = 0.0) -> dict[str, str]:
        """Return why ranks cannot run on nodes, by node; new nodes are asked, and not used until they answer.

        Args:
            nodes: All alive nodes on which ranks could be placed, as in ``private_api.node_table``.
            wait_seconds: How long to wait for their answers.
        """
        has_gpus = {node["NodeID"]: "GPU" in node["Resources"] for node in nodes}
        self._checks = {node: self._checks.get(node) or _Check(time.monotonic()) for node in has_gpus}
        for node, check in self._checks.items():
            if check.answer is None and check.again_at is not None and time.monotonic() >= check.again_at:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                remote = self._software.options(scheduling_strategy=there).remote
                check.answer = remote(self._head["interpreter"], self._head["starter"])
        pending = [check.answer for check in self._checks.values() if check.answer is not None]
        answered = set(ready(pending, wait_seconds))
        reasons: dict[str, str] = {}
        now = time.monotonic()  # after having waited
        for node, check in self._checks.items():
            if check.answer in answered:
                answer, check.answer, check.again_at = check.answer, None, now + AGAIN_SECONDS
                try:
                    check.reason = why_not(ray.get(answer), self._head, has_gpus[node])
                    check.read = True
                    check.again_at = now + AGAIN_SECONDS if check.reason else None
                except RayTaskError as error:
                    check.reason, check.read = f"cannot be checked: {error.cause}", True
                except RayError:
                    pass  # what has kept it from answering says nothing about its software
            if check.reason is not None and (check.read or now < check.began + CHECK_SECONDS):
                reasons[node] = check.reason
        return reasons


def why_not(node: Software, head: Software, has_gpus: bool) -> str | None:
    """Return why ranks cannot run on a node, to follow "it"; ``None`` if they can.

    Args:
        node: What the node has.
        head: What Ray's head has.
        has_gpus: Whether the node has GPUs, for which torch has to be built and Triton needs a compiler.
    """
    if (version := node.get("boost")) is not None and version != __version__:
        return f"has BOOST {version}, but this service has {__version__}"
    if problem := node.get("problem"):
        return f"lacks the trainer: {problem}"
    for what, name in (("python", "Python"), ("torch", "torch")):
        # Nodes with and without GPUs have different builds of a version, such as 2.9.0+cpu.
        of_head, of_node = ((each.get(what) or "").partition("+")[0] or None for each in (head, node))
        if of_node != of_head:
            has = f"has {name} {of_node}, but Ray's head has {of_head}"
            return has if of_node else f"has no {name}, which Ray's head has"
    if has_gpus and node.get("torch") and not node.get("cuda"):
        return f"has GPUs, but its torch {node['torch']} is built without CUDA; install one that is built with it"
    return f"has GPUs, but {node['compiler']}" if has_gpus and node.get("compiler") else None
