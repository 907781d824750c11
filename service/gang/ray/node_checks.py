"""Whether Ray's nodes have what ranks need: the interpreter, the packages and the versions of Ray's head.

Ray starts ranks on all nodes with the head's command for Python. On a node without that interpreter or these packages
they would never come up, so each node is asked once, by a process there that takes no CPU. A node that comes back has
another ID, and is asked again.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from boost_core import __version__
from service.gang.resources import ON_THE_HEAD
from service.gang.versions import require_version

HEAD_SECONDS = 120.0  # for a process to start there
ANSWER_SECONDS = 20.0  # for another node to answer before it is used without an answer: it may only be busy
AGAIN_SECONDS = 60.0  # after which a node that cannot be used, or that could not be asked, is asked again

Software = dict[str, str | None]

_PROGRAM = """
import importlib.metadata, importlib.util, json, sys

sys.path += sys.argv[1:]
found = {"interpreter": sys.executable, "python": "%d.%d" % sys.version_info[:2], "torch": None, "problem": None}
needed = ["service.gang.ray_train.rank_worker", "service.gang.worker.worker", "service.gang.ray.fork_client"]
try:
    from boost_core import __version__
    found["boost"] = __version__
    specs = [importlib.util.find_spec(name) for name in needed]
    missing = [name for name, spec in zip(needed, specs) if spec is None]
    found["problem"] = "no module " + missing[0] if missing else None
    found["starter"] = None if missing else specs[-1].origin
    found["torch"] = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    pass
except Exception as error:
    found["problem"] = "%s: %s" % (type(error).__name__, error)
print(json.dumps(found))
"""


class NodeChecks:
    """The checks of a cluster's nodes. For use by one thread.

    Raises:
        ConnectionError: The head starts no process.
        ValueError: The head has no BOOST, or another version than this process.
    """

    def __init__(self) -> None:
        self._checks: dict[str, _Check] = {}
        self._software = _software_task()
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

    def wait(self, nodes: Collection[str]) -> None:
        """Ask nodes, and wait until they have answered, at most ``ANSWER_SECONDS``."""
        for node in nodes:
            self._checks[node] = self._ask(node)
        answers = [check.answer for check in self._checks.values()]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=ANSWER_SECONDS)

    def unusable(self, nodes: Collection[str]) -> dict[str, str]:
        """Return why ranks cannot run on nodes, by node; new nodes are asked, and not used until they answer.

        Args:
            nodes: All alive nodes on which ranks could be placed.
        """
        now = time.monotonic()
        self._checks = {node: self._checks.get(node) or self._ask(node) for node in nodes}
        waited_for = [check.answer for check in self._checks.values() if check.answer is not None]
        there = set(ray.wait(waited_for, num_returns=len(waited_for), timeout=0)[0]) if waited_for else set()
        reasons: dict[str, str] = {}
        for node, check in self._checks.items():
            if check.answer in there:
                self._read(check, now)
            elif check.answer is None and check.again_at is not None and now >= check.again_at:
                check.answer = self._on(node)
            if check.reason is not None and (check.read or now < check.began + ANSWER_SECONDS):
                reasons[node] = check.reason
        return reasons

    def _ask(self, node: str) -> "_Check":
        return _Check(self._on(node), time.monotonic())

    def _on(self, node: str) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        command = self._head["interpreter"], self._head["starter"]
        return self._software.options(scheduling_strategy=there).remote(*command)

    def _read(self, check: "_Check", now: float) -> None:
        """Take a node's answer. What has kept it from answering says nothing about its software."""
        answer, check.answer, check.again_at = check.answer, None, now + AGAIN_SECONDS
        try:
            check.reason = why_not(ray.get(answer), self._head)
        except RayTaskError as error:
            check.reason = f"cannot be checked: {error.cause}"
        except RayError:
            return
        check.read = True
        if check.reason is None:
            check.again_at = None


@dataclass
class _Check:
    """The check of one node.

    Attributes:
        answer: Ray's reference to its answer; ``None`` once that is read.
        began: When it was first asked, on the monotonic clock.
        reason: Why it cannot be used.
        read: Whether it has answered.
        again_at: When it is to be asked again, if at all.
    """

    answer: Any
    began: float
    reason: str | None = "is being checked"
    read: bool = False
    again_at: float | None = None


def why_not(node: Software, head: Software) -> str | None:
    """Return why ranks cannot run on a node, to follow "it"; ``None`` if they can.

    Args:
        node: What the node has.
        head: What Ray's head has.
    """
    if (version := node.get("boost")) is not None and version != __version__:
        return f"has BOOST {version}, but this service has {__version__}"
    if problem := node.get("problem"):
        return f"lacks the trainer: {problem}"
    for what, name in (("python", "Python"), ("torch", "torch")):
        mine, its = (_public(each.get(what)) for each in (head, node))
        if its != mine:
            return f"has {name} {its}, but Ray's head has {mine}" if its else f"has no {name}, which Ray's head has"
    return None


def _public(version: str | None) -> str | None:
    """A version without its build: nodes with and without GPUs have different builds."""
    return version and version.partition("+")[0]


def _software_task() -> Any:
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

    return ray.remote(num_cpus=0, max_retries=0)(software)
