"""Checkpoints: ``boost ckpt`` manages those of a job, through the service, or of a folder, without one.

``boost eval`` scores one on lm-eval tasks, ``boost export`` writes its model for Hugging Face's tools to a folder, S3
or a hub, and ``boost generate`` continues a text with it. What needs torch or reads much data runs in a process of its
own, so that this program need not load it.
"""

import json
import re
import shutil
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from boost_core.checkpoint.folder import CheckpointFolder, located
from boost_core.checkpoint.manifest import CheckpointDamaged
from boost_core.config import Layout
from boost_core.messages import Scores
from service.cli.commands.jobs import where_served
from service.cli.commands.local import run_trainer
from service.cli.connection import open_client
from service.cli.console import BadInput, ExitStatus, Failed, print_answer, say
from service.cli.job_text import value_in_words
from service.cli.options import UNOPENED, AsJson, AtStep, JobId, JobOrCheckpoint, JobOrFolder, Service, Tokenizer, Url
from service.client import Client
from service.models.access import Scope
from service.models.jobs import CheckpointDetail, CheckpointList

app = typer.Typer(no_args_is_help=True, help="List, verify, pin and delete checkpoints.")

JOB_ID = re.compile(r"job-[0-9a-z]+")

Step = Annotated[int, Argument(min=0, metavar="STEP", help="Step of the checkpoint.")]
FolderUrl = Annotated[str, Argument(metavar="URL", help="Folder of a job's checkpoints: a path, file:// or s3://.")]


@app.command("ls")
def list_checkpoints(where: JobOrFolder, as_json: AsJson = False, url: Url = None) -> None:
    """List the committed checkpoints of a job or a folder, newest first, then the damaged ones."""
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            result = client.checkpoints(where)
    else:
        folder = CheckpointFolder(where)
        _steps(folder)
        result = CheckpointList.of(folder, folder.checkpoints(), folder.pinned())
    rows = []
    for each in result.checkpoints:
        saved, size = f"{each.saved_at.astimezone():%Y-%m-%d %H:%M:%S}", f"{each.bytes / 2**20:,.1f} MiB"
        rows.append((str(each.step), saved, size, str(Layout.of(each)), "pinned" if each.pinned else "-", each.url))
    print_answer(result, as_json, rows, ("STEP", "SAVED", "SIZE", "LAYOUT", "PINNED", "URL"))
    if not as_json:
        for one in result.damaged:
            say(f"the checkpoint of step {one.step} is damaged{' and pinned' if one.pinned else ''}: {one.damage}")


@app.command()
def show(where: JobOrFolder, step: AtStep = None, url: Url = None) -> None:
    """Print a checkpoint's details as JSON."""
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            print_answer(checkpoint_of_job(client, where, step), as_json=True)
        return
    folder = CheckpointFolder(where)
    chosen = _steps(folder, step)[-1]
    try:
        manifest = folder.manifest(chosen)
    except CheckpointDamaged as damage:
        raise BadInput(f"the checkpoint of step {chosen} is damaged: {damage}; choose another with --step") from damage
    print_answer(manifest, as_json=True)


@app.command()
def pin(job_id: JobId, step: Step, client: Service = UNOPENED) -> None:
    """Keep a checkpoint until it is unpinned."""
    say(f"{client.pin(job_id, step).url} is kept until it is unpinned")


@app.command()
def unpin(job_id: JobId, step: Step, client: Service = UNOPENED) -> None:
    """Return a checkpoint to the job's retention."""
    say(f"{client.unpin(job_id, step).url} is again subject to the job's retention")


@app.command("rm")
def remove(job_id: JobId, step: Step, client: Service = UNOPENED) -> None:
    """Delete a checkpoint of a job."""
    client.delete_checkpoint(job_id, step)
    say(f"deleted the checkpoint of step {step} of {job_id}")


@app.command()
def verify(
    url: FolderUrl, step: Annotated[int | None, Option(min=0, help="Only this step (default: all).")] = None
) -> None:
    """Verify the checksum of every file."""
    folder = CheckpointFolder(url)
    damaged = False
    for each in _steps(folder, step):
        problems = folder.damage(each)
        damaged = damaged or bool(problems)
        for line in problems or ["intact"]:
            say(f"step {each}: {line}")
    if damaged:
        raise typer.Exit(ExitStatus.FAILED)


