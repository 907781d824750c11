"""Builds a corpus, from files to shards: finished work is kept, and the result is recorded.

Each file becomes runs: its documents are read, filtered and tokenized, and sorted by the shuffle's key. A run is some
64 MiB of tokens and a table with a row per document: its number and shuffle key, its part, its numbers of tokens and
bytes of text, and the keys it shares with its duplicates. Each pair of shards is made from all runs. Axes: B bands.
"""

import hashlib
import io
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial, reduce
from itertools import compress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import tokenizers
from pydantic import Field

from boost_core import __version__
from boost_core.config.base import Config
from boost_core.config.data_files import INDEX, Cursor, Input, Part, Shard, SourceFile, TokenIndex, index_of, list_files
from boost_core.config.storage import literal
from boost_core.config.training import BYTES, CorpusConfig
from boost_core.data.documents import Document, Reading
from boost_core.data.pipeline.duplicates import ALGORITHM, Documents, Keys, Ties, minhash_keys, not_the_first
from boost_core.data.pipeline.filters import refusing
from boost_core.data.tokenize import NewFile, QuarantineFile, ShardFile, TokenFolder, part_of
from boost_core.data.tokenizers import Tokenizer, Tokens, batches, encode, open_tokenizer

# The records that the pipeline writes next to its tokens: for each finished file and shard, and for the corpus.

LINEAGE = "lineage.json"
BUILDING = "building"  # folder of intermediate files, needed until the shards are complete
RECORD = BUILDING + "/file-{:05}.json"  # the record of a file


class Counts(Config):
    """Counts of what became of documents."""

    read: int = Field(0, description="Documents read.")
    bad: int = Field(0, description="Documents that could not be used; listed in quarantine-*.jsonl.")
    filtered: dict[str, int] = Field({}, description="Documents dropped by filters, by measure.")
    exact_duplicates: int = Field(0, description="Documents with the same words as an earlier one.")
    near_duplicates: int = Field(0, description="Documents nearly equal to an earlier one.")
    kept: int = Field(0, description="Documents in the shards.")
    bytes: int = Field(0, description="UTF-8 bytes of the good documents read.")
    tokens: int = Field(0, description="Tokens in the shards.")

    def plus(self, other: "Counts") -> "Counts":
        """The sum of both."""
        added = {name: getattr(self, name) + getattr(other, name) for name in Counts.model_fields if name != "filtered"}
        filtered = Counter(self.filtered) + Counter(other.filtered)
        return Counts(**added, filtered=dict(sorted(filtered.items())))


class FileRecord(Config):
    """A file whose tokens are all in runs: ``building/<digest>-<number>-<run>.bin``, each with a table ``.arrow``.

    Attributes:
        corpus: Digest of how its tokens were made.
        number: Its index among the files.
        input: What was read.
        runs: Names of the runs, without suffix.
        counts: Counts for its documents; duplicates are found later.
    """

    corpus: str
    number: int
    input: Input
    runs: tuple[str, ...]
    counts: Counts


class ShardRecord(Config):
    """A shard of one part."""

    part: Part
    name: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


class ShardPair(Config):
    """The shards filled from one range of the shuffle's keys.

    Attributes:
        inputs: Digest of everything they were made from.
        shards: The shards.
    """

    inputs: str
    shards: tuple[ShardRecord, ...]


class TokenizerRecord(Config):
    """The tokenizer that made the tokens."""

    name: str = Field(description="Name as given.")
    sha256: str = Field(description="SHA-256 of its tokenizer.json; empty for bytes.")
    vocabulary: int
    end_of_document: int


class Lineage(Config):
    """What a corpus was made from and how, as written to ``lineage.json`` next to its shards."""

    format: int = 1
    corpus: CorpusConfig = Field(description="The corpus as requested.")
    tokenizer: TokenizerRecord
    files: tuple[Input, ...] = Field(description="The files, with a digest of their documents.")
    counts: Counts
    shards: tuple[ShardRecord, ...]
    versions: dict[str, str] = Field(description="Versions of software that may affect the result.")

    @property
    def fingerprint(self) -> str:
        """A digest that is equal for the same tokenizer and tokens, wherever the documents are."""
        digests = [self.tokenizer.sha256, *(shard.sha256 for shard in self.shards)]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()


