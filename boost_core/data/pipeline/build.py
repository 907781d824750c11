"""Builds a corpus, from files to shards: finished work is kept, and the result is recorded."""

import hashlib
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal, get_args

import fsspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tokenizers

from boost_core import __version__
from boost_core.config.data_files import INDEX, Cursor, Part, Shard, SourceFile, TokenIndex, index_of, list_files
from boost_core.config.storage import read_small
from boost_core.config.training import BYTES, CorpusConfig
from boost_core.config.user_files import MOST_TOKENIZER_BYTES
from boost_core.data.pipeline.duplicates import ALGORITHM, Documents, not_the_first, together
from boost_core.data.pipeline.engine import Engine
from boost_core.data.pipeline.files import (
    BUILDING,
    EXACT_COLUMNS,
    LINEAGE,
    RECORD,
    ROWS_AT_ONCE,
    Counts,
    FileRecord,
    FileTask,
    KeyColumns,
    Lineage,
    ShardPair,
    ShardRecord,
    TokenizerRecord,
    prepare,
    read_tables,
)
from boost_core.data.tokenize import TokenFolder
from boost_core.data.tokenizers import Tokens, dtype_for, open_tokenizer

# Writes one pair of shards: the documents in a range of the shuffle's keys, from all runs and in order.

_Array = npt.NDArray[Any]

DROPPED = f"{BUILDING}/dropped.bin"
_PAIR = BUILDING + "/shards-{:05}.json"  # the record of a pair of shards

_PARTS: tuple[Part, ...] = get_args(Part)
_COLUMNS = ("document", "key", "validation", "text_bytes")


@dataclass(frozen=True)
class ShardTask:
    """A pair of shards to be written.

    Attributes:
        folder: The folder of tokens.
        number: Its index among the pairs.
        of: Number of pairs.
        runs: All runs.
        dtype: Data type of tokens.
        inputs: Digest of everything the pair is made from.
    """

    folder: str
    number: int
    of: int
    runs: tuple[str, ...]
    dtype: str
    inputs: str


