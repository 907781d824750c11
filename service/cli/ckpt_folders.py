"""``boost ckpt`` on a folder: check, thin out, take a model out of one. Needs no service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from boost_core.checkpoint.folder import CheckpointFolder, Manifest
from service.cli.failures import BadInput, ExitStatus
from service.cli.handed_on import run_trainer
from service.cli.printing import say
from service.models.checkpoints import Checkpoint

Url = Annotated[str, typer.Argument(metavar="URL", help="Folder of a job's checkpoints: a path, file:// or s3://.")]
Step = Annotated[int | None, typer.Option(min=0, help="The checkpoint of this step; else the newest.")]


def checkpoints_in(url: str) -> Iterator[Checkpoint]:
    """The committed checkpoints of a folder, the newest first.

    Raises:
        BadInput: There is none.
    """
    folder = CheckpointFolder(url)
    steps, pinned = _steps(folder), folder.pinned()
    for step in reversed(steps):
        manifest = folder.manifest(step)
        layout = manifest.parallelism
        yield Checkpoint(
            step=step,
            url=folder.step_url(step),
            bytes=manifest.bytes,
            saved_at=manifest.saved_at,
            pinned=step in pinned,
            tensor_parallel_size=layout.tensor_parallel_size,
            pipeline_parallel_size=layout.pipeline_parallel_size,
            data_parallel_size=layout.data_parallel_size,
            samples=manifest.samples,
        )


def manifest_in(url: str, step: int | None) -> Manifest:
    """The manifest of a folder's checkpoint of a step, or of its newest.

    Raises:
        BadInput: There is no such checkpoint.
    """
    folder = CheckpointFolder(url)
    return folder.manifest(_chosen(folder, step))


def verify(url: Url, step: Annotated[int | None, typer.Option(min=0, help="Only this step; else all.")] = None) -> None:
    """Read every file and compare it with what was written."""
    folder = CheckpointFolder(url)
    damaged = False
    for each in _steps(folder) if step is None else [_chosen(folder, step)]:
        problems = folder.damage(each)
        damaged = damaged or bool(problems)
        for line in problems or ["intact"]:
            say(f"step {each}: {line}")
    if damaged:
        raise typer.Exit(ExitStatus.FAILED)


def prune(
    url: Url,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep this many of the newest.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep multiples of this many steps, too.")] = None,
) -> None:
    """Remove old checkpoints."""
    folder = CheckpointFolder(url)
    _steps(folder)
    removed = folder.prune(keep_last, keep_every)
    say(f"removed {len(removed)}; left: {', '.join(map(str, folder.steps()))}")


def export(url: Url, model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder to write to.")]) -> None:
    """Write the newest checkpoint's model as safetensors; `python -m boost_core.convert` can do more."""
    raise typer.Exit(run_trainer("boost_core.convert", ["export", url, str(model)]))


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