_Array = npt.NDArray[Any]

_RUN_BYTES = 64 << 20  # size of tokens at which a run is written
_DOCUMENT_BYTES = 400  # memory per document besides its tokens

_open_once = lru_cache(maxsize=1)(open_tokenizer)  # for all files of a process


class FileTask(NamedTuple):
    """A file to tokenize, and the destination.

    Attributes:
        corpus: How to tokenize it.
        folder: Path or URL of the folder for the tokens.
        tokenizer: ``bytes``, or the path or URL of the folder's copy of the tokenizer.
        digest: Digest of how tokens are made, for the record.
        number: The file's index among the files.
        file: The file.
    """

    corpus: CorpusConfig
    folder: str
    tokenizer: str
    digest: str
    number: int
    file: SourceFile


@dataclass
class _Run:
    """A run to be written: the positions, tokens and duplicate keys of documents."""

    places: list[int] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)
    exact: list[Keys] = field(default_factory=list)
    bands: list[Keys] = field(default_factory=list)
    size: int = 0


def prepare(task: FileTask) -> FileRecord:
    """Write the runs of a file, then its record; leftovers of an interrupted attempt are overwritten.

    Raises:
        ValueError: A document is bad, and bad ones are not skipped.
        OSError: The file cannot be read, or the runs cannot be written.
    """
    folder, reading = TokenFolder(task.folder), Reading(task.file, task.corpus.source)
    tokenizer = _open_once(task.tokenizer, task.corpus.end_of_document)
    counts, runs, run = Counts(), list[str](), _Run()
    with folder.quarantine(task.number) as quarantine:
        for batch in batches(reading):
            counts = counts.plus(_add(run, batch, reading.count - len(batch), task.corpus, tokenizer, quarantine))
            if run.size >= _RUN_BYTES:
                runs.append(_write(run, folder, task, len(runs)))
                run = _Run()
    if run.places:
        runs.append(_write(run, folder, task, len(runs)))
    source = reading.so_far(0, whole=True)
    record = FileRecord(corpus=task.digest, number=task.number, input=source, runs=tuple(runs), counts=counts)
    folder.write(RECORD.format(task.number), record.model_dump_json().encode())
    return record


def _add(
    run: _Run, batch: Sequence[Document], first: int, corpus: CorpusConfig, tokenizer: Tokenizer,
    quarantine: QuarantineFile,
) -> Counts:  # fmt: skip
    """Add a batch's documents to a run, except bad ones and those that a filter drops."""
    filtered: Counter[str] = Counter()
    chosen: list[tuple[int, str, Document]] = []
    for place, document in enumerate(batch, start=first):
        if not (document.content or document.problem):  # as of an empty file
            continue
        text = "" if document.problem else document.content.decode()
        if not document.problem and (measure := refusing(text, corpus.filters)):
            filtered[measure] += 1
            continue
        chosen.append((place, text, document))
    bad, remaining = 0, []
    encoded = encode([document for _, _, document in chosen], tokenizer)
    for (place, text, _), (document, tokens) in zip(chosen, encoded, strict=True):
        if document.problem:
            if corpus.on_error == "fail":
                raise ValueError(document.refusal())
            quarantine.add(document)
            bad += 1
            continue
        run.places.append(place)
        run.tokens.append(tokens)
        run.text_bytes.append(len(document.content))
        run.size += tokens.nbytes + _DOCUMENT_BYTES
        remaining.append(text)
    if remaining and (corpus.exact_dedup or corpus.near_dedup):
        words = [text.lower().split() for text in remaining]
        if corpus.exact_dedup:
            # A 64-bit hash of each document's words, [D]. Among a hundred million different documents, the probability
            # of any collision is 3 in 10,000.
            digests = [hashlib.blake2b(" ".join(each).encode(), digest_size=8).digest() for each in words]
            run.exact.append(np.frombuffer(b"".join(digests), "<u8").astype(np.uint64))
        if corpus.near_dedup:
            run.bands.append(minhash_keys(words, corpus.near_dedup))
    size = sum(len(document.content) for document in batch if not document.problem)
    return Counts(read=len(chosen) + filtered.total(), bad=bad, filtered=dict(filtered), bytes=size)


