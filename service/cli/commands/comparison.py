"""Jobs side by side: ``boost diff`` shows in what the specs of two differ, ``boost compare`` their results."""

import json
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer
from typer import Argument, Option

from boost_core.config import JobSpec
from boost_core.terminal import duration
from service.cli.connection import open_client
from service.cli.console import BadInput, Failed, print_answer, print_facts, print_rows, read_job, say_raw
from service.cli.options import UNOPENED, AsJson, JobIds, Service, Url, complete_job_ids, job_of
from service.jobs.comparison import differing_fields
from service.models.jobs import DifferingField, Result, SpecDiff, csv_of

JobOrFile = Annotated[str, Argument(help="A job's ID or name, or a job file.", autocompletion=complete_job_ids)]


def diff(context: typer.Context, a: JobOrFile, b: JobOrFile, as_json: AsJson = False, url: Url = None) -> None:
    """Show in which fields the specs of two jobs or job files differ."""

    def spec_of(which: str) -> JobSpec:
        if Path(which).suffix in (".yaml", ".yml", ".json") or Path(which).is_file():
            return read_job(Path(which))
        with open_client(url) as client:
            return client.get(job_of(context, which)).spec

    result = SpecDiff(jobs=[a, b], fields=differing_fields([spec_of(a), spec_of(b)]))
    if as_json or not result.fields:
        print_answer(result, as_json, "no field differs")
        return
    print_facts([("A", a), ("B", b)], 3)  # as headings, paths would leave the values no room
    for submitted, heading in ((True, "FIELD"), (False, "FOLLOWS FROM THESE")):
        rows = [(each.field, *values_in_words(each)) for each in result.fields if each.submitted is submitted]
        if rows:
            print_rows((heading, "A", "B"), rows)


def value_in_words(value: Any) -> str:
    """Return a field's value as a job file has it on one line; a dash where a job has none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def values_in_words(field: DifferingField) -> list[str]:
    """Return a field's value in each job, and in its first step if the job has been steered since."""
    now, at_first = ([*map(value_in_words, values)] for values in (field.values, field.values_at_first or field.values))
    return [new if new == old else f"{new} (from {old})" for new, old in zip(now, at_first, strict=True)]


def compare(
    job_ids: JobIds = None,
    group: Annotated[str | None, Option(help="Compare the jobs of this group.")] = None,
    tag: Annotated[list[str] | None, Option(help="Compare those with this tag; repeatable.")] = None,
    search: Annotated[str | None, Option(help="Compare those with this in name, group, tags or notes.")] = None,
    tenant: Annotated[str | None, Option(help="Whose group; for operators.")] = None,
    sort: Annotated[Result | None, Option(help="Sort by this result, the lowest first.")] = None,
    descending: Annotated[bool, Option("--descending", help="The highest first.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
    client: Service = UNOPENED,
) -> None:
    """Show jobs' results side by side, with the fields in which their specs differ."""
    if not (job_ids or group or tag or search):
        raise BadInput("nothing to compare; give the jobs' IDs, --group, --tag or --search")
    if as_csv and as_json:
        raise BadInput("give one of --csv and --json")
    result = client.compare(
        job_ids or [], group=group, tags=tag or [], search=search, tenant=tenant, sort=sort, descending=descending
    )
    if not result.jobs:
        raise Failed("no job fits these options; `boost ls` lists the jobs, and takes the same")
    fields = [each.field for each in result.fields]
    if as_csv:
        lines: list[list[Any]] = [["id", "name", "state", *Result, *fields]]
        for place, job in enumerate(result.jobs):
            values = (each.values[place] for each in result.fields)
            lines.append([job.id, job.name, job.state, *(getattr(job, each) for each in Result), *values])
        say_raw(csv_of(lines).removesuffix("\n"))
        return
    differing = [values_in_words(each) for each in result.fields]
    rows = []
    for place, job in enumerate(result.jobs):
        state = f"{job.state}\n{shorten(job.message, 60)}" if job.message else job.state
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (job.final_loss, job.best_validation_loss))
        speed = "-" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}"
        tokens = "-" if job.tokens is None else f"{job.tokens:,}"
        spent = "-" if job.seconds is None else duration(job.seconds), f"{job.gpu_hours:,.2f}"
        values = (each[place] for each in differing)
        rows.append((f"{job.name}\n{job.id}", state, *losses, speed, tokens, *spent, *values))
    columns = ("JOB", "STATE", "LOSS", "VALIDATION", "TOKENS/S", "TOKENS", "TIME", "GPU-HOURS", *fields)
    print_answer(result, as_json, rows, columns)
