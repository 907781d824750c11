"""Documents to shards of tokens: in streams, in constant memory, going on where it was interrupted.

Each round fills one shard of training tokens and, beside it, one of held-out ones; then the index names both and says
which document comes next. What was written of a round that did not come to its end is written anew.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, get_args

import fsspec
import numpy as np

from boost_core.config.data import SourceConfig
from boost_core.config.sources import SourceFile, list_files
from boost_core.config.tokenized import INDEX, Cursor, Part, Shard, TokenIndex, find_index
from boost_core.data.corpus import batches
from boost_core.data.documents import documents
from boost_core.data.tokenizers import Tokenizer, Tokens, dtype_for

_PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Progress:
    """How far it is.

    Attributes:
        files: Files done.
        of_files: All files.
        documents: Documents done, those of earlier runs included.
        tokens: Tokens written in this run.
        seconds: Since this run began.
    """

    files: int
    of_files: int
    documents: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """What is tokenized and how.

    Attributes:
        source: The documents.
        folder: Where the tokens go: a path or URL.
        tokenizer: Makes tokens of documents.
        tokenizer_json: The tokenizer's file; empty for bytes.
        held_out_fraction: Share of the documents held out, chosen by a hash of their place.
        shard_tokens: Training tokens of a shard, at least.
    """

    source: SourceConfig
    folder: str
    tokenizer: Tokenizer
    tokenizer_json: str
    held_out_fraction: float
    shard_tokens: int
    files: list[SourceFile] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", list_files(self.source))

    @property
    def digest(self) -> str:
        """The same for the same files, tokenizer and split."""
        said = [
            [(file.url, file.size) for file in self.files], self.source.kind, self.source.text_field,
            self.tokenizer_json, self.held_out_fraction, self.shard_tokens,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def tokenize(plan: Plan, report: Callable[[Progress], None]) -> TokenIndex:
    """Write the tokens of all documents; what is there already is kept.

    Args:
        plan: What and how.
        report: Is told after each batch.

    Raises:
        ValueError: The folder has tokens of something else, or a document cannot be read.
        OSError: A file cannot be read or written.
    """
    started = time.monotonic()
    folder = _Folder(plan.folder)
    index = _begun(plan, folder)
    # One reading for all rounds: each goes on where the one before it stopped.
    rest = _batches_from(plan, index.cursor)
    tokens = 0
    while not index.complete:
        finished = False
        with ExitStack() as stack:
            shards = {part: stack.enter_context(folder.shard(part, len(index.shards) // 2)) for part in _PARTS}
            for place, batch in rest:
                written = _write(batch, plan, shards, place)
                index = index.model_copy(update={"cursor": place.after, "documents": index.documents + len(batch)})
                tokens += written
                report(Progress(place.after.file, len(plan.files), index.documents, tokens, time.monotonic() - started))
                if shards["training"].tokens >= plan.shard_tokens:
                    break
            else:
                finished = True
        made = tuple(Shard(part=part, name=shard.name, tokens=shard.tokens) for part, shard in shards.items())
        index = index.model_copy(update={"shards": (*index.shards, *made), "complete": finished})
        folder.write(INDEX, index.model_dump_json(indent=2))
    return index


@dataclass(frozen=True)
class _Place:
    """Where a batch begins, and what comes after it."""

    begin: Cursor
    after: Cursor


def _begun(plan: Plan, folder: "_Folder") -> TokenIndex:
    index = find_index(plan.folder)
    if index is None:
        dtype: Any = dtype_for(plan.tokenizer.vocabulary).name
        if plan.tokenizer_json:
            folder.write("tokenizer.json", plan.tokenizer_json)
        return TokenIndex(
            dtype=dtype, vocabulary=plan.tokenizer.vocabulary, end_of_document=plan.tokenizer.end_of_document,
            source=plan.digest,
        )  # fmt: skip
    if index.source != plan.digest:
        raise ValueError(
            f"{plan.folder} has tokens of other files, or by another tokenizer, split or shard size; give the same as "
            "before to go on, or another folder"
        )
    return index


def _batches_from(plan: Plan, start: Cursor) -> Iterator[tuple[_Place, list[str | bytes]]]:
    for number, file in enumerate(plan.files[start.file :], start=start.file):
        texts = documents(file, plan.source)
        done = start.document if number == start.file else 0
        for _ in range(done):
            next(texts)
        for batch in batches(texts):
            begin, done = Cursor(file=number, document=done), done + len(batch)
            yield _Place(begin, Cursor(file=number, document=done)), batch
        # An empty list of documents moves the cursor to the next file.
        yield _Place(Cursor(file=number, document=done), Cursor(file=number + 1)), []


def _write(batch: list[str | bytes], plan: Plan, shards: dict[Part, "_Shard"], place: _Place) -> int:
    end, before = plan.tokenizer.end_of_document, sum(shard.tokens for shard in shards.values())
    for offset, tokens in enumerate(plan.tokenizer.encode(batch)):
        number = f"{place.begin.file}/{place.begin.document + offset}"
        share = int.from_bytes(hashlib.sha256(number.encode()).digest()[:4], "big") / 2**32
        shard = shards["held_out" if share < plan.held_out_fraction else "training"]
        shard.write(tokens)
        shard.write(np.array([end], tokens.dtype))
    return sum(shard.tokens for shard in shards.values()) - before


class _Folder:
    """Where the tokens go."""

    def __init__(self, url: str) -> None:
        self._filesystem, self._path = fsspec.url_to_fs(url, use_listings_cache=False)
        self._filesystem.makedirs(self._path, exist_ok=True)

    def write(self, name: str, content: str) -> None:
        """Write a file in one piece."""
        if self._filesystem.protocol[0] != "file":
            self._filesystem.pipe_file(f"{self._path}/{name}", content.encode())
            return
        self._filesystem.pipe_file(f"{self._path}/{name}.new", content.encode())
        self._filesystem.mv(f"{self._path}/{name}.new", f"{self._path}/{name}")

    def shard(self, part: Part, number: int) -> "_Shard":
        """A new shard; what an interrupted run left of it is overwritten."""
        name = f"{part}-{number:05}.bin"
        return _Shard(name, self._filesystem.open(f"{self._path}/{name}", "wb"))


class _Shard:
    """A shard that is being written."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name, self.tokens, self._stream = name, 0, stream

    def write(self, tokens: Tokens) -> None:
        """Append tokens."""
        self._stream.write(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes())
        self.tokens += len(tokens)

    def __enter__(self) -> "_Shard":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
