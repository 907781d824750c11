"""Problem details (RFC 9457), and pydantic's validation errors as readable messages, field by field."""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, get_args

from pydantic import BaseModel, Field

from boost_core.config import JobSpec
from boost_core.config.base import UNSHOWN, FieldProblem, in_words, is_miscounted

_NAMELESS = '""'
_LONGEST_VALUE = 200  # characters of a refused value that are shown
# What people put where nothing or just a name belongs may be the secret itself.
_UNSHOWN_ERRORS = frozenset({"missing", "extra_forbidden", UNSHOWN})
_UNSHOWN_FIELDS = frozenset({"credentials"})


class FieldError(BaseModel):
    """One error in one field."""

    field: str = Field(description="Path of the field, for example parallelism.tensor_parallel_size.")
    message: str = Field(description="What is wrong and what to do about it.")
    value: str | int | float | bool | None = Field(None, description="The given value, if it is short enough to show.")

    @classmethod
    def of(cls, problem: FieldProblem) -> Self:
        """Describe a problem that the trainer's library has found."""
        return cls(field=".".join(problem.field), message=problem.message, value=problem.value)


class Problem(BaseModel):
    """Why a request was refused: the body of every error response."""

    type: str = Field(description="URI that identifies the problem type; stable across versions.")
    code: str = Field("", description="Last part of type, for programs, such as job-not-found.")
    title: str = Field(description="The kind of problem, human-readable.")
    status: int = Field(description="HTTP status.")
    detail: str = Field(description="What went wrong, and what to do.")
    instance: str = Field(description="The request path.")
    errors: list[FieldError] = Field([], description="The invalid fields, if any.")


def job_errors(
    errors: Iterable[Mapping[str, Any]], model: type[BaseModel] = JobSpec, of_file: bool = False
) -> list[FieldError]:
    """Convert pydantic's ``ValidationError.errors()``, with a remedy for each field.

    Args:
        errors: Pydantic's list.
        model: The model that was validated.
        of_file: Whether it was read from a file, whose errors as a whole then name no field, rather than a request.
    """
    fields: list[FieldError] = []
    for error in errors:
        path: tuple[str | int, ...] = tuple(error["loc"])
        if is_miscounted(error):
            continue
        if not path:
            required = ", ".join(name for name, field in model.model_fields.items() if field.is_required())
            at_least = f" with at least {required}" if required else ""
            message = f"must be a JSON object{at_least} (Content-Type: application/json)"
            if of_file:
                message = error["msg"] if error["type"] == "json_invalid" else f"must hold a mapping{at_least}"
            fields.append(FieldError(field="" if of_file else "body", message=message))
            continue
        problem = field_error(path, error)
        if error["type"] == "extra_forbidden":
            name, section = str(path[-1])[:_LONGEST_VALUE], model
            for part in path[:-1]:
                field = section.model_fields.get(str(part))  # ``None`` for an index
                section = (field and _section_in(field.annotation)) or section
            known = list(section.model_fields)
            likely = [place for place in _places(model) if place.split(".")[-1] == name]
            likely += difflib.get_close_matches(name, known, n=1)
            remedy = f"did you mean {likely[0]}?" if likely else f"known here: {', '.join(known)}"
            message = f"there is no such field; {remedy}"
            if ".".join(map(str, path)) in _places(getattr(model, "changes", BaseModel)):
                message = f"cannot be changed in a job that has been submitted; these can: {', '.join(known)}"
            problem = problem.model_copy(update={"message": message})
        fields.append(problem)
    return fields


def field_error(path: tuple[str | int, ...], error: Mapping[str, Any]) -> FieldError:
    """Convert one entry of ``ValidationError.errors()`` for the field at ``path``."""
    hidden = error["type"] in _UNSHOWN_ERRORS or bool(_UNSHOWN_FIELDS.intersection(path))
    sent = error.get("input")
    value: str | int | float | bool | None = None
    # JSON has no NaN; everything but plain values is too long to show.
    is_short = isinstance(sent, int) and sent.bit_length() <= 3 * _LONGEST_VALUE
    if not hidden and (is_short or (isinstance(sent, float) and math.isfinite(sent))):
        value = sent
    elif not hidden and isinstance(sent, str | float):
        text = str(sent)
        # A URL with a user, password or query is not shown.
        value = None if any(sign in text.partition("://")[2] for sign in "@:?") else text[:_LONGEST_VALUE]
    shown = not hidden and not (isinstance(sent, str) and value is None)
    # pydantic marks a mapping's key, as opposed to its value, with an extra part.
    named = path[:-1] if path[-1] == "[key]" else path
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part or _NAMELESS}" for part in named)
    place = dotted.removeprefix(".")[:_LONGEST_VALUE]
    return FieldError(field=place, message=in_words(error, shown=shown), value=value)


def _places(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield the paths of all of a model's fields."""
    for name, field in model.model_fields.items():
        yield above + name
        if section := _section_in(field.annotation):
            yield from _places(section, f"{above}{name}.")


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in a type such as ``Model``, ``Model | None`` or ``tuple[Model, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)
