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
    """Who may do what, and who has done what."""

    @operation
    def whoami(self) -> Call[Identity]:
        """The key's tenant, name and scopes."""
        return get(path_of("whoami"), Identity)

    @operation
    def create_key(
        self, request: KeyRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[NewKey]:
        """Create a key; for operators. Only this answer shows it.

        Sent again with the same ``idempotency_key``, the key of before gets a new secret.
        """
        return create(path_of("keys"), NewKey, plain(request), idempotency_key)

    @operation
    def keys(self) -> Call[KeyList]:
        """All keys; for operators."""
        return get(path_of("keys"), KeyList)

    @operation
    def revoke_key(self, key_id: str) -> Call[None]:
        """Revoke a key; for operators."""
        return Call("DELETE", path_of("keys", key_id), NoneType, repeatable=True)

    @operation
    def audit(self, tenant: str | None = None, after: int | None = None, limit: int | None = None) -> Call[AuditPage]:
        """Entries of the audit log, in order; for operators.

        Args:
            tenant: Only what this tenant has asked for.
            after: Only entries with ids above this.
            limit: Maximum number of results.
        """
        return get(path_of("audit"), AuditPage, tenant=tenant, after=after, limit=limit)
