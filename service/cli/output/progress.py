"""Following a job: a live progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from boost_core.messages.report_text import duration, numbers_of
from boost_core.messages.reports import StepReport
from service.cli.failures import ExitStatus
from service.cli.output.event_text import line_of, report_of
from service.cli.output.printing import print_line
from service.client import Client
from service.jobs.model import EVENT_KINDS, JobEvent, JobRecord
from service.jobs.states import JobState

_PLAIN_SECONDS = 5.0  # between two lines about steps

_View = AbstractContextManager[Callable[[JobEvent], None]]  # shows events until it is closed

# All but the frequent ones, which feed curves and gauges, and those of newer services.
_SHOWN = EVENT_KINDS - {"ranks", "spare"}


def follow(client: Client, job_id: str, console: Console) -> JobRecord:
    """Show a job's events from the first one until the job has ended, and return its final record.

    Raises:
        ApiError: There is no such job.
        ServiceUnreachable: The service has gone away.
    """
    view: _View = _live(console) if console.is_terminal else nullcontext(_PlainView(console).show)
    with view as show:
        for event in client.events(job_id):
            if event.kind in _SHOWN:
                show(event)
    return client.get(job_id)


def follow_until_interrupted(client: Client, job_id: str, console: Console) -> JobRecord:
    """Like ``follow``, but Ctrl-C ends this program and leaves the job running.

    Raises:
        typer.Exit: The user pressed Ctrl-C.
    """
    try:
        return follow(client, job_id, console)
    except KeyboardInterrupt:
        print_line(console, f"stopped following; the job continues. Follow it again: boost events {job_id} -f")
        print_line(console, f"cancel it: boost cancel {job_id}")
        raise typer.Exit(ExitStatus.INTERRUPTED) from None


def exit_as(job: JobRecord) -> None:
    """Exit with the status of a job that has ended; do nothing if it has not.

    Raises:
        typer.Exit: The job did not succeed.
    """
    if job.finished and job.state is not JobState.SUCCEEDED:
        raise typer.Exit(ExitStatus.FAILED)


@contextmanager
def _live(console: Console) -> Iterator[Callable[[JobEvent], None]]:
    """A progress bar for steps; all other events scroll by above it."""
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(None, table_column=Column(max_width=40)),  # narrower where the numbers need the room
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=1, visible=False)

        def show(event: JobEvent) -> None:
            report = report_of(event)
            if not isinstance(report, StepReport):
                print_line(console, line_of(event))
                return
            description = f"{numbers_of(report)}  ETA {duration(report.eta_seconds)}"
            progress.update(bar, completed=report.step, total=report.steps, description=description, visible=True)

        yield show


class _PlainView:
    """Plain lines: for steps only one every few seconds, and the last."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._quiet_until = 0.0

    def show(self, event: JobEvent) -> None:
        """Print an event's line, unless another step was printed too recently."""
        report = report_of(event)
        if isinstance(report, StepReport) and report.step < report.steps:
            if time.monotonic() < self._quiet_until:
                return
            self._quiet_until = time.monotonic() + _PLAIN_SECONDS
        print_line(self._console, line_of(event))
