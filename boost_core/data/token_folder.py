"""The folder that tokens are written to, and the files in it that are written incrementally.

Of a file that could not be written, for want of room or for another reason, nothing stays, and the error names it.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Self

import fsspec

from boost_core.config.data_files import Part
from boost_core.config.storage import literal
from boost_core.data.documents import Document
from boost_core.data.tokenizers import Tokens

_SHOWN = 1000  # bytes of a bad document shown in the quarantine
_AT_ONCE = 8  # files read at a time; a run's table may have 25 MB


class TokenFolder:
    """The folder that tokens are written to.

    Args:
        url: The folder's path or URL; it is created.
    """

    def __init__(self, url: str) -> None:
        self._filesystem, self._path = fsspec.url_to_fs(url, use_listings_cache=False)
        self._filesystem.makedirs(self._path, exist_ok=True)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Read a file, or its bytes from ``begin`` up to ``end``."""
        if end is not None and end <= begin:
            return b""
        content: bytes = self._filesystem.cat_file(f"{self._path}/{name}", start=begin or None, end=end)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file in one piece.

        Raises:
            OSError: It cannot be written.
        """
        path = f"{self._path}/{name}"
        if self._filesystem.protocol[0] != "file":
            with _named(path):
                self._filesystem.pipe_file(path, content)
            return
        try:
            with _named(path):
                self._filesystem.pipe_file(f"{path}.new", content)
                self._filesystem.mv(f"{path}.new", path)
        except OSError:
            with suppress(OSError):
                self._filesystem.rm_file(f"{path}.new")
            raise

    def read_each(self, names: Sequence[str]) -> Iterator[bytes]:
        """Read many files; some at a time, which object stores answer in the time of one."""
        for first in range(0, len(names), _AT_ONCE):
            paths = [f"{self._path}/{name}" for name in names[first : first + _AT_ONCE]]
            yield from self._filesystem.cat_ranges(paths, None, None, on_error="raise")

    def names_in(self, name: str) -> set[str]:
        """The names of the files in a folder of it, below the folder's own; none if it does not exist."""
        folder = f"{self._path}/{name}"
        try:
            listed = self._filesystem.ls(folder, detail=False)
        except FileNotFoundError:
            return set()
        return {f"{name}/{path.rpartition('/')[2]}" for path in listed}

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its contents; does nothing if it does not exist."""
        if self._filesystem.exists(f"{self._path}/{name}"):
            self._filesystem.rm(literal(self._filesystem, f"{self._path}/{name}"), recursive=True)

    def make(self, name: str) -> None:
        """Create a folder unless it exists."""
        self._filesystem.makedirs(f"{self._path}/{name}", exist_ok=True)

    def open(self, name: str) -> "NewFile":
        """Open a new file for writing; an existing one is overwritten.

        Raises:
            OSError: It cannot be opened.
        """
        return NewFile(self._filesystem, f"{self._path}/{name}")

    def shard(self, part: Part, number: int) -> "ShardFile":
        """Start a new shard; what an interrupted run left of it is overwritten."""
        return ShardFile(self._filesystem, f"{self._path}/{part}-{number:05}.bin")

    def quarantine(self, number: int) -> "QuarantineFile":
        """Start a list of documents skipped for a pair of shards; what an interrupted run left of it is removed."""
        path = f"{self._path}/quarantine-{number:05}.jsonl"
        if self._filesystem.exists(path):
            self._filesystem.rm_file(path)
        return QuarantineFile(self._filesystem, path)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Make errors from writing a file name it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        error.filename = error.filename or path
        raise


class NewFile:
    """A file that is being written, and is removed if the block that writes it fails.

    Args:
        filesystem: Where it is.
        path: Its path there.
    """

    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        with _named(path):
            self._stream = filesystem.open(path, "wb")

    def write(self, content: bytes) -> None:
        """Append bytes.

        Raises:
            OSError: They cannot be written.
        """
        with _named(self._path):
            self._stream.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        failed = kind is not None
        try:
            with _named(self._path):
                self._stream.close()
        except OSError:
            failed = True
            if kind is None:
                raise
        finally:
            if failed:
                with suppress(OSError):
                    self._filesystem.rm_file(self._path)


class ShardFile(NewFile):
    """A shard that is being written.

    Args:
        filesystem: Where it is.
        path: Its path there.

    Attributes:
        name: Its name.
        tokens: Number of tokens so far.
        text_bytes: Bytes of their text.
        digest: SHA-256 of what was written.
    """

    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        super().__init__(filesystem, path)
        self.name, self.tokens, self.text_bytes = path.rpartition("/")[2], 0, 0
        self.digest = hashlib.sha256()

    def append(self, tokens: Tokens, text_bytes: int) -> None:
        """Append a document's tokens and count its bytes."""
        content = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes()
        self.write(content)
        self.digest.update(content)
        self.tokens += len(tokens)
        self.text_bytes += text_bytes


class QuarantineFile(ExitStack):
    """The list of skipped documents, one per line; no file is created if there are none.

    Args:
        filesystem: Where it is.
        path: Its path there.
    """

    def __init__(self, filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        super().__init__()
        self._filesystem, self._path = filesystem, path
        self._file: NewFile | None = None

    def write(self, document: Document) -> None:
        """Append a bad document: where it is, why it is bad, and how it begins."""
        if self._file is None:
            self._file = self.enter_context(NewFile(self._filesystem, self._path))
        line = {
            "file": document.file, "place": document.place, "reason": document.problem,
            "begins": document.content[:_SHOWN].decode(errors="backslashreplace"),
        }  # fmt: skip
        self._file.write(json.dumps(line).encode() + b"\n")
