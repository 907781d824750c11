"""Reading checkpoints that may come from untrusted sources.

torch's index of the shards is a pickle, and loading a pickle can execute code. A job may name any folder to start from,
so here an index may contain only torch's own descriptions of tensors and of files next to it.

torch does not compare what it reads with what was written, so that is done here, using the manifest.
"""

import io
import os
import pickle
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePosixPath
from typing import IO, Any, cast

import torch
from fsspec.core import strip_protocol
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from boost_core.checkpoint.index import INDEX
from boost_core.checkpoint.manifest import CheckpointDamaged, StoredFile
from boost_core.config.parsing.small_files import Unreadable, refuse_irregular

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

    def index(self) -> Metadata:
        """The index.

        Raises:
            CheckpointDamaged: It is not what was written, or names files that are not in the manifest.
            ValueError: It contains what an index written by the trainer never does.
        """
        if self._index is None:
            self._index = self._read_index()
        return self._index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index, for torch, which wraps errors raised here in its own."""
        index = self.index()
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index

    def _read_index(self) -> Metadata:
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
            summed = _SummedParts(stream)
            try:
                yield summed
            except Exception as error:  # damaged bytes can cause any error; then report the damage
                self._compare(path, summed, name, error)
                raise
            self._compare(path, summed, name, None)

    def _compare(
        self, path: str | os.PathLike[str], summed: "_SummedParts", name: str, error: Exception | None
    ) -> None:
        summed.skip_to_end()
        if wrong := self._files[name].difference(summed.position, summed.checksum):
            raise CheckpointDamaged(f"{os.fspath(path)} {wrong}") from error


class _SummedParts:
    """Reads parts of a stream in order; the bytes in between are read and included in the checksum as well."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._last, self.position, self.checksum = stream, (0, b""), 0, 0

    def part(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes at an offset, fewer at the end. The last part may be read again, but no earlier one."""
        if (offset, length) != (self._last[0], len(self._last[1])):
            self._skip(offset - self.position)
            self._last = offset, self._read(length)
        return self._last[1]

    def skip_to_end(self) -> None:
        """Include the rest of the stream in the checksum."""
        while self._read(_READ_BYTES):
            pass

    def _skip(self, count: int) -> None:
        if count < 0:
            raise ValueError("the index has tensors that overlap in their file; do not load it")
        while count > 0 and (block := self._read(min(count, _READ_BYTES))):
            count -= len(block)

    def _read(self, length: int) -> bytes:
        block: bytes = self._stream.read(length)
        self.position, self.checksum = self.position + len(block), zlib.crc32(block, self.checksum)
        return block


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise ValueError(f"the checkpoint's index would run {module}.{name}; it is not one of ours, do not load it")
        return super().find_class(module, name)
