"""Jobs: ``boost submit``, ``clone``; ``ls`` to ``watch`` show them, ``pause`` to ``profile`` act on one."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Literal, TypeVar, cast

import typer
from rich.live import Live
from typer import Argument, Option

from boost_core.config.base import counted
from boost_core.config.job import Steering
from boost_core.messages import Drill, Profile, changes_in_words, numbers_of
from boost_core.terminal import duration
from service.cli import job_text
from service.cli.commands.plan import print_plan, print_stored
from service.cli.connection import listed, retry_longer
from service.cli.console import BadInput, ExitStatus, Failed, PlainTable, Terminal, print_answer, read_job, say, say_raw
from service.cli.options import UNOPENED, AsJson, Changes, JobFile, JobId, JobIds, Quiet, Service, merge_patch, moment
from service.client import ApiError, Client
from service.client.calls import IDEMPOTENCY_KEY
from service.jobs.model import EVENT_KINDS, EventKind, JobPage, JobRecord
from service.jobs.states import TERMINAL_STATES, JobState
from service.models.jobs import unused_replicas


def _checked_key(key: str | None) -> str | None:
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise BadInput(f"--idempotency-key {key!r}: give 1 to 255 visible ASCII characters")
    return key


_KEY_HELP = "Idempotency key: repeating the command with it creates only one job."
_IdempotencyKey = Annotated[str | None, Option(metavar="KEY", help=_KEY_HELP, callback=_checked_key)]
_Follow = Annotated[bool, Option("--follow", "-f", help="Follow until the job ends.")]


def submit(
    job: JobFile,
    name: Annotated[str | None, Option(help="Override the job's name.")] = None,
    queue: Annotated[str | None, Option(help="Override the job's queue.")] = None,
    priority: Annotated[int | None, Option(help="Override the job's priority.")] = None,
    group: Annotated[str | None, Option(help="Override the job's group.")] = None,
    tag: Annotated[list[str] | None, Option(help="Override the job's tags; repeatable.")] = None,
    notes: Annotated[str | None, Option(help="Override the job's notes.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check and plan the job without submitting it.")] = False,
    idempotency_key: _IdempotencyKey = None,
    follow_it: _Follow = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Submit a job."""
    spec = read_job(job, name=name, queue=queue, priority=priority, group=group, tags=tag or None, notes=notes)
    if dry_run:
        result = client.dry_run(spec)
        print_answer(result, as_json, f"{result.spec.name} could be submitted to the queue {result.spec.queue}")
        if not as_json:
            print_plan(result.plan, result.spec, result.chosen)
            print_stored(result.profile)
        return
    _go_on(client, client.submit(spec, idempotency_key=idempotency_key), follow_it, quiet, as_json)


_FROM_CHECKPOINT_HELP = "Continue from the job's newest checkpoint, at its step."
_FROM_WEIGHTS_HELP = "Start at step 0 from the weights of the job's newest checkpoint."


