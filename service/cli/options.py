"""What several commands take."""

from typing import Annotated

import typer

from service.cli.completion import complete_job_ids

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="Job ID; `boost ls` lists them.", autocompletion=complete_job_ids)
]
Url = Annotated[
    str | None,
    typer.Option(help="URL of the service (default: BOOST_URL, or where `boost login` signed in, or this machine)."),
]
JobOrCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="JOB|CHECKPOINT",
        help="A job, or a folder of checkpoints or one of them: a path, file:// or s3://.",
        autocompletion=complete_job_ids,
    ),
]
WhichStep = Annotated[int | None, typer.Option("--step", min=0, help="Step of the checkpoint (default: the newest).")]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="FILE", help="The job's tokenizer.json, if it is no longer where it was."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job has ended.")]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Idempotency key: however often the command runs with it, one job is created."),
]
