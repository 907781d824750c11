"""Removes known secrets from everything that this process outputs."""

import html
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
SHORTEST = 4  # characters that can be told from other text


# How a value may be written in a text: as is, in a URL, in JSON, in Python and in markup.
_WRITINGS: tuple[Callable[[str], str], ...] = (
    str,
    quote,
    quote_plus,
    lambda value: re.sub("%..", lambda escape: escape.group().lower(), quote(value, safe="")),
    lambda value: json.dumps(value)[1:-1],
    lambda value: repr(value)[1:-1],
    html.escape,
)


@dataclass
class _Secrets:
    """The secret values of the whole process, and a pattern to find them."""

    forms: set[str] = field(default_factory=set)
    pattern: re.Pattern[str] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def register(self, values: Iterable[str]) -> None:
        """Make ``redact`` remove these values from text from now on, in the whole process.

        Args:
            values: The secrets, each at least ``SHORTEST`` characters long.
        """
        with self.lock:
            forms = {write(value) for value in values for write in _WRITINGS}
            if not forms <= self.forms:
                self.forms |= forms
                # Longest first, because one may be part of another.
                self.pattern = re.compile("|".join(map(re.escape, sorted(self.forms, key=len, reverse=True))))

    def redact(self, text: str) -> str:
        """Return the text without secrets, however it writes them."""
        return text if self.pattern is None else self.pattern.sub(REDACTED, text)


_secrets = _Secrets()
register_secrets, redact = _secrets.register, _secrets.redact


def redact_logs() -> None:
    """Redact every log record of this process, whoever creates it and whichever handler writes it."""
    logging.setLogRecordFactory(_redacted_record)


def _redacted_record(*arguments: Any, **named: Any) -> logging.LogRecord:
    record = logging.LogRecord(*arguments, **named)
    try:
        message = record.getMessage()
    except Exception:  # the message does not fit its arguments; the handler reports this as usual
        return record
    if (redacted := redact(message)) != message:
        record.msg, record.args = redacted, ()
    if record.exc_info:
        # Formatters use this text if there is one.
        record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
    return record
