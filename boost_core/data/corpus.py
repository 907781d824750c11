"""The training and validation token streams of a job's sources."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt

from boost_core.config import data_files
from boost_core.config.data_files import Part, Shard, SourceFile, TokenIndex, distinct_folders, list_files, read_index
from boost_core.config.storage import Disk, options_at
from boost_core.config.training import MIXTURE_PERIOD, DataConfig, SourceConfig
from boost_core.data.tokenizers import Tokenizer, Tokens, batches, encode, open_tokenizer

# A node's cache of token shards from object stores: one copy, which all ranks and jobs on the node map.
#
# Whoever maps a shard holds a shared lock on its file, which the kernel drops with the mapping, however the process
# ends.
# Shards that nobody maps stay for later jobs as long as they take little of the disk.

_UNUSED_SHARE = 0.1  # of the disk, for shards that nobody maps
_POLL_SECONDS = 0.2
_OTHER_SIZE = "{} has {:,} bytes instead of {:,}; make the tokens again"


def map_shard(folder: str, index: TokenIndex, shard: Shard) -> "np.memmap[Any, np.dtype[Any]]":
    """Map a shard's tokens into memory, from the node's cache if the folder is not on a disk.

    Args:
        folder: Path or URL of the folder of tokens.
        index: The folder's index.
        shard: One of its shards, not empty.

    Raises:
        OSError: It cannot be read, or the cache's disk is full.
        ValueError: It is missing on this node's disk, or has another size than the index says.
    """
    dtype = np.dtype(index.dtype).newbyteorder("<")
    filesystem, path = fsspec.url_to_fs(folder, **options_at(folder, None))
    name, size = f"{path.rstrip('/')}/{shard.name}", shard.tokens * dtype.itemsize
    if isinstance(filesystem, Disk):
        try:
            with filesystem.open(name, "rb") as stream:
                if (actual := os.fstat(stream.fileno()).st_size) != size:
                    raise ValueError(_OTHER_SIZE.format(name, actual, size))
                return np.memmap(stream, dtype, "r", shape=(shard.tokens,))
        except FileNotFoundError as error:
            raise ValueError(f"{name} is missing on this node; name a folder that every node can read") from error
    # Other tokens at the same URL have other digests, or in folders older than those another index. Tenants may have
    # several stores.
    place, content = f"{getattr(filesystem, 'endpoint', '')}\n{folder}", shard.sha256 or index.model_dump_json()
    digest = hashlib.sha256(f"{place}\n{content}\n{shard.name}".encode()).hexdigest()
    cache = Path(tempfile.gettempdir()) / f"boost-tokens-{os.geteuid()}"
    cache.mkdir(mode=0o700, exist_ok=True)
    status = cache.lstat()
    if not cache.is_dir() or cache.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{cache} is not a folder that only this user can use; remove it, or set another TMPDIR")
    cached = cache / digest
    while True:
        with suppress(FileNotFoundError), cached.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
            os.utime(stream.fileno())
            # The mapping duplicates the descriptor, and with it the lock.
            return np.memmap(stream, dtype, "r", shape=(shard.tokens,))
        _copy(filesystem, name, size, cached)


def _copy(filesystem: fsspec.AbstractFileSystem, name: str, size: int, cached: Path) -> None:
    """Copy a shard into the cache, or wait until another process has."""
    part = cached.with_suffix(".part")
    with part.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
            return
        with suppress(FileNotFoundError):
            if cached.exists() or not os.path.samestat(part.stat(), os.fstat(stream.fileno())):
                return  # another process was faster
        # The shards that were not used for the longest go until what is left unused and the new one have room.
        cache, unused = cached.parent, []
        for path in cache.iterdir():
            with suppress(OSError), path.open("rb") as there:  # it was just removed, or is mapped
                fcntl.flock(there, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(there.fileno())
                unused.append((status.st_mtime, status.st_size, path))
        total, disk = sum(of_file for _, of_file, _ in unused), shutil.disk_usage(cache)
        for _, of_file, path in sorted(unused):
            if shutil.disk_usage(cache).free >= size and total <= _UNUSED_SHARE * disk.total:
                break
            path.unlink(missing_ok=True)
            total -= of_file
        if (free := shutil.disk_usage(cache).free) < size:
            raise OSError(
                f"{cache} has {free / 1e9:,.3f} GB free, and a shard of tokens takes {size / 1e9:,.3f} GB; make room, "
                "or set TMPDIR to a folder on a larger disk"
            )
        try:
            filesystem.get_file(name, str(part))
        except OSError as error:
            part.unlink()
            raise OSError(
                error.errno,
                f"cannot copy {name} to {part}, of which nothing is left: {error.strerror or error}; if that disk is "
                "full, make room or set TMPDIR to a folder on a larger one",
            ) from error
        if (actual := part.stat().st_size) != size:
            part.unlink()
            raise ValueError(_OTHER_SIZE.format(name, actual, size))
        part.rename(cached)


# A long sequence of tokens in one or more pieces, with random access.

_MOST_COUNTED = 2**26  # tokens of a stream


class TokenStream:
    """A concatenation of pieces, which may be memory-mapped files and are not copied.

    Args:
        pieces: The pieces, none of them empty.
        text_bytes: Size of the text they came from, in UTF-8; ``None`` if unknown.

    Attributes:
        bytes_per_token: Mean bytes of text per token; ``None`` if unknown.
    """

    def __init__(self, pieces: Sequence[Tokens], text_bytes: float | None = None) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(map(len, pieces)))
        self.bytes_per_token = None if text_bytes is None else text_bytes / len(self)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The tokens from position ``begin`` up to ``end``."""
        parts, place = [], begin
        while place < end:
            index = bisect_right(self._ends, place)
            first = self._ends[index] - len(self._pieces[index])
            parts.append(self._pieces[index][place - first : end - first])
            place = self._ends[index]
        return np.concatenate(parts).astype(np.int64)

    def counts(self) -> npt.NDArray[np.int64]:
        """Number of occurrences of each token id, from 0 to the largest, in as much as is counted in a moment."""
        rooms = [_MOST_COUNTED - end + len(piece) for piece, end in zip(self._pieces, self._ends, strict=True)]
        return _sum([np.bincount(piece[:room]) for piece, room in zip(self._pieces, rooms, strict=True) if room > 0])


