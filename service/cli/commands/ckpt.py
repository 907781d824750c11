"""``boost ckpt``: list, show, pin and delete the checkpoints of a job or a folder."""

import re
from typing import Annotated

import typer

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, Manifest
from boost_core.config import Layout
from service.cli.completion import complete_job_ids
from service.cli.connection import open_client
from service.cli.failures import BadInput, ExitStatus
from service.cli.options import AsJson, JobId, Url
from service.cli.output.printing import print_json, print_table, say
from service.client import Client
from service.models.jobs import Checkpoint, CheckpointDetail, CheckpointList, DamagedCheckpoint

# ``boost ckpt`` on a folder: verify and prune, without a service.

FolderUrl = Annotated[
    str, typer.Argument(metavar="URL", help="Folder of a job's checkpoints: a path, file:// or s3://.")
]


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
    url: FolderUrl, step: Annotated[int | None, typer.Option(min=0, help="Only this step (default: all).")] = None
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
    url: FolderUrl,
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


app = typer.Typer(no_args_is_help=True, help="List, verify, pin and delete checkpoints.")

JOB_ID = re.compile(r"job-[0-9a-z]+")

JobOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="ID|URL", help="A job, or a folder: a path, file:// or s3://.", autocompletion=complete_job_ids
    ),
]
Step = Annotated[int, typer.Argument(min=0, metavar="STEP", help="Step of the checkpoint.")]


@app.command("ls")
def list_checkpoints(where: JobOrFolder, as_json: AsJson = False, url: Url = None) -> None:
    """List the committed checkpoints of a job or a folder, newest first, then the damaged ones."""
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            found = client.checkpoints(where)
    else:
        found = checkpoints_in(where)
    if as_json:
        print_json(found)
    else:
        _print(found)


@app.command()
def show(
    where: JobOrFolder,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    url: Url = None,
) -> None:
    """Print a checkpoint's details as JSON."""
    if not JOB_ID.fullmatch(where):
        print_json(manifest_in(where, step))
        return
    with open_client(url) as client:
        print_json(checkpoint_of_job(client, where, step))


@app.command()
def pin(job_id: JobId, step: Step, url: Url = None) -> None:
    """Keep a checkpoint until it is unpinned."""
    with open_client(url) as client:
        say(f"{client.pin(job_id, step).url} is kept until it is unpinned")


@app.command()
def unpin(job_id: JobId, step: Step, url: Url = None) -> None:
    """Return a checkpoint to the job's retention."""
    with open_client(url) as client:
        say(f"{client.unpin(job_id, step).url} is again subject to the job's retention")


@app.command("rm")
def remove(job_id: JobId, step: Step, url: Url = None) -> None:
    """Delete a checkpoint of a job."""
    with open_client(url) as client:
        client.delete_checkpoint(job_id, step)
    say(f"deleted the checkpoint of step {step} of {job_id}")


for of_folders in (verify, prune):
    app.command()(of_folders)


def checkpoint_of_job(client: Client, job_id: str, step: int | None) -> CheckpointDetail:
    """Return a job's checkpoint of a step, or its newest intact one.

    Raises:
        BadInput: The job has none.
    """
    if step is None:
        found = client.checkpoints(job_id)
        if not found.checkpoints:
            damaged = [f"; that of step {one.step} is damaged: {one.damage}" for one in found.damaged[:1]]
            raise BadInput(
                f"{job_id} has no {'intact checkpoint' if damaged else 'committed checkpoint yet'}{''.join(damaged)}"
            )
        step = found.checkpoints[0].step
    return client.checkpoint(job_id, step)


def _print(found: CheckpointList) -> None:
    print_table(("STEP", "SAVED", "SIZE", "LAYOUT", "PINNED", "URL"), map(_row, found.checkpoints))
    for one in found.damaged:
        say(f"the checkpoint of step {one.step} is damaged{' and pinned' if one.pinned else ''}: {one.damage}")


def _row(checkpoint: Checkpoint) -> tuple[str, ...]:
    return (
        str(checkpoint.step),
        f"{checkpoint.saved_at.astimezone():%Y-%m-%d %H:%M:%S}",
        f"{checkpoint.bytes / 2**20:,.1f} MiB",
        str(Layout.of(checkpoint)),
        "pinned" if checkpoint.pinned else "-",
        checkpoint.url,
    )
