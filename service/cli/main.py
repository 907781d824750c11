"""``boost``: serve, submit, look, follow, change, cancel."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from service.cli import change, checkpoints
from service.cli.demo import run_demo
from service.cli.facts import age, facts, loss, step
from service.cli.failures import ExitStatus, ReadableErrors, read_foreign_config, read_job, read_settings
from service.cli.follow import follow
from service.cli.lines import line_of
from service.cli.options import AsJson, Follow, JobId, Url, open_client
from service.client import Client
from service.jobs.model import JobRecord
from service.jobs.states import JobState

app = typer.Typer(
    cls=ReadableErrors, no_args_is_help=True, add_completion=False, help="Train low-rank-bottleneck models."
)

app.add_typer(checkpoints.app, name="ckpt")


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; else BOOST_HOST, else 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65_535, help="Port to listen on; else BOOST_PORT, else 8900.")
    ] = None,
) -> None:
    """Run the service until it is interrupted."""
    from service.serve import run  # the engine takes seconds to import, which no other command needs

    given = {"host": host, "port": port}
    run(read_settings().model_copy(update={name: value for name, value in given.items() if value is not None}))


# What needs torch or reads much data runs in a process of its own, which this program does not load.
_HANDED_ON: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "add_help_option": False,
}


@app.command(**_HANDED_ON)
def bench(context: typer.Context) -> None:
    """Measure what the trainer's work costs on this machine; `boost bench --help` says what there is."""
    raise typer.Exit(subprocess.run([sys.executable, "-m", "boost_core.bench", *context.args]).returncode)


@app.command(**_HANDED_ON)
def data(context: typer.Context) -> None:
    """Make tokens of documents; `boost data tokenize --help` says how."""
    raise typer.Exit(subprocess.run([sys.executable, "-m", "boost_core.data", *context.args]).returncode)


@app.command("import-config")
def import_configuration(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.YAML", help="Of nanotron, or of BOOST's fork of it.")],
    out: Annotated[Path | None, typer.Option(help="Where to write the job; else to standard output.")] = None,
) -> None:
    """Make a job file of another trainer's configuration, and say what could not be carried over."""
    job, notes = read_foreign_config(config)
    for note in notes:
        typer.echo(f"not carried over as it was: {note}", err=True)
    text = yaml.safe_dump(job, sort_keys=False)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")


@app.command()
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="The job spec, as YAML or JSON.")],
    follow_it: Follow = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Submit a job."""
    with open_client(url) as client:
        record = client.submit(read_job(job))
        if not as_json:
            _print(f"submitted {record.id}")
        if follow_it:
            record = _follow(client, record.id, Console(stderr=as_json, highlight=False))
        elif not as_json:
            _print(f"watch it with: boost logs {record.id} -f")
    if as_json:
        _print(record.model_dump_json(indent=2))
    if record.finished and record.state is not JobState.SUCCEEDED:
        raise typer.Exit(ExitStatus.FAILED)


@app.command("ls")
def list_jobs(as_json: AsJson = False, url: Url = None) -> None:
    """List the newest jobs."""
    with open_client(url) as client:
        page = client.list()
    if as_json:
        _print(page.model_dump_json(indent=2))
        return
    table = Table("ID", "NAME", "STATE", "STEP", "LOSS", "AGE", "MESSAGE", box=None, pad_edge=False)
    for column in table.columns[:-1]:
        column.no_wrap = True
    for job in page.jobs:
        table.add_row(job.id, job.name, job.state, step(job), loss(job), age(job), job.message)
    _console().print(table, markup=False)
    if page.next_cursor:
        _print(f"(the newest {len(page.jobs)}; older ones: GET /v1/jobs?cursor={page.next_cursor})")


@app.command()
def show(job_id: JobId, as_json: AsJson = False, url: Url = None) -> None:
    """Show one job."""
    with open_client(url) as client:
        job = client.get(job_id)
    if as_json:
        _print(job.model_dump_json(indent=2))
        return
    for name, value in facts(job):
        _print(f"{name:<12}{value}")


@app.command()
def logs(job_id: JobId, follow_it: Follow = False, url: Url = None) -> None:
    """Print what happened to a job."""
    with open_client(url) as client:
        if not follow_it:
            for event in client.events(job_id, follow=False):
                _print(line_of(event))
            return
        record = _follow(client, job_id, Console(highlight=False))
    if record.state is not JobState.SUCCEEDED:
        raise typer.Exit(ExitStatus.FAILED)


@app.command()
def cancel(job_id: JobId, url: Url = None) -> None:
    """Cancel a job."""
    with open_client(url) as client:
        record = client.cancel(job_id)
    _print(f"{record.id} is {record.state}" if record.finished else f"{record.id} will be cancelled within seconds")


for command in (change.pause, change.resume, change.patch, change.drill):
    app.command()(command)


@app.command()
def demo() -> None:
    """Start a service, train the example job on it, and show what came of it."""
    raise typer.Exit(run_demo(read_settings(), Console(highlight=False)))


def _follow(client: Client, job_id: str, console: Console) -> JobRecord:
    try:
        return follow(client, job_id, console)
    except KeyboardInterrupt:
        console.print(f"stopped following; the job goes on. Look again: boost logs {job_id} -f", soft_wrap=True)
        console.print(f"cancel it: boost cancel {job_id}", soft_wrap=True)
        raise typer.Exit(ExitStatus.INTERRUPTED) from None


def _console() -> Console:
    """Standard output; where that is no terminal, wide enough that no line is broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=240)


def _print(line: str) -> None:
    typer.echo(line)


if __name__ == "__main__":
    app()
