"""What all of the configuration shares: models that name the fields at fault, kinds of fields, and reading of YAML.

Among the kinds are names, points in time, and the URLs of data and checkpoints.

YAML has the core schema of YAML 1.2, in which ``1:30`` and ``yes`` are strings and ``3e-4`` is a number.
PyYAML reads YAML 1.1, in which ``1:30`` is 90, ``yes`` is true, ``010`` is 8, a date is a date and ``3e-4`` a string.
Merge keys (``<<``), which 1.2 dropped, are still supported because many configurations use them.
"""

import json
import math
import re
import signal
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from types import EllipsisType, NoneType
from typing import Annotated, Any, get_args, get_origin

import yaml
from annotated_types import MaxLen
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, WrapValidator, field_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, PydanticKnownError

# Strings, numbers and booleans are checked strictly: JSON tells them apart, but pydantic converts them into each other.
# Types that it mixes up, and its error for a value of another type; int goes first.
_KINDS: dict[Any, str] = {int: "int_type", float: "float_type", bool: "bool_type"}


_MOST_MIXED_UP = 100  # entries of a list that are reported


# Pydantic's validation errors in terms of JSON; its own messages are about Python's types.

_LONGEST = 100  # characters of a value inside a sentence

_WHOLE, _NUMBER, _TEXT = "must be a whole number", "must be a number", "must be a string"
_SWITCH, _LIST, _OBJECT = "must be true or false", "must be a list", "must be an object"
_TIME = "must be a time such as 2026-01-31T12:00:00Z"

_BY_TYPE = {
    "missing": "is missing; add it",
    "extra_forbidden": "is unknown here; leave it out",
    "int_type": _WHOLE, "int_parsing": _WHOLE, "int_parsing_size": _WHOLE, "int_from_float": _WHOLE,
    "float_type": _NUMBER, "float_parsing": _NUMBER,
    "string_type": _TEXT,
    "bool_type": _SWITCH, "bool_parsing": _SWITCH,
    "list_type": _LIST, "tuple_type": _LIST,
    "dict_type": _OBJECT, "model_type": _OBJECT, "model_attributes_type": _OBJECT,
    "datetime_type": _TIME, "datetime_parsing": _TIME, "datetime_from_date_parsing": _TIME, "timezone_aware": _TIME,
}  # fmt: skip
_OF_LENGTH = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
_COMPLETE = frozenset({"missing", "extra_forbidden", "illegal_value", "value_error", *_OF_LENGTH})


def in_words(error: Mapping[str, Any], *, shown: bool) -> str:
    """Phrase one entry of ``ValidationError.errors()`` as a sentence about the field.

    Args:
        error: The entry.
        shown: Whether the sentence may repeat the value.
    """
    kind, context = error["type"], error.get("ctx", {})
    if kind in _OF_LENGTH:
        bound, limit = _OF_LENGTH[kind]
        what = f"must have {bound} {context[limit]} {'entry' if context[limit] == 1 else 'entries'}"
        if (length := context.get("actual_length")) is not None:
            what += f", not {length}"
    elif kind in _BY_TYPE:
        what = _BY_TYPE[kind]
    else:
        what = re.sub("^(Value error, )?(Input )?(String )?", "", error["msg"])
    if kind in _COMPLETE or not shown:
        return what
    match error.get("input"):  # in JSON's terms, shortened
        case Mapping():
            value = "an object"
        case list() | tuple():
            value = "a list"
        case None | bool() as constant:
            value = json.dumps(constant)
        case int() as number if number.bit_length() > 14_000:  # Python writes no more than 4,300 digits
            value = f"an integer of {number.bit_length()} bits"
        case other:
            value = repr(other)
            value = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    return f"{what}, not {value}"


def is_miscounted(error: Mapping[str, Any]) -> bool:
    """Whether pydantic found a list too short only because it does not count entries that are wrong."""
    return bool(error["type"] == "too_short" and len(error.get("input") or ()) >= error["ctx"]["min_length"])


INTERRUPTED = 130  # exit status of a program after Ctrl-C
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
Location = Annotated[str, Field(min_length=1, max_length=4096)]  # a path or URL; no file system takes longer ones


