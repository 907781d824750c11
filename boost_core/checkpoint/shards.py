"""Saving and loading the tensors of a checkpoint, on any number of ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from boost_core.checkpoint.checksums import ChecksummingWriter, StoreRefused
from boost_core.checkpoint.chunks import Chunk, LoadChunks, SaveChunks, TensorMissing
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, Manifest
from boost_core.checkpoint.reading import ShardReader

Result = TypeVar("Result")

# A rank that needs this much of a file reads it whole, and so finds out whether it is what was written. Less, and the
# ranks together would read the files many times over.
_WORTH_READING_WHOLE = 0.5


class SaveFailed(OSError):
    """A checkpoint could not be written; all ranks know. Nothing is committed, and what is there stays."""


def save_chunks(
    folder: CheckpointFolder, step: int, chunks: Iterable[Chunk], ranks: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """Write every rank's chunks of a step; the checkpoint is not committed by it. All ranks call it.

    Args:
        folder: The job's checkpoints.
        step: The checkpoint's step.
        chunks: What this rank has.
        ranks: A group of all ranks to agree over; ``None`` for the default one.

    Returns:
        The checksum of each file that any rank has written, by name.

    Raises:
        SaveFailed: On all ranks, whichever failed.
    """
    on_first_rank(lambda: folder.prepare(step), ranks)
    writer = _writer(folder, step)
    try:
        save({}, storage_writer=writer, planner=SaveChunks(chunks), process_group=ranks)
    except CheckpointException as failure:  # raised on all ranks; no Exception, by torch's choice
        raise SaveFailed(_first_cause(failure)) from failure
    checksums: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(checksums, writer.checksums, group=ranks)
    return {name: checksum for of_rank in checksums for name, checksum in of_rank.items()}


def refuse_damaged(folder: CheckpointFolder, step: int, ranks: dist.ProcessGroup | None = None) -> None:
    """Read a committed checkpoint back against its manifest, each rank a part of its files. All ranks call it.

    Raises:
        SaveFailed: On all ranks: the store does not give back what was written.
    """
    if problems := _of_all_ranks(_damage(folder, step), ranks):
        raise SaveFailed(f"what was written does not come back: {'; '.join(problems)}")


def _damage(folder: CheckpointFolder, step: int) -> list[str]:
    try:
        return folder.damage(step, dist.get_rank(), dist.get_world_size())
    except Exception as error:  # stores raise types of their own
        return [f"it cannot be read back: {_in_words(error)}"]


def on_first_rank(action: Callable[[], Result], ranks: dist.ProcessGroup | None = None) -> Result:
    """Do something on the first rank alone; all ranks call it and get its result.

    Raises:
        SaveFailed: On all ranks, if it failed on the first.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # stores raise types of their own
            outcome[1] = _in_words(error)
    dist.broadcast_object_list(outcome, src=0, group=ranks)
    result, failure = outcome
    if failure is not None:
        raise SaveFailed(failure)
    return cast(Result, result)


def _first_cause(failure: CheckpointException) -> str:
    rank, (cause, _) = next(iter(failure.failures.items()))
    return f"rank {rank}: {_in_words(cause)}"


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, StoreRefused) else f"{type(error).__name__}: {error}"


def load_chunks(folder: CheckpointFolder, manifest: Manifest, chunks: Iterable[Chunk]) -> None:
    """Fill every rank's chunks, whatever layout wrote the checkpoint. All ranks call it.

    Every file is read whole by some rank and compared with what was written: by one that needs much of it, or else
    afterwards. What the chunks hold counts only if nothing is raised.

    Raises:
        CheckpointDamaged: On all ranks: a file is not what was written.
        ValueError: On all ranks: it lacks a tensor, as of an optimizer that keeps fewer moments.
        OSError: On all ranks, whichever failed.
    """
    url, rank, ranks = folder.step_url(manifest.step), dist.get_rank(), dist.get_world_size()
    reader = ShardReader(url, manifest.files, _WORTH_READING_WHOLE, **folder.storage_options)
    try:
        load({}, storage_reader=reader, planner=LoadChunks(chunks))
    except CheckpointException as failure:  # raised on all ranks; no Exception, by torch's choice
        _refuse(_of_all_ranks(folder.damage(manifest.step, rank, ranks)), failure)
        for cause, _ in failure.failures.values():
            if isinstance(cause, TensorMissing):
                raise ValueError(
                    f"the checkpoint at {url} has no tensor {cause}; if another optimizer.kind wrote it, use that, or "
                    "start from its weights alone (boost export, then python -m boost_core.convert start)"
                ) from failure
        raise OSError(f"checkpoint {url} cannot be read: {_first_cause(failure)}") from failure
    unread = sorted(manifest.files.keys() - set(_of_all_ranks(reader.verified)))
    _refuse(_of_all_ranks(folder.damage_of(manifest, unread[rank::ranks])))


def _of_all_ranks(found: Iterable[str], ranks: dist.ProcessGroup | None = None) -> list[str]:
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, list(found), group=ranks)
    return [each for of_rank in gathered for each in of_rank]


def _refuse(damage: list[str], cause: BaseException | None = None) -> None:
    if damage:
        raise CheckpointDamaged("; ".join(damage)) from cause


def save_whole(folder: CheckpointFolder, step: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """``save_chunks`` of whole tensors, in one process."""
    return _save_alone(folder, step, SaveChunks(Chunk.whole(*each) for each in tensors.items()), single_file=True)


def save_one_by_one(folder: CheckpointFolder, step: int, planner: SaveChunks) -> dict[str, int]:
    """``save_chunks`` of a planner's, in one process, each made when it is its turn, and gone when it is written.

    Each has a file of its own, because torch keeps all tensors of a file until it is whole.
    """
    return _save_alone(folder, step, planner, single_file=False)


def _save_alone(folder: CheckpointFolder, step: int, planner: SaveChunks, single_file: bool) -> dict[str, int]:
    folder.prepare(step)
    writer = _writer(folder, step, single_file)
    save({}, storage_writer=writer, planner=planner, no_dist=True)
    return writer.checksums


def load_whole(folder: CheckpointFolder, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """``load_alone`` of whole tensors."""
    load_alone(folder, manifest, LoadChunks(Chunk.whole(*each) for each in tensors.items()))


def load_alone(folder: CheckpointFolder, manifest: Manifest, planner: LoadChunks) -> None:
    """Fill the chunks of a planner, in one process; every file that is read is compared with what was written.

    Raises:
        CheckpointDamaged: A file is not what was written. What the chunks hold is of no use.
        ValueError: Its index has what no index of ours has.
        OSError: It cannot be read.
    """
    url = folder.step_url(manifest.step)
    reader = ShardReader(url, manifest.files, **folder.storage_options)
    reader.index()
    try:
        load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failure:  # no Exception, by torch's choice
        cause, _ = next(iter(failure.failures.values()))
        if isinstance(cause, CheckpointDamaged):
            raise cause from failure
        raise OSError(f"checkpoint {url} cannot be read: {_first_cause(failure)}") from failure


def _writer(folder: CheckpointFolder, step: int, single_file: bool = True) -> ChecksummingWriter:
    return ChecksummingWriter(folder.step_url(step), folder.is_local, single_file, **folder.storage_options)
