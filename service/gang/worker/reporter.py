"""How a rank's reports and heartbeats reach its supervisor."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from boost_core.messages import FaultReport, LogLine, Report
from service.gang.assignment import Message
from service.gang.control.watch import Heartbeat
from service.security.redaction import redact

BACKLOG = 10_000  # reports; more accumulate only if the supervisor is stuck, and then the oldest are dropped
BEAT_SECONDS = 0.2  # between messages that carry only a heartbeat
ALIVE_SECONDS = 1.0  # after which a message is sent even if nothing has happened


class SupervisorReporter:
    """Sends reports in order from its own thread, so that the step loop never waits.

    Args:
        push: Sends a message to the supervisor, and returns once it has arrived.
        worker: Number of this process.
    """

    def __init__(self, push: Callable[[Message], None], worker: int) -> None:
        self._push, self._worker = push, worker
        self._rank: int | None = None
        self._generation = 0
        self._waiting: deque[tuple[datetime, Report]] = deque(maxlen=BACKLOG)
        self._beat: Heartbeat | None = None
        self._kept_step: int | None = None
        self._saving: str | None = None
        self._reported, self._arrived = 0, 0  # total reports
        self._sent = 0.0
        self._changed = threading.Condition()
        threading.Thread(target=self._send_forever, name="reports", daemon=True).start()

    def begin(self, rank: int, generation: int) -> None:
        """Send as a rank of a gang from now on; earlier reports have been flushed."""
        with self._changed:
            self._rank, self._generation = rank, generation
            self._beat = self._kept_step = self._saving = None

    def report(self, report: Report) -> None:
        """Queue a report; it is sent once the ones before it have arrived."""
        with self._changed:
            self._waiting.append((datetime.now(UTC), without_secrets(report)))
            self._reported += 1
            self._changed.notify_all()

    def beat(self, beat: Heartbeat) -> None:
        """Take note of a step; of several within a moment only the last one is sent."""
        with self._changed:
            self._beat = beat
            self._changed.notify_all()

    def kept(self, step: int) -> None:
        """Take note that a step's state is in memory twice for every rank."""
        with self._changed:
            self._kept_step = step

    def saves(self, failure: str) -> None:
        """Take note that the last checkpoint is being written, and of the store's error."""
        with self._changed:
            self._saving = redact(failure)

    def flush(self, timeout_seconds: float) -> None:
        """Wait until all reports so far have arrived, for at most ``timeout_seconds``."""
        with self._changed:
            reported = self._reported
            self._changed.wait_for(lambda: self._arrived >= reported, timeout_seconds)

    def _send_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._due, ALIVE_SECONDS)
                message = Message(
                    self._worker, self._rank, self._generation, list(self._waiting), self._beat, self._kept_step,
                    self._saving,
                )  # fmt: skip
                self._waiting.clear()
                self._beat = self._kept_step = self._saving = None
                reported = self._reported
            try:
                self._push(message)
            finally:  # a supervisor that is gone takes its workers with it; this thread need not outlive it
                with self._changed:
                    self._arrived, self._sent = reported, time.monotonic()
                    self._changed.notify_all()

    def _due(self) -> bool:
        if self._waiting:
            return True
        return self._beat is not None and time.monotonic() >= self._sent + BEAT_SECONDS


def without_secrets(report: Report) -> Report:
    """Return the report without secrets. A fault may quote a store's error, and stores repeat what they are sent."""
    if isinstance(report, FaultReport):
        return report.model_copy(update={"message": redact(report.message)})
    return report


class LogReports(logging.Handler):
    """Turns a rank's log records into reports."""

    def __init__(self, reporter: SupervisorReporter, rank: int) -> None:
        super().__init__(logging.INFO)
        self._reporter, self._rank = reporter, rank

    def emit(self, record: logging.LogRecord) -> None:
        """Report a record, with its traceback if it has one."""
        self._reporter.report(LogLine(rank=self._rank, level=record.levelname, message=redact(self.format(record))))
