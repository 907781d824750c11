"""How deep lists and mappings lie in each other, found without descending: what is checked may be nested endlessly."""

from typing import Any

DEEPEST = 100  # levels; no field goes nearly that deep


def is_too_deep(content: Any) -> bool:
    """Whether more than ``DEEPEST`` lists and mappings lie in each other, or one in itself."""
    level = {id(content): content}
    for _ in range(DEEPEST + 1):
        # By identity, because YAML may name the same one often.
        level = {id(each): each for container in level.values() for each in _inside(container)}
        if not level:
            return False
    return True


def _inside(container: Any) -> Any:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, list) else ()