def clone(
    job_id: JobId,
    changes: Changes = None,
    name: Annotated[str | None, Option(help="The copy's name.")] = None,
    from_checkpoint: Annotated[bool, Option("--from-checkpoint", help=_FROM_CHECKPOINT_HELP)] = False,
    from_weights: Annotated[bool, Option("--from-weights", help=_FROM_WEIGHTS_HELP)] = False,
    idempotency_key: _IdempotencyKey = None,
    follow_it: _Follow = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Submit a copy of a job."""
    patch = merge_patch(changes or []) | _without_none(name=name)
    if from_checkpoint and from_weights:
        raise BadInput("--from-checkpoint continues and --from-weights starts at step 0; give one of them")
    begin = {"from_checkpoint": from_checkpoint, "from_weights": from_weights}
    record = client.clone(job_id, patch, **begin, idempotency_key=idempotency_key)
    _go_on(client, record, follow_it, quiet, as_json)


def _go_on(client: Client, record: JobRecord, follow_it: bool, quiet: bool, as_json: bool) -> None:
    """Print a job that has just been submitted, or follow it."""
    if quiet and not as_json:
        say_raw(record.id)
    elif not as_json:
        say(f"submitted {record.id}")
        if note := unused_replicas(record.spec):
            say(f"note: {note}")
    if follow_it:
        if as_json:  # its record comes at the end, and who runs the command again must know of it
            say(f"submitted {record.id}", err=True)
        record = job_text.follow_until_interrupted(client, record.id, Terminal(stderr=as_json or quiet))
    elif not as_json and not quiet:
        say(f"watch it with: boost watch {record.id}")
    print_answer(record, as_json)
    job_text.exit_as(record)


# Inspecting and changing them.

_Part = TypeVar("_Part")

_InState = Annotated[list[JobState] | None, Option(case_sensitive=False, help="Only jobs in this state; repeatable.")]
_InQueue = Annotated[str | None, Option(help="Only jobs in this queue.")]
_Named = Annotated[str | None, Option(help="Only jobs whose name contains this.")]
_OfTenant = Annotated[str | None, Option(help="Only this tenant's jobs; for operators.")]
_OfGroup = Annotated[str | None, Option(help="Only jobs of this group.")]
_Tagged = Annotated[list[str] | None, Option(help="Only jobs with this tag; repeatable.")]
_With = Annotated[str | None, Option(help="Only jobs with this in their name, group, tags or notes.")]


def list_jobs(
    state: _InState = None,
    queue: _InQueue = None,
    name: _Named = None,
    tenant: _OfTenant = None,
    group: _OfGroup = None,
    tag: _Tagged = None,
    search: _With = None,
    limit: Annotated[int, Option("--limit", "-n", min=1, help="Maximum number of results.")] = 100,
    cursor: Annotated[str | None, Option(help="Continue a previous list; its last line shows the value.")] = None,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """List jobs, newest first."""
    filters = {"queue": queue, "name": name, "tenant": tenant, "group": group, "search": search}
    jobs, cursor = listed(client, limit, cursor, states=state or (), tags=tag or (), **filters)
    rows = []
    for job in jobs:
        loss = f"{job.progress.loss:.4f}" if job.progress else "-"
        progress = job_text.step(job), loss, duration((datetime.now(UTC) - job.submitted_at).total_seconds())
        rows.append((job.id, job.name, job.queue, job.state, *progress, job_text.news(job)))
    columns = ("ID", "NAME", "QUEUE", "STATE", "STEP", "LOSS", "AGE", "MESSAGE")
    print_answer(JobPage(jobs=jobs, next_cursor=cursor), as_json, rows, columns)
    if cursor and not as_json:
        say(f"(showing {len(jobs)}; for older ones add --cursor {cursor})")


def show(job_id: JobId, as_json: AsJson = False, client: Service = UNOPENED) -> None:
    """Show one job."""
    job = client.get(job_id)
    evaluated = None if as_json else where_served(client.evaluations, job_id)
    tracked = None if as_json else where_served(client.trackers, job_id)
    evaluations, trackers = evaluated.evaluations if evaluated else [], tracked.trackers if tracked else []
    print_answer(job, as_json, job_text.facts(job, evaluations, trackers))


def where_served(ask: Callable[[str], _Part], job_id: str) -> _Part | None:
    """Ask the service about a job; ``None`` if the service is too old to answer."""
    try:
        return ask(job_id)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return None


def events(
    job_id: JobId,
    kind: Annotated[list[str] | None, Option(help="Only events of this kind; repeatable.")] = None,
    follow_it: _Follow = False,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Print a job's events: states, steps, checkpoints, restarts. For the logs of its ranks: `boost logs`."""
    if unknown := {*(kind or ())} - EVENT_KINDS:
        raise BadInput(f"--kind {min(unknown)}: there is no such kind; choose from {', '.join(sorted(EVENT_KINDS))}")
    kinds = cast("list[EventKind]", kind or [])
    if follow_it and not as_json:
        job_text.exit_as(job_text.follow_until_interrupted(client, job_id, Terminal(), kinds))
        return
    if follow_it:
        retry_longer(client)
    for event in client.events(job_id, follow=follow_it, kinds=kinds):
        if as_json:
            say_raw(event.model_dump_json())
        elif event.kind in EVENT_KINDS:
            say(job_text.line_of(event))
    if follow_it:
        job_text.exit_as(client.get(job_id))


_SINCE_HELP = "Only newer lines: 10m, 2h, 7d, or 2026-03-01T12:00:00Z."


def logs(
    job_id: JobId,
    rank: Annotated[int | None, Option(min=0, help="Only this rank's lines.")] = None,
    level: Annotated[list[str] | None, Option(help="Only lines of this level, for example ERROR; repeatable.")] = None,
    since: Annotated[str | None, Option(metavar="TIME", help=_SINCE_HELP)] = None,
    follow_it: _Follow = False,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Print the logs of a job's ranks. For the job's events: `boost events`."""
    begin = moment(since, in_future=False) if since else None
    levels, event = [each.upper() for each in level or ()], None
    if follow_it:
        retry_longer(client)
    for event in client.logs(job_id, rank=rank, level=levels, since=begin, follow=follow_it):
        say_raw(event.model_dump_json() if as_json else job_text.line_of(event))
    if event is None:
        fit = "" if rank is None and not levels and begin is None else " that fit these options"
        say(f"{job_id} has no log lines{fit}", err=True)


def pause(job_id: JobId, client: Service = UNOPENED) -> None:
    """Pause a job: it saves its state and releases its resources."""
    job = client.pause(job_id)
    say(f"{job.id} is PAUSED" if job.state is JobState.PAUSED else f"{job.id} will be paused after its current step")


def resume(job_id: JobId, client: Service = UNOPENED) -> None:
    """Resume a paused job."""
    job = client.resume(job_id)
    say(f"{job.id} is {job.state}: {job_text.news(job)}")


def cancel(
    job_ids: JobIds = None,
    state: _InState = None,
    queue: _InQueue = None,
    name: _Named = None,
    tenant: _OfTenant = None,
    group: _OfGroup = None,
    tag: _Tagged = None,
    search: _With = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Cancel without asking first.")] = False,
    client: Service = UNOPENED,
) -> None:
    """Cancel jobs: those with these IDs, or all that the same options of `boost ls` show."""
    filters = {"queue": queue, "name": name, "tenant": tenant, "group": group, "search": search}
    request = _without_none(**filters, ids=job_ids or None, state=state or None, tag=tag or None)
    if not request or (job_ids and len(request) > 1):
        raise BadInput("give the jobs' IDs, or else options such as --group that say which jobs to cancel")
    if not job_ids and not yes and not sys.stdin.isatty():
        raise BadInput("options may fit many jobs, and here nobody can be asked first; add --yes to cancel them")
    if job_ids and len(job_ids) == 1:
        job = client.cancel(job_ids[0])
        say(f"{job.id} is {job.state}" if job.finished else f"{job.id} will be cancelled within seconds")
        return
    if not job_ids and not yes:
        jobs, _ = listed(client, sys.maxsize, None, states=state or _UNFINISHED, tags=tag or (), **filters)
        if fitting := sum(not (job.finished or job.cancel_requested) for job in jobs):
            typer.confirm(f"Cancel {counted(fitting, 'job')}?", abort=True)
    cancelled = 0
    while True:  # as many requests as needed
        answer = client.cancel_many(request)
        cancelled += answer.cancelled
        if not answer.remaining:
            break
    if not (job_ids or cancelled or answer.ended):
        say("no job that has not ended fits these options; none was cancelled")
        return
    ended = f"; {counted(answer.ended, 'job')} had ended before" if answer.ended else ""
    say(f"{counted(cancelled, 'job')} cancelled, within seconds where workers have to end{ended}")
    if answer.not_found:
        raise Failed(f"there is no job {', '.join(answer.not_found)}; `boost ls` lists the jobs")


def retry(job_id: JobId, client: Service = UNOPENED) -> None:
    """Requeue a failed or cancelled job; it continues from its newest checkpoint."""
    job = client.retry(job_id)
    say(f"{job.id} is {job.state} again and continues from step {job.checkpoint.step if job.checkpoint else 0}")


def patch(
    job_id: JobId,
    name: Annotated[str | None, Option(help="New name.")] = None,
    priority: Annotated[int | None, Option(help="New priority; higher-priority jobs start first.")] = None,
    min_replicas: Annotated[int | None, Option(help="Minimum number of data parallel replicas.")] = None,
    max_replicas: Annotated[int | None, Option(help="Maximum number of data parallel replicas.")] = None,
    min_gpus: Annotated[int | None, Option(help="Minimum number of GPUs, with layouts: auto.")] = None,
    max_gpus: Annotated[int | None, Option(help="Maximum number of GPUs, with layouts: auto.")] = None,
    group: Annotated[str | None, Option(help='New group; "" for none.')] = None,
    tag: Annotated[list[str] | None, Option(help="Tag to add; repeatable.")] = None,
    untag: Annotated[list[str] | None, Option(help="Tag to remove; repeatable.")] = None,
    notes: Annotated[str | None, Option(help="New notes.")] = None,
    client: Service = UNOPENED,
) -> None:
    """Change a job that has not ended; its group, tags and notes also later."""
    replicas, gpus = _without_none(min=min_replicas, max=max_replicas), _without_none(min=min_gpus, max=max_gpus)
    sizes = {"data_parallel_size": replicas or None, "gpus": gpus or None}
    changes = _without_none(name=name, priority=priority, **sizes, group=group, notes=notes)
    if not changes and not tag and not untag:
        raise BadInput(
            "nothing to change; give --name, --priority, --min-replicas, --max-replicas, --min-gpus, --max-gpus, "
            "--group, --tag, --untag or --notes"
        )
    etag = None
    if tag or untag:  # the API takes all of a job's tags, so they must not change in between
        before = client.get(job_id)
        tags = dict.fromkeys([*before.spec.tags, *(tag or [])])
        changes["tags"] = [each for each in tags if each not in (untag or [])]
        etag = before.etag
    job = client.patch(job_id, changes, if_match=etag)
    spec, elasticity = job.spec, job.spec.elasticity
    if elasticity and elasticity.gpus:
        ranks = "GPU(s)" if spec.resources.gpus_per_worker else "worker(s)"
        size = f"{elasticity.gpus.min} to {elasticity.gpus.max} {ranks}"
    elif elasticity and (allowed := elasticity.data_parallel_size):
        size = f"{allowed.min} to {allowed.max} replica(s)"
    else:
        size = f"{spec.parallelism.data_parallel_size} replica(s)"
    say(f"{job.id} is {job.name}, priority {spec.priority}, with {size}")
    if note := unused_replicas(spec):
        say(f"note: {note}")


_CHANGES_HELP = "New value, as optimizer.learning_rate=1e-4; repeatable."


def steer(
    job_id: JobId,
    changes: Annotated[list[str] | None, Option("--set", metavar="FIELD=VALUE", help=_CHANGES_HELP)] = None,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Change a job while it trains: learning rate and schedule, steps, intervals, prompts to sample."""
    patch = merge_patch(changes or [])
    if not patch:
        raise BadInput("nothing to change; give --set FIELD=VALUE, such as --set optimizer.learning_rate=1e-4")
    if others := patch.keys() - Steering.model_fields:
        raise BadInput(f"--set {min(others)}: only fields of training, optimizer and checkpoint can be steered")
    before = client.get(job_id)
    job = client.patch(job_id, patch)
    text = changes_in_words(before.requested_spec.steering.changes_to(job.requested_spec.steering)) or "nothing new"
    text += "; waits for its gang, and an event says from which step on" if job.steers else ""
    print_answer(job, as_json, f"{job.id}: {text}")


_SECONDS_HELP = "For delay_rank: delay per step; for drop_node and fill_store: duration (default: 10)."


def drill(
    kind: Annotated[str, Argument(metavar="KIND", help=Drill.model_fields["kind"].description)],
    job_id: JobId,
    rank: Annotated[int | None, Option(help="The rank to inject it into (default: 0).")] = None,
    at_step: Annotated[int | None, Option(help="Inject after this step (default: immediately).")] = None,
    steps: Annotated[int | None, Option(help="For delay_rank: number of steps (default: 10).")] = None,
    seconds: Annotated[float | None, Option(help=_SECONDS_HELP)] = None,
    client: Service = UNOPENED,
) -> None:
    """Inject one fault into a running job, to see it recover."""
    job = client.drill(job_id, _without_none(kind=kind, rank=rank, at_step=at_step, steps=steps, seconds=seconds))
    say(f"{kind} will be injected into {job.id}; see the result: boost events {job.id} -f")


def _without_none(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


# Traces of steps.

_OUTCOMES: tuple[EventKind, ...] = ("profile", "fault", "interruption")  # of a profile
_READERS = "a trace opens at https://ui.perfetto.dev, or in TensorBoard"


def profile(
    job_id: JobId,
    steps: Annotated[int, Option(help="Number of steps, 1 to 20.")] = Profile().steps,
    rank: Annotated[list[int] | None, Option(help="Rank to trace (default: 0); repeatable.")] = None,
    wait: Annotated[bool, Option("--wait", help="Wait for the traces and print their locations.")] = False,
    client: Service = UNOPENED,
) -> None:
    """Trace some steps of a running job with torch's profiler. The traces are stored next to its checkpoints."""
    ranks = rank or [0]
    seen = max((event.id for event in client.events(job_id, follow=False, kinds=_OUTCOMES)), default=0)
    job = client.profile(job_id, {"steps": steps, "ranks": ranks})
    if not wait:
        say(f"{steps} step(s) of {job.id} will be traced; for the traces' locations: boost events {job.id} -f")
        say(_READERS)
        return

    retry_longer(client)
    untraced = set(ranks)
    for event in client.events(job_id, after=seen, kinds=_OUTCOMES):
        is_of_them = event.data.get("rank") in untraced
        failed = event.kind == "fault" and event.data["what"] == "profile" and is_of_them
        if event.kind == "interruption" or failed:
            raise Failed(f"{job_text.line_of(event)}; incomplete profiles are lost; run the command again")
        if event.kind == "profile" and is_of_them:
            untraced.remove(event.data["rank"])
            say(event.data["url"])
        if not untraced:
            return
    raise Failed(f"the job ended before the steps of rank {min(untraced)} were traced")


# ``boost watch``: several jobs at once, live, with the curves of their losses and throughputs.

_LOOK_SECONDS = 2.0
_PLAIN_SECONDS = 30.0  # between two lines about a job in the same state
_POINTS = 24  # of a curve
_ENDED = 10  # ended jobs that stay visible while all active jobs are watched
_UNFINISHED = [state for state in JobState if state not in TERMINAL_STATES]
_COLUMNS = ("JOB", "STATE", "STEP", "ETA", "LOSS", "TOKENS/S", "EXPOSED", "LAYOUT", "GOODPUT", "MESSAGE")
_BLOCKS = "▁▂▃▄▅▆▇█"

Curve = deque[tuple[int, float | None, float | None]]  # the newest steps of a job, each with its loss and throughput
_Printed = tuple[JobState, str | None, float]  # a job's state, what it waited for, and when its next line is due


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


_UNTIL_HELP = "Stop once all named jobs have ended, or also if they run."


def watch(
    job_ids: JobIds = None,
    until: Annotated[Literal["ended", "running"], Option(help=_UNTIL_HELP)] = "ended",
    client: Service = UNOPENED,
) -> None:
    """Watch jobs, or all active ones, until those named have ended or Ctrl-C: live on a terminal, or else as lines."""
    if until == "running" and not job_ids:
        raise BadInput("--until running needs the ids of the jobs to wait for")
    console, named = Terminal(), list(dict.fromkeys(job_ids or []))
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None  # its last state stays
    printed: dict[str, _Printed] = {}
    jobs: list[JobRecord] = []
    curves: dict[str, Curve] = {}
    client.list(limit=1)  # fail at once if the service was never reachable
    retry_longer(client)
    try:
        with live or nullcontext():
            while True:
                if named:
                    jobs = [client.get(job_id) for job_id in named]
                else:  # the active jobs, and those that ended while they were watched
                    active, _ = listed(client, 500, None, states=_UNFINISHED)  # a table of more is hard to read
                    ids = {job.id for job in active}
                    ended = [job if job.finished else client.get(job.id) for job in jobs if job.id not in ids]
                    jobs = active + [job for job in ended if job.finished][:_ENDED]
                for job in jobs:
                    _extend_curve(curves, job, client)
                if live:
                    live.update(PlainTable(_COLUMNS, [_row(job, curves[job.id]) for job in jobs]), refresh=True)
                else:
                    _print_changes(console, jobs, printed)
                runs = JobState.RUNNING if until == "running" else None
                if named and all(job.finished or job.state is runs for job in jobs):
                    break
                time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    if any(job.state not in (JobState.SUCCEEDED, JobState.RUNNING) for job in jobs):
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


def _print_changes(console: Terminal, jobs: Iterable[JobRecord], printed: dict[str, _Printed]) -> None:
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
            line += f"  step {job_text.step(job)}  {numbers_of(job.progress)}  goodput {job_text.productive_share(job)}"
            line += f"  ETA {duration(job.progress.eta_seconds)}"
        else:
            line += f": {job_text.news(job)}"
        console.say(line)


def _row(job: JobRecord, curve: Curve) -> tuple[str, ...]:
    newest = job.progress
    trains = job.state is JobState.RUNNING and newest is not None
    losses, throughputs = ([point[number] for point in curve] for number in (1, 2))
    eta = duration(newest.eta_seconds) if newest and trains else "-"
    speed = f"{newest.tokens_per_second:,.0f}\n{sparkline(throughputs)}" if newest else "-"
    exposed = f"{newest.exposed_communication_share:.0%}" if newest else "-"
    loss = f"{newest.loss:.4f}" if newest else "-"
    progress = job_text.step(job), eta, f"{loss}\n{sparkline(losses)}", speed, exposed
    layout, news = str(job.present_layout) if job.shape else "-", "" if trains else job_text.news(job)
    return (f"{job.name}\n{job.id}", job.state, *progress, layout, job_text.productive_share(job), news)
