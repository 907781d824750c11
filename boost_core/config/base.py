"""The base of every configuration model and the way a cross-field error names its field."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Config(BaseModel):
    """An immutable configuration that refuses fields it does not know. The text of its errors shows no values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


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


def in_lines(error: Exception) -> str:
    """An error for a terminal; one that names fields, a line each."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())


def raise_problems(title: str, problems: list[FieldProblem]) -> None:
    """Raise one ``ValidationError`` that names every field at fault; do nothing if there is none."""
    if not problems:
        return
    details = [
        InitErrorDetails(
            # The message travels as a context value so that braces in it are left alone.
            type=PydanticCustomError("illegal_value", "{problem}", {"problem": problem.message}),
            loc=problem.field,
            input=problem.value,
        )
        for problem in problems
    ]
    raise ValidationError.from_exception_data(title, details, hide_input=True)
