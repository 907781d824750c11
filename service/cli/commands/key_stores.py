"""Where ``boost keys`` makes keys: through a service, or in its database."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Protocol

from pydantic import ValidationError

from service.cli.failures import BadInput, Failed
from service.client import Client
from service.models.identity import Scope
from service.models.keys import Key, NewKey
from service.models.problems import job_errors
from service.models.requests import KeyRequest
from service.settings import Settings


class KeyBook(Protocol):
    """Makes, lists and revokes keys."""

    def create(self, name: str, tenant: str, scopes: Sequence[Scope], expires_at: datetime | None) -> NewKey:
        """Make a key."""

    def list(self) -> Sequence[Key]:
        """All keys."""

    def revoke(self, key_id: str) -> None:
        """Revoke a key."""


class KeysOfService:
    """The keys of a service, by its API.

    Args:
        client: The service.
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def create(self, name: str, tenant: str, scopes: Sequence[Scope], expires_at: datetime | None) -> NewKey:
        """Make a key."""
        request = KeyRequest(name=name, tenant=tenant, scopes=[*scopes], expires_at=expires_at)
        return self._client.create_key(request)

    def list(self) -> Sequence[Key]:
        """All keys."""
        return self._client.keys().keys

    def revoke(self, key_id: str) -> None:
        """Revoke a key."""
        self._client.revoke_key(key_id)


@contextmanager
def keys_in_database(settings: Settings) -> Iterator[KeyBook]:
    """The keys in the database itself, whose tables are made if they are not there yet.

    Raises:
        Failed: The database cannot be used, or there is no such key.
    """
    # Imported here, because no other command needs SQL.
    from sqlalchemy.exc import SQLAlchemyError

    from service.accounts.keys import KeyNotFound
    from service.accounts.local import LocalKeys
    from service.jobs.database import migrate

    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        migrate(settings.database_url)
        yield LocalKeys(settings.database_url)
    except KeyNotFound as error:
        raise Failed(str(error)) from error
    except (OSError, SQLAlchemyError) as error:
        raise Failed(f"the database that BOOST_DATABASE_URL names cannot be used: {error}") from error


def legal_key(**wanted: Any) -> KeyRequest:
    """What a key is to be.

    Raises:
        BadInput: There can be no such key; names the options at fault.
    """
    try:
        return KeyRequest.model_validate(wanted)
    except ValidationError as error:
        raise BadInput(*(f"{fault.field}: {fault.message}" for fault in job_errors(error.errors()))) from error
