"""Saving the tensors of a checkpoint, on any number of ranks, in chunks: boxes of whole tensors.

torch's distributed checkpoint stores boxes by the name of their tensor and their position in it, and can read any other
boxes from them. So the stored state does not depend on how many ranks wrote it or along which axes they split it.
"""

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable
from boost_core.config.storage import Disk

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """A box of a whole tensor.

    Attributes:
        name: Name of the whole tensor.
        shape: Shape of the whole tensor.
        offsets: Where the box begins in the whole tensor.
        tensor: The box, which is read from and written to.
    """

    name: str
    shape: Sizes
    offsets: Sizes
    tensor: torch.Tensor

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "Chunk":
        """A chunk that is all of a tensor."""
        return cls(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)

    @classmethod
    def of_shard(
        cls, name: str, shape: Sizes, offsets: Sizes, tensor: torch.Tensor, axis: int | None, rank: int, size: int
    ) -> "Chunk":
        """A box of one of ``size`` equal shards.

        Args:
            name: Name of the tensor.
            shape: Shape of the shard.
            offsets: Where the box begins in the shard.
            tensor: The box.
            axis: The axis along which the tensor is split; ``None`` if each rank has the whole tensor.
            rank: Number of the shard.
            size: Number of shards.
        """
        if axis is None:
            return cls(name, shape, offsets, tensor)
        whole, begin = list(shape), list(offsets)
        whole[axis] *= size
        begin[axis] += rank * shape[axis]
        return cls(name, tuple(whole), tuple(begin), tensor)

    @property
    def index(self) -> MetadataIndex:
        """The chunk's identity among all chunks of a checkpoint."""
        return MetadataIndex(self.name, torch.Size(self.offsets))


class TensorMissing(ValueError):
    """A checkpoint does not have a tensor; its only argument is the name."""


class SaveChunks(DefaultSavePlanner):
    """Writes this rank's chunks; a chunk that several ranks have is written by one of them.

    Args:
        chunks: This rank's chunks.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """The items that this rank could write."""
        items = []
        for chunk in self._chunks.values():
            place = ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)
            data = TensorWriteData(place, TensorProperties.create_from_tensor(chunk.tensor), torch.Size(chunk.shape))
            items.append(WriteItem(index=chunk.index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor of an item."""
        return self._chunks[write_item.index].tensor.detach()


# Checksums of a checkpoint's files, computed while they are written, so that nothing is read back for them.


class StoreRefused(OSError):
    """The store's own error for a write, as text, because not every store's errors can be pickled."""


class ChecksummingWriter(FsspecWriter):
    """torch's writer of shards over fsspec; ``checksums`` has the CRC-32 of each file it has written, by name.

    A store's errors are raised as ``StoreRefused``; torch itself would raise its archive format's error instead,
    "enforce fail at inline_container.cc", whatever the cause.
    """

    def __init__(self, path: str, sync_files: bool, single_file: bool, **storage_options: Any) -> None:
        super().__init__(path, single_file_per_rank=single_file, sync_files=sync_files)
        self._summing = cast(Any, _Checksumming())
        self.checksums: dict[str, int] = self._summing.checksums
        self.fs, self.path = self._summing, self._summing.init_path(path, **storage_options)

    def write_data(self, *arguments: Any, **named: Any) -> Any:
        """Write this rank's shard.

        Raises:
            StoreRefused: The store does not accept it.
        """
        with self._summing.telling_the_cause():
            return super().write_data(*arguments, **named)

    def finish(self, *arguments: Any, **named: Any) -> None:
        """Write the index of all shards.

        Raises:
            StoreRefused: The store does not accept it.
        """
        with self._summing.telling_the_cause():
            super().finish(*arguments, **named)


