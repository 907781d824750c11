"""Options and arguments that several commands share: completion, and changes and times as written on a command line."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from boost_core.config.base import read_yaml
from service.cli.connection import open_client
from service.cli.console import BadInput
from service.client import ApiError, Client, ServiceUnreachable
from service.client.calls import IDEMPOTENCY_KEY
from service.jobs.model import JobRecord

_PAGE = 500  # jobs; the API's maximum per request
_COMPLETION_SECONDS = 1.0
_MOST_NAMED = 5
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"(\d{1,6})([smhdw])")


def complete_job_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the newest jobs' IDs that start with what was typed, with descriptions; none if the service is slow.

    Completion must be quick and never print an error.
    """
    try:
        with open_client(context.params.get("url"), timeout=_COMPLETION_SECONDS, retry_seconds=0) as client:
            jobs = client.list().jobs
    except Exception:  # whatever it is, it cannot be reported during completion
        return []
    return [(job.id, f"{job.name}, {job.state}") for job in jobs if job.id.startswith(incomplete)]


def listed(client: Client, limit: int, cursor: str | None, **which: Any) -> tuple[list[JobRecord], str | None]:
    """Return jobs, from as many pages as needed, and the cursor for older ones."""
    jobs: list[JobRecord] = []
    while True:
        page = client.list(limit=min(limit - len(jobs), _PAGE), cursor=cursor, **which)
        jobs += page.jobs
        cursor = page.next_cursor
        if cursor is None or len(jobs) >= limit:
            return jobs, cursor


def job_of(context: typer.Context, job: str) -> str:
    """Return the ID of the only job with this name, or what was given if no job has it.

    Raises:
        BadInput: Several jobs have this name.
    """
    if context.resilient_parsing or job.startswith("job-"):
        return job
    with open_client(context.params.get("url")) as client:
        named = [each for each in listed(client, sys.maxsize, None, name=job)[0] if each.name == job]
    if len(named) > 1:
        which = [f"{each.id} ({each.state})" for each in named[:_MOST_NAMED]]
        raise BadInput(f"{job!r} is the name of several jobs; give an ID: {', '.join(which)}, as `boost ls` lists them")
    return named[0].id if named else job


def job_or_place(context: typer.Context, job: str) -> str:
    """Likewise of what may also be a folder or URL: those have a slash, or exist, or nobody knows them as a job."""
    with suppress(ApiError, ServiceUnreachable):
        return job if "/" in job or Path(job).exists() else job_of(context, job)
    return job


def jobs_of(context: typer.Context, jobs: list[str] | None) -> list[str]:
    """Return the IDs of jobs, each as in ``job_of``."""
    return [job_of(context, job) for job in jobs or ()]


def _job_argument(metavar: str, about: str, callback: Callable[..., Any]) -> Any:
    """An argument that names jobs."""
    return typer.Argument(metavar=metavar, help=about, autocompletion=complete_job_ids, callback=callback)


JobFile = Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec, as YAML or JSON.")]
JobId = Annotated[str, _job_argument("ID", "ID or name of a job; `boost ls` lists them.", job_of)]
_URL_HELP = "URL of the service (default: BOOST_URL, else the service of `boost login`, else this machine)."
Url = Annotated[str | None, typer.Option(help=_URL_HELP, is_eager=True)]  # read before arguments that need it
JobIds = Annotated[list[str] | None, _job_argument("[ID]...", "IDs or names of jobs.", jobs_of)]
_CHECKPOINT_HELP = "A job, a folder of checkpoints, or one checkpoint: a path, file:// or s3://."
JobOrCheckpoint = Annotated[str, _job_argument("JOB|CHECKPOINT", _CHECKPOINT_HELP, job_or_place)]
JobOrFolder = Annotated[str, _job_argument("ID|URL", "A job, or a folder: a path, file:// or s3://.", job_or_place)]
WhichStep = Annotated[int | None, typer.Option("--step", min=0, help="Step of the checkpoint (default: the newest).")]
Tokenizer = Annotated[
    str | None, typer.Option("--tokenizer", metavar="FILE", help="The job's tokenizer.json, if it has moved.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the job's ID.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")]
_CHANGES_HELP = "Field to change, such as training.steps=500; repeatable."
Changes = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=_CHANGES_HELP)]


def _checked_key(key: str | None) -> str | None:
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise BadInput(f"--idempotency-key {key!r}: give 1 to 255 visible ASCII characters")
    return key


_KEY_HELP = "Idempotency key: repeating the command with it creates only one job."
IdempotencyKey = Annotated[str | None, typer.Option(metavar="KEY", help=_KEY_HELP, callback=_checked_key)]


def merge_patch(changes: list[str]) -> dict[str, Any]:
    """Build a JSON merge patch from ``section.field=value`` changes; values are read as YAML.

    Raises:
        BadInput: A change does not have this form, or conflicts with another one.
    """
    patch: dict[str, Any] = {}
    whole = set[str]()  # paths that have been set
    for change in changes:
        path, equals, text = change.partition("=")
        *sections, field = path.split(".")
        if not equals or not all([*sections, field]):
            raise BadInput(f"--set {change}: give a field and its value, such as training.steps=500")
        section = patch
        for name in sections:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise BadInput(f"--set {change}: {name} is also set to a value; set one or the other")
        if isinstance(section.get(field), dict) and path not in whole:
            raise BadInput(f"--set {change}: fields of {field} are also set; set one or the other")
        try:
            section[field] = read_yaml(text)
            whole.add(path)
            json.dumps(section[field], allow_nan=False)
        except yaml.YAMLError as error:
            raise BadInput(f"--set {change}: {text!r} is not YAML: {error}") from error
        except (TypeError, ValueError) as error:
            raise BadInput(f"--set {change}: {text!r} cannot be sent: {error}") from error
    return patch


def _span(text: str) -> timedelta | None:
    """A span such as ``10m``; ``None`` if the text is none."""
    match = _SPAN.fullmatch(text)
    return match and timedelta(**{_UNITS[match[2]]: int(match[1])})


def hours(text: str) -> float:
    """Parse a number of hours, or a span such as ``12h`` or ``30d``, as hours.

    Raises:
        BadParameter: The text is neither, or beyond what a plan takes.
    """
    try:
        span = _span(text)
        value = float(text) if span is None else span / timedelta(hours=1)
    except ValueError:
        value = 0.0
    if not 1e-3 <= value <= 1e12:
        raise typer.BadParameter(
            f"{text!r} is not a time of 0.001 to 1e12 hours; give hours, or a span such as 12h or 30d"
        )
    return value


def moment(text: str, *, in_future: bool) -> datetime:
    """Parse a time: a span such as ``10m`` from now, or else a date and time, local unless it names a time zone.

    Args:
        text: The text.
        in_future: Whether the time has to be in the future, and a span leads there; otherwise a span leads back.

    Raises:
        BadInput: The text is neither, or the time is not in the future.
    """
    if (length := _span(text)) is not None:
        span = length if in_future else -length
        try:
            result = datetime.now(UTC) + span
        except OverflowError:
            problem = f"{span.days} days are beyond the calendar's range; give a shorter span, such as 90d"
            raise BadInput(problem) from None
    else:
        try:
            result = datetime.fromisoformat(text).astimezone()
        except (ValueError, OverflowError):
            raise BadInput(
                f"{text!r} is not a time; give a span such as 90s, 10m, 2h, 7d, or a date such as 2026-03-01T12:00:00Z"
            ) from None
    if in_future and result <= datetime.now(UTC):
        raise BadInput(f"{text} is not in the future; give a later time, such as 90d")
    return result
