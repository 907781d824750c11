"""Checksums of a checkpoint's files, computed while they are written, so that nothing is read back for them."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any, cast

from fsspec import AbstractFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem, FsspecWriter

from boost_core.config.parsing.disk import Disk


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


class _SummedStream:
    """A write stream that computes a checksum of what is written; everything else is delegated to the stream."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.checksum = stream, 0
        self.refusal: Exception | None = None  # the first error

    def write(self, data: Any) -> Any:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return self._stream.write(data)
        except Exception as error:  # stores raise types of their own
            self.refusal = self.refusal or error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