def _sum(counts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The sum of counts, each from token 0 to the largest that it has."""
    total = np.zeros(max(map(len, counts)), np.int64)
    for each in counts:
        total[: len(each)] += each
    return total


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


def load_corpus(data: DataConfig, sequence_length: int, indices: Mapping[str, TokenIndex] | None = None) -> Corpus:
    """Tokenize all sources into memory, or map sources that are already tokenized.

    Args:
        data: The sources.
        sequence_length: Tokens per sequence.
        indices: The indices of the folders of tokens, by path, as ``check_data`` returns them; read if ``None``.

    Raises:
        ValueError: A path names no file, a document cannot be used, there is too little text, or tokenized sources
            were made by different tokenizers; see ``check_data``.
        OSError: A file cannot be read.
    """
    if data.tokenized:
        sources = [*(source for source, _ in data.sources), *data.validation]
        if indices is None:
            indices = {path: read_index(path) for source in sources for path in distinct_folders(source.paths)}
        data_files.refuse_mixed(indices)
        mapped = tuple(
            Stream(_mapped_part(source, "training", indices), _mapped_part(source, "validation", indices), weight)
            for source, weight in data.sources
        )
        sets = {named.name: _mapped_part(named, "validation", indices) for named in data.validation}
        return Corpus(mapped, next(iter(indices.values())).end_of_document, sets)

    tokenizer = open_tokenizer(data.tokenizer, data.end_of_document)
    streams = []
    for source, weight in data.sources:
        split = data_files.split_source(source, data.validation_fraction, sequence_length, new=False)
        training, text_bytes = _tokens_of(split.training, source, tokenizer)
        if split.lone_file:
            boundary = len(training) - data_files.validation_tail(len(training), data.validation_fraction)
            training, validation = training[:boundary], training[boundary:]
            # The boundary is between two tokens; the tail is assumed to have its share of the file's bytes.
            text_bytes *= len(validation) / max(len(training) + len(validation), 1)
        else:
            validation, text_bytes = _tokens_of(split.validation, source, tokenizer)
        for part, tokens in (("training", training), ("validation", validation)):
            data_files.refuse_too_little(part, len(tokens), "tokens", sequence_length)
        streams.append(Stream(TokenStream([training]), TokenStream([validation], text_bytes), weight))
    validation_sets = {}
    for named in data.validation:
        tokens, text_bytes = _tokens_of(list_files(named, new=False), named, tokenizer)
        data_files.refuse_too_little(f"validation ({named.name})", len(tokens), "tokens", sequence_length)
        validation_sets[named.name] = TokenStream([tokens], text_bytes)
    return Corpus(tuple(streams), tokenizer.end_of_document, validation_sets)


def unigram_entropy(corpus: Corpus) -> float:
    """Entropy of single validation tokens, −Σ p log p in nats: the loss of a model that knows only frequencies."""
    counts = _sum([stream.validation.counts() for stream in corpus.streams])
    frequency = counts[counts > 0] / counts.sum()
    return float(-(frequency * np.log(frequency)).sum())


def _tokens_of(files: Sequence[SourceFile], source: SourceConfig, tokenizer: Tokenizer) -> tuple[Tokens, float]:
    """All documents' tokens in sequence, with end-of-document tokens between them, and the bytes of their text."""
    from boost_core.data.documents import documents  # with pyarrow, which ranks that read shards of tokens do without

    parts, text_bytes = [np.array([], tokenizer.dtype)], 0.0
    for file in files:
        for batch in batches(documents(file, source)):
            for document, tokens in encode(batch, tokenizer):
                if document.problem:
                    remedy = "; or tokenize beforehand with: boost data tokenize --on-error skip"
                    raise ValueError(document.refusal(remedy))
                if document.content:  # as `boost data tokenize` does
                    parts.append(tokens)
                text_bytes += len(document.content)
    return np.concatenate(parts)[:-1], text_bytes


def _mapped_part(source: SourceConfig, part: Part, indices: Mapping[str, TokenIndex]) -> TokenStream:
    """One part of a source's shards, mapped into memory."""
    pieces, text_bytes = [], []
    # Only the first name of each folder has an index; on another node, a link may be a folder by itself.
    for folder in filter(indices.__contains__, distinct_folders(source.paths)):
        index = indices[folder]
        for shard in index.shards:
            if shard.part == part and shard.tokens:
                text_bytes.append(shard.text_bytes)
                pieces.append(map_shard(folder, index, shard))
    known = [each for each in text_bytes if each is not None]
    return TokenStream(pieces, sum(known) if len(known) == len(pieces) else None)


# The tokens of the sample with a given global index, as a pure function, so that resuming needs only one number.


Sequences = npt.NDArray[np.int64]


class Windows:
    """One source's windows of ``sequence_length + 1`` tokens, overlapping by one and reshuffled each epoch.

    Sample i is window ``permutation[i mod n]`` of epoch ``i div n``.

    Args:
        tokens: The source's training tokens.
        sequence_length: Tokens per sequence.
        seed: Seed of the permutations, together with the epoch's number.
    """

    def __init__(self, tokens: TokenStream, sequence_length: int, seed: Sequence[int]) -> None:
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self.count = (len(tokens) - 1) // sequence_length
        self._epoch = -1
        self._permutation: npt.NDArray[np.unsignedinteger[Any]] = np.empty(0, dtype=np.uint8)

    def sequence(self, sample: int) -> Sequences:
        """A sample, ``[sequence_length + 1]``."""
        epoch, place = divmod(sample, self.count)
        if epoch != self._epoch:
            self._permutation = np.arange(self.count, dtype=np.min_scalar_type(self.count))  # each rank holds it
            np.random.default_rng((*self._seed, epoch)).shuffle(self._permutation)
            self._epoch = epoch
        begin = int(self._permutation[place]) * self._length
        return self._tokens.read(begin, begin + self._length + 1)


class Sampler:
    """The samples of a job, which take turns among its sources by weight.

    The order of sources repeats every 4096 samples, so each stretch of that length has every source's share to within
    1/4096. A job's data cursor is the number of samples it has consumed, whatever the number of workers.

    Args:
        corpus: The sources.
        sequence_length: Tokens per sequence.
        seed: The job's seed.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int) -> None:
        texts = [stream.training for stream in corpus.streams]
        seeds = [(seed, number) if number else (seed,) for number in range(len(texts))]
        self._sources = [Windows(text, sequence_length, own) for text, own in zip(texts, seeds, strict=True)]
        self._pattern = turns([stream.weight for stream in corpus.streams], MIXTURE_PERIOD)
        self._counts = np.bincount(self._pattern, minlength=len(self._sources))
        self._before = np.empty_like(self._pattern)  # for each turn, the number of earlier turns of the same source
        for source in np.unique(self._pattern):
            turns_of_source = np.flatnonzero(self._pattern == source)
            self._before[turns_of_source] = np.arange(len(turns_of_source))
        self._newest: tuple[tuple[int, int], Sequences] | None = None

    def sequences(self, first_sample: int, count: int) -> Sequences:
        """Samples ``first_sample`` … ``first_sample + count − 1`` as ``[count, sequence_length + 1]``.

        The newest batch is kept, so that a caller that has prefetched it need not wait for it to be read again.
        """
        if self._newest is None or self._newest[0] != (first_sample, count):
            batch = []
            for sample in range(first_sample, first_sample + count):
                period, place = divmod(sample, len(self._pattern))
                source = self._pattern[place]
                number = int(period * self._counts[source] + self._before[place])
                batch.append(self._sources[int(source)].sequence(number))
            self._newest = (first_sample, count), np.stack(batch)
        return self._newest[1]


def turns(weights: Sequence[float], period: int) -> npt.NDArray[np.int64]:
    """Source numbers in the order of their turns, each as often as its weight requires and spread evenly.

    Args:
        weights: A weight for each source; none less than 1/period of their sum.
        period: Total number of turns.
    """
    if len(weights) == 1:
        return np.zeros(1, np.int64)
    shares = np.array(weights) / sum(weights) * period
    counts = np.floor(shares).astype(np.int64)
    for source in np.argsort(counts - shares, kind="stable")[: period - counts.sum()]:
        counts[source] += 1
    # Turn j of n is due at (j + 1/2)/n of the period.
    due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(weights)), counts)[np.argsort(due, kind="stable")]


def replica_share(first_sample: int, global_batch_size: int, part: int, parts: int) -> tuple[int, int]:
    """First sample and number of samples of one replica's share of a step.

    Args:
        first_sample: First sample of the step's global batch.
        global_batch_size: Samples per step; a multiple of ``parts``.
        part: Number of the replica, from 0.
        parts: Number of replicas.
    """
    share = global_batch_size // parts
    return first_sample + share * part, share


@dataclass(frozen=True)
class EvaluationSet:
    """Windows to evaluate on, the same each time.

    Attributes:
        windows: For each window, the tokens it is taken from and its number among their windows.
        sequence_length: Tokens per sequence.
    """

    windows: Sequence[tuple[TokenStream, int]]
    sequence_length: int

    @classmethod
    def of(cls, parts: Sequence[tuple[TokenStream, float]], sequence_length: int, sequences: int) -> "EvaluationSet":
        """Choose the given number of windows, or all if there are fewer.

        Args:
            parts: The tokens, each with the weight that sets its share of the windows, which are spread evenly over it.
            sequence_length: Tokens per sequence.
            sequences: Windows in the whole set.
        """
        total = sum(weight for _, weight in parts)
        shares = np.cumsum([0.0] + [weight / total for _, weight in parts])
        windows: list[tuple[TokenStream, int]] = []
        bounds = np.rint(shares * sequences).astype(int).tolist()
        for (tokens, _), (low, high) in zip(parts, pairwise(bounds), strict=True):
            available = (len(tokens) - 1) // sequence_length
            spread = np.linspace(0, available - 1, min(high - low, available))
            windows += [(tokens, window) for window in np.unique(spread.astype(np.int64)).tolist()]
        return cls(windows, sequence_length)

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text per token; ``None`` if they are unknown for some windows."""
        known = [tokens.bytes_per_token for tokens, _ in self.windows if tokens.bytes_per_token is not None]
        return sum(known) / len(known) if len(known) == len(self.windows) else None

    def batches(self, batch_size: int, part: int, parts: int) -> Iterator[Sequences]:
        """Yield one rank's part of the set, in batches.

        Args:
            batch_size: Windows per batch; the last batch of a part may be smaller.
            part: Number of the part, from 0.
            parts: Number of parts.
        """
        windows, length = self.windows[part::parts], self.sequence_length
        for first in range(0, len(windows), batch_size):
            batch = windows[first : first + batch_size]
            yield np.stack([tokens.read(number * length, (number + 1) * length + 1) for tokens, number in batch])
