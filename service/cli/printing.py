"""Tables and JSON on standard output."""

from collections.abc import Iterable, Sequence

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table
from rich.text import Text


def say(line: str) -> None:
    """Print a line."""
    typer.echo(line)


def print_json(answer: BaseModel) -> None:
    """Print an answer of the API as it came."""
    say(answer.model_dump_json(indent=2))


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table without a frame, of which only the last column is broken into lines."""
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))  # as they are: brackets in a message are no markup
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    _console().print(table_of(columns, rows))


def number(value: float | None) -> str:
    """A number as short as it can be; a dash for none."""
    return "-" if value is None else f"{value:g}"


def _console() -> Console:
    """Standard output; where that is no terminal, wide enough that no line is broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=240)
