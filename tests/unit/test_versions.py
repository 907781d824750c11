"""A rank does not train for a service of another version, and says which one is which."""

import pytest

from boost_core import __version__
from service.gang.assignment import Assignment, End, GangContext, Rendezvous, require_version
from service.gang.ray.nodes import Software, why_not
from service.gang.status import JobTag
from service.gang.worker import worker
from service.logs import GangLogs, LogFormat
from service.security.access import Access
from tests.service.records import a_spec


def test_the_same_version_is_taken() -> None:
    require_version(__version__, "Ray's head")


def test_a_rank_refuses_a_service_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "redact_logs", lambda: None)  # the log is that of all tests
    monkeypatch.setattr(GangLogs, "write", lambda *_: None)
    tag, logs = JobTag("job-1", 1, "tiny", "lab", "alice"), GangLogs(LogFormat.TEXT, "job-1", 1)
    assert GangContext(tag, Access(), range(0), logs).version == __version__
    context = GangContext(tag, Access(), range(0), logs, version="0.0.9")
    rank = worker.Worker(0, context, "node", "actor", "127.0.0.1", (), lambda _: None, lambda *_: [])
    assignment = Assignment(1, a_spec(), 0, Rendezvous("127.0.0.1", 1, "p"), (0,))
    rank.join(assignment, None)
    end = rank.train(assignment)
    assert end.how is End.LASTING
    assert end.message.startswith(
        f"the service has BOOST 0.0.9, but this process has {__version__}; run the same version"
    )


HEAD: Software = {"boost": __version__, "python": "3.11", "torch": "2.13.0+cpu", "problem": None}


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({}, None),
        ({"torch": "2.13.0+cu128"}, None),
        ({"boost": "0.0.9", "problem": "no module service"}, f"has BOOST 0.0.9, but this service has {__version__}"),
        ({"boost": None, "problem": "/opt/python is not there"}, "lacks the trainer: /opt/python is not there"),
        ({"python": "3.12"}, "has Python 3.12, but Ray's head has 3.11"),
        ({"torch": "2.12.1+cpu"}, "has torch 2.12.1, but Ray's head has 2.13.0"),
        ({"torch": None}, "has no torch, which Ray's head has"),
    ],
)
def test_a_node_must_have_what_the_head_has(node: Software, reason: str | None) -> None:
    assert why_not(HEAD | node, HEAD) == reason
