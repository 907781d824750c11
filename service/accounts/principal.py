"""The sender of a request, as the service sees it."""

from dataclasses import dataclass

from service.models.identity import DEFAULT_TENANT, Scope


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
