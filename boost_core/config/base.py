"""The base class of all configuration models, and errors that name the fields at fault."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import EllipsisType, NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

# Strings, numbers and booleans are checked strictly: JSON tells them apart, but pydantic converts them into each other.
# Types that it mixes up, and its error for a value of another type; int goes first.
_KINDS: dict[Any, str] = {int: "int_type", float: "float_type", bool: "bool_type"}


@dataclass(frozen=True)
class AcceptedKind:
    """Which of the types that pydantic mixes up a field accepts.

    Attributes:
        error: Pydantic's error type for a value of another type.
        truth: Whether it accepts true and false; otherwise it accepts numbers.
        listed: Whether it accepts a list of them.
    """

    error: str
    truth: bool
    listed: bool

    @classmethod
    def of(cls, annotation: Any) -> "AcceptedKind | None":
        """What a field of a type accepts; ``None`` unless it takes numbers or booleans, as pydantic checks the rest."""
        types, parts = set[Any](), [annotation]  # those of ``int | None``, ``tuple[float, ...]``, a ``Literal``, …
        while parts:
            part = parts.pop()
            inner, origin = get_args(part), get_origin(part)
            parts += inner[:1] if origin is Annotated else inner
            if origin is tuple:
                types.add(tuple)
            if not inner:
                types.add(part if isinstance(part, type) else type(part))
        scalars = types - {NoneType, EllipsisType, tuple}
        if not scalars or not scalars <= _KINDS.keys():
            return None
        error = next(error for python_type, error in _KINDS.items() if python_type in scalars)
        return cls(error, scalars == {bool}, tuple in types)

    def mixed_up(self, value: Any) -> list[InitErrorDetails]:
        """Errors for the parts of a value that are of another kind, with their place in a list."""
        if isinstance(value, list | tuple) != self.listed:
            return []
        errors: list[InitErrorDetails] = []
        parts: list[tuple[tuple[int, ...], Any]] = [((), value)]
        while parts:
            place, part = parts.pop()
            if isinstance(part, list | tuple):
                parts += reversed([((*place, index), entry) for index, entry in enumerate(part)])
            elif isinstance(part, str) or (isinstance(part, int | float) and isinstance(part, bool) != self.truth):
                errors.append(InitErrorDetails(type=self.error, loc=place, input=part))
        return errors


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
        what = str(error["msg"])
        for subject in ("Value error, ", "Input ", "String "):
            what = what.removeprefix(subject)
    if kind in _COMPLETE or not shown:
        return what
    match error.get("input"):  # in JSON's terms, shortened
        case Mapping():
            value = "an object"
        case list() | tuple():
            value = "a list"
        case None:
            value = "null"
        case bool() as truth:
            value = str(truth).lower()
        case other:
            value = repr(other)
            value = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    return f"{what}, not {value}"


INTERRUPTED = 130  # exit status of a program after Ctrl-C
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Location = Annotated[str, Field(min_length=1, max_length=4096)]  # a path or URL; no file system takes longer ones


class Frozen(BaseModel):
    """An immutable model that refuses unknown fields. The text of its errors shows no values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Config(Frozen):
    """A configuration as people write it: strings are not accepted as numbers, nor numbers as true or false."""

    @field_validator("*", mode="before")
    @classmethod
    def _kinds_are_not_mixed_up(cls, value: Any, info: Any) -> Any:
        accepted = _accepted(cls, info.field_name)
        if accepted and (errors := accepted.mixed_up(value)):
            raise ValidationError.from_exception_data(cls.__name__, errors, hide_input=True)
        return value


@cache
def _accepted(model: type[BaseModel], field: str) -> AcceptedKind | None:
    return AcceptedKind.of(model.model_fields[field].annotation)


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


def in_lines(error: Exception) -> str:
    """Format an error for a terminal; a validation error has one line per field."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(f"{'.'.join(map(str, each['loc']))}: {in_words(each, shown=False)}" for each in error.errors())


def hear_interrupts() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, even if the program was started so that Ctrl-C kills it while it loads."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # otherwise it is handled, or ignored on purpose
        signal.signal(signal.SIGINT, signal.default_int_handler)


def counted(number: int, noun: str) -> str:
    """Format a count with its noun, such as ``1 job`` or ``1,200 documents``."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


def raise_problems(title: str, problems: list[FieldProblem]) -> None:
    """Raise one ``ValidationError`` that names every field at fault; do nothing if there are no problems."""
    if not problems:
        return
    details = [
        InitErrorDetails(
            # The message is passed as a context value so that braces in it are left alone.
            type=PydanticCustomError("illegal_value", "{problem}", {"problem": problem.message}),
            loc=problem.field,
            input=problem.value,
        )
        for problem in problems
    ]
    raise ValidationError.from_exception_data(title, details, hide_input=True)


def spelled(words: str) -> WrapValidator:
    """Make the error for a string that does not match its pattern describe the pattern in words.

    Args:
        words: What the pattern accepts.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
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


ResourceName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$"),
    spelled("lower-case letters, digits and hyphens, at most 63, not starting with a hyphen"),
]
