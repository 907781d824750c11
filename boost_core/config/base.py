"""The base class of all configuration models, and errors that name the fields at fault."""

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
    """An immutable model that refuses unknown fields. The text of its errors shows no values."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class Config(Frozen):
    """A configuration as people write it: strings are not accepted as numbers, nor numbers as true or false."""

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
