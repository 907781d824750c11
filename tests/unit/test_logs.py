"""Lines of the log as JSON."""

import json
import logging
import threading
from datetime import datetime

import pytest

from service.logs import JsonLines, about
from service.security.redaction import REDACTED, redact_logs, register_secrets


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("a.test")


def written(record: logging.LogRecord, **facts: object) -> dict[str, object]:
    line = JsonLines(facts).format(record)
    assert "\n" not in line
    assert line.isascii()
    return json.loads(line)


def record_of(
    logger: logging.Logger, message: str, *arguments: object, failed: Exception | None = None
) -> logging.LogRecord:
    exc_info = (type(failed), failed, failed.__traceback__) if failed else None
    return logger.makeRecord(logger.name, logging.WARNING, "file.py", 1, message, arguments, exc_info)


def test_a_line_says_when_who_and_what(logger: logging.Logger) -> None:
    line = written(record_of(logger, "two\nlines, %d%% of \udcff“", 5), host="pod-1")
    time = datetime.fromisoformat(str(line.pop("time")))
    assert time.utcoffset().total_seconds() == 0
    assert line == {"level": "WARNING", "logger": "a.test", "message": "two\nlines, 5% of \udcff“", "host": "pod-1"}


def test_what_lines_are_about_nests_and_is_each_threads_own(logger: logging.Logger) -> None:
    seen = []
    with about(job="job-1", attempt=0), about(attempt=1, rank=None):
        inside = written(record_of(logger, "inside"))
        thread = threading.Thread(target=lambda: seen.append(written(record_of(logger, "elsewhere"))))
        thread.start()
        thread.join()
    assert (inside["job"], inside["attempt"]) == ("job-1", 1)
    assert "rank" not in inside
    assert "job" not in seen[0]
    assert "job" not in written(record_of(logger, "afterwards"))


def test_failures_come_with_their_traceback_and_without_secrets(logger: logging.Logger) -> None:
    register_secrets(["hunter-22"])
    before = logging.getLogRecordFactory()
    redact_logs()
    try:
        try:
            raise ValueError("no entry with hunter-22")
        except ValueError as error:
            line = written(record_of(logger, "tried %s", "hunter-22", failed=error))
    finally:
        logging.setLogRecordFactory(before)
    assert line["message"] == f"tried {REDACTED}"
    assert str(line["exception"]).startswith("Traceback")
    assert str(line["exception"]).endswith(f"ValueError: no entry with {REDACTED}")
