"""Processes one file: reads, filters and tokenizes its documents into runs sorted by the shuffle's key.

A run is some 64 MiB of tokens and a table with a row per document: its number and shuffle key, its part, its numbers of
tokens and bytes of text, and the keys it shares with its duplicates. Axes: B bands.
"""

import functools
import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.data_files import Input, Part, SourceFile
from boost_core.config.training import CorpusConfig
from boost_core.data.documents import Document, QuarantineFile, Reading
from boost_core.data.pipeline.duplicates import Documents, Keys, minhash_keys
from boost_core.data.pipeline.filters import refusing
from boost_core.data.tokenize import TokenFolder, part_of
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
        measures = sorted({*self.filtered, *other.filtered})
        filtered = {each: self.filtered.get(each, 0) + other.filtered.get(each, 0) for each in measures}
        return Counts(**added, filtered=filtered)


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


_RUN_BYTES = 64 << 20  # size of tokens at which a run is written
_DOCUMENT_BYTES = 400  # memory per document besides its tokens


@dataclass(frozen=True)
class FileTask:
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
    tokenizer = _opened(task.tokenizer, task.corpus.end_of_document)
    counts, runs, run = Counts(), list[str](), _Run()
    with folder.quarantine(task.number) as quarantine:
        first = 0
        for batch in batches(reading):
            counts = counts.plus(_add(run, batch, first, task.corpus, tokenizer, quarantine))
            first = reading.count
            if run.size >= _RUN_BYTES:
                runs.append(_write(run, folder, task, len(runs)))
                run = _Run()
    if run.places:
        runs.append(_write(run, folder, task, len(runs)))
    record = FileRecord(
        corpus=task.digest, number=task.number, input=reading.so_far(0, whole=True), runs=tuple(runs), counts=counts
    )
    folder.write(RECORD.format(task.number), record.model_dump_json().encode())
    return record


@functools.lru_cache(maxsize=1)
def _opened(name: str, end_of_document: str | None) -> Tokenizer:
    return open_tokenizer(name, end_of_document)


def _add(
    run: _Run, batch: Sequence[Document], first: int, corpus: CorpusConfig, tokenizer: Tokenizer,
    quarantine: QuarantineFile,
) -> Counts:  # fmt: skip
    """Add a batch's documents to a run, except bad ones and those that a filter drops."""
    filtered: dict[str, int] = {}
    chosen, places, texts = [], [], []
    for place, document in enumerate(batch, start=first):
        if not (document.content or document.problem):  # as of an empty file
            continue
        text = "" if document.problem else document.content.decode()
        measure = None if document.problem else refusing(text, corpus.filters)
        if measure is not None:
            filtered[measure] = filtered.get(measure, 0) + 1
            continue
        chosen.append(document)
        places.append(place)
        texts.append(text)
    bad, remaining = 0, []
    for place, text, (document, tokens) in zip(places, texts, encode(chosen, tokenizer), strict=True):
        if document.problem:
            if corpus.on_error == "fail":
                raise ValueError(document.refusal())
            quarantine.write(document)
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
    return Counts(read=len(chosen) + sum(filtered.values()), bad=bad, filtered=filtered, bytes=size)


def _write(run: _Run, folder: TokenFolder, task: FileTask, number: int) -> str:
    # The digest keeps these files apart from any that another, just stopped build may still be writing.
    name = f"{BUILDING}/{task.digest[:12]}-{task.number:05}-{number:03}"
    seed = task.corpus.seed.to_bytes(8, "little")
    digests = (
        hashlib.blake2b(f"{task.number}/{place}".encode(), key=seed, digest_size=8).digest() for place in run.places
    )
    keys = np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64, len(run.places))
    order = np.argsort(keys, kind="stable")
    with folder.open(f"{name}.bin") as stream:
        for place in order:
            stream.write(run.tokens[place].astype(run.tokens[place].dtype.newbyteorder("<"), copy=False).tobytes())
    parts = [part_of(task.number, place, task.corpus.validation_fraction) for place in run.places]
    columns = {
        # The lower bits of a document's number are its index in the file.
        "document": (np.array(run.places, np.int64) | task.number << 32)[order],
        "key": keys[order],
        "validation": np.array([part == "validation" for part in parts])[order],
        "tokens": np.array([len(tokens) for tokens in run.tokens], np.int64)[order],
        "text_bytes": np.array(run.text_bytes, np.int64)[order],
    }
    if run.exact:
        columns["exact"] = np.concatenate(run.exact)[order]
    if run.bands:
        columns |= {f"band_{band}": each[order] for band, each in enumerate(np.concatenate(run.bands).T)}
    folder.write(f"{name}.arrow", _as_arrow(pa.table(columns)))
    return name


def _as_arrow(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def read_tables(
    folder: TokenFolder, runs: Sequence[str], columns: Sequence[str]
) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Yield columns of each run's table."""
    for content in folder.read_each([f"{run}.arrow" for run in runs]):
        with pa.ipc.open_file(pa.BufferReader(content)) as reader:
            table = reader.read_all().select(list(columns))
        yield {name: table[name].to_numpy() for name in columns}


# Where the keys of documents are, by which duplicates are found (``duplicates``).

EXACT_COLUMNS = ("exact",)  # documents with the same words share its key

ROWS_AT_ONCE = 1 << 25  # keys per partition, of 16 bytes each with its document


@dataclass(frozen=True)
class KeyColumns:
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
