"""The base of every configuration model and the way a cross-field error names its field."""

import signal
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

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

from boost_core.config.parsing.kinds import Wanted
from boost_core.config.parsing.validation_messages import in_words

INTERRUPTED = 130  # exit status of a program after Ctrl-C
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Location = Annotated[str, Field(min_length=1, max_length=4096)]  # a path or URL; no file system takes longer ones


class Frozen(BaseModel):
    """An immutable model that refuses fields it does not know. The text of its errors shows no values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Config(Frozen):
    """A configuration, as people write it: a string is not taken for a number, nor a number for true or false."""

    @field_validator("*", mode="before")
    @classmethod
    def _kinds_are_not_mixed_up(cls, value: Any, info: Any) -> Any:
        wanted = _wanted(cls, info.field_name)
        if wanted and (found := wanted.mixed_up(value)):
            raise ValidationError.from_exception_data(cls.__name__, found, hide_input=True)
        return value


@cache
def _wanted(model: type[BaseModel], field: str) -> Wanted | None:
    return Wanted.by(model.model_fields[field].annotation)


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
    return "\n".join(f"{'.'.join(map(str, each['loc']))}: {in_words(each, shown=False)}" for each in error.errors())


def hear_interrupts() -> None:
    """Have Ctrl-C raise KeyboardInterrupt, also in a program that was started to end at once until it is loaded."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # else it is heard, or somebody wants it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)


def counted(number: int, noun: str) -> str:
    """A number of things, such as ``1 job`` or ``1,200 documents``."""
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"


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


def spelled(words: str) -> WrapValidator:
    """Have a string that is not of its pattern refused with the pattern in words.

    Args:
        words: What the pattern takes.
    """

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            (problem,) = error.errors()
            if problem["type"] != "string_pattern_mismatch":
                raise
            message = f"should match pattern {problem['ctx']['pattern']}: {words}"
            # Braces in a message would be taken for places to fill in, so it travels as a value.
            raise PydanticCustomError("illegal_spelling", "{problem}", {"problem": message}) from error

    return WrapValidator(check)


ResourceName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$"),
    spelled("small letters, digits and hyphens, at most 63 and no hyphen first"),
]
