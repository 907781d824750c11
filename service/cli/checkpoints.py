"""``boost ckpt``: look at checkpoints, check them, thin them out, take a model out of one. Needs no service."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from boost_core.checkpoint.folder import CheckpointFolder, Manifest
from service.cli.failures import BadInput, ExitStatus

app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check them, thin them out, export a model.")

Url = Annotated[str, typer.Argument(metavar="URL", help="Folder of a job's checkpoints: a path, file:// or s3://.")]
Step = Annotated[int | None, typer.Option(min=0, help="The checkpoint of this step; else the newest.")]


@app.command("ls")
def list_checkpoints(url: Url) -> None:
    """List the committed checkpoints."""
    folder = CheckpointFolder(url)
    table = Table("STEP", "SAVED", "SIZE", "LAYOUT", "JOB", box=None, pad_edge=False)
    for step in _steps(folder):
        manifest = folder.manifest(step)
        saved = f"{manifest.saved_at.astimezone():%Y-%m-%d %H:%M:%S}"
        table.add_row(str(step), saved, _size(manifest), _layout(manifest), manifest.job.name)
    Console(highlight=False).print(table, markup=False)


@app.command()
def show(url: Url, step: Step = None) -> None:
    """Print a checkpoint's manifest."""
    folder = CheckpointFolder(url)
    typer.echo(folder.manifest(_chosen(folder, step)).model_dump_json(indent=2))


@app.command()
def verify(url: Url, step: Annotated[int | None, typer.Option(min=0, help="Only this step; else all.")] = None) -> None:
    """Read every file and compare it with what was written."""
    folder = CheckpointFolder(url)
    damaged = False
    for each in _steps(folder) if step is None else [_chosen(folder, step)]:
        problems = folder.damage(each)
        damaged = damaged or bool(problems)
        for line in problems or ["intact"]:
            typer.echo(f"step {each}: {line}")
    if damaged:
        raise typer.Exit(ExitStatus.FAILED)


@app.command()
def prune(
    url: Url,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep this many of the newest.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep multiples of this many steps, too.")] = None,
) -> None:
    """Remove old checkpoints."""
    folder = CheckpointFolder(url)
    _steps(folder)
    removed = folder.prune(keep_last, keep_every)
    typer.echo(f"removed {len(removed)}; left: {', '.join(map(str, folder.steps()))}")


@app.command()
def export(url: Url, model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder to write to.")]) -> None:
    """Write the newest checkpoint's model as safetensors; `python -m boost_core.convert` can do more."""
    # In a process of its own, because it needs torch, which this program does not load.
    done = subprocess.run([sys.executable, "-m", "boost_core.convert", "export", url, str(model)])
    raise typer.Exit(done.returncode)


def _steps(folder: CheckpointFolder) -> list[int]:
    steps = folder.steps()
    if not steps:
        raise BadInput(f"{folder.url} holds no committed checkpoint; check the URL")
    return steps


def _chosen(folder: CheckpointFolder, step: int | None) -> int:
    steps = _steps(folder)
    if step is None:
        return steps[-1]
    if step not in steps:
        raise BadInput(f"{folder.url} holds no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
    return step


def _size(manifest: Manifest) -> str:
    return f"{manifest.bytes / 2**20:,.1f} MiB"


def _layout(manifest: Manifest) -> str:
    layout = manifest.parallelism
    sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size)
    return "tp {} × pp {} × dp {}".format(*sizes)
