"""What a command has to do with its user: files read, lines and tables printed, failures with an exit status.

Lines and tables are as wide as the terminal; control characters are escaped, as much of the text others wrote. A
failure is one readable line per problem, and an exit status that tells what kind it is.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from typer.core import TyperGroup
from yaml import YAMLError

from boost_core.config import JobSpec, load_job
from boost_core.config.base import StoreUnusable, in_lines, read_yaml, stores_in_words
from boost_core.plan.machine import MeasuredProfile
from boost_core.terminal import UNLIMITED, columns_here, printable, table_lines, wrapped
from service.client import ApiError, ServiceUnreachable
from service.models.problems import job_errors
from service.settings import Settings


class Terminal(Console):
    """Standard output or standard error. A reader that has gone is an error, as for ``print``.

    Args:
        stderr: Whether it is standard error.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)
        if not self.is_terminal:
            self.width = columns_here()

    def on_broken_pipe(self) -> None:
        """Raise it; rich would end the program with the status of a failed job."""
        raise BrokenPipeError

    def say(self, line: str, style: str | None = None, hang: int = 2) -> None:
        """Print a line, wrapped between words to this console's width.

        Args:
            line: The line.
            style: Style of its text.
            hang: Blanks before what continues it.
        """
        text = "\n".join(wrapped(printable(line), self.width, hang))
        self.print(text, markup=False, soft_wrap=True, style=style)


def say(line: str, *, err: bool = False) -> None:
    """Print a line, wrapped to the terminal's width.

    Args:
        line: The line.
        err: Print to standard error.
    """
    Terminal(stderr=err).say(line)


def say_raw(text: str) -> None:
    """Print what others read or wrote, such as JSON and lines of logs: in lines of any length."""
    typer.echo(printable(text))


def print_facts(facts: Iterable[Sequence[str]], indent: int = 12) -> None:
    """Print names and values beside each other.

    Args:
        facts: The names, empty where a value belongs to the name before it, and the values.
        indent: The column at which values begin.
    """
    console = Terminal()
    for name, value in facts:
        console.say(f"{name:<{indent}}{value}", hang=indent)


@dataclass(frozen=True)
class PlainTable:
    """A table without borders, as wide as the console that shows it; see ``table_lines``.

    Attributes:
        columns: The headings.
        rows: A cell per column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay it out."""
        rows = [[printable(cell) for cell in row] for row in self.rows]
        headings, lines = table_lines(self.columns, rows, options.max_width)
        # As Text: brackets in a message are not markup.
        yield Text("\n".join(headings), style="table.header", no_wrap=True, overflow="ignore")
        if lines:
            yield Text("\n".join(lines), no_wrap=True, overflow="ignore")


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, reported: bool = False) -> None:
    """Print a table; one that is ``reported`` is read rather than searched: at 80 columns in a pipe, too."""
    width = 80 if reported and columns_here() == UNLIMITED else None
    Terminal().print(PlainTable(columns, [*rows]), crop=False, width=width)


def print_answer(
    answer: BaseModel,
    as_json: bool,
    shown: str | Iterable[Sequence[str]] = (),
    columns: Sequence[str] = (),
    indent: int = 12,
) -> None:
    """Print what the API has answered with: as its JSON, or else as a text, a table with these columns, or facts."""
    if as_json:
        say_raw(answer.model_dump_json(indent=2))
    elif isinstance(shown, str):
        say(shown)
    elif columns:
        print_rows(columns, shown)
    else:
        print_facts(shown, indent)


def number(value: float | None, form: str = "g") -> str:
    """Format a number, as short as possible by default; a dash for ``None``."""
    return "-" if value is None else format(value, form)


# Failures, and the reading of files, which may fail.

Model = TypeVar("Model", bound=BaseModel)


