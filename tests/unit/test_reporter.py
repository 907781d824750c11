"""What reaches a supervisor, and when."""

import threading

from boost_core.messages import LogLine
from service.gang.assignment import Message
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
