"""Jobs side by side: ``boost diff`` shows in what the specs of two differ."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from boost_core.config import JobSpec
from service.cli.connection import open_client
from service.cli.console import print_json, print_table, read_job, say
from service.cli.options import AsJson, Url, complete_job_ids
from service.jobs.comparison import differing_fields
from service.models.jobs import SpecDiff

JobOrFile = Annotated[str, typer.Argument(help="A job's ID, or a job file.", autocompletion=complete_job_ids)]


def diff(a: JobOrFile, b: JobOrFile, as_json: AsJson = False, url: Url = None) -> None:
    """Show in which fields the specs of two jobs or job files differ."""

    def spec_of(which: str) -> JobSpec:
        if Path(which).suffix in (".yaml", ".yml", ".json") or Path(which).is_file():
            return read_job(Path(which))
        with open_client(url) as client:
            return client.get(which).spec

    result = SpecDiff(jobs=[a, b], fields=differing_fields([spec_of(a), spec_of(b)]))
    if as_json:
        print_json(result)
        return
    for submitted, heading in ((True, "FIELD"), (False, "FOLLOWS FROM THESE")):
        rows = [
            (each.field, *map(value_in_words, each.values)) for each in result.fields if each.submitted is submitted
        ]
        if rows:
            print_table((heading, a, b), rows)
    if not result.fields:
        say("no field differs")


def value_in_words(value: Any) -> str:
    """Return a field's value as a job file has it on one line; a dash where a job has none."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
