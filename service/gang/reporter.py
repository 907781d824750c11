"""How a worker's reports reach its supervisor."""

import logging
import threading
from collections import deque
from datetime import UTC, datetime
from typing import Any

import ray

from boost_core.config.reports import LogLine, Report

BACKLOG = 10_000  # reports; more than that wait only when the supervisor is stuck, and then the oldest go first


class SupervisorReporter:
    """Sends reports in order from a thread of its own, so that the step loop never waits.

    Args:
        supervisor: Handle of the gang's ``Supervisor`` actor.
    """

    def __init__(self, supervisor: Any) -> None:
        self._supervisor = supervisor
        self._waiting: deque[tuple[datetime, Report]] = deque(maxlen=BACKLOG)
        self._sending = False
        self._changed = threading.Condition()
        threading.Thread(target=self._send_forever, name="reports", daemon=True).start()

    def report(self, report: Report) -> None:
        """Take one report; it is sent as soon as the ones before it have arrived."""
        with self._changed:
            self._waiting.append((datetime.now(UTC), report))
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all that was reported has arrived, for ``timeout_seconds`` at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._sending, timeout_seconds)

    def _send_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                batch = list(self._waiting)
                self._waiting.clear()
                self._sending = True
            try:
                ray.get(self._supervisor.push.remote(batch))
            finally:  # a supervisor that is gone takes its workers with it; this thread need not outlive it
                with self._changed:
                    self._sending = False
                    self._changed.notify_all()


class LogReports(logging.Handler):
    """Turns log records of one rank into reports."""

    def __init__(self, reporter: SupervisorReporter, rank: int) -> None:
        super().__init__(logging.INFO)
        self._reporter, self._rank = reporter, rank

    def emit(self, record: logging.LogRecord) -> None:
        """Report a record, with its traceback if it has one."""
        self._reporter.report(LogLine(rank=self._rank, level=record.levelname, message=self.format(record)))
