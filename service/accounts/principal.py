"""Who a request comes from, as the service takes it."""

from dataclasses import dataclass

from service.models.identity import DEFAULT_TENANT, Scope


@dataclass(frozen=True)
class Principal:
    """Who asks, and what they may do.

    Attributes:
        tenant: Whose jobs they see.
        key_id: The key that they came with; ``None`` while authentication is off.
        name: What that key is called.
        scopes: What it is good for.
    """

    tenant: str
    key_id: str | None
    name: str
    scopes: tuple[Scope, ...]

    def may(self, scope: Scope) -> bool:
        """Whether they may do what a scope is for."""
        return any(own.includes(scope) for own in self.scopes)


# Everybody, while authentication is off.
ANONYMOUS = Principal(DEFAULT_TENANT, None, "anonymous", tuple(Scope))
