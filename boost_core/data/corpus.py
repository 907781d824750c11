"""The training and held-out token streams of a source, byte by byte."""

from dataclasses import dataclass

import fsspec
import numpy as np
import numpy.typing as npt

from boost_core.config.data import DataConfig
from boost_core.config.sources import SourceFile, held_out_bytes, split_source

Tokens = npt.NDArray[np.uint8]

# Between files; text has no zero bytes.
DOCUMENT_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Two streams of byte-level tokens; ids are 0 … 255, and 0 ends a document."""

    training: Tokens
    held_out: Tokens


def load_corpus(data: DataConfig, sequence_length: int) -> Corpus:
    """Read a source into memory.

    Raises:
        ValueError: A path names no file, or there is too little text; see ``split_source``.
        OSError: A file cannot be read.
    """
    split = split_source(data, sequence_length)
    if not split.lone_file:
        return Corpus(_read(split.training), _read(split.held_out))
    tokens = _read(split.training)
    boundary = len(tokens) - held_out_bytes(len(tokens), data.held_out_fraction)
    return Corpus(tokens[:boundary], tokens[boundary:])


def unigram_entropy(tokens: Tokens) -> float:
    """Entropy of single tokens, −Σ p log p in nats: the loss of a model that knows their frequencies only."""
    counts = np.bincount(tokens)
    frequency = counts[counts > 0] / len(tokens)
    return float(-(frequency * np.log(frequency)).sum())


def _read(files: list[SourceFile]) -> Tokens:
    documents = []
    for file in files:
        with fsspec.open(file.url, "rb") as stream:
            documents.append(stream.read())
    return np.frombuffer(DOCUMENT_SEPARATOR.join(documents), dtype=np.uint8)
