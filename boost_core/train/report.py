"""Reports for people: the reporter of a trainer that runs without the service."""

from pathlib import Path

from boost_core.messages.report_text import line_of
from boost_core.messages.reports import Report
from boost_core.terminal import print_lines


class ConsoleReporter:
    """Prints one line per report.

    Args:
        path: A file to append every report to as well, one JSON object per line.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def report(self, report: Report) -> None:
        """Print a report."""
        print_lines(line_of(report))
        if self._path:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(report.model_dump_json() + "\n")
