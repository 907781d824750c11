"""Options and arguments that several commands share: completion, and changes and times as written on a command line."""

import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer import Argument, Option

from boost_core.config.base import read_yaml
from service.cli.connection import listed, open_client
from service.cli.console import BadInput
from service.client import ApiError, Client, ServiceUnreachable

_COMPLETION_SECONDS = 1.0
_MOST_NAMED = 5
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SPAN = re.compile(r"(\d{1,6})([smhdw])")


def complete_job_ids(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the newest jobs' IDs that start with what was typed, with descriptions; none if the service is slow.

    Completion must be quick and never print an error.
    """
    try:
        url = context.params.get("url") or context.params.get("client")  # not opened during completion
        with open_client(url, timeout=_COMPLETION_SECONDS, retry_seconds=0) as client:
            jobs = client.list().jobs
    except Exception:  # whatever it is, it cannot be reported during completion
        return []
    return [(job.id, f"{job.name}, {job.state}") for job in jobs if job.id.startswith(incomplete)]


def job_of(context: typer.Context, job: str) -> str:
    """Return the ID of the only job with this name, or what was given if no job has it.

    Raises:
        BadInput: Several jobs have this name.
    """
    if context.resilient_parsing or job.startswith("job-"):
        return job
    opened = context.params.get("client")
    with nullcontext(opened) if opened else open_client(context.params.get("url")) as client:
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
    return Argument(metavar=metavar, help=about, autocompletion=complete_job_ids, callback=callback)


JobFile = Annotated[Path, Argument(metavar="JOB.YAML", help="The job spec, as YAML or JSON.")]
JobId = Annotated[str, _job_argument("ID", "ID or name of a job; `boost ls` lists them.", job_of)]
_URL_HELP = "URL of the service (default: BOOST_URL, else the service of `boost login`, else this machine)."
Url = Annotated[str | None, Option(help=_URL_HELP, is_eager=True)]  # read before arguments that need it


@dataclass(frozen=True)
class _Unusable:
    """In place of a client that cannot be opened: its first use says why, after ``--help`` and what else is wrong."""

    error: BadInput

    def __getattr__(self, _: str) -> Any:
        raise self.error


def _open(context: typer.Context, url: str | None) -> Client | _Unusable | str | None:
    """Open a command's client, until the whole command line ends: also if another of its options is wrong."""
    if context.resilient_parsing:
        return url
    try:
        return context.find_root().with_resource(open_client(url))
    except BadInput as error:
        return _Unusable(error)


Service = Annotated[Client, Option("--url", metavar="<str>", help=_URL_HELP, is_eager=True, parser=str, callback=_open)]
UNOPENED: Any = None  # the default of ``Service``, in whose place its callback puts a client
JobIds = Annotated[list[str] | None, _job_argument("[ID]...", "IDs or names of jobs.", jobs_of)]
_CHECKPOINT_HELP = "A job, a folder of checkpoints, or one checkpoint: a path, file:// or s3://."
JobOrCheckpoint = Annotated[str, _job_argument("JOB|CHECKPOINT", _CHECKPOINT_HELP, job_or_place)]
JobOrFolder = Annotated[str, _job_argument("ID|URL", "A job, or a folder: a path, file:// or s3://.", job_or_place)]
AtStep = Annotated[int | None, Option("--step", min=0, help="Step of the checkpoint (default: the newest).")]
_TOKENIZER_HELP = "The job's tokenizer.json, if it has moved."
Tokenizer = Annotated[str | None, Option("--tokenizer", metavar="FILE", help=_TOKENIZER_HELP)]
AsJson = Annotated[bool, Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print only the job's ID.")]
_CHANGES_HELP = "Field to change, such as training.steps=500; repeatable."
Changes = Annotated[list[str] | None, Option("--set", metavar="FIELD=VALUE", help=_CHANGES_HELP)]


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
        remedy = "give hours, or a span such as 12h or 30d"
        raise typer.BadParameter(f"{text!r} is not a time of 0.001 to 1e12 hours; {remedy}")
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
            remedy = "give a span such as 90s, 10m, 2h, 7d, or a date such as 2026-03-01T12:00:00Z"
            raise BadInput(f"{text!r} is not a time; {remedy}") from None
    if in_future and result <= datetime.now(UTC):
        raise BadInput(f"{text} is not in the future; give a later time, such as 90d")
    return result
