"""The index of a folder of tokens, as written by ``boost data tokenize``.

::

    <folder>/training-00000.bin …   token ids, little-endian; each document ends with its end-of-document token
    <folder>/validation-00000.bin …
    <folder>/inputs-00000.json …    which documents of which files the pair of shards holds
    <folder>/quarantine-00000.jsonl …  the documents that were skipped for that pair, if any
    <folder>/tokenizer.json         the tokenizer used, unless tokens are bytes
    <folder>/index.json             the finished shards; rewritten after each pair of shards

"""

from typing import Any, Literal

import fsspec
from pydantic import Field, ValidationError, field_validator

from boost_core.config.base import Config
from boost_core.config.parsing.small_files import Unreadable, read_small
from boost_core.config.parsing.stores import StoreUnusable
from boost_core.config.parsing.urls import StorageOptions, options_at

INDEX = "index.json"
_MOST_INDEX_BYTES = 16 * 2**20  # enough for some 200,000 shards

Part = Literal["training", "validation"]


class Shard(Config):
    """One file of tokens."""

    part: Part
    name: str = Field(pattern=r"^\w[\w.-]*$")  # in this folder: a path out of it is impossible
    tokens: int
    text_bytes: int | None = None  # size of the documents; missing in older folders

    @field_validator("part", mode="before")
    @classmethod
    def _read_old_name(cls, value: Any) -> Any:
        return "validation" if value == "held_out" else value  # its name in old folders


class Cursor(Config):
    """How far the input has been read: the file and document that come next."""

    file: int = 0
    document: int = 0


class Input(Config):
    """The part of one file that a pair of shards holds.

    Attributes:
        file: URL of the file.
        size: Its size in bytes.
        stamp: Changes when the file is written: its ETag or modification time.
        first: Index of the first document that the shards hold, counted from 0.
        end: Index after the last.
        digest: Digest of all the file's documents before ``end`` and the positions of bad ones.
        whole: Whether the file has no documents after that.
    """

    file: str
    size: int
    stamp: str
    first: int
    end: int
    digest: str
    whole: bool


class TokenIndex(Config):
    """The contents of a folder of tokens."""

    format: int = 1
    dtype: Literal["uint8", "uint16", "uint32"]
    vocabulary: int
    end_of_document: int
    documents: int = 0
    skipped: int = 0
    shards: tuple[Shard, ...] = ()
    source: str  # a digest of how documents become tokens, so that only the same run is resumed
    cursor: Cursor = Cursor()
    complete: bool = False

    def tokens(self, part: Part) -> int:
        """Number of tokens in one part."""
        return sum(shard.tokens for shard in self.shards if shard.part == part)


def read_index(folder: str, storage_options: StorageOptions | None = None) -> TokenIndex:
    """Read the index of a complete folder of tokens.

    Args:
        folder: Its path or URL.
        storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.

    Raises:
        ValueError: The index is missing or damaged, or the folder is not complete yet.
    """
    index = find_index(folder, storage_options)
    if index is None:
        raise ValueError(f"{folder!r} holds no tokens ({INDEX} is missing); make them with: boost data tokenize")
    if not index.complete:
        raise ValueError(f"{folder!r} is not complete; run the same boost data tokenize again to continue it")
    return index


def find_index(folder: str, storage_options: StorageOptions | None = None) -> TokenIndex | None:
    """Read the index of a folder of tokens, complete or not; ``None`` if there is none.

    Args:
        folder: Its path or URL.
        storage_options: Options for ``s3://``; default: the process's own.

    Raises:
        ValueError: The index is damaged, too large, not a regular file, or cannot be read.
    """
    try:
        filesystem, path = fsspec.url_to_fs(folder, **options_at(folder, storage_options))
        return TokenIndex.model_validate_json(read_small(filesystem, f"{path}/{INDEX}", _MOST_INDEX_BYTES))
    except FileNotFoundError:
        return None
    except (StoreUnusable, Unreadable):  # a store may come back
        raise
    except ValidationError as error:
        raise ValueError(f"{folder}/{INDEX} is damaged; make the tokens again with: boost data tokenize") from error
    except OSError as error:
        raise ValueError(f"cannot read {folder}/{INDEX}: {error}") from error
