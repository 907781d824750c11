"""Keys by which equal and nearly equal documents are found, because they have keys in common.

Words are in lower case and separated by white space. MinHash is rensa's; bands are as in Leskovec, Rajaraman and
Ullman, Mining of Massive Datasets, chapter 3. Axes: D documents, B bands.
"""

import hashlib
from collections.abc import Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import rensa

from boost_core.config.dataset import NearDedup
from boost_core.data.pipeline.filters import split_words

Keys = npt.NDArray[np.uint64]

# Of words as well as of signatures: records of other ones are not continued.
ALGORITHM = f"rensa RMinHash {rensa.RMinHash.ALGORITHM_VERSION}, words by script"

_SEED = 0  # of the permutations; always the same, so that corpora can be compared
_SHINGLE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


def exact_keys(words: Sequence[Sequence[str]]) -> Keys:
    """A 64-bit hash of each document's words: [D].

    Among a hundred million different documents, the probability of any collision is 3 in 10,000.
    """
    digests = [hashlib.blake2b(" ".join(each).encode(), digest_size=8).digest() for each in words]
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def band_keys(words: Sequence[Sequence[str]], near: NearDedup) -> Keys:
    """A key for each band of each document's MinHash signature: [D, B].

    Words of scripts without spaces are split further, see ``filters.split_words``.
    """
    words = [split_words(" ".join(each)) for each in words]
    shingles, offsets = _shingles(words, near.shingle_words)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, near.bands * near.rows, _SEED)
    signatures = np.array(matrix.to_rows(), np.uint64).reshape(len(words), near.bands, near.rows)
    keys = np.broadcast_to(np.arange(near.bands, dtype=np.uint64), (len(words), near.bands))
    for row in range(near.rows):
        keys = _mixed(keys ^ signatures[:, :, row])
    return keys


def _shingles(words: Sequence[Sequence[str]], length: int) -> tuple[Keys, Keys]:
    """Hashes of every ``length`` consecutive words, and each document's offset; its last ones have fewer words."""
    counts = np.array([len(each) for each in words], np.uint64)
    offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts, dtype=np.uint64)])
    # Each document's words are padded with zeros, so that no shingle reaches into the next document.
    is_word = _not_padding(counts, length - 1)
    hashes = chain.from_iterable(rensa.RMinHash.hash_token_sets(words))
    of_words = np.zeros(len(is_word), np.uint64)
    of_words[is_word] = np.fromiter(hashes, np.uint64, int(offsets[-1]))
    shingles = np.zeros(max(len(of_words) - length + 1, 0), np.uint64)
    for place in range(length):
        shingles = _mixed(shingles * _SHINGLE + of_words[place : place + len(shingles)])
    return shingles[is_word[: len(shingles)]], offsets


def _not_padding(counts: Keys, padding: int) -> npt.NDArray[np.bool_]:
    """Mask of the positions of words, where each document's words are followed by ``padding`` zeros."""
    flags = np.tile(np.array([True, False]), len(counts))
    return np.repeat(flags, np.stack([counts.astype(np.int64), np.full(len(counts), padding)], axis=1).ravel())


def _mixed(values: Keys) -> Keys:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): each output bit depends on all input bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
