"""Streaming of a file's documents, never all in memory at once; documents that cannot be used are reported."""

import codecs
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from boost_core.config.data_files import HUB, WHOLE_DISK, Input, SourceFile, compression, hub_problem
from boost_core.config.training import SourceConfig
from boost_core.config.user_files import ARROW_FILE, no_text_column, no_text_field

_LONGEST = 1 << 30  # bytes of one document, or of its line
_READ_AHEAD = 1 << 16  # bytes; the last of them are lost if an archive is truncated
_ROWS = 1024  # rows decoded at once
# The types of columns of text, each with the one that reads the same memory as bytes.
_BINARY = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
# What decompression and Arrow raise for damaged content, and file systems when they fail.
_UNREADABLE = (OSError, EOFError, zlib.error, pa.ArrowException)
_BYTE_ORDER_MARKS = (  # the longer ones first: UTF-32's begins like UTF-16's
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_REMEDY = (
    "\nfix it and run the same command again, which keeps what is complete; or leave bad documents out with --on-error "
    "skip (on_error: skip in a dataset's file)"
)


@dataclass(frozen=True, slots=True)
class Document:
    """A document, or a placeholder for one that cannot be used.

    Attributes:
        file: URL of its file.
        place: Its place in the file, such as ``line 3``; empty if the file is the document.
        content: Its text in UTF-8; for a bad document, as much as could be read.
        problem: Why it cannot be used; empty for a good one.
        misread: Whether no document of its file has had the text's field so far, so that all might be bad.
    """

    file: str
    place: str
    content: bytes
    problem: str = ""
    misread: bool = False

    def __str__(self) -> str:
        return f"{self.file}{self.place and f', {self.place}'}: {self.problem}"

    def refusal(self, remedy: str = _REMEDY) -> str:
        """What is wrong with it, and what to do; never to leave it out where that could leave out all."""
        return str(self) if self.misread else f"{self}{remedy}"


def documents(file: SourceFile, source: SourceConfig) -> Iterator[Document]:
    """Yield the documents of a file, including bad ones, in order.

    If the rest of a file cannot be read, as in a truncated archive, it counts as one bad document.

    Raises:
        OSError: The file system cannot provide the file.
    """
    try:
        options, field = WHOLE_DISK if source.kind == "standard_library" else {}, source.text_field
        with fsspec.open(file.url, "rb", **options) as stream:
            if source.kind == "parquet":
                table = pq.ParquetFile(stream)
                if problem := no_text_column(table.schema_arrow, field):
                    yield Document(file.url, "", b"", problem, misread=True)
                    return
                for group in range(table.num_row_groups):
                    row = 0
                    try:
                        for batch in table.iter_batches(_ROWS, row_groups=[group], columns=[field]):
                            yield from _of_rows(batch.column(0), file.url, f"row group {group}, row", row, field)
                            row += len(batch)
                    except (OSError, pa.ArrowException) as error:
                        yield Document(file.url, f"row group {group}, from row {row} on", b"", _damage(error))
            elif source.kind in ("arrow", "dataset"):
                is_file = stream.read(len(ARROW_FILE)) == ARROW_FILE
                stream.seek(0)
                with _damage_as_arrows():
                    reader = pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)
                    problem = no_text_column(reader.schema, field)
                    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
                if problem:
                    yield Document(file.url, "", b"", problem, misread=True)
                    return
                row = 0
                try:
                    with _damage_as_arrows():
                        for batch in batches:
                            yield from _of_rows(batch.column(field), file.url, "row", row, field)
                            row += len(batch)
                except _UNREADABLE as error:
                    yield Document(file.url, f"from row {row} on", b"", _damage(error))
            else:
                yield from _of_text(stream, file.url, source)
    except _UNREADABLE as error:
        yield Document(file.url, "", b"", _damage(error))
    except Exception as error:
        if not file.url.startswith(HUB):
            raise
        raise OSError(f"cannot read {file.url}: {hub_problem(error)}") from error


