"""Tokenization of documents into shards: streaming, in constant memory, and resumable.

Each round fills one shard of training tokens and one of validation tokens; then the index lists both and the next
document to read. A round that was interrupted is repeated.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, get_args

import fsspec
from pydantic import TypeAdapter

from boost_core.config.base import counted
from boost_core.config.data_files import INDEX, Cursor, Input, Part, Shard, SourceFile, TokenIndex, index_of, list_files
from boost_core.config.storage import literal
from boost_core.config.training import BYTES, OnError, SourceConfig
from boost_core.data.documents import Document, NewFile, QuarantineFile, Reading, naming, refuse_changed
from boost_core.data.tokenizers import Tokenizer, Tokens, batches, dtype_for, encode

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
            with naming(path):
                self._filesystem.pipe_file(path, content)
            return
        try:
            with naming(path):
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

    def open(self, name: str) -> NewFile:
        """Open a new file for writing; an existing one is overwritten.

        Raises:
            OSError: It cannot be opened.
        """
        return NewFile(self._filesystem, f"{self._path}/{name}")

    def shard(self, part: Part, number: int) -> "ShardFile":
        """Start a new shard; what an interrupted run left of it is overwritten."""
        return ShardFile(self._filesystem, f"{self._path}/{part}-{number:05}.bin")

    def first_quarantined(self, number: int) -> str:
        """The first document skipped for a pair of shards, why, and where the others are listed."""
        name = f"quarantine-{number:05}.jsonl"
        line = json.loads(self.read(name).partition(b"\n")[0])
        return f"{Document(line['file'], line['place'], b'', line['reason'])}; {self._path}/{name} lists them"

    def refuse_skipped(self, skipped: int, on_error: OnError) -> None:
        """Refuse to go on with what bad documents were left out of, if a bad one is to end the run.

        Raises:
            ValueError: Some were.
        """
        if skipped and on_error == "fail":
            raise ValueError(
                f"{self._path} holds the tokens of a run that left out {counted(skipped, 'bad document')}, as "
                f"{self._path}/quarantine-*.jsonl lists; skip them again (--on-error skip, on_error: skip), or take "
                "another folder"
            )

    def quarantine(self, number: int) -> QuarantineFile:
        """Start a list of documents skipped for a pair of shards; what an interrupted run left of it is removed."""
        path = f"{self._path}/quarantine-{number:05}.jsonl"
        if self._filesystem.exists(path):
            self._filesystem.rm_file(path)
        return QuarantineFile(self._filesystem, path)


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


_PARTS: tuple[Part, ...] = get_args(Part)
_INPUTS = TypeAdapter(list[Input])
_INPUTS_NAME = "inputs-{:05}.json"
_SETTINGS = "settings.json"  # that made the tokens, for people: the index has their digest


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        files: Files done.
        of_files: Number of all files.
        documents: Documents done, those of earlier runs included.
        skipped: Bad documents left out, those of earlier runs included.
        tokens: Tokens written in this run.
        seconds: Seconds since this run began.
    """

    files: int
    of_files: int
    documents: int
    skipped: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class TokenizePlan:
    """What is tokenized and how.

    Attributes:
        source: The documents.
        folder: Path or URL of the folder for the tokens.
        tokenizer: The tokenizer.
        tokenizer_json: The tokenizer's file; empty for bytes.
        validation_fraction: Share of the documents kept for validation, chosen by a hash of their position.
        shard_tokens: Minimum training tokens per shard, except the last.
        on_error: Whether a bad document ends the run, or is skipped and listed in a file beside the shards.
    """

    source: SourceConfig
    folder: str
    tokenizer: Tokenizer
    tokenizer_json: str
    validation_fraction: float
    shard_tokens: int
    on_error: OnError = "fail"
    files: list[SourceFile] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", list_files(self.source, new=False))


def tokenize(plan: TokenizePlan, report: Callable[[Progress], None]) -> TokenIndex:
    """Write the tokens of all documents, keeping those already written.

    Args:
        plan: What to tokenize and how.
        report: Called with the progress after each batch.

    Raises:
        ValueError: The folder has tokens of something else, a document is bad and bad ones are not skipped, or there
            are no good documents.
        OSError: A file cannot be read or written.
    """
    started = time.monotonic()
    folder = TokenFolder(plan.folder)
    index, stored = _resumed(plan, folder)
    # One iterator for all rounds: each continues where the previous one stopped.
    rest = _batches_from(plan, index.cursor, stored)
    tokens = 0
    while not index.complete:
        finished = False
        inputs: dict[str, Input] = {}
        number = len(index.shards) // len(_PARTS)
        with ExitStack() as stack:
            shards = {part: stack.enter_context(folder.shard(part, number)) for part in _PARTS}
            quarantine = stack.enter_context(folder.quarantine(number))
            for batch in rest:
                good, skipped, written = _write(batch, plan, shards, quarantine)
                counts = {"documents": index.documents + good, "skipped": index.skipped + skipped}
                index = index.model_copy(update={"cursor": batch.after, **counts})
                before = inputs.get(batch.read.file, batch.read)  # what had been read of the file so far
                inputs[batch.read.file] = batch.read.model_copy(update={"first": before.first})
                tokens += written
                seconds = time.monotonic() - started
                report(Progress(batch.after.file, len(plan.files), index.documents, index.skipped, tokens, seconds))
                if shards["training"].tokens >= plan.shard_tokens:
                    break
            else:
                finished = True
        if finished and not index.documents:
            where = ", ".join(plan.source.paths)
            if index.skipped:
                raise ValueError(f"all documents of {where} are bad: {folder.first_quarantined(number)}")
            raise ValueError(f"there are no documents in {where}; check the files")
        finished_shards = tuple(
            Shard(
                part=part, name=shard.name, tokens=shard.tokens, text_bytes=shard.text_bytes,
                sha256=shard.digest.hexdigest(),
            )
            for part, shard in shards.items()
        )  # fmt: skip
        index = index.model_copy(update={"shards": (*index.shards, *finished_shards), "complete": finished})
        folder.write(_INPUTS_NAME.format(number), _INPUTS.dump_json(list(inputs.values()), indent=2))
        folder.write(INDEX, index.model_dump_json(indent=2).encode())
    return index


