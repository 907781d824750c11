"""Lines and tables as wide as the terminal, and JSON; control characters escaped: much of the text others wrote."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import typer
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from boost_core.terminal import table_lines, wrapped

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Terminal(Console):
    """Standard output or standard error. A reader that has gone is an error, as for ``print``.

    Args:
        stderr: Whether it is standard error.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False)

    def on_broken_pipe(self) -> None:
        """Raise it; rich would end the program with the status of a failed job."""
        raise BrokenPipeError


def printable(text: str) -> str:
    """Return the text with its control characters, including bidirectional ones, escaped as in JSON."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def say(line: str, *, err: bool = False) -> None:
    """Print a line, wrapped to the terminal's width.

    Args:
        line: The line.
        err: Print to standard error.
    """
    print_line(Terminal(stderr=err), line)


def say_unchanged(text: str) -> None:
    """Print what others read or wrote, such as JSON and lines of logs: in lines of any length."""
    typer.echo(printable(text))


def print_json(answer: BaseModel) -> None:
    """Print an answer of the API unchanged."""
    say_unchanged(answer.model_dump_json(indent=2))


def print_facts(facts: Iterable[tuple[str, str]], indent: int = 12) -> None:
    """Print names and values beside each other.

    Args:
        facts: The names, empty where a value belongs to the name before it, and the values.
        indent: The column at which values begin.
    """
    console = Terminal()
    for name, value in facts:
        print_line(console, f"{name:<{indent}}{value}", hang=indent)


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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    Terminal().print(PlainTable(columns, [*rows]), crop=False)


def print_list(answer: BaseModel, as_json: bool, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a list that the API has answered with, as its JSON or as a table."""
    if as_json:
        print_json(answer)
    else:
        print_table(columns, rows)


def print_line(console: Console, line: str, style: str | None = None, hang: int = 2) -> None:
    """Print a line, wrapped between words to the console's width.

    Args:
        console: Where to.
        line: The line.
        style: Style of its text.
        hang: Blanks before what continues it.
    """
    text = "\n".join(wrapped(printable(line), console.width, hang))
    console.print(text, markup=False, soft_wrap=True, style=style)


def number(value: float | None) -> str:
    """Format a number as short as possible; a dash for ``None``."""
    return "-" if value is None else f"{value:g}"
