"""JSON merge patch (RFC 7396)."""

from typing import Any


def merged(target: Any, patch: Any) -> Any:
    """Return a document with a patch applied: given members replace existing ones, ``null`` removes one."""
    if not isinstance(patch, dict):
        return patch
    kept = target if isinstance(target, dict) else {}
    changed = {name: merged(kept.get(name), value) for name, value in patch.items() if value is not None}
    return {name: value for name, value in kept.items() if name not in patch} | changed
