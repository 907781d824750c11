"""``boost ckpt``: the checkpoints of a job, through the service, or of a folder, without one."""

import re
from typing import Annotated

import typer

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged
from boost_core.config import Layout
from service.cli.connection import open_client
from service.cli.failures import BadInput, ExitStatus
from service.cli.options import AsJson, JobId, Url, complete_job_ids
from service.cli.output.printing import print_json, print_table, say
from service.client import Client
from service.models.jobs import Checkpoint, CheckpointDetail, CheckpointList, DamagedCheckpoint

app = typer.Typer(no_args_is_help=True, help="List, verify, pin and delete checkpoints.")

JOB_ID = re.compile(r"job-[0-9a-z]+")

JobOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="ID|URL", help="A job, or a folder: a path, file:// or s3://.", autocompletion=complete_job_ids
    ),
]
Step = Annotated[int, typer.Argument(min=0, metavar="STEP", help="Step of the checkpoint.")]
FolderUrl = Annotated[
    str, typer.Argument(metavar="URL", help="Folder of a job's checkpoints: a path, file:// or s3://.")
]


@app.command("ls")
def list_checkpoints(where: JobOrFolder, as_json: AsJson = False, url: Url = None) -> None:
    """List the committed checkpoints of a job or a folder, newest first, then the damaged ones."""
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            result = client.checkpoints(where)
    else:
        folder = CheckpointFolder(where)
        _steps(folder)
        pinned = folder.pinned()
        checkpoints, damaged = [], []
        for stored in folder.checkpoints():
            step, manifest = stored.step, stored.manifest
            about = {"step": step, "url": folder.step_url(step), "pinned": step in pinned}
            if manifest is None or stored.damage:
                damaged.append(DamagedCheckpoint(**about, damage=stored.damage))
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
        result = CheckpointList(checkpoints=checkpoints, damaged=damaged)
    if as_json:
        print_json(result)
        return
    rows = (
        (
            str(each.step),
            f"{each.saved_at.astimezone():%Y-%m-%d %H:%M:%S}",
            f"{each.bytes / 2**20:,.1f} MiB",
            str(Layout.of(each)),
            "pinned" if each.pinned else "-",
            each.url,
        )
        for each in result.checkpoints
    )
    print_table(("STEP", "SAVED", "SIZE", "LAYOUT", "PINNED", "URL"), rows)
    for one in result.damaged:
        say(f"the checkpoint of step {one.step} is damaged{' and pinned' if one.pinned else ''}: {one.damage}")


@app.command()
def show(
    where: JobOrFolder,
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")] = None,
    url: Url = None,
) -> None:
    """Print a checkpoint's details as JSON."""
    if JOB_ID.fullmatch(where):
        with open_client(url) as client:
            print_json(checkpoint_of_job(client, where, step))
        return
    folder = CheckpointFolder(where)
    chosen = _chosen(folder, step)
    try:
        manifest = folder.manifest(chosen)
    except CheckpointDamaged as damage:
        raise BadInput(f"the checkpoint of step {chosen} is damaged: {damage}; choose another with --step") from damage
    print_json(manifest)


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


@app.command()
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


@app.command()
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


def checkpoint_of_job(client: Client, job_id: str, step: int | None) -> CheckpointDetail:
    """Return a job's checkpoint of a step, or its newest intact one.

    Raises:
        BadInput: The job has none.
    """
    if step is None:
        result = client.checkpoints(job_id)
        if not result.checkpoints:
            damaged = [f"; that of step {one.step} is damaged: {one.damage}" for one in result.damaged[:1]]
            raise BadInput(
                f"{job_id} has no {'intact checkpoint' if damaged else 'committed checkpoint yet'}{''.join(damaged)}"
            )
        step = result.checkpoints[0].step
    return client.checkpoint(job_id, step)


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
