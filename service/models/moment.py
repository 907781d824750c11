"""A time as requests give it."""

from typing import Annotated, Any

from pydantic import AwareDatetime, BeforeValidator
from pydantic_core import PydanticKnownError


def _no_number(value: Any) -> Any:
    # pydantic reads numbers as seconds since 1970, or as milliseconds, as it sees fit.
    if isinstance(value, int | float) or (isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdigit()):
        raise PydanticKnownError("datetime_type")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_no_number)]  # RFC 3339, with its zone
