"""``boost watch``: several jobs at once, live, with the curves of their losses and throughputs."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from boost_core.messages import duration, numbers_of
from service.cli.connection import open_client
from service.cli.failures import ExitStatus
from service.cli.options import Url, complete_job_ids
from service.cli.output.jobs import loss, news, productive_share, step
from service.cli.output.printing import PlainTable, Terminal, print_line
from service.client import ApiError, Client
from service.jobs.model import JobRecord
from service.jobs.states import TERMINAL_STATES, JobState

_POINTS = 24  # of a curve
_ENDED = 10  # ended jobs that stay visible while all active jobs are watched
_UNFINISHED = [state for state in JobState if state not in TERMINAL_STATES]


class Curve:
    """The newest numbers of a job, as many as fit into a line."""

    def __init__(self) -> None:
        self.losses: deque[float | None] = deque(maxlen=_POINTS)
        self.throughputs: deque[float | None] = deque(maxlen=_POINTS)
        self._step = 0

    def begin(self, client: Client, job_id: str) -> None:
        """Load the job's past; without it, the curve just starts now."""
        with suppress(ApiError):
            for sample in client.metrics(job_id, _POINTS).samples:
                self._add(sample.step, sample.loss, sample.tokens_per_second)

    def go_on(self, job: JobRecord) -> None:
        """Add the job's newest step, if it is new."""
        if job.progress and job.progress.step != self._step:
            self._add(job.progress.step, job.progress.loss, job.progress.tokens_per_second)

    def _add(self, step: int, loss: float | None, throughput: float | None) -> None:
        self._step = step
        self.losses.append(loss)
        self.throughputs.append(throughput)


class Watched:
    """Some jobs, as of the last poll.

    Args:
        client: The service.
        job_ids: The jobs; if empty, all active ones, including new ones.
    """

    def __init__(self, client: Client, job_ids: Sequence[str]) -> None:
        self._client = client
        self._named = list(dict.fromkeys(job_ids))
        self._curves: dict[str, Curve] = {}
        self.jobs: list[JobRecord] = []

    def look(self) -> None:
        """Poll the jobs.

        Raises:
            ApiError: One of the named jobs does not exist.
            ServiceUnreachable: The service does not answer.
        """
        if self._named:
            self.jobs = [self._client.get(job_id) for job_id in self._named]
        else:  # the active jobs, and those that ended while they were watched
            active = self._client.list(_UNFINISHED).jobs
            ids = {job.id for job in active}
            ended = [job if job.finished else self._client.get(job.id) for job in self.jobs if job.id not in ids]
            self.jobs = active + ended[:_ENDED]
        for job in self.jobs:
            self.curve(job).go_on(job)

    def curve(self, job: JobRecord) -> Curve:
        """Return the curve of a job."""
        if job.id not in self._curves:
            self._curves[job.id] = curve = Curve()
            if job.progress:
                curve.begin(self._client, job.id)
        return self._curves[job.id]

    @property
    def is_over(self) -> bool:
        """Whether all named jobs have ended."""
        return bool(self._named) and all(job.finished for job in self.jobs)


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """Draw a block for each value, taller for larger values; a blank for missing and non-finite ones."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    line = ""
    for value in values:
        if value is None or not math.isfinite(value):
            line += " "
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        line += _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]
    return line


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
                while True:
                    watched.look()
                    show(watched)
                    if watched.is_over:
                        break
                    time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
    if any(job.state is not JobState.SUCCEEDED for job in watched.jobs):
        raise typer.Exit(ExitStatus.FAILED)


@contextmanager
def _screen(console: Console) -> Iterator[Callable[[Watched], None]]:
    """A table that is redrawn; its last state stays on the screen."""
    with Live(console=console, auto_refresh=False) as live:
        yield lambda watched: live.update(
            PlainTable(_COLUMNS, (_row(watched, job) for job in watched.jobs)), refresh=True
        )


class _Lines:
    """A line for a job when its state changes, and from time to time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: dict[str, tuple[JobState, str | None, float]] = {}

    def show(self, watched: Watched) -> None:
        """Print the lines that are due."""
        for job in watched.jobs:
            state, waiting_for, until = self._printed.get(job.id, (None, None, 0.0))
            if (job.state, job.waiting_for) != (state, waiting_for) or (
                job.state is JobState.RUNNING and time.monotonic() >= until
            ):
                self._printed[job.id] = job.state, job.waiting_for, time.monotonic() + _PLAIN_SECONDS
                line = f"{time.strftime('%H:%M:%S')}  {job.id} {job.name}  {job.state}"
                if job.state is JobState.RUNNING and job.progress:
                    if job.last_seen:
                        line += f", as last seen at {job.last_seen.astimezone():%H:%M:%S}"
                    line += f"  step {step(job)}  {numbers_of(job.progress)}  goodput {productive_share(job)}"
                    line += f"  ETA {duration(job.progress.eta_seconds)}"
                else:
                    line += f": {news(job)}"
                print_line(self._console, line)


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
