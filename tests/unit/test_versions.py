"""What is checked of a process and of a node before a rank trains there: its version, its software, its gang."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from boost_core import __version__
from service.gang.assignment import Assignment, End, GangContext, Rendezvous, require_version
from service.gang.ray import nodes
from service.gang.ray.nodes import Software, why_not
from service.gang.status import JobTag
from service.gang.worker import worker
from service.logs import LogFormat
from service.security.access import Access
from tests.service.records import a_spec


def test_the_same_version_is_taken() -> None:
    require_version(__version__, "Ray's head")


def a_worker(monkeypatch: pytest.MonkeyPatch, version: str = __version__) -> worker.Worker:
    monkeypatch.setattr(worker, "redact_logs", lambda: None)  # the log is that of all tests
    monkeypatch.setattr(GangContext, "write_logs", lambda *_: None)
    tag = JobTag("job-1", 1, "tiny", "lab", "alice")
    assert GangContext(tag, Access(), range(0), LogFormat.TEXT).version == __version__
    context = GangContext(tag, Access(), range(0), LogFormat.TEXT, version=version)
    return worker.Worker(0, context, "node", "actor", "127.0.0.1", (), lambda _: None, lambda *_: [])


def assignment_of(generation: int) -> Assignment:
    return Assignment(generation, a_spec(), 0, Rendezvous("127.0.0.1", 1, "p"), (0,))


@pytest.mark.full
def test_a_rank_refuses_a_service_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = a_worker(monkeypatch, "0.0.9")
    rank.join(assignment_of(1), None)
    end = rank.train(assignment_of(1))
    assert end.how is End.LASTING
    assert end.message.startswith(
        f"the service has BOOST 0.0.9, but this process has {__version__}; run the same version"
    )


@pytest.mark.full
def test_a_rank_trains_in_its_own_gang_though_the_next_is_joined_while_it_meets_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank, trained = a_worker(monkeypatch), list[int]()

    def train(_spec: object, _reporter: object, membership: Any, _basis: object) -> str:
        trained.append(membership.generation)
        return End.HALTED

    monkeypatch.setattr(rank, "_meet", lambda _: rank.join(assignment_of(2), None))
    monkeypatch.setattr(worker.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(worker.trainer, "train", train)
    rank.join(assignment_of(1), None)
    assert rank.train(assignment_of(1)).how is End.HALTED
    assert trained == [1]


def test_a_node_that_cannot_be_used_is_asked_again_a_while_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, node = 100.0, "a" * 56  # as long as Ray's IDs

    def wait(pending: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        nonlocal now
        now += timeout
        return pending[:num_returns], []

    checks = nodes.NodeChecks.__new__(nodes.NodeChecks)
    asked = SimpleNamespace(remote=lambda *_: "answer")
    head = HEAD | {"interpreter": "/python", "starter": "/starter"}
    vars(checks).update(_checks={}, _head=head, _software=SimpleNamespace(options=lambda **_: asked))
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now)
    monkeypatch.setattr(nodes.ray, "wait", wait)
    monkeypatch.setattr(nodes.ray, "get", lambda _: HEAD | {"torch": None})
    reasons = {node: "has no torch, which Ray's head has"}
    assert checks.unusable([{"NodeID": node, "Resources": {"CPU": 1.0}}], wait_seconds=20.0) == reasons
    assert vars(checks)["_checks"][node].again_at == 120.0 + nodes.AGAIN_SECONDS


HEAD: Software = {"boost": __version__, "python": "3.11", "torch": "2.13.0+cpu", "problem": None}


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({}, None),
        ({"torch": "2.13.0+cu128", "cuda": "12.8", "GPU": "yes"}, None),
        ({"GPU": "yes"}, "has GPUs, but its torch 2.13.0+cpu is built without CUDA; install one that is built with it"),
        (
            {"cuda": "12.8", "compiler": "this machine has no C compiler", "GPU": "yes"},
            "has GPUs, but this machine has no C compiler",
        ),
        ({"compiler": "this machine has no C compiler"}, None),
        ({"boost": "0.0.9", "problem": "no module service"}, f"has BOOST 0.0.9, but this service has {__version__}"),
        ({"boost": None, "problem": "/opt/python is not there"}, "lacks the trainer: /opt/python is not there"),
        ({"python": "3.12"}, "has Python 3.12, but Ray's head has 3.11"),
        ({"torch": "2.12.1+cpu"}, "has torch 2.12.1, but Ray's head has 2.13.0"),
        ({"torch": None}, "has no torch, which Ray's head has"),
    ],
)
def test_a_node_must_have_what_the_head_has(node: Software, reason: str | None) -> None:
    assert why_not(HEAD | node, HEAD, has_gpus="GPU" in node) == reason


def test_a_node_says_what_its_torch_is_built_for_and_whether_it_has_a_compiler() -> None:
    def software(**environment: str) -> Software:
        command = [sys.executable, "-P", "-c", nodes._PROGRAM, *sys.path]
        return json.loads(subprocess.check_output(command, env=os.environ | environment))

    assert software().items() >= {"cuda": torch.version.cuda, "torch": torch.__version__, "problem": None}.items()
    assert "no C compiler none, which CC names" in (software(CC="none")["compiler"] or "")
