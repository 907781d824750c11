"""Tokenization of documents into shards: streaming, in constant memory, and resumable.

Each round fills one shard of training tokens and one of validation tokens; then the index lists both and the next
document to read. A round that was interrupted is repeated.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self, get_args

import fsspec
from pydantic import TypeAdapter

from boost_core.config.base import counted
from boost_core.config.data_files import INDEX, Cursor, Input, Part, Shard, SourceFile, TokenIndex, index_of, list_files
from boost_core.config.training import BYTES, CorpusConfig, OnError, SourceConfig
from boost_core.data.documents import Document, Reading, refuse_changed
from boost_core.data.tokenizers import Tokenizer, Tokens, batches, encode, open_tokenizer

_AT_ONCE = 8  # files read at a time; a run's table may have 25 MB
_SHOWN = 1000  # bytes of a bad document shown in the quarantine


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Make errors from writing a file name it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        error.filename = error.filename or path
        raise


class TokenFolder:
    """The folder that tokens are written to.

    Args:
        url: The folder's path or URL; it is created.
    """

    def __init__(self, url: str) -> None:
        self.url, (self.filesystem, self.path) = url, fsspec.url_to_fs(url, use_listings_cache=False)
        self.filesystem.makedirs(self.path, exist_ok=True)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Read a file, or its bytes from ``begin`` up to ``end``."""
        content: bytes = self.filesystem.cat_file(f"{self.path}/{name}", start=begin or None, end=end)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file in one piece.

        Raises:
            OSError: It cannot be written.
        """
        path = f"{self.path}/{name}"
        if self.filesystem.protocol[0] != "file":
            with _naming(path):
                self.filesystem.pipe_file(path, content)
            return
        try:
            with _naming(path):
                self.filesystem.pipe_file(f"{path}.new", content)
                self.filesystem.mv(f"{path}.new", path)
        except OSError:
            with suppress(OSError):
                self.filesystem.rm_file(f"{path}.new")
            raise

    def read_each(self, names: Sequence[str]) -> Iterator[bytes]:
        """Read many files; some at a time, which object stores answer in the time of one."""
        for first in range(0, len(names), _AT_ONCE):
            paths = [f"{self.path}/{name}" for name in names[first : first + _AT_ONCE]]
            yield from self.filesystem.cat_ranges(paths, None, None, on_error="raise")

    def names_in(self, name: str) -> set[str]:
        """The names of the files in a folder of it, below the folder's own; none if it does not exist."""
        folder = f"{self.path}/{name}"
        try:
            listed = self.filesystem.ls(folder, detail=False)
        except FileNotFoundError:
            return set()
        return {f"{name}/{path.rpartition('/')[2]}" for path in listed}

    def first_quarantined(self, number: int) -> str:
        """The first document skipped for a pair of shards, why, and where the others are listed."""
        name = f"quarantine-{number:05}.jsonl"
        line = json.loads(self.read(name).partition(b"\n")[0])
        return f"{Document(line['file'], line['place'], b'', line['reason'])}; {self.path}/{name} lists them"

    def refuse_skipped(self, skipped: int, on_error: OnError) -> None:
        """Refuse to go on with what bad documents were left out of, if a bad one is to end the run.

        Raises:
            ValueError: Some were.
        """
        if skipped and on_error == "fail":
            raise ValueError(
                f"{self.path} holds the tokens of a run that left out {counted(skipped, 'bad document')}, as "
                f"{self.path}/quarantine-*.jsonl lists; skip them again (--on-error skip, on_error: skip), or take "
                "another folder"
            )

    def quarantine(self, number: int) -> "QuarantineFile":
        """Start a list of documents skipped for a pair of shards; what an interrupted run left of it is removed."""
        name = f"quarantine-{number:05}.jsonl"
        if self.filesystem.exists(f"{self.path}/{name}"):
            self.filesystem.rm_file(f"{self.path}/{name}")
        return QuarantineFile(self, name)


class NewFile:
    """A file that is being written, from its first bytes on, and is removed if the block that writes it fails.

    Args:
        folder: Its folder; a file of its name there is overwritten.
        name: Its name.
    """

    def __init__(self, folder: TokenFolder, name: str) -> None:
        self.name, self._filesystem, self._path = name, folder.filesystem, f"{folder.path}/{name}"
        self._stream: Any = None

    def write(self, content: bytes) -> None:
        """Append bytes.

        Raises:
            OSError: They cannot be written.
        """
        with _naming(self._path):
            self._stream = self._stream or self._filesystem.open(self._path, "wb")
            self._stream.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._stream is None:
            return
        complete = False
        try:
            with suppress(OSError) if kind else _naming(self._path):
                self._stream.close()
                complete = kind is None
        finally:
            if not complete:
                with suppress(OSError):
                    self._filesystem.rm_file(self._path)


