"""What several commands take, and the client that they talk to the service with."""

from typing import Annotated

import typer

from service.cli.failures import BadInput, read_settings
from service.client import Client

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id; `boost ls` lists them.")]
Url = Annotated[str | None, typer.Option(help="Where the service is; else BOOST_URL, else this machine.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has come to its end.")]


def open_client(url: str | None) -> Client:
    """A client of the service at ``url``, else of the one that the settings name.

    Raises:
        BadInput: That is no address.
    """
    address = url or read_settings().url
    try:
        return Client(address)
    except ValueError as error:
        raise BadInput(str(error)) from error
