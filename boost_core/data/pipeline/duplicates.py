"""Finds documents that duplicate earlier ones. Axes: N pairs of a key and a document that has it.

Documents that share a key are tied to the first of them. Ties are transitive: of each connected component, only the
first document is kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from boost_core.data.pipeline.files import Keys, read_tables
from boost_core.data.token_folder import TokenFolder

EXACT_COLUMNS = ("exact",)  # documents with the same words share its key

ROWS_AT_ONCE = 1 << 25  # keys per partition, of 16 bytes each with its document

Documents = npt.NDArray[np.int64]


class Ties(NamedTuple):
    """Documents, and for each one an earlier document that shares a key with it: both [N]."""

    documents: Documents
    firsts: Documents


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


def together(parts: Iterator[Ties]) -> Ties:
    """Concatenate ties."""
    pairs = [Ties(np.zeros(0, np.int64), np.zeros(0, np.int64)), *parts]
    return Ties(np.concatenate([each.documents for each in pairs]), np.concatenate([each.firsts for each in pairs]))


def not_the_first(ties: Ties) -> Documents:
    """The documents that are connected to an earlier one, in order."""
    members, places = np.unique(np.concatenate(ties), return_inverse=True)
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