def _damage(error: Exception) -> str:
    """Describe an error about damaged content. The file system's errors, with a class or errno, are re-raised."""
    if isinstance(error, OSError) and (type(error) not in (OSError, gzip.BadGzipFile) or error.errno is not None):
        raise error
    return f"is damaged or cut off: {error}"


def _of_text(file: Any, url: str, source: SourceConfig) -> Iterator[Document]:
    """The documents of a file of text or lines; reading a damaged archive raises one of ``_UNREADABLE``."""
    codec = compression(url)
    stream: io.BufferedReader | gzip.GzipFile = io.BufferedReader(file, _READ_AHEAD)
    if codec is not None:
        if not stream.peek(1):
            raise OSError(f"the {codec} archive is empty")
        if codec == "gzip":  # Arrow fails on the zeros with which tapes and tar pad archives
            stream = gzip.GzipFile(fileobj=stream)
        else:
            stream = io.BufferedReader(pa.CompressedInputStream(stream, codec), _READ_AHEAD)
    beginning = stream.peek(4)
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if beginning.startswith(mark)), None)
    if encoding:
        problem = f"is {encoding}, by its byte order mark; convert it to UTF-8, as with: iconv -f {encoding} -t UTF-8"
        yield Document(url, "", beginning, problem)
    elif source.kind == "jsonl":
        number, misread = 0, True
        try:
            while line := stream.readline(_LONGEST + 1):
                number += 1
                if len(line) > _LONGEST:
                    yield Document(url, f"line {number}", line, _unusable(line))
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(_READ_AHEAD)
                elif line.strip():
                    yield (document := _of_line(line, url, f"line {number}", source.text_field, misread))
                    misread = misread and document.misread
        except _UNREADABLE as error:
            yield Document(url, f"after line {number}", b"", _damage(error))
    else:
        content = stream.read(_LONGEST + 1)
        yield Document(url, "", content.removeprefix(codecs.BOM_UTF8), _unusable(content))


def _of_line(line: bytes, url: str, place: str, field: str, misread: bool) -> Document:
    try:
        record = json.loads(line.decode("utf-8-sig"))
        if isinstance(record, dict):
            if isinstance(text := record.get(field), str):
                return Document(url, place, text.encode())
            return Document(url, place, line, no_text_field(record, field), misread)
        problem = f"no JSON object with a field {field!r}"
    except UnicodeEncodeError as error:
        surrogate = ascii(error.object[error.start]).strip("'")
        problem = f"{field!r} holds {surrogate}, a lone surrogate, which is not a character"
    except UnicodeDecodeError:
        problem = _unusable(line)
    except RecursionError:
        problem = "nested too deeply to be read as JSON"
    except json.JSONDecodeError as error:
        problem = f"no JSON from character {error.pos + 1} on ({error.msg}): an object with a field {field!r} is needed"
    except ValueError as error:
        problem = f"cannot be read as JSON: {error}"
    return Document(url, place, line, problem)


@contextmanager
def _damage_as_arrows() -> Iterator[None]:
    """Raise Arrow's error where Arrow takes damaged sizes and names at their word, and Python's follow from that."""
    try:
        yield
    except MemoryError as error:
        raise pa.ArrowInvalid("it claims to hold more than fits into memory") from error
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid("it has names that are not UTF-8") from error


def _of_rows(column: pa.Array, url: str, place: str, first: int, field: str) -> Iterator[Document]:
    """The documents of a column: its texts as bytes, because writers are not forced to use UTF-8 in their strings.

    Raises:
        pa.ArrowException: Their positions are damaged; Arrow itself checks none, and would read beyond its buffers.
    """
    by_number, texts = pa.types.is_dictionary(column.type), column
    if by_number:
        column.indices.validate(full=True)
        texts = column.dictionary
    texts = texts.view(_BINARY[texts.type])
    texts.validate(full=True)
    if by_number:
        texts = pa.DictionaryArray.from_arrays(column.indices, texts).dictionary_decode()
    for row, value in enumerate(texts, start=first):
        content = value.as_py()
        if content is None:
            yield Document(url, f"{place} {row}", b"", f"{field!r} is null; remove the row, or give it text")
        else:
            yield Document(url, f"{place} {row}", content, _unusable(content))