def part_of(file: int, document: int, validation_fraction: float) -> Part:
    """The part that a document belongs to, by a hash of the file's number and the document's number in the file."""
    share = int.from_bytes(hashlib.sha256(f"{file}/{document}".encode()).digest()[:4], "big") / 2**32
    return "validation" if share < validation_fraction else "training"


@dataclass(frozen=True)
class _Batch:
    """Documents, the positions of the first and of the next after them, and what was read of their file."""

    documents: list[Document]
    begin: Cursor
    after: Cursor
    read: Input


def _resumed(plan: TokenizePlan, folder: TokenFolder) -> tuple[TokenIndex, list[Input]]:
    """The index to continue from, and what its shards hold of each file."""
    index = index_of(plan.folder)
    # Equal for equal tokenizers, splits and other settings.
    settings = {
        "kind": plan.source.kind, "text field": plan.source.text_field, "tokenizer": plan.tokenizer_json,
        "validation share": plan.validation_fraction, "shard size": plan.shard_tokens,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps([*settings.values()]).encode()).hexdigest()
    checksum = hashlib.sha256(plan.tokenizer_json.encode()).hexdigest() if plan.tokenizer_json else ""
    settings["tokenizer"] = f"{plan.tokenizer.vocabulary} tokens, SHA-256 {checksum[:12]}" if checksum else BYTES
    if index is None:
        dtype: Any = dtype_for(plan.tokenizer.vocabulary).name
        if plan.tokenizer_json:
            folder.write("tokenizer.json", plan.tokenizer_json.encode())
        folder.write(_SETTINGS, json.dumps(settings, indent=2).encode())
        return TokenIndex(
            dtype=dtype, vocabulary=plan.tokenizer.vocabulary, end_of_document=plan.tokenizer.end_of_document,
            tokenizer=checksum, source=digest,
        ), []  # fmt: skip
    if index.source != digest:
        before: dict[str, Any] = {}
        with suppress(FileNotFoundError):
            before = json.loads(folder.read(_SETTINGS))
        different = (f"{name} {was}, not {settings[name]}" for name, was in before.items() if was != settings[name])
        problem = "; ".join(different) or "another tokenizer, kind, text field, split or shard size"
        raise ValueError(
            f"{plan.folder} has tokens from {problem}; give the same settings as before to continue, or another folder"
        )
    if index.end_of_document != plan.tokenizer.end_of_document:
        raise ValueError(
            f"{plan.folder} has tokens in which token {index.end_of_document} ends documents, not "
            f"{plan.tokenizer.end_name}; give the same end_of_document as before to continue, or another folder"
        )
    folder.refuse_skipped(index.skipped, plan.on_error)
    inputs: dict[str, Input] = {}
    for number in range(len(index.shards) // len(_PARTS)):
        for read in _INPUTS.validate_json(folder.read(_INPUTS_NAME.format(number))):
            inputs[read.file] = read.model_copy(update={"first": inputs.get(read.file, read).first})
    stored = list(inputs.values())
    refuse_changed(stored, plan.files, plan.source)
    if index.complete and len(plan.files) > len(stored):
        raise ValueError(
            f"{plan.folder} is complete and holds nothing of {plan.files[len(stored)].url}; tokenize new files into "
            "another folder"
        )
    return index, stored


def _batches_from(plan: TokenizePlan, start: Cursor, stored: list[Input]) -> Iterator[_Batch]:
    for number, file in enumerate(plan.files[start.file :], start=start.file):
        reading = Reading(file, plan.source)
        if number == start.file and start.document:
            reading.skip(stored[number])
        done = first = reading.count
        for batch in batches(reading):
            begin, done = Cursor(file=number, document=done), reading.count
            yield _Batch(batch, begin, Cursor(file=number, document=done), reading.so_far(first, whole=False))
            first = done
        # An empty list of documents moves the cursor to the next file.
        here = Cursor(file=number, document=done)
        yield _Batch([], here, Cursor(file=number + 1), reading.so_far(first, whole=True))


def _write(
    batch: _Batch, plan: TokenizePlan, shards: dict[Part, ShardFile], quarantine: QuarantineFile
) -> tuple[int, int, int]:
    """Write a batch's documents; return the numbers of good ones, of bad ones skipped, and of tokens written."""
    before, good, skipped = sum(shard.tokens for shard in shards.values()), 0, 0
    for offset, (document, tokens) in enumerate(encode(batch.documents, plan.tokenizer)):
        if document.problem:
            if plan.on_error == "fail":
                raise ValueError(document.refusal())
            quarantine.write(document)
            skipped += 1
        elif document.content:  # empty ones, as of empty files, are left out
            part = part_of(batch.begin.file, batch.begin.document + offset, plan.validation_fraction)
            shards[part].append(tokens, len(document.content))
            good += 1
    return good, skipped, sum(shard.tokens for shard in shards.values()) - before
