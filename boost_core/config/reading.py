"""Reading what users give: YAML, small files, points in time.

YAML has the core schema of YAML 1.2, in which ``1:30`` and ``yes`` are strings and ``3e-4`` is a number.
PyYAML reads YAML 1.1, in which ``1:30`` is 90, ``yes`` is true, ``010`` is 8, a date is a date and ``3e-4`` a string.
Merge keys (``<<``), which 1.2 dropped, are still supported because many configurations use them.
"""

import os
import re
import stat
from collections.abc import Hashable
from datetime import UTC, datetime
from typing import Annotated, Any

import yaml
from fsspec import AbstractFileSystem
from pydantic import AfterValidator, AwareDatetime, BeforeValidator
from pydantic_core import PydanticKnownError

from boost_core.config.storage import Disk

# The nesting depth of lists and mappings, found without recursion, since input may be nested endlessly.

DEEPEST = 100  # levels; no field is nested nearly that deep


def is_too_deep(content: Any) -> bool:
    """Whether lists and mappings are nested more than ``DEEPEST`` deep, or one contains itself."""
    level = {id(content): content}
    for _ in range(DEEPEST + 1):
        # By identity, because YAML may reference the same container many times.
        inside = [
            container.values() if isinstance(container, dict) else container
            for container in level.values()
            if isinstance(container, dict | list)
        ]
        level = {id(each): each for container in inside for each in container}
        if not level:
            return False
    return True


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


# Reading of files that are small by nature, such as an index or a tokenizer, whatever is really at the path.
#
# ``refuse_irregular`` is for large ones, which are read as a stream.

# Opening must not block, as it would for a pipe without a writer or a terminal.
_WITHOUT_WAITING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Unreadable(ValueError):
    """The path is not a regular file, or the file is too large for its kind."""


def read_small(filesystem: AbstractFileSystem, path: str, most_bytes: int) -> bytes:
    """Read a regular file, following symbolic links.

    Args:
        filesystem: Where it is.
        path: Its path there.
        most_bytes: Maximum size; more is never read.

    Raises:
        FileNotFoundError: Nothing is there.
        Unreadable: It is a folder, a pipe, a device or a socket, or too large.
        OSError: It cannot be read.
    """
    if isinstance(filesystem, Disk):
        _refuse_irregular(path, filesystem.status(path))  # first, because opening a device may have side effects
        with os.fdopen(filesystem.descriptor(path, _WITHOUT_WAITING), "rb") as stream:
            status = os.fstat(stream.fileno())  # of the file opened, which may have replaced the one checked
            _refuse_irregular(path, status)
            _refuse_large(path, status.st_size, most_bytes)
            content: bytes = stream.read(most_bytes + 1)
        _refuse_large(path, len(content), most_bytes)
        return content
    info = filesystem.info(path)
    if info["type"] != "file":
        raise Unreadable(f"{path!r} is not a regular file; check the path")
    size = int(info["size"])
    _refuse_large(path, size, most_bytes)
    remote: bytes = filesystem.cat_file(path, start=0, end=size) if size else b""
    return remote


def refuse_irregular(filesystem: AbstractFileSystem, path: str) -> None:
    """Refuse what is not a regular file on a local disk, where opening a pipe would wait for a writer.

    Raises:
        FileNotFoundError: Nothing is there.
        Unreadable: It is a folder, a pipe, a device or a socket.
        OSError: It cannot be looked at.
    """
    if isinstance(filesystem, Disk):
        _refuse_irregular(path, filesystem.status(path))


def _refuse_irregular(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{path!r} is not a regular file; check the path")


def _refuse_large(path: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise Unreadable(f"{path!r} has {size} bytes, and {most_bytes} is the limit; check the path")


# A point in time as given in requests.


def _no_number(value: Any) -> Any:
    # pydantic reads numbers as seconds or milliseconds since 1970, depending on their size.
    if isinstance(value, int | float) or (isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdigit()):
        raise PydanticKnownError("datetime_type")
    return value


def _in_utc(value: datetime) -> datetime:
    # At the ends of the calendar, the time cannot be converted to the other zones that databases and people use.
    if not _FIRST_YEAR <= value.year <= _LAST_YEAR:
        raise ValueError(f"must be in the years {_FIRST_YEAR} to {_LAST_YEAR}")
    return value.astimezone(UTC)


_FIRST_YEAR, _LAST_YEAR = 1900, 9000

Moment = Annotated[AwareDatetime, BeforeValidator(_no_number), AfterValidator(_in_utc)]  # RFC 3339, with its zone