class QuarantineFile(NewFile):
    """The list of skipped documents, one per line; no file is created if there are none."""

    def add(self, document: Document) -> None:
        """Append a bad document: where it is, why it is bad, and how it begins."""
        begins = document.content[:_SHOWN].decode(errors="backslashreplace")
        line = {"file": document.file, "place": document.place, "reason": document.problem, "begins": begins}
        self.write(json.dumps(line).encode() + b"\n")


class ShardFile(NewFile):
    """A shard that is being written.

    Args:
        folder: Its folder; what an interrupted run left of it is overwritten.
        part: Its part.
        number: Its number among the part's.

    Attributes:
        name: Its name.
        documents: Number of documents so far.
        tokens: Number of their tokens.
        text_bytes: Bytes of their text.
    """

    def __init__(self, folder: TokenFolder, part: Part, number: int) -> None:
        super().__init__(folder, f"{part}-{number:05}.bin")
        self.part = part
        self.write(b"")  # it exists, even if it stays empty
        self.documents = self.tokens = self.text_bytes = 0
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """SHA-256 of what was written."""
        return self._digest.hexdigest()

    def append(self, tokens: Tokens, text_bytes: int) -> None:
        """Append a document's tokens and count its bytes."""
        content = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes()
        self.write(content)
        self._digest.update(content)
        self.documents += 1
        self.tokens += len(tokens)
        self.text_bytes += text_bytes


_PARTS: tuple[Part, ...] = get_args(Part)
_INPUTS = TypeAdapter(list[Input])
_INPUTS_NAME = "inputs-{:05}.json"
_SETTINGS = "settings.json"  # that made the tokens, for people: the index has their digest


# Called after each batch with the index so far, the number of all files, and this run's tokens and seconds.
Report = Callable[[TokenIndex, int, int, float], None]


def tokenize(corpus: CorpusConfig, url: str, report: Report) -> TokenIndex:
    """Write the tokens of all documents, keeping those already written; filters and the like are ``Build``'s.

    Args:
        corpus: What to tokenize and how.
        url: Path or URL of the folder for the tokens.
        report: Called after each batch.

    Raises:
        ValueError: The tokenizer cannot be read, a path matches no file, the folder has tokens of something else, a
            document is bad and bad ones are not skipped, or there are no good documents.
        OSError: A file cannot be read or written.
    """
    tokenizer = open_tokenizer(corpus.tokenizer, corpus.end_of_document)
    files, started, tokens = list_files(corpus.source, new=False), time.monotonic(), 0
    folder = TokenFolder(url)
    index, stored = _resumed(corpus, folder, tokenizer, files)
    # One iterator for all rounds: each continues where the previous one stopped.
    rest = _batches_from(corpus.source, files, index.cursor, stored)
    while not index.complete:
        finished = False
        inputs: dict[str, Input] = {}
        number = len(index.shards) // len(_PARTS)
        with ExitStack() as stack:
            shards = {part: stack.enter_context(ShardFile(folder, part, number)) for part in _PARTS}
            quarantine = stack.enter_context(folder.quarantine(number))
            for batch, after, read in rest:
                good, skipped = index.documents, index.skipped
                for place, (document, encoded) in enumerate(encode(batch, tokenizer), start=index.cursor.document):
                    if document.problem:
                        if corpus.on_error == "fail":
                            raise ValueError(document.refusal())
                        quarantine.add(document)
                        skipped += 1
                    elif document.content:  # empty ones, as of empty files, are left out
                        part = part_of(index.cursor.file, place, corpus.validation_fraction)
                        shards[part].append(encoded, len(document.content))
                        good, tokens = good + 1, tokens + len(encoded)
                index = index.model_copy(update={"cursor": after, "documents": good, "skipped": skipped})
                before = inputs.get(read.file, read)  # what had been read of the file so far
                inputs[read.file] = read.model_copy(update={"first": before.first})
                report(index, len(files), tokens, time.monotonic() - started)
                if shards["training"].tokens >= corpus.shard_tokens:
                    break
            else:
                finished = True
        if finished and not index.documents:
            where = ", ".join(corpus.source.paths)
            if index.skipped:
                raise ValueError(f"all documents of {where} are bad: {folder.first_quarantined(number)}")
            raise ValueError(f"there are no documents in {where}; check the files")
        added = (Shard.model_validate(shard, from_attributes=True) for shard in shards.values())
        index = index.model_copy(update={"shards": (*index.shards, *added), "complete": finished})
        folder.write(_INPUTS_NAME.format(number), _INPUTS.dump_json(list(inputs.values()), indent=2))
        folder.write(INDEX, index.model_dump_json(indent=2).encode())
    return index