class ExitStatus(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    UNREACHABLE = 3
    NOT_ALLOWED = 4
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141  # as a shell reports the signal SIGPIPE, which ends other programs


# By the HTTP status of the service's refusal.
_STATUSES = {422: ExitStatus.BAD_INPUT, 401: ExitStatus.NOT_ALLOWED, 403: ExitStatus.NOT_ALLOWED}


class BadInput(ValueError):
    """The user's input cannot be used; each argument is a line that says why."""


class Failed(RuntimeError):
    """The request could not be carried out; the message says why."""


class ReadableErrors(TyperGroup):
    """A group of commands that prints expected failures to standard error instead of raising tracebacks."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            try:
                with stores_in_words():
                    return super().invoke(ctx)
            except ServiceUnreachable as error:
                raise _exit([str(error)], ExitStatus.UNREACHABLE) from error
            except ApiError as error:
                lines = [f"{each.field}: {each.message}" for each in error.errors] or [error.detail]
                if error.status == HTTPStatus.UNAUTHORIZED:
                    lines = [error.detail, "sign in with `boost login`, or set BOOST_API_KEY"]
                raise _exit(lines, _STATUSES.get(error.status, ExitStatus.FAILED)) from error
            except BadInput as error:
                raise _exit(error.args, ExitStatus.BAD_INPUT) from error
            except (Failed, StoreUnusable) as error:
                raise _exit([str(error)], ExitStatus.FAILED) from error
            finally:
                sys.stdout.flush()  # here, where a failure can be reported
        except OSError as error:
            # Discard what could not be printed; otherwise the interpreter would try again when it ends.
            with suppress(OSError, ValueError):  # standard output may be no file
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
            if isinstance(error, BrokenPipeError):
                raise typer.Exit(ExitStatus.OUTPUT_CLOSED) from error
            raise _exit([in_lines(error)], ExitStatus.BAD_INPUT if error.filename else ExitStatus.FAILED) from error


@contextmanager
def bad_input(prefix: str = "", model: type[BaseModel] = JobSpec) -> Iterator[None]:
    """Raise what is wrong with a file or an option as ``BadInput``, a line for each field.

    Args:
        prefix: Begins each line.
        model: What is read.
    """
    try:
        yield
    except ValidationError as error:
        problems = job_errors(error.errors(), model, of_file=True)
        raise BadInput(*(prefix + f"{each.field}: {each.message}".removeprefix(": ") for each in problems)) from error
    except (ValueError, YAMLError) as error:
        raise BadInput(f"{prefix}{error}") from error


def read_job(path: Path, **changes: Any) -> JobSpec:
    """Read a job file.

    Args:
        path: The file.
        **changes: Fields to replace; ``None`` leaves a field unchanged.

    Raises:
        BadInput: It is not a valid job.
        OSError: It cannot be read.
    """
    with bad_input():
        spec = load_job(path)
        replaced = {field: value for field, value in changes.items() if value is not None}
        return JobSpec.model_validate(spec.model_dump(mode="json") | replaced) if replaced else spec


def read_as(model: type[Model], path: Path, inlined: str | None = None) -> Model:
    """Read a YAML file, such as a dataset's description or the network's levels.

    Args:
        model: What it is.
        path: The file.
        inlined: A field that may be the path of another YAML file, which is read in its place.

    Raises:
        BadInput: It is not valid.
        OSError: It cannot be read.
    """
    with bad_input(f"{path}: ", model):
        content = read_yaml(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(content.get(inlined), str):
            other = path.parent / content[inlined]
            content = content | {inlined: read_yaml(other.read_text(encoding="utf-8"))}
        return model.model_validate(content)


def read_profile(path: Path) -> MeasuredProfile:
    """Read a measured device profile.

    Raises:
        BadInput: It is not a profile.
        OSError: It cannot be read.
    """
    with bad_input(f"{path}: ", MeasuredProfile):
        return MeasuredProfile.model_validate_json(path.read_bytes())


def read_settings(**options: Any) -> Settings:
    """Read the settings from the environment.

    Args:
        **options: Settings given on the command line, which take precedence; ``None`` for those that are not.

    Raises:
        BadInput: A variable has an invalid value.
    """
    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        # A default derived from an invalid variable is not an error of its own.
        faults = [fault for fault in error.errors() if fault["type"] != "default_factory_not_called"]
        raise BadInput(*(f"BOOST_{fault.field.upper()}: {fault.message}" for fault in job_errors(faults))) from error


def _exit(lines: Iterable[str], status: ExitStatus) -> typer.Exit:
    console = Terminal(stderr=True)
    for line in lines:
        console.say(f"error: {line}", style="red")
    return typer.Exit(status)