class Frozen(BaseModel):
    """An immutable model that refuses unknown fields. The text of its errors shows no values, nor fields' old names."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, loc_by_alias=False)


class Config(Frozen):
    """A configuration as people write it: strings are not accepted as numbers, nor numbers as true or false.

    A list or mapping that is too long has a single error; pydantic alone would report each entry that is wrong.
    """

    @field_validator("*", mode="before")
    @classmethod
    def _kinds_are_not_mixed_up(cls, value: Any, info: Any) -> Any:
        error, truth, listed, most = _accepted(cls, info.field_name)
        is_listed = isinstance(value, list | tuple)
        if (is_listed or isinstance(value, dict)) and len(value) > most:
            details = {"field_type": "List", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", details)
        # The parts of the value that are of another kind, with their place in a list.
        errors: list[InitErrorDetails] = []
        is_checked = error and is_listed == listed
        parts: list[tuple[tuple[int, ...], Any]] = [((), value)] if is_checked else []
        while parts and len(errors) < _MOST_MIXED_UP:
            place, part = parts.pop()
            if isinstance(part, list | tuple):
                parts += reversed([((*place, index), entry) for index, entry in enumerate(part)])
            elif isinstance(part, str) or (isinstance(part, int | float) and isinstance(part, bool) != truth):
                errors.append(InitErrorDetails(type=error, loc=place, input=part))
        if errors:
            raise ValidationError.from_exception_data(cls.__name__, errors, hide_input=True)
        return value


@cache
def _accepted(model: type[BaseModel], field: str) -> tuple[str, bool, bool, float]:
    """Which of the types that pydantic mixes up a field accepts.

    Returns:
        Pydantic's error type for a value of another type, empty unless it takes numbers or booleans, as pydantic checks
        the rest; whether it accepts true and false, otherwise numbers; whether it accepts a list of them; and the
        maximum number of entries if it takes a list or a mapping.
    """
    of = model.model_fields[field]
    types, parts = set[Any](), [of.annotation]  # those of ``int | None``, ``tuple[float, ...]``, a ``Literal``, …
    while parts:
        part = parts.pop()
        inner, origin = get_args(part), get_origin(part)
        parts += inner[:1] if origin is Annotated else inner
        if origin is tuple:
            types.add(tuple)
        if not inner:
            types.add(part if isinstance(part, type) else type(part))
    listed, scalars = tuple in types, types - {NoneType, EllipsisType, tuple}
    if listed:
        scalars.discard(str)  # of ``Literal["auto"]``
    known = [error for python_type, error in _KINDS.items() if python_type in scalars and scalars <= _KINDS.keys()]
    most = _most_entries(of.annotation, of.metadata) or math.inf
    return known[0] if known else "", scalars == {bool}, listed, most


def _most_entries(annotation: Any, limits: Iterable[Any]) -> float:
    """Maximum number of entries of a list or mapping of a type; 0 for other types."""
    inner, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return _most_entries(inner[0], [limit for each in inner[1:] for limit in getattr(each, "metadata", [each])])
    if origin in (tuple, list, dict):
        return min((each.max_length for each in limits if isinstance(each, MaxLen)), default=math.inf)
    return max((_most_entries(each, limits) for each in inner), default=0)


@dataclass(frozen=True)
class FieldProblem:
    """One thing wrong with one field.

    Attributes:
        field: The path of the field, for example ``("parallelism", "tensor_parallel_size")``.
        value: What was given.
        message: What is wrong and what to do about it.
    """

    field: tuple[str, ...]
    value: object
    message: str


class UnfitField(ValueError):
    """A field of a legal job names something that the job cannot use.

    Args:
        field: The job's field at fault.
        message: What is wrong and what to do.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # both, so that it can be pickled
        self.field, self.message = field, message

    def __str__(self) -> str:
        return self.message


_OF_FILES: dict[type[OSError], str] = {
    FileNotFoundError: "does not exist; check the path",
    IsADirectoryError: "is a folder; give the path of a file",
    PermissionError: "may not be used by you; check its permissions",
}


