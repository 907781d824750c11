"""Keys for those who work on the service's database itself: how the first one is made."""

import uuid

from sqlalchemy import Engine

from service.accounts.audit import LOCAL, AuditEvent, AuditLog
from service.accounts.keys import KeyStore
from service.jobs.database import open_engine
from service.models.keys import KeyList, NewKey
from service.models.requests import KeyRequest


class LocalKeys:
    """Keys by the client's methods; changes are in the audit log as those of nobody known, from the address ``local``.

    Args:
        database: A URL of SQLAlchemy, or an engine.
    """

    def __init__(self, database: str | Engine) -> None:
        engine = open_engine(database) if isinstance(database, str) else database
        self._keys, self._audit = KeyStore(engine), AuditLog(engine)

    def create_key(self, request: KeyRequest) -> NewKey:
        """Make a key, and its tenant if there is none of that name."""
        made = self._keys.create(request.name, request.tenant, request.scopes, request.expires_at)
        self._record("key.create", made.id, 201)
        return made

    def keys(self) -> KeyList:
        """All keys, the newest first."""
        return KeyList(keys=list(self._keys.list()))

    def revoke_key(self, key_id: str) -> None:
        """Have a key refused.

        Raises:
            KeyNotFound: There is no such key.
        """
        self._keys.revoke(key_id)
        self._record("key.revoke", key_id, 204)

    def _record(self, action: str, key_id: str, status: int) -> None:
        self._audit.record(AuditEvent(None, action, f"/v1/keys/{key_id}", status, LOCAL, uuid.uuid4().hex))
