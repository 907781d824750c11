"""Operations on identity, keys and the audit log."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

from service.client.calls import Call, create, get, operation, path_of, plain
from service.models.audit import AuditPage
from service.models.identity import Identity
from service.models.keys import KeyList, NewKey
from service.models.requests import KeyRequest


class AccountCalls:
    """Operations on identities, keys and the audit log."""

    @operation
    def whoami(self) -> Call[Identity]:
        """Return the key's tenant, name and scopes."""
        return get(path_of("whoami"), Identity)

    @operation
    def create_key(
        self, request: KeyRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[NewKey]:
        """Create a key; for operators. It is shown only in this answer.

        A repeated request with the same ``idempotency_key`` gives the same key a new secret.
        """
        return create(path_of("keys"), NewKey, plain(request), idempotency_key)

    @operation
    def keys(self) -> Call[KeyList]:
        """Return all keys; for operators."""
        return get(path_of("keys"), KeyList)

    @operation
    def revoke_key(self, key_id: str) -> Call[None]:
        """Revoke a key; for operators."""
        return Call("DELETE", path_of("keys", key_id), NoneType, repeatable=True)

    @operation
    def audit(self, tenant: str | None = None, after: int | None = None, limit: int | None = None) -> Call[AuditPage]:
        """Return entries of the audit log, in order; for operators.

        Args:
            tenant: Only this tenant's requests.
            after: Only entries with ids above this.
            limit: Maximum number of results.
        """
        return get(path_of("audit"), AuditPage, tenant=tenant, after=after, limit=limit)