def part_of(file: int, document: int, validation_fraction: float) -> Part:
    """The part that a document belongs to, by a hash of the file's number and the document's number in the file."""
    share = int.from_bytes(hashlib.sha256(f"{file}/{document}".encode()).digest()[:4], "big") / 2**32
    return "validation" if share < validation_fraction else "training"


def _resumed(
    corpus: CorpusConfig, folder: TokenFolder, tokenizer: Tokenizer, files: Sequence[SourceFile]
) -> tuple[TokenIndex, list[Input]]:
    """The index to continue from, and what its shards hold of each file."""
    index = index_of(folder.url)
    # Equal for equal tokenizers, splits and other settings.
    settings = {
        "kind": corpus.source.kind, "text field": corpus.source.text_field, "tokenizer": tokenizer.content.decode(),
        "validation share": corpus.validation_fraction, "shard size": corpus.shard_tokens,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps([*settings.values()]).encode()).hexdigest()
    of_file = f"{tokenizer.vocabulary} tokens, SHA-256 {tokenizer.sha256[:12]}"
    settings["tokenizer"] = of_file if tokenizer.content else BYTES
    if index is None:
        dtype: Any = tokenizer.dtype.name
        if tokenizer.content:
            folder.write("tokenizer.json", tokenizer.content)
        folder.write(_SETTINGS, json.dumps(settings, indent=2).encode())
        return TokenIndex(
            dtype=dtype, vocabulary=tokenizer.vocabulary, end_of_document=tokenizer.end_of_document,
            tokenizer=tokenizer.sha256, source=digest,
        ), []  # fmt: skip
    if index.source != digest:
        before: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            before = json.loads(folder.read(_SETTINGS))
        different = (f"{name} {was}, not {settings[name]}" for name, was in before.items() if was != settings[name])
        problem = "; ".join(different) or "another tokenizer, kind, text field, split or shard size"
        remedy = "give the same settings as before to continue, or another folder"
        raise ValueError(f"{folder.url} has tokens from {problem}; {remedy}")
    if index.end_of_document != tokenizer.end_of_document:
        raise ValueError(
            f"{folder.url} has tokens in which token {index.end_of_document} ends documents, not "
            f"{tokenizer.end_name}; give the same end_of_document as before to continue, or another folder"
        )
    folder.refuse_skipped(index.skipped, corpus.on_error)
    inputs: dict[str, Input] = {}
    for number in range(len(index.shards) // len(_PARTS)):
        for read in _INPUTS.validate_json(folder.read(_INPUTS_NAME.format(number))):
            inputs[read.file] = read.model_copy(update={"first": inputs.get(read.file, read).first})
    stored = list(inputs.values())
    refuse_changed(stored, files, corpus.source)
    if index.complete and len(files) > len(stored):
        new = files[len(stored)].url
        raise ValueError(f"{folder.url} is complete and holds nothing of {new}; tokenize new files into another folder")
    return index, stored


def _batches_from(
    source: SourceConfig, files: Sequence[SourceFile], start: Cursor, stored: list[Input]
) -> Iterator[tuple[list[Document], Cursor, Input]]:
    """Documents, the position of the next after them, and what was read of their file."""
    for number, file in enumerate(files[start.file :], start=start.file):
        reading = Reading(file, source)
        if number == start.file and start.document:
            reading.skip(stored[number])
        for batch in batches(reading):
            read = reading.so_far(reading.count - len(batch), whole=False)
            yield batch, Cursor(file=number, document=reading.count), read
        # An empty list of documents moves the cursor to the next file.
        yield [], Cursor(file=number + 1), reading.so_far(reading.count, whole=True)
