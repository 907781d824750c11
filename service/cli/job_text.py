"""A job as text: what ``boost show`` and ``boost ls`` print, and its events as readable lines.

Following a job shows a live progress bar on a terminal, and plain lines elsewhere.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime

import typer
from pydantic import ValidationError
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from boost_core import messages
from boost_core.config.base import counted
from boost_core.plan.resolve import ChosenLayouts
from boost_core.terminal import duration
from service.cli.connection import retry_longer
from service.cli.console import ExitStatus, Terminal
from service.client import Client
from service.jobs.goodput import as_of
from service.jobs.model import EVENT_KINDS, EventKind, JobEvent, JobRecord
from service.jobs.states import JobState
from service.models.jobs import JobEvaluation, TrackerState

_SHOWN_RESTARTS = 5
_SHOWN_SCORES = 20
_LAYOUTS_A_LINE = 3
_PLAIN_SECONDS = 5.0  # between two lines about steps

# Kinds of events that are not reports of the trainer.
_OF_THE_SERVICE = frozenset({"state", "patch", "drill", "scores", "layouts"})
# All but the frequent ones, which feed curves and gauges, and those of newer services.
_SHOWN = EVENT_KINDS - {"ranks", "spare"}


def facts(
    job: JobRecord, evaluations: Sequence[JobEvaluation] = (), trackers: Sequence[TrackerState] = ()
) -> Iterator[tuple[str, str]]:
    """Yield a job's facts, each with its name; the name is empty on continuation lines.

    Args:
        job: The job.
        evaluations: Its evaluations on tasks, newest first.
        trackers: The state of its trackers.
    """
    yield "id", job.id
    yield "name", job.name
    requested = ""
    if job.cancel_requested and not job.finished:
        requested = ", to be cancelled"
    elif job.pause_requested and job.has_gang:
        requested = ", to be paused"
    yield "state", f"{job.state} ({job.reason}){requested}"
    seen = f"as last seen at {job.last_seen.astimezone():%H:%M:%S}: " if job.last_seen else ""
    yield "message", seen + job.message
    if job.last_seen:
        yield "not seen", f"since {job.last_seen.astimezone():%Y-%m-%d %H:%M:%S}: {job.waiting_for}"
    elif job.waiting_for:
        yield "waits for", job.waiting_for
    ago = duration((datetime.now(UTC) - job.submitted_at).total_seconds())
    yield "submitted", f"{job.submitted_at.astimezone():%Y-%m-%d %H:%M:%S} ({ago} ago) by {job.submitted_by}"
    yield "tenant", job.tenant
    yield "queue", f"{job.queue}, priority {job.spec.priority}"
    if job.spec.group:
        yield "group", job.spec.group
    if job.spec.tags:
        yield "tags", ", ".join(job.spec.tags)
    for number, line in enumerate(job.spec.notes.splitlines()):
        yield "" if number else "notes", line
    if job.cloned_from:
        yield "clone of", job.cloned_from
    if origin := job.spec.checkpoint.origin:
        how = "continues from" if origin[0] == "continue_from" else "starts at step 0 from the weights of"
        yield "origin", f"{how} the newest checkpoint in {origin[1]}"
    yield "attempts", str(job.attempt)
    if job.shape:
        yield "layout", f"{messages.layout_in_words(job.shape)}: {', '.join(dict.fromkeys(job.shape.nodes))}"
    else:
        yield "layout", "not formed yet" if job.spec.leaves_layouts else f"{job.present_layout}; not formed yet"
    elasticity = job.spec.elasticity
    if elasticity is not None and elasticity.gpus is not None:  # the layouts of a job with ``layouts: auto``
        gpus, layouts = elasticity.gpus, [str(layout) for layout in elasticity.chosen]
        ranks = "GPUs" if job.spec.resources.gpus_per_worker else "workers"
        yield "layouts", f"{len(layouts)}, chosen for {gpus.min} to {gpus.max} {ranks}:"
        for first in range(0, len(layouts), _LAYOUTS_A_LINE):
            yield "", ", ".join(layouts[first : first + _LAYOUTS_A_LINE])
    if job.spare is not None and job.spare_step is not None:
        yield "spare copy", f"of step {job.spare_step}, on node {job.spare.node}"
    causes = ", ".join(f"{count} {cause}" for cause, count in job.restart_counts.items())
    yield "restarts", f"{sum(job.restart_counts.values())}" + (f" ({causes})" if causes else "")
    for restart in job.restarts[-_SHOWN_RESTARTS:]:
        yield "", f"{restart.time.astimezone():%H:%M:%S}  {messages.restart_in_words(restart)}"
    goodput = as_of(job.goodput, datetime.now(UTC))
    seconds = goodput.total.total_seconds()
    spent = sorted(goodput.seconds.items(), key=lambda kind: -kind[1])
    shares = [f"{part / seconds:.0%} {kind.replace('_', ' ')}" for kind, part in spent if part >= 0.005 * seconds > 0]
    yield "goodput", f"{', '.join(shares) or 'none booked'}, of {duration(seconds)}"
    yield "step", f"{step(job)}, on {job.spec.training.total_tokens:,} tokens in all"
    before = job.spec.steering
    for steer in job.steers:
        changes = messages.changes_in_words(before.changes_to(steer.steering))
        waits = "the job ended before" if job.finished else "waits for its gang"
        yield "to change", f"{changes}, as {steer.by} has asked; {waits}"
        before = steer.steering
    for stage, after in zip(job.spec.steered, [*job.spec.steered, job.spec.steering][1:], strict=True):
        changes = messages.changes_in_words(stage.changes_to(after))
        yield "changed", f"from step {stage.until_step + 1} on: {changes}, by {stage.changed_by}"
    if job.progress:
        yield "newest step", messages.numbers_of(job.progress)
    if job.comparison:
        yield "versus plan", messages.comparison_in_words(job.comparison)
    if job.evaluation:
        newest = job.evaluation
        words = messages.validation_in_words(newest)
        yield "validation", f"loss {words} at step {newest.step}, unigram {newest.unigram_entropy:.4f}"
        yield from (("", f"{each.name} {messages.validation_in_words(each)}") for each in newest.sets)
    yield "checkpoint", job.checkpoint.url if job.checkpoint else f"none yet; goes to {job.checkpoint_url}"
    scored = [(each.step, score) for each in evaluations for score in each.scores]
    for number, (at, score) in enumerate(scored[:_SHOWN_SCORES]):
        yield "" if number else "scores", f"{score.task} {score.metric} {value_in_words(score)} at step {at}"
    for tracker in trackers:
        behind = f", {counted(tracker.behind, 'event')} behind" if tracker.behind else ""
        problem = f", failing: {tracker.problem}" if tracker.problem else ""
        yield tracker.kind, f"{tracker.place or 'not reached yet'}{behind}{problem}"


def value_in_words(score: messages.Score) -> str:
    """Return a score's value with its standard error, and on how much it was measured."""
    value = "not finite" if score.value is None else f"{score.value:.4f}"
    error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    return f"{value}{error} on {counted(score.samples, 'document')}"


