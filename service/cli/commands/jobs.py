"""Jobs: ``boost ls``, ``show``, ``events`` and ``logs`` inspect them, ``pause`` to ``drill`` act on one."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, TypeVar

import typer

from boost_core.messages import Drill
from service.cli.connection import open_client
from service.cli.failures import BadInput
from service.cli.options import AsJson, Follow, JobId, Url, moment
from service.cli.output.jobs import (
    age,
    exit_as,
    facts,
    follow_until_interrupted,
    line_of,
    loss,
    news,
    step,
)
from service.cli.output.printing import Terminal, print_facts, print_json, print_table, say, say_unchanged
from service.client import ApiError, Client
from service.jobs.model import EVENT_KINDS, JobPage, JobRecord
from service.jobs.states import JobState
from service.models.jobs import JobEvaluation

_Part = TypeVar("_Part")

_PAGE = 500  # the API's maximum per request


def list_jobs(
    state: Annotated[
        list[JobState] | None, typer.Option(case_sensitive=False, help="Only jobs in this state; repeatable.")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only jobs in this queue.")] = None,
    name: Annotated[str | None, typer.Option(help="Only jobs whose name contains this.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's jobs; for operators.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of results.")] = 100,
    cursor: Annotated[str | None, typer.Option(help="Continue a previous list; its last line shows the value.")] = None,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """List jobs, newest first."""
    filters = {"queue": queue, "name": name, "tenant": tenant}
    jobs: list[JobRecord] = []
    with open_client(url) as client:
        while True:  # as many pages as needed
            page = client.list(state or [], min(limit - len(jobs), _PAGE), cursor, **filters)
            jobs += page.jobs
            cursor = page.next_cursor
            if cursor is None or len(jobs) >= limit:
                break
    if as_json:
        print_json(JobPage(jobs=jobs, next_cursor=cursor))
        return
    rows = ((job.id, job.name, job.queue, job.state, step(job), loss(job), age(job), news(job)) for job in jobs)
    print_table(("ID", "NAME", "QUEUE", "STATE", "STEP", "LOSS", "AGE", "MESSAGE"), rows)
    if cursor:
        say(f"(showing {len(jobs)}; for older ones add --cursor {cursor})")


def show(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """Show one job."""
    with open_client(url) as client:
        job = client.get(job_id)
        evaluations = [] if as_json else evaluations_of(client, job_id)
        tracked = None if as_json else _where_served(client.trackers, job_id)
    if as_json:
        print_json(job)
        return
    print_facts(facts(job, evaluations, tracked.trackers if tracked else []))


def evaluations_of(client: Client, job_id: str) -> list[JobEvaluation]:
    """Return a job's evaluations on tasks; none if the service is too old to have them."""
    result = _where_served(client.evaluations, job_id)
    return result.evaluations if result else []


def _where_served(ask: Callable[[str], _Part], job_id: str) -> _Part | None:
    """Ask the service about a job; ``None`` if the service is too old to answer."""
    try:
        return ask(job_id)
    except ApiError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return None


def events(job_id: JobId, follow_it: Follow = False, as_json: AsJson = False, url: Url = None) -> None:
    """Print a job's events: states, steps, checkpoints, restarts. For the logs of its ranks: `boost logs`."""
    with open_client(url) as client:
        if follow_it and not as_json:
            exit_as(follow_until_interrupted(client, job_id, Terminal()))
            return
        for event in client.events(job_id, follow=follow_it):
            if as_json:
                say_unchanged(event.model_dump_json())
            elif event.kind in EVENT_KINDS:
                say(line_of(event))


