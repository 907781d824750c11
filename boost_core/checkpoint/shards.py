"""Saving and loading the tensors of a checkpoint, on any number of ranks, in chunks: boxes of whole tensors.

torch's distributed checkpoint stores boxes by the name of their tensor and their position in it, and can read any other
boxes from them. So the stored state does not depend on how many ranks wrote it or along which axes they split it.
"""

import io
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist
from fsspec import AbstractFileSystem
from fsspec.core import strip_protocol
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from boost_core.checkpoint.folder import INDEX, CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable, Manifest, StoredFile
from boost_core.config.storage import Disk, Unreadable, refuse_irregular

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
            kind = TensorProperties.create_from_tensor(chunk.tensor)
            data = TensorWriteData(place, kind, torch.Size(chunk.shape))
            items.append(WriteItem(index=chunk.index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor of an item."""
        return self._chunks[write_item.index].tensor.detach()


class LoadChunks(DefaultLoadPlanner):
    """Fills this rank's chunks.

    Args:
        chunks: This rank's chunks.
    """

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        """The items that this rank reads.

        Raises:
            TensorMissing: The checkpoint lacks a tensor.
            ValueError: The checkpoint has a tensor of another shape.
        """
        items: list[ReadItem] = []
        for chunk in self._chunks.values():
            stored = self.metadata.state_dict_metadata.get(chunk.name) if self.metadata else None
            if not isinstance(stored, TensorStorageMetadata):
                raise TensorMissing(chunk.name)
            if tuple(stored.size) != chunk.shape:
                raise ValueError(f"{chunk.name} is {tuple(stored.size)} in the checkpoint and {chunk.shape} here")
            place = ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.tensor.shape)
            items += create_read_items_for_chunk_list(chunk.name, stored, [place])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a chunk that an item fills."""
        part = self._chunks[read_item.dest_index].tensor
        for axis, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, begin, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing, because the tensor is a view."""


# Reading checkpoints that may come from untrusted sources.
#
# torch's index of the shards is a pickle, and loading a pickle can execute code. A job may name any folder to start
# from, so here an index may contain only torch's own descriptions of tensors and of files next to it.
#
# torch does not compare what it reads with what was written, so that is done here, using the manifest.

_READ_BYTES = 8 * 2**20

_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *((descriptions.__name__, name) for name in _CLASSES),
        *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    }
)


class ShardReader(FsspecReader):
    """torch's reader of shards over fsspec, which treats the index as plain data and verifies files.

    A file of which this process needs a large part is read once, from start to end, and verified along the way; at most
    one tensor is in memory besides those being filled. Of other files, only what is needed is read, unverified. The
    tensors' contents are valid only once everything has been read and verified.

    Args:
        path: The checkpoint's folder.
        files: The files as written, by name.
        least_share: The share of a file from which on it is read whole; 0 to read every file whole.
        storage_options: Options for accessing the folder.

    Attributes:
        verified: Names of the files that were read whole and match what was written.
    """

    def __init__(
        self, path: str, files: Mapping[str, StoredFile], least_share: float = 0.0, **storage_options: Any
    ) -> None:
        super().__init__(path, **storage_options)
        self._files, self._least_share = files, least_share
        self._index: Metadata | None = None
        self.verified: set[str] = set()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index; torch wraps errors raised here in its own.

        Raises:
            CheckpointDamaged: It is not what was written, or names files that are not in the manifest.
            ValueError: It contains what an index written by the trainer never does.
        """
        if self._index is not None:
            return self._index
        self._refuse_irregular(INDEX)
        with self.fs.create_stream(self.fs.concat_path(self.path, INDEX), "rb") as stream:
            content = stream.read()
        if INDEX not in self._files:
            raise CheckpointDamaged(f"the manifest in {self.path} lists no {INDEX}")
        if wrong := self._files[INDEX].difference(len(content), zlib.crc32(content)):
            raise CheckpointDamaged(f"{self.path}/{INDEX} {wrong}")
        self.verified.add(INDEX)
        try:
            index: Metadata = _Unpickler(io.BytesIO(content)).load()
            names = {str(file.relative_path) for file in index.storage_data.values()}
        except ValueError:
            raise
        except Exception as error:  # a pickle can raise anything
            problem = f"is not a torch checkpoint index: {type(error).__name__}: {error}"
            raise CheckpointDamaged(f"{self.path}/{INDEX} {problem}") from error
        for name in sorted(names):
            if "/" in name:
                raise ValueError(f"the index in {self.path} names a file of another folder; do not load it")
            if name not in self._files:
                raise CheckpointDamaged(f"{self.path}/{INDEX} names {name}, which is not in the manifest")
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        self._index = index
        return index

    def _refuse_irregular(self, name: str) -> None:
        try:
            refuse_irregular(cast(Any, self.fs).fs, strip_protocol(f"{self.path}/{name}"))
        except Unreadable as error:
            raise CheckpointDamaged(str(error)) from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan, in their order within each file.

        Raises:
            CheckpointDamaged: A file that was read whole is not what was written.
        """
        items = sorted(plan.items, key=lambda item: int(self.storage_data[item.storage_index].offset))
        needed: Counter[str] = Counter()
        for index in {item.storage_index for item in items}:
            needed[self.storage_data[index].relative_path] += self.storage_data[index].length
        for name in needed:
            self._refuse_irregular(name)
        whole = {name for name, size in needed.items() if size >= self._least_share * self._files[name].bytes}
        self.fs = cast(Any, _Verifying(cast(Any, self.fs).fs, {name: self._files[name] for name in whole}))
        future = super().read_data(replace(plan, items=items), planner)
        self.verified |= whole
        return future

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        if isinstance(file, _SummedParts):
            return io.BytesIO(file.part(sinfo.offset, sinfo.length))
        return super()._slice_file(file, sinfo)


class _Verifying(FileSystem):
    """Computes checksums of the named files while they are read, and compares them when they are closed."""

    def __init__(self, filesystem: Any, files: Mapping[str, StoredFile]) -> None:
        super().__init__()
        self.fs, self._files = filesystem, files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            name = PurePosixPath(os.fspath(path)).name
            if name not in self._files:
                yield stream
                return
            summed, failure = _SummedParts(stream), cast("Exception | None", None)
            try:
                yield summed
            except Exception as error:  # damaged bytes can cause any error; then report the damage
                failure = error
            while summed.read(_READ_BYTES):  # the rest counts, too
                pass
            if wrong := self._files[name].difference(summed.position, summed.checksum):
                raise CheckpointDamaged(f"{os.fspath(path)} {wrong}") from failure
            if failure:
                raise failure


@dataclass(eq=False)
class _SummedParts:
    """Reads parts of a stream in order; the bytes in between are read and included in the checksum as well."""

    stream: Any
    position: int = 0
    checksum: int = 0
    _last: tuple[int, bytes] = 0, b""

    def part(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes at an offset, fewer at the end. The last part may be read again, but no earlier one."""
        if (offset, length) != (self._last[0], len(self._last[1])):
            if offset < self.position:
                raise ValueError("the index has tensors that overlap in their file; do not load it")
            while offset > self.position and self.read(min(offset - self.position, _READ_BYTES)):
                pass
            self._last = offset, self.read(length)
        return self._last[1]

    def read(self, length: int) -> bytes:
        """Read the next ``length`` bytes, fewer at the end."""
        block: bytes = self.stream.read(length)
        self.position, self.checksum = self.position + len(block), zlib.crc32(block, self.checksum)
        return block


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"the checkpoint's index would run {module}.{name}; it is not one of ours, do not load it")
        return super().find_class(module, name)


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
        self.fs, self.path = self._summing, self._summing.init_path(path, **storage_options)

    @property
    def checksums(self) -> dict[str, int]:
        """CRC-32 by file name."""
        # torch renames its index into place once it is complete.
        return {name.removesuffix(".tmp"): checksum for name, checksum in self._summing.checksums.items()}

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
        self.checksums[PurePosixPath(os.fspath(path)).name] = summed.checksum

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
    try:
        damage = folder.damage(step, dist.get_rank(), dist.get_world_size())
    except Exception as error:  # stores raise types of their own
        damage = [f"it cannot be read back: {_in_words(error)}"]
    if problems := of_all_ranks(damage, ranks):
        raise SaveFailed(f"what was written cannot be read back: {'; '.join(problems)}")


def on_first_rank(
    action: Callable[[], Result],
    ranks: dist.ProcessGroup | None = None,
    failure: type[OSError] = SaveFailed,
    as_they_are: tuple[type[Exception], ...] = (),
) -> Result:
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
            outcome[1] = type(error)(str(error))
        except Exception as error:  # stores raise types of their own
            outcome[1] = failure(_in_words(error))
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
        if problems := _problems_of_all_ranks(lambda: folder.damage(manifest.step, rank, ranks)):
            raise CheckpointDamaged("; ".join(problems)) from failure
        for cause in causes:
            if isinstance(cause, TensorMissing):
                raise ValueError(
                    f"the checkpoint at {url} has no tensor {cause}; if another optimizer.kind wrote it, use that, or "
                    "start from its weights alone: checkpoint.weights_from"
                ) from failure
        raise CheckpointUnreadable(f"{url}: {_first_cause(failure)}") from failure
    unverified = sorted(manifest.files.keys() - set(of_all_ranks(reader.verified)))
    if problems := _problems_of_all_ranks(lambda: folder.damage_of(manifest, unverified[rank::ranks])):
        raise CheckpointDamaged("; ".join(problems))


def _problems_of_all_ranks(examine: Callable[[], list[str]]) -> list[str]:
    """The problems that all ranks see, each in its own part of a checkpoint.

    Raises:
        CheckpointUnreadable: Raised on all ranks if none sees a problem and any fails to read.
    """
    problems, failures = [], []
    try:
        problems = examine()
    except Exception as error:  # stores raise types of their own
        failures = [_in_words(error)]
    failures = of_all_ranks(failures)
    if (problems := of_all_ranks(problems)) or not failures:
        return problems
    raise CheckpointUnreadable(failures[0])


def of_all_ranks(texts: Iterable[str], ranks: dist.ProcessGroup | None = None) -> list[str]:
    """Gather what all ranks say, in their order; all call this."""
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, list(texts), group=ranks)
    return [each for of_rank in gathered for each in of_rank]


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
    reader.read_metadata()
    try:
        load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as failure:  # not a subclass of Exception
        cause, _ = next(iter(failure.failures.values()))
        if isinstance(cause, CheckpointDamaged):
            raise cause from failure
        raise OSError(f"checkpoint {url} cannot be read: {_first_cause(failure)}") from failure
