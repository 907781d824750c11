"""YAML parsing with the core schema of YAML 1.2, in which ``1:30`` and ``yes`` are strings and ``3e-4`` is a number.

PyYAML reads YAML 1.1, in which ``1:30`` is 90, ``yes`` is true, ``010`` is 8, a date is a date and ``3e-4`` a string.
Merge keys (``<<``), which 1.2 dropped, are still supported because many configurations use them.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from boost_core.config.parsing.depth import is_too_deep

_TAG = "tag:yaml.org,2002:"
# The pattern of each tag, and the characters with which it can begin.
_CORE_SCHEMA = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


def read_yaml(text: str, foreign: bool = False) -> Any:
    """Parse a YAML or JSON document.

    Args:
        text: The document.
        foreign: Read it as the program does for which it was written: with PyYAML, where the last value of a field
            given twice wins; but ``3e-4`` is a number.

    Raises:
        yaml.YAMLError: It is not YAML, gives a field twice, or is nested too deeply.
    """
    try:
        content = yaml.load(text, _ForeignLoader if foreign else _Loader)
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error
    except (ValueError, LookupError) as error:
        raise yaml.YAMLError(f"a value is invalid for its type: {error}") from error
    if is_too_deep(content):
        raise yaml.YAMLError("it is nested too deeply")
    return content


class _Loader(yaml.SafeLoader):
    """The safe loader with the core schema; refuses duplicate fields."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # as the parent has it

    def construct_core_int(self, node: yaml.ScalarNode) -> int:
        """A whole number: decimal even with leading zeros, unless prefixed by ``0o`` or ``0x``."""
        digits = str(self.construct_scalar(node))
        return int(digits, 0 if digits[:2] in ("0o", "0x") else 10)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping; written fields may override merged ones but must not be duplicated."""
        written: set[tuple[str, str]] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in written:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate field {key.value[:100]!r}; remove one", key.start_mark
                    )
                written.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


for _name, (_pattern, _first) in _CORE_SCHEMA.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_core_int)


class _ForeignLoader(yaml.SafeLoader):
    """The safe loader with YAML 1.1, where ``3e-4`` would be a string."""


_ForeignLoader.add_implicit_resolver(
    f"{_TAG}float", re.compile(f"(?:{_CORE_SCHEMA['float'][0]})$"), _CORE_SCHEMA["float"][1]
)