def _write(run: _Run, folder: TokenFolder, task: FileTask, number: int) -> str:
    # The digest keeps these files apart from any that another, just stopped build may still be writing.
    name = f"{BUILDING}/{task.digest[:12]}-{task.number:05}-{number:03}"
    seed = task.corpus.seed.to_bytes(8, "little")
    positions = (f"{task.number}/{place}".encode() for place in run.places)
    digests = (hashlib.blake2b(position, key=seed, digest_size=8).digest() for position in positions)
    keys = np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64, len(run.places))
    order = np.argsort(keys, kind="stable")
    with NewFile(folder, f"{name}.bin") as stream:
        for place in order:
            stream.write(run.tokens[place].astype(run.tokens[place].dtype.newbyteorder("<"), copy=False).tobytes())
    fraction = task.corpus.validation_fraction
    columns = {
        # The lower bits of a document's number are its index in the file.
        "document": (np.array(run.places, np.int64) | task.number << 32)[order],
        "key": keys[order],
        "validation": np.array([part_of(task.number, place, fraction) == "validation" for place in run.places])[order],
        "tokens": np.array([len(tokens) for tokens in run.tokens], np.int64)[order],
        "text_bytes": np.array(run.text_bytes, np.int64)[order],
    }
    if run.exact:
        columns["exact"] = np.concatenate(run.exact)[order]
    if run.bands:
        columns |= {f"band_{band}": each[order] for band, each in enumerate(np.concatenate(run.bands).T)}
    table, sink = pa.table(columns), io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    folder.write(f"{name}.arrow", sink.getvalue())
    return name


def read_tables(folder: TokenFolder, runs: Sequence[str], columns: Sequence[str]) -> Iterator[dict[str, _Array]]:
    """Yield columns of each run's table."""
    for content in folder.read_each([f"{run}.arrow" for run in runs]):
        with pa.ipc.open_file(pa.BufferReader(content)) as reader:
            table = reader.read_all().select(list(columns))
        yield {name: table[name].to_numpy() for name in columns}


# Where the keys of documents are, by which duplicates are found (``duplicates``).

EXACT_COLUMNS = ("exact",)  # documents with the same words share its key

ROWS_AT_ONCE = 1 << 25  # keys per partition, of 16 bytes each with its document


class KeyColumns(NamedTuple):
    """Where to find keys.

    Attributes:
        folder: The folder of tokens.
        runs: The runs whose tables have them.
        documents: The number of documents of each run, or an upper bound.
        names: The names of the key columns.
        partitions: The number of partitions of the keys, each of which is searched separately.
    """

    folder: str
    runs: tuple[str, ...]
    documents: tuple[int, ...]
    names: tuple[str, ...]
    partitions: int


def keys_of(columns: KeyColumns, runs: Sequence[str], partition: int | None = None) -> tuple[Keys, Documents]:
    """All keys of some runs and their documents, or those in one partition: both [N]."""
    keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for table in read_tables(TokenFolder(columns.folder), runs, ("document", *columns.names)):
        of_run = np.concatenate([table[name].astype(np.uint64) for name in columns.names])
        which = np.tile(table["document"].astype(np.int64), len(columns.names))
        if partition is not None and columns.partitions > 1:
            chosen = of_run % np.uint64(columns.partitions) == partition
            of_run, which = of_run[chosen], which[chosen]
        keys.append(of_run)
        documents.append(which)
    return np.concatenate(keys), np.concatenate(documents)


# Writes one pair of shards: the documents in a range of the shuffle's keys, from all runs and in order.

DROPPED = f"{BUILDING}/dropped.bin"
_PAIR = BUILDING + "/shards-{:05}.json"  # the record of a pair of shards

_PARTS: tuple[Part, ...] = get_args(Part)
_COLUMNS = ("document", "key", "validation", "text_bytes")


