"""Equal and nearly equal documents: the keys that they share, and which of them come after the first.

Documents that share a key are tied to the first of them. Ties are transitive: of each connected component, only the
first document is kept. Words are in lower case and separated by white space. MinHash is rensa's; bands are as in
Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, chapter 3. Axes: D documents, B bands, N pairs of a key and
a document that has it.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import rensa

from boost_core.config.training import NearDedup
from boost_core.data.pipeline.filters import split_words

Keys = npt.NDArray[np.uint64]
Documents = npt.NDArray[np.int64]

# Of words as well as of signatures: records of other ones are not continued.
ALGORITHM = f"rensa RMinHash {rensa.RMinHash.ALGORITHM_VERSION}, words by script"

_SEED = 0  # of the permutations; always the same, so that corpora can be compared
_SHINGLE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing


def minhash_keys(words: Sequence[Sequence[str]], near: NearDedup) -> Keys:
    """A key for each band of each document's MinHash signature: [D, B].

    Words of scripts without spaces are split further, see ``split_words``.
    """
    words = [split_words(" ".join(each)) for each in words]
    # Hashes of every few consecutive words, and each document's offset; its last ones have fewer words.
    counts = np.array([len(each) for each in words], np.uint64)
    offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(counts, dtype=np.uint64)])
    # Each document's words are padded with zeros, so that no shingle reaches into the next document.
    flags = np.tile(np.array([True, False]), len(words))
    lengths = np.stack([counts.astype(np.int64), np.full(len(words), near.shingle_words - 1)], axis=1)
    is_word = np.repeat(flags, lengths.ravel())
    hashes = chain.from_iterable(rensa.RMinHash.hash_token_sets(words))
    of_words = np.zeros(len(is_word), np.uint64)
    of_words[is_word] = np.fromiter(hashes, np.uint64, int(offsets[-1]))
    shingles = np.zeros(max(len(of_words) - near.shingle_words + 1, 0), np.uint64)
    for place in range(near.shingle_words):
        shingles = _mixed(shingles * _SHINGLE + of_words[place : place + len(shingles)])
    shingles = shingles[is_word[: len(shingles)]]
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(shingles, offsets, near.bands * near.rows, _SEED)
    signatures = np.array(matrix.to_rows(), np.uint64).reshape(len(words), near.bands, near.rows)
    keys = np.broadcast_to(np.arange(near.bands, dtype=np.uint64), (len(words), near.bands))
    for row in range(near.rows):
        keys = _mixed(keys ^ signatures[:, :, row])
    return keys


def _mixed(values: Keys) -> Keys:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014): each output bit depends on all input bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Ties(NamedTuple):
    """Documents, and for each one an earlier document that shares a key with it: both [N]."""

    documents: Documents
    firsts: Documents


def ties(keys: Keys, documents: Documents) -> Ties:
    """Tie documents that share a key to the first of them.

    Args:
        keys: [N]
        documents: [N]
    """
    order = np.lexsort((documents, keys))
    keys, documents = keys[order], documents[order]
    begins = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else np.zeros(0, np.int64)
    firsts = np.repeat(documents[begins], np.diff([*begins, len(keys)]))
    tied = documents != firsts
    return Ties(documents[tied], firsts[tied])


def not_the_first(parts: Iterable[Ties]) -> Documents:
    """The documents that are connected to an earlier one by any of the ties, in order."""
    pairs = [Ties(np.zeros(0, np.int64), np.zeros(0, np.int64)), *parts]
    ends = [each.documents for each in pairs] + [each.firsts for each in pairs]
    members, places = np.unique(np.concatenate(ends), return_inverse=True)
    documents, firsts = np.split(places, 2)
    labels = np.arange(len(members))
    while True:
        before = labels.copy()
        np.minimum.at(labels, documents, labels[firsts])
        np.minimum.at(labels, firsts, labels[documents])
        labels = labels[labels]  # halves the distance to the first
        if (labels == before).all():
            later: Documents = members[labels != np.arange(len(members))]
            return later