def write_shards(task: ShardTask) -> ShardPair:
    """Write a pair of shards, then its record.

    Raises:
        OSError: The runs cannot be read, or the shards cannot be written.
    """
    folder = TokenFolder(task.folder)
    dropped = np.frombuffer(folder.read(DROPPED), "<i8")
    # The keys at which the pair's range begins and ends; the last range extends to the largest key.
    low, high = (place * 2**64 // task.of for place in (task.number, task.number + 1))
    bounds = np.array([low, min(high, 2**64 - 1)], np.uint64)
    columns: list[tuple[_Array, ...]] = []
    of_token = np.dtype(task.dtype).newbyteorder("<")
    tokens: list[Tokens] = []
    for run, table in zip(task.runs, read_tables(folder, task.runs, (*_COLUMNS, "tokens")), strict=True):
        begin, end = np.searchsorted(table["key"], bounds)
        remaining = ~np.isin(table["document"][begin:end], dropped)
        columns.append(tuple(table[name][begin:end][remaining] for name in _COLUMNS))
        if end > begin:  # documents' tokens are stored consecutively
            ends = np.cumsum(table["tokens"])
            first, last = (int(ends[place - 1]) if place else 0 for place in (begin, end))
            content = folder.read(f"{run}.bin", first * of_token.itemsize, last * of_token.itemsize)
            of_documents = np.split(np.frombuffer(content, of_token), ends[begin : end - 1] - first)
            tokens.extend(compress(of_documents, remaining))
    documents, keys, validation, text_bytes = (np.concatenate(each) for each in zip(*columns, strict=True))
    written = dict.fromkeys(_PARTS, 0)
    with ExitStack() as stack:
        shards = {part: stack.enter_context(folder.shard(part, task.number)) for part in _PARTS}
        for place in np.lexsort((documents, keys)):
            part: Part = "validation" if validation[place] else "training"
            shards[part].append(tokens[place], int(text_bytes[place]))
            written[part] += 1
    records = [
        ShardRecord(
            part=part, name=shard.name, tokens=shard.tokens, documents=written[part], text_bytes=shard.text_bytes,
            sha256=shard.digest.hexdigest(),
        )
        for part, shard in shards.items()
    ]  # fmt: skip
    pair = ShardPair(inputs=task.inputs, shards=tuple(records))
    folder.write(_PAIR.format(task.number), pair.model_dump_json().encode())
    return pair


_TOKENIZER = "tokenizer.json"

Stage = Literal["files", "duplicates", "shards", "done"]


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build.

    Attributes:
        stage: The current stage: tokenizing files, finding duplicates, or writing shards.
        done: Files or pairs of shards done, those of earlier runs included.
        of: Their total number.
        counts: Counts for the documents of finished files.
        bytes: UTF-8 bytes of the documents read in this run.
        seconds: Seconds since this run began.
    """

    stage: Stage
    done: int
    of: int
    counts: Counts
    bytes: int
    seconds: float


Report = Callable[[BuildProgress], None]


class Build:
    """The build of a corpus.

    Args:
        corpus: What to build, and how.
        folder: Path or URL of the folder for the tokens.
        engine: Runs the expensive work.
        report: Called with the progress after each file and pair of shards.

    Raises:
        ValueError: The tokenizer cannot be read, or a path matches no file.
        OSError: One of them cannot be read.
    """

    def __init__(self, corpus: CorpusConfig, folder: str, engine: Engine, report: Report) -> None:
        # Workers may run in another working directory.
        self.folder = folder if "://" in folder else str(Path(folder).absolute())
        self.corpus, self.engine, self.report = corpus, engine, report
        self._began, self._counts, self._read_bytes = time.monotonic(), Counts(), 0
        # Read only once, so that what is recorded is what is used.
        name = corpus.tokenizer
        self._content = b""
        if name != BYTES:
            filesystem, path = fsspec.url_to_fs(name)
            self._content = read_small(filesystem, path, MOST_TOKENIZER_BYTES)
        self._tokenizer = open_tokenizer(name, corpus.end_of_document)
        self._sha256 = hashlib.sha256(self._content).hexdigest() if self._content else ""
        self._files = list_files(corpus.source, new=False)
        # Equal whenever the same documents give the same tokens.
        settings = corpus.model_dump_json(exclude={"source": {"paths"}, "tokenizer": True, "on_error": True})
        self._digest = hashlib.sha256(f"{ALGORITHM}\n{self._sha256}\n{settings}".encode()).hexdigest()

    def run(self) -> Lineage:
        """Build the corpus or resume its build; a finished one is left as it is.

        Raises:
            ValueError: The folder holds tokens of something else, a document is bad and bad ones are not skipped, or
                no documents are left.
            OSError: A file cannot be read or written.
        """
        folder = TokenFolder(self.folder)
        index = index_of(self.folder)
        if index is None:
            folder.make(BUILDING)
            if self._content:
                folder.write(_TOKENIZER, self._content)
            finished = self._make(folder)
            folder.write(LINEAGE, finished.model_dump_json(indent=2).encode())
            dtype: Any = dtype_for(self._tokenizer.vocabulary).name
            index = TokenIndex(
                dtype=dtype, vocabulary=self._tokenizer.vocabulary, end_of_document=self._tokenizer.end_of_document,
                tokenizer=self._sha256, documents=finished.counts.kept, skipped=finished.counts.bad,
                shards=tuple(Shard.model_validate(each.model_dump(exclude={"documents"})) for each in finished.shards),
                source=self._digest, cursor=Cursor(file=len(finished.files)), complete=True,
            )  # fmt: skip
            folder.write(INDEX, index.model_dump_json(indent=2).encode())
        else:
            if index.source != self._digest:
                raise ValueError(
                    f"{self.folder} has tokens from another tokenizer, filters, split, seed or other settings; give "
                    "the same as before, or another folder"
                )
            folder.refuse_skipped(index.skipped, self.corpus.on_error)
            finished = Lineage.model_validate_json(folder.read(LINEAGE))
            stored = {SourceFile(file.file, file.size, file.stamp) for file in finished.files}
            if different := sorted(file.url for file in stored ^ set(self._files)):
                raise ValueError(
                    f"{self.folder} is complete, and {different[0]} was added, removed or changed since; undo that, or "
                    "tokenize into another folder"
                )
        folder.remove(BUILDING)
        self._counts = finished.counts
        self._tell("done", len(finished.shards), len(finished.shards))
        return finished

    def _make(self, folder: TokenFolder) -> Lineage:
        records = self._prepare(folder)
        runs = tuple(run for record in records for run in record.runs)
        self._tell("duplicates", 0, 1)
        exact = self._tied(records, runs, EXACT_COLUMNS if self.corpus.exact_dedup else ())
        bands = self.corpus.near_dedup.bands if self.corpus.near_dedup else 0
        near = self._tied(records, runs, tuple(f"band_{band}" for band in range(bands)))
        folder.write(DROPPED, np.union1d(exact, near).astype("<i8").tobytes())
        pairs = self._shards(folder, records, runs)
        shards = tuple(shard for pair in pairs for shard in pair.shards)
        self._counts = self._counts.model_copy(
            update={
                "exact_duplicates": len(exact), "near_duplicates": len(np.setdiff1d(near, exact)),
                "kept": sum(each.documents for each in shards), "tokens": sum(each.tokens for each in shards),
            }
        )  # fmt: skip
        tokenizer = TokenizerRecord(
            name=self.corpus.tokenizer, sha256=self._sha256, vocabulary=self._tokenizer.vocabulary,
            end_of_document=self._tokenizer.end_of_document,
        )  # fmt: skip
        versions = {
            "boost": __version__, "python": platform.python_version(), "tokenizers": tokenizers.__version__,
            "pyarrow": pa.__version__, "minhash": ALGORITHM,
        }  # fmt: skip
        return Lineage(
            corpus=self.corpus, tokenizer=tokenizer, files=tuple(record.input for record in records),
            counts=self._counts, shards=shards, versions=versions,
        )  # fmt: skip

    def _prepare(self, folder: TokenFolder) -> list[FileRecord]:
        """Tokenize all files into runs."""
        tokenizer = f"{self.folder.rstrip('/')}/{_TOKENIZER}" if self._content else BYTES
        records, of, digest, there = dict[int, FileRecord](), len(self._files), self._digest, folder.names_in(BUILDING)
        tasks = {
            number: FileTask(self.corpus, self.folder, tokenizer, digest, number, file)
            for number, file in enumerate(self._files)
        }
        recorded = [number for number in tasks if RECORD.format(number) in there]
        # Empty ones are of a machine that went down while it wrote.
        for content in filter(None, folder.read_each([RECORD.format(number) for number in recorded])):
            # What an earlier run left counts if it is of the same corpus, the file is unchanged, and nothing in it ends
            # this run.
            record = FileRecord.model_validate_json(content)
            was, file = record.input, tasks[record.number].file
            unchanged = bool(file.stamp) and (was.file, was.size, was.stamp) == (file.url, file.size, file.stamp)
            good = self.corpus.on_error == "skip" or not record.counts.bad
            if record.corpus == digest and unchanged and good:
                records[record.number] = record
                del tasks[record.number]
        self._counts = Counts()
        for record in records.values():
            self._counts = self._counts.plus(record.counts)
        self._tell("files", len(records), of)
        sizes = [task.file.size for task in tasks.values()]
        for record in self.engine.map(prepare, list(tasks.values()), sizes):
            records[record.number] = record
            self._counts = self._counts.plus(record.counts)
            self._read_bytes += record.counts.bytes
            self._tell("files", len(records), of)
        if not any(record.runs for record in records.values()):
            where, counts = ", ".join(self.corpus.source.paths) or "the standard library", self._counts
            if not counts.read:
                raise ValueError(f"there are no documents in {where}; check the files")
            dropped = ", ".join(f"{count:,} by {measure}" for measure, count in counts.filtered.items()) or "none"
            bad = next((number for number in range(of) if records[number].counts.bad), None)
            raise ValueError(
                f"none of the {counts.read:,} documents of {where} is left: {counts.bad:,} are bad"
                f"{'' if bad is None else f' ({folder.first_quarantined(bad)})'}, filtered out: {dropped}; fix the "
                "documents, or set other bounds"
            )
        return [records[number] for number in range(of)]

    def _tied(self, records: Sequence[FileRecord], runs: tuple[str, ...], names: tuple[str, ...]) -> Documents:
        if not names:
            return np.zeros(0, np.int64)
        documents = tuple(record.counts.read for record in records for _ in record.runs)
        partitions = max(1, -(-self._counts.read * len(names) // ROWS_AT_ONCE))  # each of which fits into memory
        columns = KeyColumns(self.folder, runs, documents, names, partitions)
        return not_the_first(together(self.engine.ties(columns)))

    def _shards(self, folder: TokenFolder, records: Sequence[FileRecord], runs: tuple[str, ...]) -> list[ShardPair]:
        dropped, training_tokens = folder.read(DROPPED), 0
        for table in read_tables(folder, runs, ("document", "validation", "tokens")):
            training = ~table["validation"].astype(bool) & ~np.isin(table["document"], np.frombuffer(dropped, "<i8"))
            training_tokens += int(table["tokens"][training].sum())
        of = max(1, -(-training_tokens // self.corpus.shard_tokens))
        ingredients = [self._digest, dropped.hex(), *(record.model_dump_json() for record in records)]
        inputs = hashlib.sha256("\n".join(ingredients).encode()).hexdigest()
        dtype = dtype_for(self._tokenizer.vocabulary).name
        pairs, tasks, there = dict[str, ShardPair](), list[ShardTask](), folder.names_in(BUILDING)
        for number in range(of):
            name = _PAIR.format(number)
            content = folder.read(name) if name in there else b""
            pair = ShardPair.model_validate_json(content) if content else None
            if pair is not None and pair.inputs == inputs:
                pairs[pair.shards[0].name] = pair
            else:
                tasks.append(ShardTask(self.folder, number, of, runs, dtype, inputs))
        self._tell("shards", len(pairs), of)
        for pair in self.engine.map(write_shards, tasks):
            pairs[pair.shards[0].name] = pair
            self._tell("shards", len(pairs), of)
        return [pairs[name] for name in sorted(pairs)]

    def _tell(self, stage: Stage, done: int, of: int) -> None:
        seconds = time.monotonic() - self._began
        self.report(BuildProgress(stage, done, of, self._counts, self._read_bytes, seconds))