class _Checksumming(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, int] = {}
        self._refusal: Exception | None = None

    @contextmanager
    def telling_the_cause(self) -> Iterator[None]:
        self._refusal = None
        try:
            yield
        except Exception as error:
            cause = self._refusal or error
            raise StoreRefused(f"{type(cause).__name__}: {cause}") from error

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = _SummedStream(stream)
            try:
                yield summed
            finally:
                self._refusal = self._refusal or summed.refusal
        # torch renames its index into place once it is complete.
        self.checksums[PurePosixPath(os.fspath(path)).name.removesuffix(".tmp")] = summed.checksum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        filesystem = cast(AbstractFileSystem, self.fs)
        if isinstance(filesystem, Disk):
            super().rename(path, new_path)
        else:  # whose rename would take the path for a pattern
            filesystem.cp_file(os.fspath(path), os.fspath(new_path))
            with suppress(OSError):  # what is left of it does no harm
                filesystem.rm_file(os.fspath(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file that is about to be replaced, or that was not completed: in a store, nothing needs it."""
        if isinstance(self.fs, Disk):
            super().rm_file(path)


@dataclass(eq=False)
class _SummedStream:
    """A write stream that computes a checksum of what is written; everything else is delegated to the stream."""

    stream: Any
    checksum: int = 0
    refusal: Exception | None = None  # the first error

    def write(self, data: Any) -> Any:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return self.stream.write(data)
        except Exception as error:  # stores raise types of their own
            self.refusal = self.refusal or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


Result = TypeVar("Result")


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
        rank, (cause, _) = next(iter(failure.failures.items()))  # the first that failed
        raise SaveFailed(f"rank {rank}: {in_words(cause)}") from failure
    return dict(of_all_ranks(writer.checksums.items(), ranks))


def refuse_damaged(folder: CheckpointFolder, step: int, ranks: dist.ProcessGroup | None = None) -> None:
    """Verify a committed checkpoint by reading it back, each rank a part of its files. All ranks call this.

    Raises:
        SaveFailed: Raised on all ranks if the store does not return what was written.
    """
    try:
        damage = folder.damage(step, dist.get_rank(), dist.get_world_size())
    except Exception as error:  # stores raise types of their own
        damage = [f"it cannot be read back: {in_words(error)}"]
    if problems := of_all_ranks(damage, ranks):
        raise SaveFailed(f"what was written cannot be read back: {'; '.join(problems)}")


def on_first_rank(
    action: Callable[[], Result], ranks: dist.ProcessGroup | None = None, failure: type[OSError] = SaveFailed,
    as_they_are: tuple[type[Exception], ...] = (),
) -> Result:  # fmt: skip
    """Do something on the first rank only; all ranks call this and get its result.

    Args:
        action: What to do.
        ranks: A group of all ranks to coordinate through; ``None`` for the default group.
        failure: What is raised on all ranks if it failed on the first.
        as_they_are: Errors that are raised on all ranks instead if they were on the first.

    Raises:
        SaveFailed: Raised on all ranks if it failed on the first, unless it says otherwise.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except as_they_are as error:
            outcome[1] = next(kind for kind in as_they_are if isinstance(error, kind))(str(error))
        except Exception as error:  # stores raise types of their own
            outcome[1] = failure(in_words(error))
    dist.broadcast_object_list(outcome, src=0, group=ranks)
    if outcome[1] is not None:
        raise outcome[1]
    return cast(Result, outcome[0])


def read_on_first_rank(action: Callable[[], Result]) -> Result:
    """Look something up on the first rank only; all ranks call this and get its result.

    Raises:
        CheckpointDamaged: Raised on all ranks if it was on the first.
        FileNotFoundError: Likewise.
        PermissionError: Likewise.
        CheckpointUnreadable: Raised on all ranks if it failed on the first in another way.
    """
    as_they_are = CheckpointDamaged, FileNotFoundError, PermissionError
    return on_first_rank(action, failure=CheckpointUnreadable, as_they_are=as_they_are)


def in_words(error: BaseException) -> str:
    """An error for people: a store's own words, or its kind and message."""
    return str(error) if isinstance(error, StoreRefused) else f"{type(error).__name__}: {error}"


def of_all_ranks(items: Iterable[Result], ranks: dist.ProcessGroup | None = None) -> list[Result]:
    """Gather what all ranks have, in their order; all call this."""
    gathered: list[list[Result]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, list(items), group=ranks)
    return [each for of_rank in gathered for each in of_rank]
