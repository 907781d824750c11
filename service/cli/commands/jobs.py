"""``boost ls``, ``show``, ``events`` and ``logs``: inspect jobs."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, TypeVar

import typer

from service.cli.connection import open_client
from service.cli.options import AsJson, Follow, JobId, Url
from service.cli.output.event_text import line_of
from service.cli.output.job_text import age, facts, loss, news, scores, step, told
from service.cli.output.printing import Terminal, print_facts, print_json, print_table, say, say_unchanged
from service.cli.output.progress import exit_as, follow_until_interrupted
from service.cli.times import moment_before_now
from service.client import ApiError, Client
from service.jobs.model import EVENT_KINDS, JobPage, JobRecord
from service.jobs.states import JobState
from service.models.evaluations import JobEvaluation

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
    with open_client(url) as client:
        page = _pages(client, state or [], limit, cursor, filters)
    if as_json:
        print_json(page)
        return
    print_table(("ID", "NAME", "QUEUE", "STATE", "STEP", "LOSS", "AGE", "MESSAGE"), map(_row, page.jobs))
    if page.next_cursor:
        say(f"(showing {len(page.jobs)}; for older ones add --cursor {page.next_cursor})")


def _pages(
    client: Client, states: list[JobState], limit: int, cursor: str | None, filters: dict[str, str | None]
) -> JobPage:
    """Fetch as many pages as needed and join them into one."""
    jobs: list[JobRecord] = []
    while True:
        page = client.list(states, min(limit - len(jobs), _PAGE), cursor, **filters)
        jobs += page.jobs
        cursor = page.next_cursor
        if cursor is None or len(jobs) >= limit:
            return JobPage(jobs=jobs, next_cursor=cursor)


def _row(job: JobRecord) -> tuple[str, ...]:
    return job.id, job.name, job.queue, job.state, step(job), loss(job), age(job), news(job)


def show(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """Show one job."""
    with open_client(url) as client:
        job = client.get(job_id)
        evaluations = [] if as_json else evaluations_of(client, job_id)
        told_to = None if as_json else _where_served(client.trackers, job_id)
    if as_json:
        print_json(job)
        return
    print_facts((*facts(job), *scores(evaluations), *told(told_to.trackers if told_to else [])))


def evaluations_of(client: Client, job_id: str) -> list[JobEvaluation]:
    """Return a job's evaluations on tasks; none if the service is too old to have them."""
    found = _where_served(client.evaluations, job_id)
    return found.evaluations if found else []


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
    begin = moment_before_now(since) if since else None
    levels = [each.upper() for each in level or ()]
    with open_client(url) as client:
        for event in client.logs(job_id, rank=rank, level=levels, since=begin, follow=follow_it):
            say_unchanged(event.model_dump_json() if as_json else line_of(event))
