"""Times as people give them on a command line."""

import re
from datetime import UTC, datetime, timedelta

from service.cli.failures import BadInput

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"(\d{1,6})([smhdw])")


def moment_before_now(text: str) -> datetime:
    """When something was: ``10m`` is ten minutes ago; else a date and time, local if it names no zone.

    Raises:
        BadInput: It is neither.
    """
    span = _span(text)
    return _date(text) if span is None else _after(-span)


def moment_from_now(text: str) -> datetime:
    """When something will be: ``90d`` is in ninety days; else a date and time, local if it names no zone.

    Raises:
        BadInput: It is neither, or in the past.
    """
    span = _span(text)
    moment = _date(text) if span is None else _after(span)
    if moment <= datetime.now(UTC):
        raise BadInput(f"{text} is not in the future; give a later time, such as 90d")
    return moment


def _span(text: str) -> timedelta | None:
    match = _SPAN.fullmatch(text)
    return timedelta(**{_UNITS[match[2]]: int(match[1])}) if match else None


def _after(span: timedelta) -> datetime:
    try:
        return datetime.now(UTC) + span
    except OverflowError:
        raise BadInput(f"{span.days} days are longer than the calendar; give a shorter span, such as 90d") from None


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise BadInput(
            f"{text!r} is not a time; give a span such as 90s, 10m, 2h, 7d, or a date such as 2026-03-01T12:00:00Z"
        ) from None
