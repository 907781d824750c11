"""The training and validation token streams of a job's sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from boost_core.config.data import DataConfig, SourceConfig, ValidationSet
from boost_core.config.sources.files import SourceFile, list_files, refuse_too_little, split_source, validation_tail
from boost_core.config.sources.tokenized import Part, TokenIndex, read_index
from boost_core.data.encode import batches, encode
from boost_core.data.shard_cache import map_shard
from boost_core.data.stream import TokenStream
from boost_core.data.tokenizers import Tokenizer, Tokens, dtype_for, open_tokenizer


@dataclass(frozen=True)
class Stream:
    """One source's tokens.

    Attributes:
        training: The tokens to train on.
        validation: The tokens to validate on.
        weight: The source's share of the samples, relative to the others.
    """

    training: TokenStream
    validation: TokenStream
    weight: float


@dataclass(frozen=True)
class Corpus:
    """All sources of a job.

    Attributes:
        streams: The tokens of each source.
        end_of_document: The token that ends a document.
        validation: The tokens of the named sets to validate on.
    """

    streams: tuple[Stream, ...]
    end_of_document: int
    validation: Mapping[str, TokenStream] = field(default_factory=dict)


def load_corpus(data: DataConfig, sequence_length: int) -> Corpus:
    """Tokenize all sources into memory, or map sources that are already tokenized.

    Raises:
        ValueError: A path names no file, a document cannot be used, there is too little text, or tokenized sources
            were made by different tokenizers; see ``check_data``.
        OSError: A file cannot be read.
    """
    if data.tokenized:
        return _mapped(data)
    tokenizer = open_tokenizer(data.tokenizer, data.end_of_document)
    streams = tuple(
        Stream(*_tokenized(source, data.validation_fraction, sequence_length, tokenizer), weight)
        for source, weight in data.sources
    )
    validation = {named.name: _whole(named, sequence_length, tokenizer) for named in data.validation}
    return Corpus(streams, tokenizer.end_of_document, validation)


def unigram_entropy(corpus: Corpus) -> float:
    """Entropy of single validation tokens, −Σ p log p in nats: the loss of a model that knows only frequencies."""
    of_streams = [stream.validation.counts() for stream in corpus.streams]
    counts = np.zeros(max(map(len, of_streams)))
    for of_stream in of_streams:
        counts[: len(of_stream)] += of_stream
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


def _tokenized(
    source: SourceConfig, validation_fraction: float, sequence_length: int, tokenizer: Tokenizer
) -> tuple[TokenStream, TokenStream]:
    split = split_source(source, validation_fraction, sequence_length)
    training, text_bytes = _tokens_of(split.training, source, tokenizer)
    if split.lone_file:
        boundary = len(training) - validation_tail(len(training), validation_fraction)
        training, validation = training[:boundary], training[boundary:]
        # The boundary is between two tokens; the tail is assumed to have its share of the file's bytes.
        text_bytes *= len(validation) / max(len(training) + len(validation), 1)
    else:
        validation, text_bytes = _tokens_of(split.validation, source, tokenizer)
    for part, tokens in (("training", training), ("validation", validation)):
        refuse_too_little(part, len(tokens), "tokens", sequence_length)
    return TokenStream([training]), TokenStream([validation], text_bytes)


def _whole(named: ValidationSet, sequence_length: int, tokenizer: Tokenizer) -> TokenStream:
    tokens, text_bytes = _tokens_of(list_files(named), named, tokenizer)
    refuse_too_little(f"validation ({named.name})", len(tokens), "tokens", sequence_length)
    return TokenStream([tokens], text_bytes)


def _tokens_of(files: Sequence[SourceFile], source: SourceConfig, tokenizer: Tokenizer) -> tuple[Tokens, float]:
    """All documents' tokens in sequence, with end-of-document tokens between them, and the bytes of their text."""
    from boost_core.data.documents import documents  # with pyarrow, which ranks that read shards of tokens do without

    parts, text_bytes = [np.array([], dtype_for(tokenizer.vocabulary))], 0.0
    for file in files:
        for batch in batches(documents(file, source)):
            for document, tokens in encode(batch, tokenizer):
                if document.problem:
                    raise ValueError(f"{document}; or tokenize beforehand with: boost data tokenize --on-error skip")
                parts.append(tokens)
                text_bytes += len(document.content)
    return np.concatenate(parts)[:-1], text_bytes


def _mapped(data: DataConfig) -> Corpus:
    sources = [*(source for source, _ in data.sources), *data.validation]
    indices = {path: read_index(path) for source in sources for path in source.paths}
    if len({(index.vocabulary, index.end_of_document) for index in indices.values()}) > 1:
        raise ValueError(f"{', '.join(indices)} were made by different tokenizers; make them all with the same one")
    streams = tuple(
        Stream(_mapped_part(source, "training", indices), _mapped_part(source, "validation", indices), weight)
        for source, weight in data.sources
    )
    validation = {named.name: _mapped_part(named, "validation", indices) for named in data.validation}
    return Corpus(streams, next(iter(indices.values())).end_of_document, validation)


def _mapped_part(source: SourceConfig, part: Part, indices: Mapping[str, TokenIndex]) -> TokenStream:
    """One part of a source's shards, mapped into memory."""
    pieces, text_bytes = [], []
    for folder in source.paths:
        index = indices[folder]
        for shard in index.shards:
            if shard.part == part and shard.tokens:
                text_bytes.append(shard.text_bytes)
                pieces.append(map_shard(folder, index, shard))
    known = [each for each in text_bytes if each is not None]
    return TokenStream(pieces, sum(known) if len(known) == len(pieces) else None)