def _unusable(content: bytes) -> str:
    """Why a text cannot be used; empty if it can."""
    if len(content) > _LONGEST:
        return f"is longer than {_LONGEST:,} bytes; split it"
    try:
        content.isascii() or content.decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}; convert it"
    return ""


# Records of the input that finished shards hold, so that a run continues only if that input is unchanged.


def refuse_own_output(source: SourceConfig, folder: str) -> None:
    """Refuse a folder for tokens in a folder of which all files are read, where later runs would read the tokens, too.

    Raises:
        ValueError: It is one of the source's folders, or in one.
    """
    if source.kind == "dataset":  # of whose folders only Arrow files are read
        return
    plain = (path.removeprefix("file://") for path in (folder, *source.paths))
    tokens, *inputs = (path.rstrip("/") if "://" in path else str(Path(path).resolve()) for path in plain)
    for path, documents_in in zip(source.paths, inputs, strict=True):
        if tokens == documents_in or tokens.startswith(f"{documents_in}/"):
            raise ValueError(f"{folder} is in {path}, of which all files are read; write the tokens to another folder")


class Reading:
    """Iterates over the documents of one file and keeps a digest of those read.

    Args:
        file: The file.
        source: Its source, which says how documents are found in it.
    """

    def __init__(self, file: SourceFile, source: SourceConfig) -> None:
        self.file, self.count = file, 0
        self._documents = documents(file, source)
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents that have not been read yet."""
        for document in self._documents:
            self.count += 1
            # Lengths are hashed so that moving text between documents changes the digest; bad documents count as -1.
            length = -1 if document.problem else len(document.content)
            self._digest.update(length.to_bytes(8, "little", signed=True))
            if not document.problem:
                self._digest.update(document.content)
            yield document

    def so_far(self, first: int, whole: bool) -> Input:
        """A record of what was read.

        Args:
            first: Index of the first of its documents that the shards hold.
            whole: Whether nothing is left to read.
        """
        return Input(
            file=self.file.url, size=self.file.size, stamp=self.file.stamp, first=first, end=self.count,
            digest=self._digest.hexdigest(), whole=whole,
        )  # fmt: skip

    def skip(self, stored: Input) -> None:
        """Skip the documents that shards hold.

        Raises:
            ValueError: The documents differ from what the shards hold.
        """
        for _ in islice(self, max(0, stored.end - self.count)):
            pass
        rest = next(self._documents, None) if stored.whole else None
        if rest is not None or self._digest.hexdigest() != stored.digest:
            problem = f"{self.file.url} has changed, and finished shards hold tokens of its old content"
            raise ValueError(f"{problem}; restore it, or tokenize into another folder")


def refuse_changed(stored: Sequence[Input], files: Sequence[SourceFile], source: SourceConfig) -> None:
    """Refuse input that differs from what shards hold. Files not in any shard may change, come and go.

    Args:
        stored: The files of which shards hold something, in order.
        files: The files that are there now, in order.
        source: Their source, which says how documents are found in them.

    Raises:
        ValueError: A file is gone, has changed, or was added between them.
    """
    for place, was in enumerate(stored):
        file = files[place] if place < len(files) else None
        if file is None or file.url != was.file:
            there = file is not None and any(each.url == was.file for each in files)
            problem = f"{file.url} was added before it" if file and there else "it is gone"
            raise ValueError(
                f"finished shards hold tokens of {was.file}, and {problem}; give the same files as before, with new "
                "ones only after them in order of name, or tokenize into another folder"
            )
        # A file with more to read is checked while what shards hold is skipped.
        if was.whole and (not file.stamp or (file.size, file.stamp) != (was.size, was.stamp)):
            Reading(file, source).skip(was)
