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

from boost_core.config.dataset import CorpusConfig
from boost_core.config.sources.files import SourceFile
from boost_core.data.documents import Document
from boost_core.data.encode import batches, encode
from boost_core.data.inputs import Reading
from boost_core.data.pipeline.filters import refusing
from boost_core.data.pipeline.records import BUILDING, Counts, FileRecord
from boost_core.data.pipeline.signatures import Keys, band_keys, exact_keys
from boost_core.data.token_folder import QuarantineFile, TokenFolder
from boost_core.data.tokenize import part_of
from boost_core.data.tokenizers import Tokenizer, Tokens, open_tokenizer

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
    folder.write(record_name(task.number), record.model_dump_json().encode())
    return record


def record_name(number: int) -> str:
    """The name of a file's record."""
    return f"{BUILDING}/file-{number:05}.json"


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
        text = "" if document.problem else document.content.decode()
        measure = None if document.problem else refusing(text, corpus.filters)
        if measure is not None:
            filtered[measure] = filtered.get(measure, 0) + 1
            continue
        chosen.append(document)
        places.append(place)
        texts.append(text)
    bad, kept = 0, []
    for place, text, (document, tokens) in zip(places, texts, encode(chosen, tokenizer), strict=True):
        if document.problem:
            _refuse(document, corpus)
            quarantine.write(document)
            bad += 1
            continue
        run.places.append(place)
        run.tokens.append(tokens)
        run.text_bytes.append(len(document.content))
        run.size += tokens.nbytes + _DOCUMENT_BYTES
        kept.append(text)
    _add_keys(run, kept, corpus)
    size = sum(len(document.content) for document in batch if not document.problem)
    return Counts(read=len(batch), bad=bad, filtered=filtered, bytes=size)


def _refuse(document: Document, corpus: CorpusConfig) -> None:
    if corpus.on_error == "fail":
        raise ValueError(
            f"{document}\nfix it and run the same command again, which continues with the files that are left; or "
            "leave bad documents out with --on-error skip"
        )


def _add_keys(run: _Run, texts: Sequence[str], corpus: CorpusConfig) -> None:
    if not texts or not (corpus.exact_dedup or corpus.near_dedup):
        return
    words = [text.lower().split() for text in texts]
    if corpus.exact_dedup:
        run.exact.append(exact_keys(words))
    if corpus.near_dedup:
        run.bands.append(band_keys(words, corpus.near_dedup))


def _write(run: _Run, folder: TokenFolder, task: FileTask, number: int) -> str:
    # The digest keeps these files apart from any that another, just stopped build may still be writing.
    name = f"{BUILDING}/{task.digest[:12]}-{task.number:05}-{number:03}"
    keys = np.fromiter(_shuffle_keys(task, run.places), np.uint64, len(run.places))
    order = np.argsort(keys, kind="stable")
    with folder.open(f"{name}.bin") as stream:
        for place in order:
            stream.write(run.tokens[place].astype(run.tokens[place].dtype.newbyteorder("<"), copy=False).tobytes())
    parts = [part_of(task.number, place, task.corpus.validation_fraction) for place in run.places]
    columns = {
        "document": (np.array(run.places, np.int64) | task.number << 32)[
            order
        ],  # the lower bits: its index in the file
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


def _shuffle_keys(task: FileTask, places: Sequence[int]) -> Iterator[int]:
    seed = task.corpus.seed.to_bytes(8, "little")
    for place in places:
        digest = hashlib.blake2b(f"{task.number}/{place}".encode(), key=seed, digest_size=8).digest()
        yield int.from_bytes(digest, "little")


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
