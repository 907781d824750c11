"""``boost generate``: text from a checkpoint's model."""

from typing import Annotated

import typer

from service.cli.commands.ckpt import JOB_ID, checkpoint_of_job
from service.cli.connection import open_client
from service.cli.options import JobOrCheckpoint, Tokenizer, Url, WhichStep
from service.cli.trainer_process import run_trainer


def generate(
    where: JobOrCheckpoint,
    prompt: Annotated[str, typer.Option(help="The beginning of a document; may be empty.")],
    step: WhichStep = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of tokens (default: 100, or what the sequence has room for)."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, help="Sampling temperature; 0 always takes the likeliest token.")
    ] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the likeliest tokens with this total probability.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed (default: a new one each time).")] = None,
    tokenizer: Tokenizer = None,
    url: Url = None,
) -> None:
    """Continue a prompt with a job's newest checkpoint, on this machine; the job may still be training."""
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            where, step = checkpoint_of_job(client, where, step).url, None
    given = {
        "prompt": prompt, "temperature": temperature, "top-p": top_p, "step": step, "max-new-tokens": max_new_tokens,
        "seed": seed, "tokenizer": tokenizer,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    raise typer.Exit(run_trainer("boost_core.inference", ["generate", *options, "--", where]))
