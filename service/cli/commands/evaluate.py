"""``boost eval``: score a checkpoint on lm-eval tasks."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated

import typer

from boost_core.messages import Scores
from service.cli.commands.ckpt import JOB_ID, checkpoint_of_job
from service.cli.connection import open_client
from service.cli.failures import Failed
from service.cli.options import JobOrCheckpoint, Tokenizer, Url, WhichStep
from service.cli.output.printing import say
from service.cli.trainer_process import run_trainer
from service.client import Client
from service.models.identity import Scope


def evaluate(
    where: JobOrCheckpoint,
    tasks: Annotated[
        list[str], typer.Option(metavar="PATH", help="An lm-eval task file, or a folder of them; repeatable.")
    ],
    step: WhichStep = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only this many documents of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Sequences at a time.")] = 8,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the scores to this file, as JSON.")
    ] = None,
    tokenizer: Tokenizer = None,
    url: Url = None,
) -> None:
    """Evaluate a checkpoint on tasks, on this machine; scores of a job's checkpoint are recorded with the job."""
    job_id = where if JOB_ID.fullmatch(where) else None
    if job_id is not None:
        with open_client(url) as client:
            _refuse_who_may_not_record(client)
            where, step = checkpoint_of_job(client, job_id, step).url, None
    given = {"step": step, "limit": limit, "batch-size": batch_size, "tokenizer": tokenizer}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    with _kept_if_not_recorded(out) as file:
        named = [f"--tasks={path}" for path in tasks]
        status = run_trainer("boost_core.inference", ["eval", *options, *named, f"--out={file}", "--", where])
        if status or job_id is None:
            raise typer.Exit(status)
        scores = Scores.model_validate_json(file.read_bytes())
        with open_client(url) as client:
            client.record_evaluation(job_id, scores)
    say(f"recorded with {job_id}, step {scores.step}")


def _refuse_who_may_not_record(client: Client) -> None:
    """Refuse before hours of work what the service would refuse afterwards."""
    who = client.whoami()
    if not any(scope.includes(Scope.SUBMIT) for scope in who.scopes):
        raise Failed(f"recording scores needs a key with the scope submit, which {who.name!r} lacks; nothing was run")


@contextmanager
def _kept_if_not_recorded(out: Path | None) -> Iterator[Path]:
    """Provide a file for the scores; it is kept if it was asked for, or if recording the scores fails."""
    folder = Path(mkdtemp(prefix="boost-eval-"))
    file = out or folder / "scores.json"
    try:
        yield file
    except BaseException as ended:
        if not isinstance(ended, typer.Exit) and file.exists():
            say(f"the scores are in {file}; POST it to /v1/jobs/JOB/evaluations to record them later", err=True)
            raise
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
