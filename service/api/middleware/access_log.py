"""Keeps values that people put into URLs by mistake out of the access log."""

import logging
import re
from urllib.parse import unquote

from service.security.redaction import REDACTED

_KEY = re.compile(r"boost_[0-9a-z]+_[\w-]+")
_NAME = re.compile(r"[a-z_]{1,32}")  # of a parameter


def holds_key(query: str) -> bool:
    """Whether the query of a URL contains an API key."""
    return _KEY.search(unquote(query)) is not None


def without_values(target: str) -> str:
    """A request's path and the parameter names of its query."""
    path, mark, query = target.partition("?")
    names = (part.partition("=")[0] for part in query.split("&"))
    shown = "&".join(f"{name if _NAME.fullmatch(name) else REDACTED}={REDACTED}" for name in names)
    return _KEY.sub(REDACTED, path) + (f"?{shown}" if mark else "")


def keep_values_out() -> None:
    """Remove values from uvicorn's access log of this process."""
    logging.getLogger("uvicorn.access").addFilter(_without_values)


def _without_values(record: logging.LogRecord) -> bool:
    match record.args:
        case (client, method, str(target), *rest):
            record.args = (client, method, without_values(target), *rest)
    return True
