"""API keys: created, listed, revoked, and verified when a request presents one.

A key is ``boost_<id>_<secret>``. The store keeps only its SHA-256: with 256 random bits in the secret there is
nothing for a slow hash to protect, and every request is verified.
"""

import hashlib
import hmac
import secrets
import string
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from service.accounts.tables import KeyRow, TenantRow
from service.jobs import queries
from service.jobs.database import open_engine, read_models, read_rows, retried_once
from service.jobs.model import Request
from service.models.access import DEFAULT_TENANT, Key, NewKey, Scope


@dataclass(frozen=True)
class Principal:
    """Who sends a request, and what they may do.

    Attributes:
        tenant: The tenant whose jobs they see.
        key_id: The key that they use; ``None`` while authentication is off.
        name: Name of that key.
        scopes: Scopes of that key.
    """

    tenant: str
    key_id: str | None
    name: str
    scopes: tuple[Scope, ...]

    def may(self, scope: Scope) -> bool:
        """Whether they have the permissions of a scope."""
        return any(own.includes(scope) for own in self.scopes)


# Every sender while authentication is off.
ANONYMOUS = Principal(DEFAULT_TENANT, None, "anonymous", tuple(Scope))

REMEMBERED_SECONDS = 5.0  # how long at most a process still accepts a revoked key
USE_NOTED_EVERY = timedelta(minutes=1)

_PREFIX = "boost"
_ID_LETTERS = string.ascii_lowercase + string.digits
_ID_LENGTH = 8
_SECRET_BYTES = 32
_NOBODYS = "0" * 64  # compared with the secret if the key does not exist, so that this takes as long


class KeyNotFound(LookupError):
    """No key has this ID."""


class KeyRevoked(RuntimeError):
    """A key was to get a new secret, but it is revoked."""


@dataclass(frozen=True)
class _CachedKey:
    """What is cached about a key for a while."""

    principal: Principal
    sha256: str
    expires_at: datetime | None
    until: float
    used_at: datetime | None


class KeyStore:
    """Keys in an SQL database whose tables are up to date. Threads may share a store, and processes a database.

    Args:
        database: An SQLAlchemy URL or engine.
    """

    def __init__(self, database: str | Engine) -> None:
        self._engine = open_engine(database) if isinstance(database, str) else database
        self._cached: dict[str, _CachedKey] = {}

    def create(
        self, name: str, tenant: str, scopes: Collection[Scope], expires_at: datetime | None = None,
        request: Request | None = None,
    ) -> NewKey:  # fmt: skip
        """Create a key, and its tenant if it does not exist.

        Repeating a request returns the same key with a new secret and invalidates the old one: the
        first answer may have been lost, and the store does not have its secret.

        Args:
            name: Its name in job records.
            tenant: The tenant that it acts for.
            scopes: Its scopes.
            expires_at: When it expires; ``None`` for never.
            request: The request for it, if that may be repeated.

        Raises:
            IdempotencyKeyReused: The idempotency key was used for another request.
            KeyRevoked: The key that the request created has been revoked.
        """
        key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        ordered, now = [scope for scope in Scope if scope in scopes], datetime.now(UTC)
        row = KeyRow(id=key_id, name=name, tenant=tenant, scopes=ordered, created_at=now, expires_at=expires_at)

        def write() -> tuple[KeyRow, str]:
            with Session(self._engine, expire_on_commit=False) as session, session.begin():
                # A new key, or a new secret for the one that the request created.
                earlier = queries.earlier_result(session, request, row.id) if request is not None else None
                stored = row if earlier is None else session.get_one(KeyRow, earlier)
                if stored.revoked_at is not None:
                    remedy = "send another Idempotency-Key for a new one"
                    raise KeyRevoked(f"the key {stored.id} that this request created is revoked; {remedy}")
                key = f"{_PREFIX}_{stored.id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
                stored.sha256 = hashlib.sha256(key.encode()).hexdigest()
                if earlier is None:
                    session.add(row)
                    if session.get(TenantRow, row.tenant) is None:
                        session.add(TenantRow(name=row.tenant))
            return stored, key

        stored, key = retried_once(write)  # a request that created the tenant may also be faster
        self._cached.pop(stored.id, None)
        return NewKey(**{name: getattr(stored, name) for name in NewKey.model_fields if name != "key"}, key=key)

    def list(self) -> Sequence[Key]:
        """Return all keys, newest first."""
        return read_models(self._engine, Key, select(KeyRow.__table__).order_by(KeyRow.created_at.desc(), KeyRow.id))

    def empty(self) -> bool:
        """Whether no key has ever been created."""
        return not read_rows(self._engine, select(KeyRow.id).limit(1))

    def revoke(self, key_id: str) -> None:
        """Revoke a key; every process refuses it after at most ``REMEMBERED_SECONDS``. Repeating this changes nothing.

        Raises:
            KeyNotFound: The key does not exist.
        """
        with Session(self._engine) as session, session.begin():
            row = session.get(KeyRow, key_id)
            if row is None:
                raise KeyNotFound(f"there is no key {key_id!r}; GET /v1/keys lists all keys")
            row.revoked_at = row.revoked_at or datetime.now(UTC)
        self._cached.pop(key_id, None)

    def verify(self, presented: str, *, cached_only: bool = False) -> Principal | None:
        """Return whose key this is; ``None`` if it is invalid, revoked or expired.

        Args:
            presented: The key.
            cached_only: Look only in the cache, which does not block; ``None``: the database must be asked as well. For
                a cached key, the result is the same.
        """
        prefix, _, rest = presented.partition("_")
        key_id, _, secret = rest.partition("_")
        well_formed = prefix == _PREFIX and secret and len(key_id) == _ID_LENGTH and set(key_id) <= set(_ID_LETTERS)
        known = self._find(key_id, cached_only=cached_only) if well_formed else None
        if known is None and cached_only:
            return None
        sha256 = hashlib.sha256(presented.encode()).hexdigest()
        if not hmac.compare_digest(sha256, known.sha256 if known else _NOBODYS) or known is None:
            return None
        now = datetime.now(UTC)
        if known.used_at is None or now - known.used_at >= USE_NOTED_EVERY:
            if cached_only:
                return None
            self._cached[key_id] = replace(known, used_at=now)
            # This is recorded for housekeeping, and a failure is no reason to refuse the request.
            with suppress(SQLAlchemyError), self._engine.begin() as connection:
                connection.execute(update(KeyRow).where(KeyRow.id == key_id).values(last_used_at=now))
        return known.principal

    def is_good(self, principal: Principal) -> bool:
        """Whether the key that a request came with is still accepted; with authentication off there was none."""
        known = self._find(principal.key_id) if principal.key_id is not None else None
        return principal.key_id is None or known is not None

    def _find(self, key_id: str, *, cached_only: bool = False) -> _CachedKey | None:
        """Return a key that is neither revoked nor expired."""
        known = self._cached.get(key_id)
        if known is None or time.monotonic() > known.until:
            if cached_only:
                return None
            until = time.monotonic() + REMEMBERED_SECONDS
            with Session(self._engine) as session:
                row = session.get(KeyRow, key_id)
            if row is None or row.revoked_at is not None:
                self._cached.pop(key_id, None)
                return None
            # Only existing keys, so that requests cannot fill the memory.
            principal = Principal(row.tenant, row.id, row.name, tuple(Scope(scope) for scope in row.scopes))
            self._cached[key_id] = known = _CachedKey(principal, row.sha256, row.expires_at, until, row.last_used_at)
        return known if known.expires_at is None or datetime.now(UTC) < known.expires_at else None
