"""``boost watch``: several jobs at once, live."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from boost_core.messages.report_text import duration, numbers_of
from service.cli.commands.watched_jobs import Watched
from service.cli.completion import complete_job_ids
from service.cli.connection import open_client
from service.cli.failures import ExitStatus
from service.cli.options import Url
from service.cli.output.job_text import loss, news, productive_share, step
from service.cli.output.printing import PlainTable, Terminal, print_line
from service.cli.output.sparkline import sparkline
from service.jobs.model import JobRecord
from service.jobs.states import JobState

_LOOK_SECONDS = 2.0
_PLAIN_SECONDS = 30.0  # between two lines about a job in the same state
_RETRY_SECONDS = 60.0  # a restart of the service must not end a watch that has run for hours

_View = AbstractContextManager[Callable[[Watched], None]]  # shows the jobs until it is closed

_COLUMNS = ("JOB", "STATE", "STEP", "ETA", "LOSS", "TOKENS/S", "EXPOSED", "LAYOUT", "GOODPUT", "MESSAGE")


def watch(
    job_ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...", help="Jobs to watch (default: all active ones).", autocompletion=complete_job_ids
        ),
    ] = None,
    url: Url = None,
) -> None:
    """Watch jobs until all those named have ended, or until Ctrl-C: live on a terminal, otherwise as lines."""
    console = Terminal()
    view: _View = _screen(console) if console.is_terminal else nullcontext(_Lines(console).show)
    with open_client(url) as client:
        client.list(limit=1)  # fail at once if the service was never reachable
    with open_client(url, retry_seconds=_RETRY_SECONDS) as client:
        watched = Watched(client, job_ids or [])
        try:
            with view as show:
                for _ in _rounds(watched):
                    show(watched)
        except KeyboardInterrupt:
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
    if any(job.state is not JobState.SUCCEEDED for job in watched.jobs):
        raise typer.Exit(ExitStatus.FAILED)


def _rounds(watched: Watched) -> Iterator[None]:
    """Poll the jobs until they are over."""
    while True:
        watched.look()
        yield
        if watched.is_over:
            return
        time.sleep(_LOOK_SECONDS)


@contextmanager
def _screen(console: Console) -> Iterator[Callable[[Watched], None]]:
    """A table that is redrawn; its last state stays on the screen."""
    with Live(console=console, auto_refresh=False) as live:
        yield lambda watched: live.update(_table(watched), refresh=True)


class _Lines:
    """A line for a job when its state changes, and from time to time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: dict[str, tuple[JobState, str | None, float]] = {}

    def show(self, watched: Watched) -> None:
        """Print the lines that are due."""
        for job in watched.jobs:
            state, waiting_for, until = self._said.get(job.id, (None, None, 0.0))
            if (job.state, job.waiting_for) != (state, waiting_for) or (
                job.state is JobState.RUNNING and time.monotonic() >= until
            ):
                self._said[job.id] = job.state, job.waiting_for, time.monotonic() + _PLAIN_SECONDS
                print_line(self._console, _line(job))


def _line(job: JobRecord) -> str:
    text = f"{time.strftime('%H:%M:%S')}  {job.id} {job.name}  {job.state}"
    if job.state is JobState.RUNNING and job.progress:
        eta = duration(job.progress.eta_seconds)
        if job.last_seen:
            text = f"{text}, as last seen at {job.last_seen.astimezone():%H:%M:%S}"
        return f"{text}  step {step(job)}  {numbers_of(job.progress)}  goodput {productive_share(job)}  ETA {eta}"
    return f"{text}: {news(job)}"


def _table(watched: Watched) -> PlainTable:
    return PlainTable(_COLUMNS, (_row(watched, job) for job in watched.jobs))


def _row(watched: Watched, job: JobRecord) -> tuple[str, ...]:
    curve, newest = watched.curve(job), job.progress
    trains = job.state is JobState.RUNNING and newest is not None
    return (
        f"{job.name}\n{job.id}",
        job.state,
        step(job),
        duration(newest.eta_seconds) if newest and trains else "-",
        f"{loss(job)}\n{sparkline(curve.losses)}",
        f"{newest.tokens_per_second:,.0f}\n{sparkline(curve.throughputs)}" if newest else "-",
        f"{newest.exposed_communication_share:.0%}" if newest else "-",
        str(job.present_layout) if job.shape else "-",
        productive_share(job),
        "" if trains else news(job),
    )
