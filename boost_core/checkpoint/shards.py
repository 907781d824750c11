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
from boost_core.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable, Manifest
from boost_core.checkpoint.reading import ShardReader

Result = TypeVar("Result")

# A rank that needs this share of a file reads it whole and so verifies it. With a smaller share, the ranks together
# would read the files many times over.
_WORTH_READING_WHOLE = 0.5


class SaveFailed(OSError):
    """A checkpoint could not be written, as all ranks know. Nothing was committed, and existing checkpoints remain."""


def save_chunks(
    folder: CheckpointFolder, step: int, chunks: Iterable[Chunk], ranks: dist.ProcessGroup | None = None
) -> dict[str, int]:
    """Write every rank's chunks of a step without committing the checkpoint. All ranks call this.

    Args:
        folder: The job's checkpoints.
        step: The checkpoint's step.
        chunks: This rank's chunks.
        ranks: A group of all ranks to coordinate through; ``None`` for the default group.

    Returns:
        The checksum of each file that any rank has written, by name.

    Raises:
        SaveFailed: Raised on all ranks if any of them fails.
    """
    on_first_rank(lambda: folder.prepare(step), ranks)
    writer = ChecksummingWriter(folder.step_url(step), folder.is_local, single_file=True, **folder.storage_options)
    try:
        save({}, storage_writer=writer, planner=SaveChunks(chunks), process_group=ranks)
    except CheckpointException as failure:  # raised on all ranks; not a subclass of Exception
        raise SaveFailed(_first_cause(failure)) from failure
    checksums: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(checksums, writer.checksums, group=ranks)
    return {name: checksum for of_rank in checksums for name, checksum in of_rank.items()}


def refuse_damaged(folder: CheckpointFolder, step: int, ranks: dist.ProcessGroup | None = None) -> None:
    """Verify a committed checkpoint by reading it back, each rank a part of its files. All ranks call this.

    Raises:
        SaveFailed: Raised on all ranks if the store does not return what was written.
    """
    if problems := _of_all_ranks(_damage(folder, step), ranks):
        raise SaveFailed(f"what was written cannot be read back: {'; '.join(problems)}")


def _damage(folder: CheckpointFolder, step: int) -> list[str]:
    try:
        return folder.damage(step, dist.get_rank(), dist.get_world_size())
    except Exception as error:  # stores raise types of their own
        return [f"it cannot be read back: {_in_words(error)}"]


def on_first_rank(action: Callable[[], Result], ranks: dist.ProcessGroup | None = None) -> Result:
    """Do something on the first rank only; all ranks call this and get its result.

    Raises:
        SaveFailed: Raised on all ranks if it failed on the first.
    """
    return _from_first_rank(action, lambda error: SaveFailed(_in_words(error)), ranks)


def read_on_first_rank(action: Callable[[], Result]) -> Result:
    """Look something up on the first rank only; all ranks call this and get its result.

    Raises:
        CheckpointDamaged: Raised on all ranks if it was on the first.
        FileNotFoundError: Likewise.
        PermissionError: Likewise.
        CheckpointUnreadable: Raised on all ranks if it failed on the first in another way.
    """

    def failure(error: Exception) -> Exception:
        known = isinstance(error, CheckpointDamaged | FileNotFoundError | PermissionError)
        return type(error)(str(error)) if known else CheckpointUnreadable(_in_words(error))

    return _from_first_rank(action, failure)


