"""``boost ckpt`` on a folder: verify and prune, without a service."""

from typing import Annotated

import typer

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, Manifest
from boost_core.config import Layout
from service.cli.failures import BadInput, ExitStatus
from service.cli.output.printing import say
from service.models.checkpoints import Checkpoint, CheckpointList, DamagedCheckpoint

Url = Annotated[str, typer.Argument(metavar="URL", help="Folder of a job's checkpoints: a path, file:// or s3://.")]


def checkpoints_in(url: str) -> CheckpointList:
    """List the committed checkpoints of a folder, newest first.

    Raises:
        BadInput: There are none.
    """
    folder = CheckpointFolder(url)
    _steps(folder)
    pinned = folder.pinned()
    checkpoints, damaged = [], []
    for found in folder.checkpoints():
        step, manifest = found.step, found.manifest
        about = {"step": step, "url": folder.step_url(step), "pinned": step in pinned}
        if manifest is None or found.damage:
            damaged.append(DamagedCheckpoint(**about, damage=found.damage))
            continue
        checkpoints.append(
            Checkpoint(
                **about,
                bytes=manifest.bytes,
                saved_at=manifest.saved_at,
                **Layout.of(manifest.parallelism).sizes,
                samples=manifest.samples,
            )
        )
    return CheckpointList(checkpoints=checkpoints, damaged=damaged)


def manifest_in(url: str, step: int | None) -> Manifest:
    """Read the manifest of a folder's checkpoint of a step, or of its newest.

    Raises:
        BadInput: There is no such checkpoint, or its manifest cannot be read.
    """
    folder = CheckpointFolder(url)
    chosen = _chosen(folder, step)
    try:
        return folder.manifest(chosen)
    except CheckpointDamaged as damage:
        raise BadInput(f"the checkpoint of step {chosen} is damaged: {damage}; choose another with --step") from damage


def verify(
    url: Url, step: Annotated[int | None, typer.Option(min=0, help="Only this step (default: all).")] = None
) -> None:
    """Verify the checksum of every file."""
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
    keep_every: Annotated[int | None, typer.Option(min=1, help="Also keep multiples of this many steps.")] = None,
) -> None:
    """Remove old checkpoints. Those kept are verified first; damaged ones do not count."""
    folder = CheckpointFolder(url)
    _steps(folder)
    removed = folder.prune(keep_last, keep_every, read_files=True)
    say(f"removed {len(removed)}; left: {', '.join(map(str, folder.steps()))}")


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