def step(job: JobRecord) -> str:
    """Return the steps done and the total."""
    return f"{job.progress.step if job.progress else job.goodput.highest_step}/{job.spec.training.steps}"


def news(job: JobRecord) -> str:
    """Return what the job waits for, or else what last happened to it, and when that is from if it may be outdated."""
    if job.last_seen:
        return f"as last seen at {job.last_seen.astimezone():%H:%M:%S}: {job.message}; {job.waiting_for}"
    return job.waiting_for or job.message


def productive_share(job: JobRecord) -> str:
    """Return the share of the job's time that went into new steps."""
    goodput = as_of(job.goodput, datetime.now(UTC))
    seconds = goodput.total.total_seconds()
    return f"{goodput.productive / seconds:.0%}" if seconds else "-"


def report_of(event: JobEvent) -> messages.Report | None:
    """Return the trainer's report in an event; ``None`` for the service's own events and reports of newer trainers."""
    if event.kind in _OF_THE_SERVICE:
        return None
    try:
        return messages.report_adapter.validate_python(event.data)
    except ValidationError:
        return None


def line_of(event: JobEvent) -> str:
    """Return one line that says what happened, with the local time."""
    data, report = event.data, report_of(event)
    if report is not None:
        text = messages.line_of(report)
    else:
        match event.kind:
            case "patch":
                text = f"changed: {messages.changes_in_words(data)}"
            case "drill":
                when = "at once" if data["at_step"] is None else f"after step {data['at_step']}"
                text = f"drill requested: {data['kind']}, rank {data['rank']}, {when}"
            case "scores":
                scores = messages.Scores.model_validate(data).scores
                listed = "; ".join(f"{score.task} {score.metric} {value_in_words(score)}" for score in scores)
                text = f"step {data['step']}  scores: {listed}"
            case "layouts":
                chosen = ChosenLayouts.model_validate(data)
                each = (f"{one.layout} ({one.step_seconds:.3g} s per step)" for one in chosen.layouts)
                text = f"layouts chosen from {chosen.timed} legal ones: {', '.join(each)}"
            case "state":
                text = f"{data['state']}: {data['message']}"
            case _:
                text = f"{event.kind}: {data.get('message', data)}"
    return f"{event.time.astimezone():%H:%M:%S}  {text}"


