"""Options and arguments that several commands share."""

from typing import Annotated

import typer

from service.cli.completion import complete_job_ids

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="Job ID; `boost ls` lists them.", autocompletion=complete_job_ids)
]
Url = Annotated[
    str | None,
    typer.Option(help="URL of the service (default: BOOST_URL, else the service of `boost login`, else this machine)."),
]
JobOrCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="JOB|CHECKPOINT",
        help="A job, a folder of checkpoints, or one checkpoint: a path, file:// or s3://.",
        autocompletion=complete_job_ids,
    ),
]
WhichStep = Annotated[int | None, typer.Option("--step", min=0, help="Step of the checkpoint (default: the newest).")]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="FILE", help="The job's tokenizer.json, if it has moved."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job ends.")]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Idempotency key: repeating the command with it creates only one job."),
]
