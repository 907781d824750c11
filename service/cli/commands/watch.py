"""``boost watch``: several jobs at once, live, with the curves of their losses and throughputs."""

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
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


Curve = deque[tuple[int, float | None, float | None]]  # the newest steps of a job, each with its loss and throughput


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
    console, named = Terminal(), list(dict.fromkeys(job_ids or []))
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None  # its last state stays
    printed: dict[str, tuple[JobState, str | None, float]] = {}
    jobs: list[JobRecord] = []
    curves: dict[str, Curve] = {}
    with open_client(url) as client:
        client.list(limit=1)  # fail at once if the service was never reachable
    with open_client(url, retry_seconds=_RETRY_SECONDS) as client:
        try:
            with live or nullcontext():
                while True:
                    if named:
                        jobs = [client.get(job_id) for job_id in named]
                    else:  # the active jobs, and those that ended while they were watched
                        active = client.list(_UNFINISHED).jobs
                        ids = {job.id for job in active}
                        ended = [job if job.finished else client.get(job.id) for job in jobs if job.id not in ids]
                        jobs = active + ended[:_ENDED]
                    for job in jobs:
                        _extend_curve(curves, job, client)
                    if live:
                        live.update(PlainTable(_COLUMNS, [_row(job, curves[job.id]) for job in jobs]), refresh=True)
                    else:
                        _print_changes(console, jobs, printed)
                    if named and all(job.finished for job in jobs):
                        break
                    time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            raise typer.Exit(ExitStatus.INTERRUPTED) from None
    if any(job.state is not JobState.SUCCEEDED for job in jobs):
        raise typer.Exit(ExitStatus.FAILED)


def _extend_curve(curves: dict[str, Curve], job: JobRecord, client: Client) -> None:
    """Add a job's newest step to its curve, if it is new; at first also its past: without it, the curve starts now."""
    if job.id not in curves:
        curve: Curve = deque(maxlen=_POINTS)
        curves[job.id] = curve
        if job.progress:
            with suppress(ApiError):
                samples = client.metrics(job.id, _POINTS).samples
                curve.extend((sample.step, sample.loss, sample.tokens_per_second) for sample in samples)
    curve, newest = curves[job.id], job.progress
    if newest and newest.step != (curve[-1][0] if curve else 0):
        curve.append((newest.step, newest.loss, newest.tokens_per_second))


def _print_changes(
    console: Console, jobs: Iterable[JobRecord], printed: dict[str, tuple[JobState, str | None, float]]
) -> None:
    """Print a line for a job when its state changes, and from time to time."""
    for job in jobs:
        state, waiting_for, until = printed.get(job.id, (None, None, 0.0))
        is_due = job.state is JobState.RUNNING and time.monotonic() >= until
        if (job.state, job.waiting_for) == (state, waiting_for) and not is_due:
            continue
        printed[job.id] = job.state, job.waiting_for, time.monotonic() + _PLAIN_SECONDS
        line = f"{time.strftime('%H:%M:%S')}  {job.id} {job.name}  {job.state}"
        if job.state is JobState.RUNNING and job.progress:
            if job.last_seen:
                line += f", as last seen at {job.last_seen.astimezone():%H:%M:%S}"
            line += f"  step {step(job)}  {numbers_of(job.progress)}  goodput {productive_share(job)}"
            line += f"  ETA {duration(job.progress.eta_seconds)}"
        else:
            line += f": {news(job)}"
        print_line(console, line)


def _row(job: JobRecord, curve: Curve) -> tuple[str, ...]:
    newest = job.progress
    trains = job.state is JobState.RUNNING and newest is not None
    losses, throughputs = ([point[number] for point in curve] for number in (1, 2))
    return (
        f"{job.name}\n{job.id}",
        job.state,
        step(job),
        duration(newest.eta_seconds) if newest and trains else "-",
        f"{loss(job)}\n{sparkline(losses)}",
        f"{newest.tokens_per_second:,.0f}\n{sparkline(throughputs)}" if newest else "-",
        f"{newest.exposed_communication_share:.0%}" if newest else "-",
        str(job.present_layout) if job.shape else "-",
        productive_share(job),
        "" if trains else news(job),
    )