def write_shards(url: str, of: int, runs: Sequence[str], dtype: str, inputs: str, number: int) -> ShardPair:
    """Write a pair of shards, then its record.

    Args:
        url: The folder of tokens.
        of: Number of pairs.
        runs: All runs.
        dtype: Data type of tokens.
        inputs: Digest of everything the pair is made from.
        number: Its index among the pairs.

    Raises:
        OSError: The runs cannot be read, or the shards cannot be written.
    """
    folder = TokenFolder(url)
    dropped = np.frombuffer(folder.read(DROPPED), "<i8")
    # The keys at which the pair's range begins and ends; the last range extends to the largest key.
    low, high = (place * 2**64 // of for place in (number, number + 1))
    bounds = np.array([low, min(high, 2**64 - 1)], np.uint64)
    columns: list[tuple[_Array, ...]] = []
    of_token = np.dtype(dtype).newbyteorder("<")
    tokens: list[Tokens] = []
    for run, table in zip(runs, read_tables(folder, runs, (*_COLUMNS, "tokens")), strict=True):
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
    with ExitStack() as stack:
        shards = {part: stack.enter_context(ShardFile(folder, part, number)) for part in _PARTS}
        for place in np.lexsort((documents, keys)):
            part: Part = "validation" if validation[place] else "training"
            shards[part].append(tokens[place], int(text_bytes[place]))
    records = tuple(ShardRecord.model_validate(shard, from_attributes=True) for shard in shards.values())
    pair = ShardPair(inputs=inputs, shards=records)
    folder.write(_PAIR.format(number), pair.model_dump_json().encode())
    return pair


# The whole build.

T = TypeVar("T")
R = TypeVar("R")


class Engine(Protocol):
    """Runs functions, possibly in parallel and elsewhere. Results do not depend on the engine."""

    def map(self, work: Callable[[T], R], items: Sequence[T], sizes: Sequence[int] | None = None) -> Iterator[R]:
        """Yield a function's result for each item, in any order; the first error ends it.

        Args:
            work: The function.
            items: What it is called with.
            sizes: Bytes of each item, so that small ones may share a task; ``None``: all are large.
        """

    def ties(self, columns: KeyColumns) -> Iterator[Ties]:
        """Yield the ties between all documents that share a key."""


_TOKENIZER = "tokenizer.json"

Stage = Literal["files", "duplicates", "shards", "done"]


class BuildProgress(NamedTuple):
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
        self._tokenizer = open_tokenizer(corpus.tokenizer, corpus.end_of_document)
        self._files = list_files(corpus.source, new=False)
        # Equal whenever the same documents give the same tokens.
        settings = corpus.model_dump_json(exclude={"source": {"paths"}, "tokenizer": True, "on_error": True})
        self._digest = hashlib.sha256(f"{ALGORITHM}\n{self._tokenizer.sha256}\n{settings}".encode()).hexdigest()

    def run(self) -> Lineage:
        """Build the corpus or resume its build; a finished one is left as it is.

        Raises:
            ValueError: The folder holds tokens of something else, a document is bad and bad ones are not skipped, or
                no documents are left.
            OSError: A file cannot be read or written.
        """
        folder = TokenFolder(self.folder)
        index, files, building = index_of(self.folder), folder.filesystem, f"{folder.path}/{BUILDING}"
        if index is None:
            files.makedirs(building, exist_ok=True)
            if self._tokenizer.content:
                folder.write(_TOKENIZER, self._tokenizer.content)
            finished = self._make(folder)
            folder.write(LINEAGE, finished.model_dump_json(indent=2).encode())
            dtype: Any = self._tokenizer.dtype.name
            index = TokenIndex(
                dtype=dtype, vocabulary=self._tokenizer.vocabulary, end_of_document=self._tokenizer.end_of_document,
                tokenizer=self._tokenizer.sha256, documents=finished.counts.kept, skipped=finished.counts.bad,
                shards=tuple(Shard.model_validate(each, from_attributes=True) for each in finished.shards),
                source=self._digest, cursor=Cursor(file=len(finished.files)), complete=True,
            )  # fmt: skip
            folder.write(INDEX, index.model_dump_json(indent=2).encode())
        else:
            if index.source != self._digest:
                others = "another tokenizer, filters, split, seed or other settings"
                raise ValueError(f"{self.folder} has tokens from {others}; give the same as before, or another folder")
            folder.refuse_skipped(index.skipped, self.corpus.on_error)
            finished = Lineage.model_validate_json(folder.read(LINEAGE))
            stored = {SourceFile(file.file, file.size, file.stamp) for file in finished.files}
            if different := sorted(file.url for file in stored ^ set(self._files)):
                problem = f"{self.folder} is complete, and {different[0]} was added, removed or changed since"
                raise ValueError(f"{problem}; undo that, or tokenize into another folder")
        if files.exists(building):
            files.rm(literal(files, building), recursive=True)
        self._counts = finished.counts
        self._tell("done", len(finished.shards), len(finished.shards))
        return finished

    def _make(self, folder: TokenFolder) -> Lineage:
        records = self._prepare(folder)
        runs = tuple(run for record in records for run in record.runs)
        self._tell("duplicates", 0, 1)
        documents, tied = tuple(record.counts.read for record in records for _ in record.runs), list[Documents]()
        bands = self.corpus.near_dedup.bands if self.corpus.near_dedup else 0
        of_exact = EXACT_COLUMNS if self.corpus.exact_dedup else ()
        for names in (of_exact, tuple(f"band_{band}" for band in range(bands))):
            partitions = max(1, -(-self._counts.read * len(names) // ROWS_AT_ONCE))  # each of which fits into memory
            columns = KeyColumns(self.folder, runs, documents, names, partitions)
            tied.append(not_the_first(self.engine.ties(columns)) if names else np.zeros(0, np.int64))
        exact, near = tied
        dropped, training_tokens = np.union1d(exact, near).astype("<i8"), 0
        folder.write(DROPPED, dropped.tobytes())

        for table in read_tables(folder, runs, ("document", "validation", "tokens")):
            training = ~table["validation"].astype(bool) & ~np.isin(table["document"], dropped)
            training_tokens += int(table["tokens"][training].sum())
        of = max(1, -(-training_tokens // self.corpus.shard_tokens))
        ingredients = [self._digest, dropped.tobytes().hex(), *(record.model_dump_json() for record in records)]
        inputs = hashlib.sha256("\n".join(ingredients).encode()).hexdigest()
        pairs, missing, there = dict[str, ShardPair](), list[int](), folder.names_in(BUILDING)
        for number in range(of):
            name = _PAIR.format(number)
            content = folder.read(name) if name in there else b""
            pair = ShardPair.model_validate_json(content) if content else None
            if pair is not None and pair.inputs == inputs:
                pairs[pair.shards[0].name] = pair
            else:
                missing.append(number)
        self._tell("shards", len(pairs), of)
        write = partial(write_shards, self.folder, of, runs, self._tokenizer.dtype.name, inputs)
        for pair in self.engine.map(write, missing):
            pairs[pair.shards[0].name] = pair
            self._tell("shards", len(pairs), of)
        shards = tuple(shard for name in sorted(pairs) for shard in pairs[name].shards)

        duplicates = {"exact_duplicates": len(exact), "near_duplicates": len(np.setdiff1d(near, exact))}
        kept = {"kept": sum(each.documents for each in shards), "tokens": sum(each.tokens for each in shards)}
        self._counts = self._counts.model_copy(update=duplicates | kept)
        tokenizer = TokenizerRecord(
            name=self.corpus.tokenizer, sha256=self._tokenizer.sha256, vocabulary=self._tokenizer.vocabulary,
            end_of_document=self._tokenizer.end_of_document,
        )  # fmt: skip
        packages = {"tokenizers": tokenizers.__version__, "pyarrow": pa.__version__}
        versions = {"boost": __version__, "python": platform.python_version(), **packages, "minhash": ALGORITHM}
        return Lineage(
            corpus=self.corpus, tokenizer=tokenizer, files=tuple(record.input for record in records),
            counts=self._counts, shards=shards, versions=versions,
        )  # fmt: skip

    def _prepare(self, folder: TokenFolder) -> list[FileRecord]:
        """Tokenize all files into runs."""
        tokenizer = f"{self.folder.rstrip('/')}/{_TOKENIZER}" if self._tokenizer.content else BYTES
        records, of, digest, there = dict[int, FileRecord](), len(self._files), self._digest, folder.names_in(BUILDING)
        files = enumerate(self._files)
        tasks = {number: FileTask(self.corpus, self.folder, tokenizer, digest, number, file) for number, file in files}
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
        self._counts = reduce(Counts.plus, (record.counts for record in records.values()), Counts())
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

    def _tell(self, stage: Stage, done: int, of: int) -> None:
        self.report(BuildProgress(stage, done, of, self._counts, self._read_bytes, time.monotonic() - self._began))
