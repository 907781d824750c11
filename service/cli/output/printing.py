"""Tables and JSON on standard output, with control characters escaped: much of the text was written by others."""

import re
from collections.abc import Iterable, Sequence

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Terminal(Console):
    """Standard output or standard error. A reader that has gone is an error, as for ``print``.

    Args:
        stderr: Whether it is standard error.
        width: Characters per line; default: the terminal's.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise it; rich would end the program with the status of a failed job."""
        raise BrokenPipeError


def printable(text: str) -> str:
    """Return the text with its control characters, including bidirectional ones, escaped as in JSON."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def say(line: str, *, err: bool = False) -> None:
    """Print a line.

    Args:
        line: The line.
        err: Print to standard error.
    """
    typer.echo(printable(line), err=err)


def print_json(answer: BaseModel) -> None:
    """Print an answer of the API unchanged."""
    say(answer.model_dump_json(indent=2))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table without borders, of which only the last column wraps."""
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # as Text: brackets in a message are not markup
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    _console().print(table_of(columns, rows))


def print_list(found: BaseModel, as_json: bool, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a list that the API has answered with, as its JSON or as a table."""
    if as_json:
        print_json(found)
    else:
        print_table(columns, rows)


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print a line without wrapping it."""
    console.print(printable(line), markup=False, soft_wrap=True, style=style)


def number(value: float | None) -> str:
    """Format a number as short as possible; a dash for ``None``."""
    return "-" if value is None else f"{value:g}"


def _console() -> Console:
    """Return standard output, wide enough not to wrap where it is not a terminal."""
    console = Terminal()
    return console if console.is_terminal else Terminal(width=240)
