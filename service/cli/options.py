"""What several commands take."""

from typing import Annotated

import typer

from service.cli.completion import complete_job_ids

JobId = Annotated[
    str, typer.Argument(metavar="ID", help="The job's id; `boost ls` lists them.", autocompletion=complete_job_ids)
]
Url = Annotated[
    str | None,
    typer.Option(
        help="Where the service is; else BOOST_URL, else where `boost login` has signed in, else this machine."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has come to its end.")]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="However often this command is run with this key, there is one job."),
]
