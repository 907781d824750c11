"""``boost export``: a checkpoint's model for Hugging Face's tools, to a folder, S3 or a hub."""

import json
from enum import StrEnum
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from service.cli.commands.ckpt import JOB_ID, checkpoint_of_job
from service.cli.commands.jobs import evaluations_of
from service.cli.connection import open_client
from service.cli.options import JobOrCheckpoint, Tokenizer, Url, WhichStep
from service.cli.output.job_text import value_in_words
from service.cli.trainer_process import run_trainer
from service.client import Client

_MOST_SCORES = 100  # on a card


class Dtype(StrEnum):
    """Types of exported tensors."""

    FP32 = "fp32"
    BF16 = "bf16"


def export(
    where: JobOrCheckpoint,
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A new folder, or an s3:// URL.")],
    step: WhichStep = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the tensors.")] = Dtype.FP32,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest size of a file.")] = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="svd only: multiply the factors out into a plain dense model.")
    ] = False,
    tokenizer: Tokenizer = None,
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Also push the model to this repository of a hub.")
    ] = None,
    url: Url = None,
) -> None:
    """Export a model: safetensors, configuration, tokenizer and card, as `transformers` loads them."""
    losses: dict[str, float] = {}
    scores: dict[str, str] = {}
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            checkpoint = checkpoint_of_job(client, where, step)
            losses = _losses(client, where, checkpoint.step)
            scores = _scores(client, where, checkpoint.step)
        where, step = checkpoint.url, None
    given = {"step": step, "tokenizer": tokenizer, "push": push}
    options = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    fixed = ["--dtype", dtype.value, "--max-shard-size", max_shard_size, *(["--merge"] if merge else [])]
    with TemporaryDirectory(prefix="boost-export-") as folder:
        known = Path(folder) / "known.json"  # a command line has no room for many scores
        known.write_text(json.dumps({"losses": losses, "scores": scores}), encoding="utf-8")
        command = ["export", where, destination, f"--known={known}", *fixed, *options]
        status = run_trainer("boost_core.convert", command)
    raise typer.Exit(status)


def _losses(client: Client, job_id: str, step: int) -> dict[str, float]:
    """Return the losses last reported by the job at a step, for the model card."""
    curves = client.metrics(job_id, to_step=step)
    last = {"training": curves.samples[-1].loss} if curves.samples else {}
    if curves.evaluations:
        newest = curves.evaluations[-1]
        last |= {"validation": newest.loss, **{f"{each.name} validation": each.loss for each in newest.sets}}
    return {part: loss for part, loss in last.items() if loss is not None}


def _scores(client: Client, job_id: str, step: int) -> dict[str, str]:
    """Return a checkpoint's scores on tasks, newest evaluation first, for the model card."""
    found: dict[str, str] = {}
    for each in evaluations_of(client, job_id):
        if each.step == step:
            for score in each.scores:
                found.setdefault(f"{score.task} {score.metric}", f"{value_in_words(score)} ({each.evaluated_by})")
    return dict(islice(found.items(), _MOST_SCORES))