@app.command()
def prune(
    url: FolderUrl,
    keep_last: Annotated[int, Option(min=1, help="Keep this many of the newest.")],
    keep_every: Annotated[int | None, Option(min=1, help="Also keep multiples of this many steps.")] = None,
) -> None:
    """Remove old checkpoints. Those kept are verified first; damaged ones do not count."""
    folder = CheckpointFolder(url)
    _steps(folder)
    removed = folder.prune(keep_last, keep_every, read_files=True)
    say(f"removed {len(removed)}; left: {', '.join(map(str, folder.steps()))}")


def checkpoint_of_job(client: Client, job_id: str, step: int | None) -> CheckpointDetail:
    """Return a job's checkpoint of a step, or its newest intact one.

    Raises:
        BadInput: The job has none.
    """
    if step is None:
        result = client.checkpoints(job_id)
        if not result.checkpoints:
            damaged = [f"; that of step {one.step} is damaged: {one.damage}" for one in result.damaged[:1]]
            missing = "intact checkpoint" if damaged else "committed checkpoint yet"
            raise BadInput(f"{job_id} has no {missing}{''.join(damaged)}")
        step = result.checkpoints[0].step
    return client.checkpoint(job_id, step)


def _steps(folder: CheckpointFolder, step: int | None = None) -> list[int]:
    """Return all steps, or only the one that is named."""
    steps = folder.steps()
    if not steps:
        raise BadInput(f"{folder.url} holds no committed checkpoint; check the URL")
    if step is None:
        return steps
    if step not in steps:
        raise BadInput(f"{folder.url} holds no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
    return [step]


# What needs torch or reads much data.


def _refuse_absent(where: str, step: int | None) -> None:
    """Refuse a place without the checkpoint before torch is imported, which takes seconds."""
    folder, named = located(where)
    _steps(folder, named if step is None else step)


def _options(**values: object) -> list[str]:
    """The options of a trainer's program that have a value."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def evaluate(
    where: JobOrCheckpoint,
    tasks: Annotated[list[str], Option(metavar="PATH", help="An lm-eval task file, or a folder of them; repeatable.")],
    step: AtStep = None,
    limit: Annotated[int | None, Option(min=1, help="Only this many documents of each task.")] = None,
    batch_size: Annotated[int, Option(min=1, max=4096, help="Sequences at a time.")] = 8,
    out: Annotated[Path | None, Option(metavar="FILE", help="Also write the scores to a file, as JSON.")] = None,
    tokenizer: Tokenizer = None,
    url: Url = None,
) -> None:
    """Evaluate a checkpoint on tasks, on this machine; scores of a job's checkpoint are recorded with the job."""
    job_id = where if JOB_ID.fullmatch(where) else None
    if absent := [path for path in tasks if not Path(path).exists()]:
        raise BadInput(f"no task file or folder is at {absent[0]!r}; check --tasks")
    if job_id is None:
        _refuse_absent(where, step)
    else:
        with open_client(url) as client:
            # Refuse before hours of work what the service would refuse afterwards.
            who = client.whoami()
            if not any(scope.includes(Scope.SUBMIT) for scope in who.scopes):
                needed = "recording scores needs a key with the scope submit"
                raise Failed(f"{needed}, which {who.name!r} lacks; nothing was run")
            where, step = checkpoint_of_job(client, job_id, step).url, None
    options = _options(step=step, limit=limit, batch_size=batch_size, tokenizer=tokenizer)
    options += [f"--tasks={path}" for path in tasks]
    folder = Path(mkdtemp(prefix="boost-eval-"))
    file = out or folder / "scores.json"
    try:
        status = run_trainer("boost_core.inference", ["eval", *options, f"--out={file}", "--", where])
        if status or job_id is None:
            raise typer.Exit(status)
        scores = Scores.model_validate_json(file.read_bytes())
        with open_client(url) as client:
            client.record_evaluation(job_id, scores)
    except BaseException as ended:
        if not isinstance(ended, typer.Exit) and file.exists():
            say(f"the scores are in {file}; POST it to /v1/jobs/JOB/evaluations to record them later", err=True)
            raise
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
    say(f"recorded with {job_id}, step {scores.step}")


_MOST_SCORES = 100  # on a card
_MERGE_HELP = "svd only: multiply the factors out into a plain dense model."


def export(
    where: JobOrCheckpoint,
    destination: Annotated[str, Argument(metavar="DEST", help="A new folder, or an s3:// URL.")],
    step: AtStep = None,
    dtype: Annotated[Literal["fp32", "bf16"], Option(help="Type of the tensors.")] = "fp32",
    max_shard_size: Annotated[str, Option(metavar="SIZE", help="Largest size of a file.")] = "5GB",
    merge: Annotated[bool, Option("--merge", help=_MERGE_HELP)] = False,
    tokenizer: Tokenizer = None,
    push: Annotated[str | None, Option(metavar="REPO", help="Also push the model to this repository of a hub.")] = None,
    url: Url = None,
) -> None:
    """Export a model: safetensors, configuration, tokenizer and card, as `transformers` loads them."""
    losses: dict[str, float] = {}
    scores: dict[str, str] = {}
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            checkpoint = checkpoint_of_job(client, where, step)
            # For the model card: the losses last reported at this step, and the scores, newest evaluation first.
            curves = client.metrics(where, to_step=checkpoint.step)
            last = {"training": curves.samples[-1].loss} if curves.samples else {}
            if curves.evaluations:
                newest = curves.evaluations[-1]
                last |= {"validation": newest.loss, **{f"{each.name} validation": each.loss for each in newest.sets}}
            losses = {part: loss for part, loss in last.items() if loss is not None}
            evaluated = where_served(client.evaluations, where)
            for evaluation in evaluated.evaluations if evaluated else ():
                for score in evaluation.scores if evaluation.step == checkpoint.step else ():
                    value = f"{value_in_words(score)} ({evaluation.evaluated_by})"
                    scores.setdefault(f"{score.task} {score.metric}", value)
            scores = dict(islice(scores.items(), _MOST_SCORES))
        where, step = checkpoint.url, None
    else:
        _refuse_absent(where, step)
    options = _options(step=step, tokenizer=tokenizer, push=push, dtype=dtype, max_shard_size=max_shard_size)
    options += ["--merge"] if merge else []
    with TemporaryDirectory(prefix="boost-export-") as folder:
        known = Path(folder) / "known.json"  # a command line has no room for many scores
        known.write_text(json.dumps({"losses": losses, "scores": scores}), encoding="utf-8")
        status = run_trainer("boost_core.convert", ["export", where, destination, f"--known={known}", *options])
    raise typer.Exit(status)


_MAX_NEW_TOKENS_HELP = "Maximum number of tokens (default: 100, or what the sequence has room for)."
_TEMPERATURE_HELP = "Sampling temperature; 0 always takes the likeliest token."
_TOP_P_HELP = "Sample from the likeliest tokens with this total probability."


def generate(
    where: JobOrCheckpoint,
    prompt: Annotated[str, Option(help="The beginning of a document; may be empty.")],
    step: AtStep = None,
    max_new_tokens: Annotated[int | None, Option(min=1, help=_MAX_NEW_TOKENS_HELP)] = None,
    temperature: Annotated[float, Option(min=0, max=100, help=_TEMPERATURE_HELP)] = 1.0,
    top_p: Annotated[float, Option(min=0, max=1, help=_TOP_P_HELP)] = 1.0,
    seed: Annotated[int | None, Option(min=0, help="Random seed (default: a new one each time).")] = None,
    tokenizer: Tokenizer = None,
    url: Url = None,
) -> None:
    """Continue a prompt with a job's newest checkpoint, on this machine; the job may still be training."""
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            where, step = checkpoint_of_job(client, where, step).url, None
    else:
        _refuse_absent(where, step)
    options = _options(prompt=prompt, temperature=temperature, top_p=top_p, step=step, seed=seed, tokenizer=tokenizer)
    options += _options(max_new_tokens=max_new_tokens)
    raise typer.Exit(run_trainer("boost_core.inference", ["generate", *options, "--", where]))
