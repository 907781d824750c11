"""Checksums of a checkpoint's files, taken while they are written, so that nothing is read back for them."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, cast

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter


class ChecksummingWriter(FsspecWriter):
    """torch's writer of shards over fsspec; ``checksums`` has the CRC-32 of each file that it has written, by name."""

    def __init__(self, path: str, sync_files: bool, **storage_options: Any) -> None:
        super().__init__(path, sync_files=sync_files)
        self._summing = cast(Any, _Checksumming())
        self.fs, self.path = self._summing, self._summing.init_path(path, **storage_options)

    @property
    def checksums(self) -> dict[str, int]:
        """CRC-32 by file name."""
        # torch renames its index into place once it is whole.
        return {name.removesuffix(".tmp"): checksum for name, checksum in self._summing.checksums.items()}


class _Checksumming(FileSystem):
    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            summed = _SummedStream(stream)
            yield summed
        self.checksums[PurePosixPath(os.fspath(path)).name] = summed.checksum


class _SummedStream:
    """A stream for writing that sums what goes through; all else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.checksum = stream, 0

    def write(self, data: Any) -> Any:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
