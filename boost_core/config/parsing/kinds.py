"""Strict checks of strings, numbers and booleans, which JSON tells apart but pydantic converts into each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType, NoneType
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import InitErrorDetails

# Types that pydantic mixes up, and its error for a value of another type; int goes first.
_KINDS: dict[Any, str] = {int: "int_type", float: "float_type", bool: "bool_type"}


@dataclass(frozen=True)
class Wanted:
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
    def by(cls, annotation: Any) -> "Wanted | None":
        """What a field of a type accepts; ``None`` unless it takes numbers or booleans, as pydantic checks the rest."""
        types = set(_plain_types(annotation)) - {NoneType, EllipsisType}
        wanted = types - {tuple}
        if not wanted or not wanted <= _KINDS.keys():
            return None
        error = next(error for python_type, error in _KINDS.items() if python_type in wanted)
        return cls(error, wanted == {bool}, tuple in types)

    def mixed_up(self, value: Any) -> list[InitErrorDetails]:
        """Errors for the parts of a value that are of another kind, with their place in a list.

        Args:
            value: What was given.
        """
        if isinstance(value, list | tuple) != self.listed:
            return []
        return [
            InitErrorDetails(type=self.error, loc=place, input=given)
            for place, given in _scalars(value)
            if isinstance(given, str) or isinstance(given, bool) != self.truth
        ]


def _plain_types(annotation: Any) -> Iterator[Any]:
    """The types that make up a type such as ``int``, ``int | None``, ``tuple[float, ...]`` or a ``Literal``."""
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    if get_origin(annotation) is tuple:
        yield tuple
    for part in parts:
        yield from _plain_types(part)
    if not parts:
        yield annotation if isinstance(annotation, type) else type(annotation)


def _scalars(value: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], bool | int | float | str]]:
    """Each string, number and boolean in nested lists, with its place."""
    if isinstance(value, bool | int | float | str):
        yield place, value
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from _scalars(entry, (*place, index))
