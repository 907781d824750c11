"""Text for a terminal: durations, and lines and tables no wider than it: what does not fit is continued, never cut off.

A word that is wider than the terminal alone, such as a URL or a path, is left whole: it can be copied. In a pipe or a
file nothing is continued, so that ``grep`` shows whole rows.
"""

import re
import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO
from unicodedata import combining, east_asian_width

_GAP = 2  # blanks between two columns, and before what continues a line or a row
UNLIMITED = 10**9  # columns
_PROSE = 30  # the last column of a table, which often holds sentences, begins a line of its own where less is left
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # what a terminal would act on
_PLAIN_SECONDS = 10.0  # between two lines of progress in a file or a pipe


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(each) else 2 if east_asian_width(each) in "WF" else 1 for each in text)


def wrapped(text: str, width: int, hang: int = _GAP) -> list[str]:
    """Break a text between words into lines.

    Args:
        text: The text. Its own line breaks, indentations and runs of blanks within a line are kept.
        width: Columns per line.
        hang: Blanks before a line that continues another, beyond that line's own indentation.

    Returns:
        At least one line; only one whose single word is too wide is wider than ``width``.
    """
    lines = list[str]()
    for line in text.split("\n"):
        if cells(line) <= width or not line.strip(" "):
            lines.append(line if cells(line) <= width else "")
            continue
        words = line.split(" ")  # blanks that follow each other have empty words between them
        indent = next(number for number, word in enumerate(words) if word)
        current = " " * indent + words[indent]
        for word in words[indent + 1 :]:
            if cells(current) + 1 + cells(word) <= width:
                current = f"{current} {word}"
            elif word:
                lines.append(current.rstrip())
                current = " " * max(0, min(indent + hang, width - cells(word))) + word
        lines.append(current.rstrip())
    return lines


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, numbers: bool = False
) -> tuple[list[str], list[str]]:
    """Lay out a table without borders. Columns that do not fit beside the others continue each row below it, indented.

    Args:
        columns: The headings.
        rows: A cell per column; a cell may have several lines, which are one if the width is ``UNLIMITED``.
        width: Columns of the terminal.
        numbers: Whether all columns but the first are aligned to the right.

    Returns:
        The lines of the headings, and those of the rows.
    """
    table = [[cell.replace("\n", " ") if width == UNLIMITED else cell for cell in row] for row in (columns, *rows)]
    # Columns are divided among bands that fit; each has its columns with their widths.
    bands: list[dict[int, int]] = [{}]
    left = width
    for index, column in enumerate(zip(*table, strict=True)):
        natural = max(cells(line) for cell in column for line in cell.split("\n"))
        least = natural
        if index == len(columns) - 1:
            longest = max((cells(word) for cell in column for word in cell.split()), default=0)
            least = max(min(natural, _PROSE), longest)
        if least > left and bands[-1]:
            bands.append({})
            left = width - _GAP
        bands[-1][index] = min(natural, max(left, 1))
        left -= natural + _GAP
    lines: list[list[str]] = []
    for row in table:
        lines.append([])
        for number, band in enumerate(bands):  # the lines of the cells that stand beside each other
            indent = _GAP * (number > 0)
            parts = [wrapped(row[index], room, 0) for index, room in band.items()]
            if indent and not any(map(any, parts)):
                continue  # they are empty below others
            for place in range(max(map(len, parts))):
                line = " " * indent
                for (index, room), part in zip(band.items(), parts, strict=True):
                    text = part[place] if place < len(part) else ""
                    padding = " " * (room - cells(text))
                    line += (padding + text if numbers and index else text + padding) + " " * _GAP
                line = line.rstrip()
                # A word that fits only without indentation is not indented.
                lines[-1].append(line if cells(line) <= width else line.lstrip())
    return lines[0], [line for of_row in lines[1:] for line in of_row]


def duration(seconds: float) -> str:
    """A duration as hours, minutes and seconds: ``1:02:03``, ``2:03``; from a day on ``193 d 10 h``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rounded(number: float, digits: int = 3) -> str:
    """A number with this many significant digits: ``12,300``, ``0.0012``, ``less than 0.0001``; never an exponent."""
    if 0 < number < 1e-4:
        return "less than 0.0001"
    text = f"{float(f'{number:.{digits}g}'):,.{digits + 3}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def size_in_words(count: float) -> str:
    """A number of bytes: ``512 MiB``, ``1,234.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def duration_in_words(seconds: float) -> str:
    """A duration in its two largest units, as people say it: ``8 days 7 h``, ``13 h 32 min``, ``2 min 5 s``."""
    if seconds < 59.5:
        return f"{seconds:.3g} s" if seconds >= 1 else f"{rounded(1000 * seconds)} ms"
    if seconds >= 1e12:  # 30,000 years: of steps over a link that hardly sends anything
        return "forever"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "day" if days == 1 else "days"), (hours, "h"), (minutes, "min"), (rest, "s")]
    largest = next(place for place, (number, _) in enumerate(units) if number)
    shown = 1 if days >= 100 else 2
    return " ".join(f"{number:,} {unit}" for number, unit in units[largest : largest + shown] if number)


def printable(text: str) -> str:
    """Return the text with its control characters, including bidirectional ones, escaped as in JSON."""
    return CONTROL.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def print_lines(text: str, *, to: TextIO | None = None) -> None:
    """Print a text, ``printable`` and wrapped to ``columns_here``.

    Args:
        text: The text.
        to: Where to; default: standard output.
    """
    for line in wrapped(printable(text), columns_here()):
        print(line, file=to or sys.stdout, flush=True)


class ProgressLine:
    """Progress on standard error: a line overwritten in place on a terminal, a new line now and then elsewhere."""

    _due = 0.0  # when the next line may be printed to a file or a pipe

    def show(self, line: str) -> None:
        """Print a line, or drop it if one has just been printed to a file or a pipe."""
        if sys.stderr.isatty():
            width = shutil.get_terminal_size().columns - 1  # a full line would move the cursor to the next one
            print(f"\r{line[:width]:<{width}}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._due:
            self._due = time.monotonic() + _PLAIN_SECONDS
            print(line, file=sys.stderr, flush=True)


def columns_here() -> int:
    """Return the width to print at: ``COLUMNS`` if set, else that of standard output, else ``UNLIMITED``."""
    return shutil.get_terminal_size((UNLIMITED, 0)).columns
