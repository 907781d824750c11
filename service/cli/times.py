"""Times as written on a command line."""

import re
from datetime import UTC, datetime, timedelta

from service.cli.failures import BadInput

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"(\d{1,6})([smhdw])")


def moment_before_now(text: str) -> datetime:
    """Parse a past time: ``10m`` is ten minutes ago; otherwise a date and time, local unless it names a time zone.

    Raises:
        BadInput: The text is neither.
    """
    span = _span(text)
    return _date(text) if span is None else _after(-span)


def moment_from_now(text: str) -> datetime:
    """Parse a future time: ``90d`` is in ninety days; otherwise a date and time, local unless it names a time zone.

    Raises:
        BadInput: The text is neither, or the time is not in the future.
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
        raise BadInput(f"{span.days} days are beyond the calendar's range; give a shorter span, such as 90d") from None


def _date(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise BadInput(
            f"{text!r} is not a time; give a span such as 90s, 10m, 2h, 7d, or a date such as 2026-03-01T12:00:00Z"
        ) from None
