"""The nesting depth of lists and mappings, found without recursion, since input may be nested endlessly."""

from typing import Any

DEEPEST = 100  # levels; no field is nested nearly that deep


def is_too_deep(content: Any) -> bool:
    """Whether lists and mappings are nested more than ``DEEPEST`` deep, or one contains itself."""
    level = {id(content): content}
    for _ in range(DEEPEST + 1):
        # By identity, because YAML may reference the same container many times.
        level = {id(each): each for container in level.values() for each in _inside(container)}
        if not level:
            return False
    return True


def _inside(container: Any) -> Any:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, list) else ()
