"""``boost datasets``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from boost_core.config.base import counted
from service.cli.connection import open_client
from service.cli.failures import Failed, read_dataset
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_facts, print_json, print_list, say
from service.client import Client
from service.models.datasets import Dataset, DatasetState

app = typer.Typer(no_args_is_help=True, help="Create, list, show, cancel and forget datasets that jobs can name.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The dataset.")]

_POLL_SECONDS = 1.0


@app.command()
def create(
    file: Annotated[Path, typer.Argument(metavar="DATASET.YAML", help="The dataset's description, as YAML or JSON.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait until it is built.")] = False,
    url: Url = None,
) -> None:
    """Build a dataset; one that failed or was cancelled continues with the remaining files."""
    with open_client(url) as client:
        dataset = client.create_dataset(read_dataset(file))
        say(f"dataset {dataset.name} ({dataset.id}) is {dataset.state}")
        if follow:
            _follow(client, dataset)


@app.command("ls")
def list_datasets(as_json: AsJson = False, url: Url = None) -> None:
    """List the datasets."""
    with open_client(url) as client:
        found = client.datasets()
    print_list(found, as_json, ("NAME", "STATE", "DOCUMENTS", "TOKENS", "MESSAGE"), map(_row, found.datasets))


@app.command()
def show(name: Name, as_json: AsJson = False, url: Url = None) -> None:
    """Show one dataset; with --json also its lineage."""
    with open_client(url) as client:
        dataset = client.dataset(name)
    if as_json:
        print_json(dataset)
        return
    facts = {"name": dataset.name, "state": dataset.state, "message": dataset.message, "url": dataset.url}
    facts |= {"progress": _progress(dataset), "fingerprint": dataset.fingerprint or "-"}
    counts = dict(dataset.counts or {})
    filtered = counts.pop("filtered", {})
    facts |= {key.replace("_", " "): str(value) for key, value in counts.items()}
    facts |= {f"by {measure}": f"{count} filtered out" for measure, count in filtered.items()}
    print_facts(facts.items(), 18)


@app.command()
def cancel(name: Name, url: Url = None) -> None:
    """Stop building a dataset."""
    with open_client(url) as client:
        dataset = client.cancel_dataset(name)
    say(f"dataset {dataset.name} is {dataset.state}")


@app.command("rm")
def remove(name: Name, url: Url = None) -> None:
    """Forget a dataset that no active job names; its files stay where they are."""
    with open_client(url) as client:
        client.delete_dataset(name)
    say(f"forgot the dataset {name}")


def _follow(client: Client, dataset: Dataset) -> None:
    said = ""
    while dataset.state is DatasetState.BUILDING:
        if (line := _progress(dataset)) != said:
            say(line)
            said = line
        time.sleep(_POLL_SECONDS)
        dataset = client.dataset(dataset.name)
    if dataset.state is not DatasetState.READY:
        raise Failed(f"dataset {dataset.name} is {dataset.state}: {dataset.message}")
    say(f"dataset {dataset.name} is {dataset.state}: {dataset.message}")


def _progress(dataset: Dataset) -> str:
    told = dataset.progress
    if told is None:
        return dataset.message
    rate = told.bytes / 2**20 / max(told.seconds, 1e-9)
    return f"{told.stage}: {told.done} of {told.of}; {counted(told.documents, 'document')}, {rate:,.1f} MiB/s"


def _row(dataset: Dataset) -> tuple[str, ...]:
    counts = dataset.counts or {}
    numbers = (f"{counts[key]:,}" if key in counts else "-" for key in ("kept", "tokens"))
    return dataset.name, dataset.state, *numbers, dataset.message
