"""``boost queues``."""

from typing import Annotated

import typer

from service.cli.commands.limits import Cpus, Gpus, by_state, held, limit
from service.cli.connection import open_client
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_facts, print_json, print_list, say
from service.client import ApiError, Client
from service.models.queues import Queue
from service.models.requests import QueueSettings

app = typer.Typer(no_args_is_help=True, help="List, create, limit and delete queues.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The queue.")]


@app.command("ls")
def list_queues(as_json: AsJson = False, url: Url = None) -> None:
    """List the queues, their usage and limits."""
    with open_client(url) as client:
        found = client.queues()
    print_list(found, as_json, ("NAME", "GPUS", "CPUS", "JOBS", "DESCRIPTION"), map(_row, found.queues))


@app.command()
def show(name: Name, as_json: AsJson = False, url: Url = None) -> None:
    """Show one queue."""
    with open_client(url) as client:
        queue = client.queue(name)
    if as_json:
        print_json(queue)
        return
    print_facts(zip(("name", "GPUs", "CPUs", "jobs", "description"), _row(queue), strict=True))


@app.command("set")
def set_queue(
    name: Name,
    description: Annotated[str | None, typer.Option(help="What it is for.")] = None,
    gpus: Gpus = None,
    cpus: Cpus = None,
    url: Url = None,
) -> None:
    """Create a queue or change the given settings of an existing one; for operators."""
    with open_client(url) as client:
        present = _present(client, name)
        settings = {
            "description": present.description if description is None else description,
            "gpus": limit(gpus, present.gpus),
            "cpus": limit(cpus, present.cpus),
        }
        queue = client.put_queue(name, settings)
    say(f"queue {queue.name}: GPUs {held(queue.used_gpus, queue.gpus)}, CPUs {held(queue.used_cpus, queue.cpus)}")


@app.command("rm")
def remove(name: Name, url: Url = None) -> None:
    """Delete a queue that has no active jobs; for operators."""
    with open_client(url) as client:
        client.delete_queue(name)
    say(f"deleted the queue {name}")


def _present(client: Client, name: str) -> Queue | QueueSettings:
    """Return the queue's settings; the defaults if it does not exist."""
    try:
        return client.queue(name)
    except ApiError as error:
        if error.code != "queue-not-found":
            raise
        return QueueSettings()


def _row(queue: Queue) -> tuple[str, ...]:
    gpus, cpus = held(queue.used_gpus, queue.gpus), held(queue.used_cpus, queue.cpus)
    return queue.name, gpus, cpus, by_state(queue.jobs), queue.description
