"""Which service the command line talks to, and with which key: its login is one file that only its owner can read."""

import stat
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from service.cli.console import BadInput, read_settings
from service.client import Client
from service.jobs.model import JobRecord

_PAGE = 500  # jobs; the API's maximum per request
_FOLLOWING_RETRY_SECONDS = 60.0
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Login(BaseModel):
    """A service and the API key for it, as ``boost login`` writes them."""

    model_config = ConfigDict(frozen=True)

    url: str
    api_key: SecretStr
    ca_file: Path | None = None


def read_login(path: Path) -> Login | None:
    """Read the login file; ``None`` if there is none.

    Raises:
        BadInput: Other users can read the file, or ``boost login`` did not write it.
    """
    try:
        if path.stat().st_mode & _OTHERS:
            raise BadInput(f"{path} holds a key and other users can read it; restrict it: chmod 600 {path}")
        return Login.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError):
        # Not pydantic's message, which would show the file's contents.
        raise BadInput(f"{path} is not what `boost login` writes, or cannot be read; sign in again") from None


def open_client(url: str | None, **options: Any) -> Client:
    """Return a client of the service at ``url``, or else of the one named by the settings or the login.

    Args:
        url: URL of the service.
        options: Client options that override the settings and the login.

    Raises:
        BadInput: The URL is invalid, or the login cannot be used.
    """
    settings = read_settings()
    login = read_login(settings.config)
    is_in_environment = not settings.model_fields_set.isdisjoint({"url", "host", "port"})
    address = url or (login.url if login and not is_in_environment else settings.url)
    known: dict[str, Any] = {"retry_seconds": settings.retry_seconds}
    if login and login.url.rstrip("/") == address.rstrip("/"):  # never send a key to any other service
        known |= {"api_key": login.api_key.get_secret_value(), "verify": login.ca_file or True}
    if settings.api_key:
        known["api_key"] = settings.api_key.get_secret_value()
    return client_of(address, **known | options)


def retry_longer(client: Client) -> None:
    """Retry for longer from now on, unless the user has set how long: following must survive a service restart."""
    if "retry_seconds" not in read_settings().model_fields_set:
        client.retry_seconds = max(client.retry_seconds, _FOLLOWING_RETRY_SECONDS)


def listed(client: Client, limit: int, cursor: str | None, **which: Any) -> tuple[list[JobRecord], str | None]:
    """Return jobs, from as many pages as needed, and the cursor for older ones."""
    jobs: list[JobRecord] = []
    while True:
        page = client.list(limit=min(limit - len(jobs), _PAGE), cursor=cursor, **which)
        jobs += page.jobs
        cursor = page.next_cursor
        if cursor is None or len(jobs) >= limit:
            return jobs, cursor


def client_of(address: str, **options: Any) -> Client:
    """Return a client of the service at an address.

    Raises:
        BadInput: The address or an option cannot be used.
    """
    try:
        return Client(address, **options)
    except ValueError as error:
        raise BadInput(str(error)) from error
