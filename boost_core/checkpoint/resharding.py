"""Loading the tensors of a checkpoint at any layout: each rank reads its chunks from whatever boxes were written."""

import io
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from fsspec.core import strip_protocol
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from boost_core.checkpoint.folder import INDEX, CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable, Manifest, StoredFile
from boost_core.checkpoint.shards import Chunk, TensorMissing, in_words, of_all_ranks, on_first_rank
from boost_core.config.storage import Unreadable, refuse_irregular


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
        """The part of a chunk that an item fills, as a view, so that nothing is left to commit."""
        part = self._chunks[read_item.dest_index].tensor
        for axis, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, begin, length)
        return part


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
        content: The index as stored, once it has been read or set; it grows with the number of ranks that wrote it.
        verified: Names of the files that were read whole and match what was written.
    """

    def __init__(self, path: str, files: dict[str, StoredFile], least_share: float = 0, **storage_options: Any) -> None:
        super().__init__(path, **storage_options)
        self._files, self._least_share = files, least_share
        self._index: Metadata | None = None
        self.content: bytes | None = None
        self.verified: set[str] = set()

    def index_bytes(self) -> bytes:
        """The index as stored, read once."""
        if self.content is None:
            self._refuse_irregular(INDEX)
            with self.fs.create_stream(self.fs.concat_path(self.path, INDEX), "rb") as stream:
                self.content = stream.read()
        return self.content

    def index_or_failure(self) -> tuple[bytes | None, BaseException | None]:
        """The index as stored, or why it cannot be read."""
        try:
            return self.index_bytes(), None
        except Exception as error:  # stores raise types of their own
            return None, _portable(error)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index; torch wraps errors raised here in its own.

        Raises:
            CheckpointDamaged: It is not what was written, or names files that are not in the manifest.
            ValueError: It contains what an index written by the trainer never does.
        """
        if self._index is not None:
            return self._index
        content = self.index_bytes()
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


def _portable(error: BaseException) -> BaseException:
    """An error that other ranks can be sent: itself, or one of Python's own in its words if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its own methods raise
        return next((k for k in (FileNotFoundError, OSError) if isinstance(error, k)), RuntimeError)(in_words(error))
    return error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"the checkpoint's index would run {module}.{name}; it is not one of ours, do not load it")
        return super().find_class(module, name)


# A rank that needs this share of a file reads it whole and so verifies it. With a smaller share, the ranks together
# would read the files many times over.
_WORTH_READING_WHOLE = 0.5


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
    # The index grows with the number of ranks that wrote it, so one rank reads it and broadcasts it. With it, each rank
    # plans its own reads: no_dist keeps torch from gathering all plans on the first rank.
    reader.content, failure = on_first_rank(reader.index_or_failure)
    if failure is None:
        try:
            load({}, storage_reader=reader, planner=LoadChunks(chunks), no_dist=True)
        except CheckpointException as wrapped:  # not a subclass of Exception
            failure, _ = next(iter(wrapped.failures.values()))
    if causes := dict(of_all_ranks([] if failure is None else [(rank, _portable(failure))])):
        errors = causes.values()
        unread = [each for each in errors if isinstance(each, OSError) and not isinstance(each, FileNotFoundError)]
        if unread and not folder.is_local:  # a disk's is damage
            raise CheckpointUnreadable(in_words(unread[0])) from failure
        if problems := _problems_of_all_ranks(lambda: folder.damage(manifest.step, rank, ranks)):
            raise CheckpointDamaged("; ".join(problems)) from failure
        if missing := next((each for each in errors if isinstance(each, TensorMissing)), None):
            raise ValueError(
                f"the checkpoint at {url} has no tensor {missing}; if another optimizer.kind wrote it, use that, or "
                "start from its weights alone: checkpoint.weights_from"
            ) from failure
        raise CheckpointUnreadable(f"{url}: rank {min(causes)}: {in_words(causes[min(causes)])}") from failure
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
        failures = [in_words(error)]
    failures = of_all_ranks(failures)
    if (problems := of_all_ranks(problems)) or not failures:
        return problems
    raise CheckpointUnreadable(failures[0])


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
        rank, (cause, _) = next(iter(failure.failures.items()))
        if isinstance(cause, CheckpointDamaged):
            raise cause from failure
        raise OSError(f"checkpoint {url} cannot be read: rank {rank}: {in_words(cause)}") from failure