def logs(
    job_id: JobId,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank's lines.")] = None,
    level: Annotated[
        list[str] | None, typer.Option(help="Only lines of this level, for example ERROR; repeatable.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only newer lines: 10m, 2h, 7d, or 2026-03-01T12:00:00Z.")
    ] = None,
    follow_it: Follow = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Print the logs of a job's ranks. For the job's events: `boost events`."""
    begin = moment(since, in_future=False) if since else None
    levels = [each.upper() for each in level or ()]
    with open_client(url) as client:
        for event in client.logs(job_id, rank=rank, level=levels, since=begin, follow=follow_it):
            say_unchanged(event.model_dump_json() if as_json else line_of(event))


def pause(job_id: JobId, url: Url = None) -> None:
    """Pause a job: it saves its state and releases its resources."""
    with open_client(url) as client:
        job = client.pause(job_id)
    say(f"{job.id} is PAUSED" if job.state is JobState.PAUSED else f"{job.id} will be paused after its current step")


def resume(job_id: JobId, url: Url = None) -> None:
    """Resume a paused job."""
    with open_client(url) as client:
        job = client.resume(job_id)
    say(f"{job.id} is {job.state}: {news(job)}")


def cancel(job_id: JobId, url: Url = None) -> None:
    """Cancel a job."""
    with open_client(url) as client:
        job = client.cancel(job_id)
    say(f"{job.id} is {job.state}" if job.finished else f"{job.id} will be cancelled within seconds")


def retry(job_id: JobId, url: Url = None) -> None:
    """Requeue a failed or cancelled job; it continues from its newest checkpoint."""
    with open_client(url) as client:
        job = client.retry(job_id)
    say(f"{job.id} is {job.state} again and continues from step {job.checkpoint.step if job.checkpoint else 0}")


def patch(
    job_id: JobId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    priority: Annotated[int | None, typer.Option(help="New priority; higher-priority jobs start first.")] = None,
    min_replicas: Annotated[int | None, typer.Option(help="Minimum number of data parallel replicas.")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="Maximum number of data parallel replicas.")] = None,
    min_gpus: Annotated[int | None, typer.Option(help="Minimum number of GPUs, with layouts: auto.")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="Maximum number of GPUs, with layouts: auto.")] = None,
    url: Url = None,
) -> None:
    """Change a job that has not ended."""
    replicas, gpus = _without_none(min=min_replicas, max=max_replicas), _without_none(min=min_gpus, max=max_gpus)
    changes = _without_none(name=name, priority=priority, data_parallel_size=replicas or None, gpus=gpus or None)
    if not changes:
        raise BadInput(
            "nothing to change; give --name, --priority, --min-replicas, --max-replicas, --min-gpus or --max-gpus"
        )
    with open_client(url) as client:
        job = client.patch(job_id, changes)
    spec, elasticity = job.spec, job.spec.elasticity
    if elasticity and elasticity.gpus:
        ranks = "GPU(s)" if spec.resources.gpus_per_worker else "worker(s)"
        size = f"{elasticity.gpus.min} to {elasticity.gpus.max} {ranks}"
    elif elasticity and (allowed := elasticity.data_parallel_size):
        size = f"{allowed.min} to {allowed.max} replica(s)"
    else:
        size = f"{spec.parallelism.data_parallel_size} replica(s)"
    say(f"{job.id} is {job.name}, priority {spec.priority}, with {size}")


def drill(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=Drill.model_fields["kind"].description)],
    job_id: JobId,
    rank: Annotated[int | None, typer.Option(help="The rank to inject it into (default: 0).")] = None,
    at_step: Annotated[int | None, typer.Option(help="Inject after this step (default: immediately).")] = None,
    steps: Annotated[int | None, typer.Option(help="For delay_rank: number of steps (default: 10).")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="For delay_rank: delay per step; for drop_node and fill_store: duration (default: 10)."),
    ] = None,
    url: Url = None,
) -> None:
    """Inject one fault into a running job, to see it recover."""
    with open_client(url) as client:
        job = client.drill(job_id, _without_none(kind=kind, rank=rank, at_step=at_step, steps=steps, seconds=seconds))
    say(f"{kind} will be injected into {job.id}; see the result: boost events {job.id} -f")


def _without_none(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}