def _from_first_rank(
    action: Callable[[], Result],
    failure_of: Callable[[Exception], Exception],
    ranks: dist.ProcessGroup | None = None,
) -> Result:
    """Return on all ranks what an action returns on the first, or raise what its error becomes."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # stores raise types of their own
            outcome[1] = failure_of(error)
    dist.broadcast_object_list(outcome, src=0, group=ranks)
    result, failure = outcome
    if failure is not None:
        raise failure
    return cast(Result, result)


def _first_cause(failure: CheckpointException) -> str:
    rank, (cause, _) = next(iter(failure.failures.items()))
    return f"rank {rank}: {_in_words(cause)}"


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, StoreRefused) else f"{type(error).__name__}: {error}"


def load_chunks(folder: CheckpointFolder, manifest: Manifest, chunks: Iterable[Chunk]) -> None:
    """Fill every rank's chunks, whatever layout wrote the checkpoint. All ranks call this.

    Every file is read whole by some rank and verified, either by a rank that needs much of it or afterwards. The
    chunks' contents are valid only if nothing is raised.

    Raises:
        CheckpointDamaged: Raised on all ranks if a file is not what was written.
        ValueError: Raised on all ranks if the checkpoint lacks a tensor, as if its optimizer keeps fewer moments.
        CheckpointUnreadable: Raised on all ranks if any of them fails to read.
    """
    url, rank, ranks = folder.step_url(manifest.step), dist.get_rank(), dist.get_world_size()
    reader = ShardReader(url, manifest.files, _WORTH_READING_WHOLE, **folder.storage_options)
    try:
        load({}, storage_reader=reader, planner=LoadChunks(chunks))
    except CheckpointException as failure:  # raised on all ranks; not a subclass of Exception
        causes = [cause for cause, _ in failure.failures.values()]
        unread = [each for each in causes if isinstance(each, OSError) and not isinstance(each, FileNotFoundError)]
        if unread and not folder.is_local:  # a disk's is damage
            raise CheckpointUnreadable(_in_words(unread[0])) from failure
        _refuse(_problems_of_all_ranks(lambda: folder.damage(manifest.step, rank, ranks)), failure)
        for cause in causes:
            if isinstance(cause, TensorMissing):
                raise ValueError(
                    f"the checkpoint at {url} has no tensor {cause}; if another optimizer.kind wrote it, use that, or "
                    "start from its weights alone: checkpoint.weights_from"
                ) from failure
        raise CheckpointUnreadable(f"{url}: {_first_cause(failure)}") from failure
    unverified = sorted(manifest.files.keys() - set(_of_all_ranks(reader.verified)))
    _refuse(_problems_of_all_ranks(lambda: folder.damage_of(manifest, unverified[rank::ranks])))


def _problems_of_all_ranks(find: Callable[[], list[str]]) -> list[str]:
    """The problems that all ranks find, each in its own part of a checkpoint.

    Raises:
        CheckpointUnreadable: Raised on all ranks if none finds a problem and any fails to read.
    """
    problems, failures = [], []
    try:
        problems = find()
    except Exception as error:  # stores raise types of their own
        failures = [_in_words(error)]
    failures = _of_all_ranks(failures)
    if (problems := _of_all_ranks(problems)) or not failures:
        return problems
    raise CheckpointUnreadable(failures[0])


def _of_all_ranks(found: Iterable[str], ranks: dist.ProcessGroup | None = None) -> list[str]:
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, list(found), group=ranks)
    return [each for of_rank in gathered for each in of_rank]


def _refuse(damage: list[str], cause: BaseException | None = None) -> None:
    if damage:
        raise CheckpointDamaged("; ".join(damage)) from cause


def save_one_by_one(folder: CheckpointFolder, step: int, planner: SaveChunks) -> dict[str, int]:
    """``save_chunks`` for a planner's chunks, in a single process; each is created on demand and freed once written.

    Each chunk has its own file, because torch keeps all tensors of a file until it is complete.

    Raises:
        ValueError: Raised by the planner while it created a chunk.
        OSError: The store does not accept them.
    """
    folder.prepare(step)
    url = folder.step_url(step)
    writer = ChecksummingWriter(url, folder.is_local, single_file=False, **folder.storage_options)
    try:
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as failure:  # not a subclass of Exception
        cause, _ = next(iter(failure.failures.values()))
        if isinstance(cause.__cause__, ValueError):
            raise cause.__cause__ from failure
        raise OSError(f"{url} cannot be written: {_in_words(cause)}") from failure
    return writer.checksums


def load_whole(folder: CheckpointFolder, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """``load_alone`` for whole tensors."""
    load_alone(folder, manifest, LoadChunks(Chunk.whole(*each) for each in tensors.items()))


def load_alone(folder: CheckpointFolder, manifest: Manifest, planner: LoadChunks) -> None:
    """Fill a planner's chunks in a single process; every file that is read is verified.

    Raises:
        CheckpointDamaged: A file is not what was written. The chunks' contents must not be used.
        ValueError: The index contains what an index written by the trainer never does.
        OSError: The checkpoint cannot be read.
    """
    url = folder.step_url(manifest.step)
    reader = ShardReader(url, manifest.files, **folder.storage_options)
    reader.index()
    try:
        load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failure:  # not a subclass of Exception
        cause, _ = next(iter(failure.failures.values()))
        if isinstance(cause, CheckpointDamaged):
            raise cause from failure
        raise OSError(f"checkpoint {url} cannot be read: {_first_cause(failure)}") from failure
