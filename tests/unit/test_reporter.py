"""What reaches a supervisor, and when."""

import threading
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from boost_core.messages import LogLine
from service.gang.assignment import Message
from service.gang.control.fault_detection import Heartbeat
from service.gang.control.port import Moment
from service.gang.control.record import GangRecord
from service.gang.ray import supervisor
from service.gang.ray_train import rank_worker
from service.gang.status import GangPhase
from service.gang.worker.rank_metrics import SupervisorReporter


def line(text: str) -> LogLine:
    return LogLine(rank=0, level="INFO", message=text)


def test_a_flush_waits_for_nothing_that_is_reported_after_it() -> None:
    arrived, held, may_arrive = threading.Event(), threading.Event(), threading.Event()

    def push(message: Message) -> None:
        texts = [report.message for _, report in message.reports if isinstance(report, LogLine)]
        if "after" in texts:
            held.set()
            assert may_arrive.wait(60)
        elif texts:
            arrived.set()

    reporter = SupervisorReporter(push, 0)
    reporter.report(line("before"))
    reporter.flush(60)
    assert arrived.is_set()
    reporter.report(line("after"))
    assert held.wait(60)
    done = threading.Thread(target=reporter.flush, args=(60,))
    reporter.report(line("later"))
    done.start()
    done.join(0.1)
    assert done.is_alive(), "what was reported before it has not arrived"
    may_arrive.set()
    done.join(60)
    assert not done.is_alive()


def test_others_signs_of_life_go_with_the_next_message_each_once_and_in_order() -> None:
    sent: list[Message] = []
    others = [Message(number, number, 1, [], Heartbeat(number, 1.0, 0.5), None) for number in (1, 2, 1)]
    reporter = SupervisorReporter(sent.append, 0)
    for other in others:
        reporter.relay(other)
    for text in ("first", "second"):
        reporter.report(line(text))
        reporter.flush(60)
    assert [other for message in sent for other in message.others] == others
    assert all(message.worker == 0 for message in sent)


def test_a_message_is_sent_again_until_the_supervisor_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, pauses = list[Message](), list[float]()

    def get(message: Message) -> None:
        sent.append(message)
        if len(sent) < 3:
            raise ActorUnavailableError("its connection broke", None)

    monkeypatch.setattr(rank_worker, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(rank_worker, "time", SimpleNamespace(sleep=pauses.append))
    supervisor = SimpleNamespace(push=SimpleNamespace(remote=lambda message: message))
    message = Message(0, 0, 1, [], None, None)
    rank_worker.RankWorker._push(SimpleNamespace(_first=None, _supervisor=supervisor), message)
    assert sent == [message] * 3
    assert pauses == [rank_worker.RELAY_SECONDS] * 2


def test_a_supervisor_that_fails_ends_and_not_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the service could read why: a gang that is gone is formed again."""
    changed, done = threading.Condition(), list[tuple[str, float]]()
    record = GangRecord(Moment(0.0, datetime.now(UTC)), changed=changed.notify_all)

    def observe() -> None:
        raise GetTimeoutError("There was timeout in creating the placement group.")

    executor = SimpleNamespace(ended=list, observe=observe)
    monkeypatch.setattr(supervisor.time, "sleep", lambda seconds: done.append(("sleeps", seconds)))
    monkeypatch.setattr(supervisor.os, "_exit", lambda status: done.append(("exits", status)))
    supervisor.Supervisor._run(SimpleNamespace(_changed=changed, _record=record, _executor=executor, _act_on=None))
    assert done == [("sleeps", supervisor.LAST_WORDS_SECONDS), ("exits", 1)]
    status, words = record.status(0), "GetTimeoutError: There was timeout in creating the placement group."
    assert (status.phase, status.message) == (GangPhase.RECOVERING, f"the gang's supervisor failed: {words}")
    assert [(each.report.level, each.report.message) for each in status.reports] == [("ERROR", status.message)]
