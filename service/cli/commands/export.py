"""``boost export``: a checkpoint's model for Hugging Face's tools, into a folder, S3 or a hub."""

import json
from enum import StrEnum
from typing import Annotated

import typer

from service.cli.commands.ckpt import JOB_ID, checkpoint_of_job
from service.cli.completion import complete_job_ids
from service.cli.connection import open_client
from service.cli.options import Url
from service.cli.trainer_process import run_trainer
from service.client import Client


class Dtype(StrEnum):
    """Types of exported tensors."""

    FP32 = "fp32"
    BF16 = "bf16"


def export(
    where: Annotated[
        str,
        typer.Argument(
            metavar="JOB|CHECKPOINT",
            help="A job, or a folder of checkpoints or one of them: a path, file:// or s3://.",
            autocompletion=complete_job_ids,
        ),
    ],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="A new folder, or an s3:// URL.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the tensors.")] = Dtype.FP32,
    max_shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest size of a file.")] = "5GB",
    merge: Annotated[
        bool, typer.Option("--merge", help="Multiply svd's products out, to a plain dense model.")
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FILE", help="The job's tokenizer.json, if it is no longer where it was.")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="REPO", help="Push the model to this repository of a hub, too.")
    ] = None,
    url: Url = None,
) -> None:
    """Export a model: safetensors, configuration, tokenizer and card, as `transformers` loads them."""
    losses: dict[str, float] = {}
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            checkpoint = checkpoint_of_job(client, where, step)
            losses = _losses(client, where, checkpoint.step)
        where, step = checkpoint.url, None
    given = {"step": step, "tokenizer": tokenizer, "push": push, "losses": json.dumps(losses)}
    options = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    fixed = ["--dtype", dtype.value, "--max-shard-size", max_shard_size, *(["--merge"] if merge else [])]
    raise typer.Exit(run_trainer("boost_core.convert", ["export", where, destination, *fixed, *options]))


def _losses(client: Client, job_id: str, step: int) -> dict[str, float]:
    """What the job had last reported by a step, for the model's card."""
    curves = client.metrics(job_id, to_step=step)
    last = {
        part: points[-1].loss
        for part, points in (("training", curves.samples), ("validation", curves.evaluations))
        if points
    }
    return {part: loss for part, loss in last.items() if loss is not None}
