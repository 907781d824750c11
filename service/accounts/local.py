"""Keys managed directly in the service's database, as needed to create the first one."""

import uuid

from sqlalchemy import Engine

from service.accounts.audit import LOCAL, AuditEvent, AuditLog
from service.accounts.keys import KeyStore
from service.jobs.database import open_engine
from service.models.access import KeyList, NewKey
from service.models.jobs import KeyRequest


class LocalKeys:
    """Keys by the client's methods; the audit log records changes with no known sender, from the address ``local``.

    Args:
        database: An SQLAlchemy URL or engine.
    """

    def __init__(self, database: str | Engine) -> None:
        engine = open_engine(database) if isinstance(database, str) else database
        self._keys, self._audit = KeyStore(engine), AuditLog(engine)

    def create_key(self, request: KeyRequest) -> NewKey:
        """Create a key, and its tenant if it does not exist."""
        key = self._keys.create(request.name, request.tenant, request.scopes, request.expires_at)
        self._audit.record(AuditEvent(None, "key.create", f"/v1/keys/{key.id}", 201, LOCAL, uuid.uuid4().hex))
        return key

    def keys(self) -> KeyList:
        """Return all keys, newest first."""
        return KeyList(keys=list(self._keys.list()))

    def revoke_key(self, key_id: str) -> None:
        """Revoke a key.

        Raises:
            KeyNotFound: The key does not exist.
        """
        self._keys.revoke(key_id)
        self._audit.record(AuditEvent(None, "key.revoke", f"/v1/keys/{key_id}", 204, LOCAL, uuid.uuid4().hex))
