"""Writes one pair of shards: the documents in a range of the shuffle's keys, from all runs and in order."""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from boost_core.config.sources.tokenized import Part
from boost_core.data.pipeline.files import read_tables
from boost_core.data.pipeline.records import BUILDING, ShardPair, ShardRecord
from boost_core.data.token_folder import TokenFolder
from boost_core.data.tokenizers import Tokens

_Array = npt.NDArray[Any]

DROPPED = f"{BUILDING}/dropped.bin"

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
    documents, keys, validation, text_bytes, tokens = _documents(task, folder)
    written = dict.fromkeys(_PARTS, 0)
    with ExitStack() as stack:
        shards = {part: stack.enter_context(folder.shard(part, task.number)) for part in _PARTS}
        for place in np.lexsort((documents, keys)):
            part: Part = "validation" if validation[place] else "training"
            shards[part].write(tokens[place], int(text_bytes[place]))
            written[part] += 1
    made = [
        ShardRecord(
            part=part, name=shard.name, tokens=shard.tokens, documents=written[part], text_bytes=shard.text_bytes,
            sha256=shard.sha256,
        )
        for part, shard in shards.items()
    ]  # fmt: skip
    pair = ShardPair(inputs=task.inputs, shards=tuple(made))
    folder.write(pair_name(task.number), pair.model_dump_json().encode())
    return pair


def pair_name(number: int) -> str:
    """The name of the record of a pair of shards."""
    return f"{BUILDING}/shards-{number:05}.json"


def _documents(task: ShardTask, folder: TokenFolder) -> tuple[_Array, _Array, _Array, _Array, list[Tokens]]:
    """The documents of a range that are not dropped: columns of the runs' tables, and their tokens."""
    dropped = np.frombuffer(folder.read(DROPPED), "<i8")
    columns: list[tuple[_Array, ...]] = []
    tokens: list[Tokens] = []
    for run, table in zip(task.runs, read_tables(folder, task.runs, (*_COLUMNS, "tokens")), strict=True):
        begin, end = np.searchsorted(table["key"], _bounds(task))
        kept = ~np.isin(table["document"][begin:end], dropped)
        columns.append(tuple(table[name][begin:end][kept] for name in _COLUMNS))
        tokens.extend(compress(_tokens(table["tokens"], begin, end, folder, f"{run}.bin", task.dtype), kept))
    documents, keys, validation, text_bytes = (np.concatenate(each) for each in zip(*columns, strict=True))
    return documents, keys, validation, text_bytes, tokens


def _bounds(task: ShardTask) -> _Array:
    """The keys at which a pair's range begins and ends; the last range extends to the largest key."""
    begin, end = (place * 2**64 // task.of for place in (task.number, task.number + 1))
    return np.array([begin, min(end, 2**64 - 1)], np.uint64)


def _tokens(counts: _Array, begin: int, end: int, folder: TokenFolder, name: str, dtype: str) -> list[Tokens]:
    """The tokens of a run's documents from ``begin`` up to ``end``, which are stored consecutively."""
    ends = np.cumsum(counts)
    first, last = (int(ends[place - 1]) if place else 0 for place in (begin, end))
    of_token = np.dtype(dtype).newbyteorder("<")
    content = folder.read_range(name, first * of_token.itemsize, last * of_token.itemsize)
    return np.split(np.frombuffer(content, of_token), ends[begin : end - 1] - first) if end > begin else []
