"""Tables and JSON on standard output, without what a terminal would obey: much of it was written by others."""

import re
from collections.abc import Iterable, Sequence

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text whose control characters, those that turn its direction included, are written as JSON writes them."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def say(line: str, *, err: bool = False) -> None:
    """Print a line.

    Args:
        line: The line.
        err: On standard error.
    """
    typer.echo(printable(line), err=err)


def print_json(answer: BaseModel) -> None:
    """Print an answer of the API as it came."""
    say(answer.model_dump_json(indent=2))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without a frame, of which only the last column is broken into lines."""
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # as they are: brackets in a message are not markup
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    _console().print(table_of(columns, rows))


def print_line(console: Console, line: str, style: str | None = None) -> None:
    """Print a line as it is, however wide the terminal."""
    console.print(printable(line), markup=False, soft_wrap=True, style=style)


def number(value: float | None) -> str:
    """A number as short as it can be; a dash for none."""
    return "-" if value is None else f"{value:g}"


def _console() -> Console:
    """Standard output; where that is not a terminal, wide enough that no line is broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=240)
