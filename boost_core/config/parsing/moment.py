"""A time as requests give it."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator
from pydantic_core import PydanticKnownError


def _no_number(value: Any) -> Any:
    # pydantic reads numbers as seconds since 1970, or as milliseconds, as it sees fit.
    if isinstance(value, int | float) or (isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdigit()):
        raise PydanticKnownError("datetime_type")
    return value


def _in_utc(value: datetime) -> datetime:
    # At the ends of the calendar there is no such time in other zones, in which databases and people ask for it.
    if not _FIRST_YEAR <= value.year <= _LAST_YEAR:
        raise ValueError(f"must be in the years {_FIRST_YEAR} to {_LAST_YEAR}")
    return value.astimezone(UTC)


_FIRST_YEAR, _LAST_YEAR = 1900, 9000

Moment = Annotated[AwareDatetime, BeforeValidator(_no_number), AfterValidator(_in_utc)]  # RFC 3339, with its zone
