"""How a process writes its log (as text or as one JSON object per line), and what the lines are about.

The objects have ``time`` (RFC 3339), ``level``, ``logger``, ``message``, ``host``, ``exception`` if there is one,
and the context set by ``about``: the job and its attempt, a request, a trace.
"""

import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from service.security.redaction import redact_logs

CHANGED_SECONDS = 10.0  # between two lines about a fault whose reason changes
REPEATED_SECONDS = 600.0  # between two lines about one that goes on for the same reason

_about: ContextVar[Mapping[str, object]] = ContextVar("about")


class LogFormat(StrEnum):
    """The format of a line."""

    TEXT = "text"
    JSON = "json"


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON.

    Args:
        facts: Further fields of every line.
    """

    def __init__(self, facts: Mapping[str, object]) -> None:
        super().__init__()
        self._facts = facts

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, in ASCII only, so that any stream accepts it."""
        created = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": created, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line = {**fields, **self._facts, **_about.get({})}
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None}, default=str)


@dataclass
class _Fault:
    since: float
    logged_at: float
    why: str
    count: int = 1


@dataclass
class RecurringFaults:
    """Logs what fails again and again in a loop: first with its traceback, then in a line when it changes or goes on.

    Used by one thread.

    Attributes:
        logger: Where to log.
        faults: By what failed, those that go on.
        since_settled: What has failed since the last call of ``settle``.
    """

    logger: logging.Logger
    faults: dict[str, _Fault] = field(default_factory=dict, init=False)
    since_settled: set[str] = field(default_factory=set, init=False)

    def occurred(self, what: str, error: Exception) -> None:
        """Log a fault, unless that has just been done.

        Args:
            what: What failed, the same each time.
            error: Why.
        """
        now, why = time.monotonic(), f"{type(error).__name__}: {error}"
        self.since_settled.add(what)
        fault = self.faults.get(what)
        if fault is None:
            self.faults[what] = _Fault(now, now, why)
            self.logger.error("%s; tries go on", what, exc_info=error)
            return
        fault.count += 1
        changed = why != fault.why
        if now - fault.logged_at >= (CHANGED_SECONDS if changed else REPEATED_SECONDS):
            self.logger.error("%s, for %.0f s now, %d times: %s", what, now - fault.since, fault.count, why)
            fault.logged_at, fault.why = now, why

    def over(self, what: str) -> None:
        """Log that a fault is over, if there was one."""
        if fault := self.faults.pop(what, None):
            seconds = time.monotonic() - fault.since
            self.logger.info("no longer: %s (%.0f s, %d times)", what, seconds, fault.count)

    def settle(self) -> None:
        """End the faults that have not occurred since the last call."""
        for what in self.faults.keys() - self.since_settled:
            self.over(what)
        self.since_settled.clear()


@contextmanager
def about(**facts: object) -> Iterator[None]:
    """Add these facts to every line logged within the block; a fact that is ``None`` is left out."""
    token = _about.set({**_about.get({}), **facts})
    try:
        yield
    finally:
        _about.reset(token)


def write_logs(log_format: LogFormat, **facts: object) -> None:
    """Write this process's log to stderr from now on, from INFO up and without secrets.

    Args:
        log_format: The format of a line.
        facts: What every line is about.
    """
    as_json = log_format is LogFormat.JSON
    handler, text = logging.StreamHandler(), logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines({"host": socket.gethostname(), **facts}) if as_json else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.captureWarnings(as_json)
    redact_logs()