def follow(client: Client, job_id: str, console: Terminal, kinds: Sequence[EventKind] = ()) -> JobRecord:
    """Show a job's events from the first one until the job has ended, and return its final record.

    Those of some kinds, or without any given, all but the frequent ones that feed curves and gauges. Of steps, a
    terminal shows a progress bar; elsewhere one has a line every few seconds.

    Raises:
        ApiError: There is no such job.
        ServiceUnreachable: The service has gone away.
    """
    retry_longer(client)
    columns = (
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(None, table_column=Column(max_width=40)),  # narrower where the numbers need the room
        TextColumn("{task.description}", markup=False),
    )
    quiet_until = 0.0
    with Progress(*columns, console=console) if console.is_terminal else nullcontext() as progress:
        bar = progress.add_task("", total=1, visible=False) if progress else None
        for event in client.events(job_id, kinds=kinds):
            if event.kind not in (kinds or _SHOWN):
                continue
            report = report_of(event)
            if isinstance(report, messages.StepReport):
                if progress and bar is not None:
                    numbers = f"{messages.numbers_of(report)}  ETA {duration(report.eta_seconds)}"
                    progress.update(bar, completed=report.step, total=report.steps, description=numbers, visible=True)
                    continue
                if report.step < report.steps:
                    if time.monotonic() < quiet_until:
                        continue
                    quiet_until = time.monotonic() + _PLAIN_SECONDS
            console.say(line_of(event))
    return client.get(job_id)


def follow_until_interrupted(
    client: Client, job_id: str, console: Terminal, kinds: Sequence[EventKind] = ()
) -> JobRecord:
    """Like ``follow``, but Ctrl-C ends this program and leaves the job running.

    Raises:
        typer.Exit: The user pressed Ctrl-C.
    """
    try:
        return follow(client, job_id, console, kinds)
    except KeyboardInterrupt:
        console.say(f"stopped following; the job continues. Follow it again: boost events {job_id} -f")
        console.say(f"cancel it: boost cancel {job_id}")
        raise typer.Exit(ExitStatus.INTERRUPTED) from None


def exit_as(job: JobRecord) -> None:
    """Exit with the status of a job that has ended; do nothing if it has not.

    Raises:
        typer.Exit: The job did not succeed.
    """
    if job.finished and job.state is not JobState.SUCCEEDED:
        raise typer.Exit(ExitStatus.FAILED)
