"""Pydantic's validation errors in terms of JSON; its own messages are about Python's types."""

from collections.abc import Mapping
from typing import Any

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
    kind = error["type"]
    if kind in _OF_LENGTH:
        what = _length(error["ctx"], *_OF_LENGTH[kind])
    else:
        what = _BY_TYPE.get(kind) or _without_subject(str(error["msg"]))
    return what if kind in _COMPLETE or not shown else f"{what}, not {_said(error.get('input'))}"


def _length(context: Mapping[str, Any], bound: str, limit: str) -> str:
    entries = "entry" if context[limit] == 1 else "entries"
    given = context.get("actual_length")
    return f"must have {bound} {context[limit]} {entries}{f', not {given}' if given is not None else ''}"


def _without_subject(message: str) -> str:
    for subject in ("Value error, ", "Input ", "String "):
        message = message.removeprefix(subject)
    return message


def _said(value: object) -> str:
    """A value in JSON's terms, shortened."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    said = repr(value)
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"
