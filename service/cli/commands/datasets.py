"""``boost datasets``."""

import time
from pathlib import Path
from typing import Annotated

import typer

from boost_core.config.base import counted
from service.cli.connection import open_client
from service.cli.failures import Failed, read_yaml_as
from service.cli.options import AsJson, Url
from service.cli.output.printing import print_facts, print_json, print_list, say
from service.models.datasets import Dataset, DatasetRequest, DatasetState

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
        dataset = client.create_dataset(read_yaml_as(DatasetRequest, file))
        say(f"dataset {dataset.name} ({dataset.id}) is {dataset.state}")
        if not follow:
            return
        printed = ""
        while dataset.state is DatasetState.BUILDING:
            if (line := _progress(dataset)) != printed:
                say(line)
                printed = line
            time.sleep(_POLL_SECONDS)
            dataset = client.dataset(dataset.name)
    if dataset.state is not DatasetState.READY:
        raise Failed(f"dataset {dataset.name} is {dataset.state}: {dataset.message}")
    say(f"dataset {dataset.name} is {dataset.state}: {dataset.message}")


@app.command("ls")
def list_datasets(as_json: AsJson = False, url: Url = None) -> None:
    """List the datasets."""
    with open_client(url) as client:
        result = client.datasets()
    rows = []
    for dataset in result.datasets:
        counts = dataset.counts or {}
        numbers = (f"{counts[key]:,}" if key in counts else "-" for key in ("kept", "tokens"))
        rows.append((dataset.name, dataset.state, *numbers, dataset.message))
    print_list(result, as_json, ("NAME", "STATE", "DOCUMENTS", "TOKENS", "MESSAGE"), rows)


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


def _progress(dataset: Dataset) -> str:
    progress = dataset.progress
    if progress is None:
        return dataset.message
    rate = progress.bytes / 2**20 / max(progress.seconds, 1e-9)
    documents = counted(progress.documents, "document")
    return f"{progress.stage}: {progress.done} of {progress.of}; {documents}, {rate:,.1f} MiB/s"
