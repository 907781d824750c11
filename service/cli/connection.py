"""Which service the command line talks to, and with which key."""

from typing import Any

from service.cli.failures import BadInput, read_settings
from service.cli.login_file import read_login
from service.client import Client


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
    named = url or (settings.url if settings.names_service else None)
    address = named or (login.url if login else settings.url)
    found: dict[str, Any] = {"retry_seconds": settings.retry_seconds}
    if login and login.is_at(address):  # never send a key to any other service
        found |= {"api_key": login.api_key.get_secret_value(), "verify": login.ca_file or True}
    if settings.api_key:
        found["api_key"] = settings.api_key.get_secret_value()
    return client_of(address, **found | options)


def client_of(address: str, **options: Any) -> Client:
    """Return a client of the service at an address.

    Raises:
        BadInput: The address or an option cannot be used.
    """
    try:
        return Client(address, **options)
    except ValueError as error:
        raise BadInput(str(error)) from error
