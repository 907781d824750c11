"""A point in time as given in requests."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, AwareDatetime, BeforeValidator
from pydantic_core import PydanticKnownError


def _no_number(value: Any) -> Any:
    # pydantic reads numbers as seconds or milliseconds since 1970, depending on their size.
    if isinstance(value, int | float) or (isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdigit()):
        raise PydanticKnownError("datetime_type")
    return value


def _in_utc(value: datetime) -> datetime:
    # At the ends of the calendar, the time cannot be converted to the other zones that databases and people use.
    if not _FIRST_YEAR <= value.year <= _LAST_YEAR:
        raise ValueError(f"must be in the years {_FIRST_YEAR} to {_LAST_YEAR}")
    return value.astimezone(UTC)


_FIRST_YEAR, _LAST_YEAR = 1900, 9000

Moment = Annotated[AwareDatetime, BeforeValidator(_no_number), AfterValidator(_in_utc)]  # RFC 3339, with its zone