def in_lines(error: Exception) -> str:
    """Format an error for a terminal; a validation error has one line per field, one about a file names it."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename} {_OF_FILES.get(type(error), f'cannot be used: {error.strerror}')}"
    if not isinstance(error, ValidationError):
        return str(error)
    faults = ((".".join(map(str, each["loc"])), each) for each in error.errors() if not is_miscounted(each))
    return "\n".join(f"{place}: {in_words(each, shown=False)}".removeprefix(": ") for place, each in faults)


def hear_interrupts() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, even if the program was started so that Ctrl-C kills it while it loads."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # otherwise it is handled, or ignored on purpose
        signal.signal(signal.SIGINT, signal.default_int_handler)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun, such as ``1 job`` or ``1,200 documents``."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def raise_problems(title: str, problems: list[FieldProblem]) -> None:
    """Raise one ``ValidationError`` that names every field at fault; do nothing if there are no problems."""
    details = list[InitErrorDetails]()
    for each in problems:
        # The message is passed as a context value so that braces in it are left alone.
        error = PydanticCustomError("illegal_value", "{problem}", {"problem": each.message})
        details.append(InitErrorDetails(type=error, loc=each.field, input=each.value))
    if details:
        raise ValidationError.from_exception_data(title, details, hide_input=True)


def spelled(words: str) -> WrapValidator:
    """Make the error for a string that does not match its pattern describe the pattern in words.

    Args:
        words: What the pattern accepts.
    """

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            (problem,) = error.errors()
            if problem["type"] != "string_pattern_mismatch":
                raise
            message = f"should match pattern {problem['ctx']['pattern']}: {words}"
            # Braces in a message would be read as placeholders, so it is passed as a value.
            raise PydanticCustomError("illegal_spelling", "{problem}", {"problem": message}) from error

    return WrapValidator(check)


_RESOURCE_NAMES = "lower-case letters, digits and hyphens, at most 63, not starting with a hyphen"
ResourceName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$"), spelled(_RESOURCE_NAMES)]


# The URLs that are served, all through fsspec: paths, ``file://``, ``s3://`` and, for sources, ``hf://``.

SCHEMES = ("file", "s3")
SOURCE_SCHEMES = (*SCHEMES, "hf")  # read-only data may also be on Hugging Face's hub
UNSHOWN = "unshown_value"  # type of errors about values that must not be shown

_CREDENTIALS = "it may hold credentials, which belong in a named secret: remove them and set the job's credentials"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_SINGLE_COLON = re.compile(r"(file|local|s3|s3a|data):")
_QUERY = re.compile(r"\?[\w-]+=")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def refuse_unserved(url: str, schemes: Sequence[str] = SCHEMES) -> str:
    """Return ``url`` if its form is served. Plain paths are local.

    Args:
        url: The URL, or a plain path.
        schemes: The schemes that are served here.

    Raises:
        ValueError: It is not served. Neither the message nor the error as shown repeats the URL, since people put
            passwords into URLs.
    """
    scheme, separator, rest = url.partition("://")
    first, *names = rest.split("/")
    *others, last = (f"{each}://" for each in schemes)
    served, problem = f"a local path, {', '.join(others)} or {last}", ""
    if "::" in url:
        problem = f"'::' chains file systems, which is not supported; use {served}"
    elif _CONTROL.search(url):
        problem = "contains a control character; check the path"
    elif not separator:
        if wrong := _SINGLE_COLON.match(url):
            problem = f"{wrong.group()} is followed by //, as in file:///folder or s3://bucket/folder"
    elif scheme not in schemes:
        named = f"the scheme {scheme!r}" if _SCHEME.fullmatch(scheme) else "no valid scheme"
        problem = f"has {named}; use {served}"
    elif scheme == "s3" and ("@" in first or (":" in first and not first.startswith("arn:"))):
        problem = f"the part before the first / is not a bucket name; {_CREDENTIALS}"
    elif scheme == "hf" and (first != "datasets" or len(names) < 2 or not all(names[:2])):
        problem = "is not in a dataset on the hub; give a path such as hf://datasets/organization/name/folder/*.parquet"
    elif scheme in ("s3", "hf") and _QUERY.search(rest):
        problem = f"has a query after '?'; {_CREDENTIALS}"
    if problem:
        raise PydanticCustomError(UNSHOWN, "{problem}", {"problem": problem})
    return url


# A point in time as given in requests.


_FIRST_YEAR, _LAST_YEAR = 1900, 9000


def _in_utc(value: Any, handler: Any) -> datetime:
    # pydantic reads numbers as seconds or milliseconds since 1970, depending on their size.
    if isinstance(value, int | float) or (isinstance(value, str) and value.lstrip("+-").replace(".", "", 1).isdigit()):
        raise PydanticKnownError("datetime_type")
    time: datetime = handler(value)
    # At the ends of the calendar, the time cannot be converted to the other zones that databases and people use.
    if not _FIRST_YEAR <= time.year <= _LAST_YEAR:
        raise ValueError(f"must be in the years {_FIRST_YEAR} to {_LAST_YEAR}")
    return time.astimezone(UTC)


Moment = Annotated[AwareDatetime, WrapValidator(_in_utc)]  # RFC 3339, with its zone


# YAML.

# The nesting depth of lists and mappings, found without recursion, since input may be nested endlessly.

DEEPEST = 100  # levels; no field is nested nearly that deep


def is_too_deep(content: Any) -> bool:
    """Whether lists and mappings are nested more than ``DEEPEST`` deep, or one contains itself."""
    level = {id(content): content}
    for _ in range(DEEPEST + 1):
        # By identity, because YAML may reference the same container many times.
        containers = [each for each in level.values() if isinstance(each, dict | list)]
        inside = [each.values() if isinstance(each, dict) else each for each in containers]
        level = {id(each): each for container in inside for each in container}
        if not level:
            return False
    return True


_TAG = "tag:yaml.org,2002:"
_CORE_SCHEMA = {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "merge": r"<<",
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
                    problem = f"duplicate field {key.value[:100]!r}; remove one"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                written.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


class _ForeignLoader(yaml.SafeLoader):
    """The safe loader with YAML 1.1, where ``3e-4`` would be a string."""


for _name, _pattern in _CORE_SCHEMA.items():
    for _loader in (_Loader, _ForeignLoader) if _name == "float" else (_Loader,):
        _loader.add_implicit_resolver(_TAG + _name, re.compile(f"(?:{_pattern})$"), None)
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_core_int)


# Readable errors of object stores' clients, which raise types of their own.

_CLIENTS = {"botocore", "aiobotocore", "aiohttp"}
UNUSABLE = "the object store cannot be used: {}; check the URL, AWS_ENDPOINT_URL and credentials"


class StoreUnusable(OSError):
    """An object store does not answer, or there are no credentials to sign requests with."""


@contextmanager
def stores_in_words() -> Iterator[None]:
    """Convert errors of object store clients to an ``OSError``, as from a disk.

    Raises:
        StoreUnusable: A client has raised an error.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise StoreUnusable(UNUSABLE.format(error)) from error
