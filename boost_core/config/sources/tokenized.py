"""The index of a folder of tokens, as ``boost data tokenize`` writes it.

::

    <folder>/training-00000.bin …   token ids one after the other, little-endian, documents ended by their last token
    <folder>/validation-00000.bin …
    <folder>/inputs-00000.json …    which documents of which files the pair of shards holds
    <folder>/quarantine-00000.jsonl …  the documents that were skipped meanwhile, if any
    <folder>/tokenizer.json         what made them, unless they are bytes
    <folder>/index.json             what is whole; rewritten after each pair of shards

"""

from typing import Any, Literal

import fsspec
from pydantic import Field, ValidationError, field_validator

from boost_core.config.base import Config
from boost_core.config.parsing.small_files import Unreadable, read_small
from boost_core.config.parsing.urls import StorageOptions, options_at

INDEX = "index.json"
_MOST_INDEX_BYTES = 16 * 2**20  # of some 200,000 shards

Part = Literal["training", "validation"]


class Shard(Config):
    """One file of tokens."""

    part: Part
    name: str = Field(pattern=r"^\w[\w.-]*$")  # of this folder: no way out of it
    tokens: int
    text_bytes: int | None = None  # of the documents; older folders do not say

    @field_validator("part", mode="before")
    @classmethod
    def _read_old_name(cls, value: Any) -> Any:
        return "validation" if value == "held_out" else value  # as folders were written first


class Cursor(Config):
    """How far the input has been read: what comes next."""

    file: int = 0
    document: int = 0


class Input(Config):
    """What a pair of shards holds of one file.

    Attributes:
        file: Its URL.
        size: Its bytes.
        stamp: What changes when it is written: its ETag, or when that was.
        first: Place of the first document that the shards hold, counted from 0.
        end: Place after the last.
        digest: Of all the file's documents before ``end``, and where the bad ones among them are.
        whole: Whether there are none after that.
    """

    file: str
    size: int
    stamp: str
    first: int
    end: int
    digest: str
    whole: bool


class TokenIndex(Config):
    """What a folder of tokens holds."""

    format: int = 1
    dtype: Literal["uint8", "uint16", "uint32"]
    vocabulary: int
    end_of_document: int
    documents: int = 0
    skipped: int = 0
    shards: tuple[Shard, ...] = ()
    source: str  # a digest of how documents become tokens, so that only the same is resumed
    cursor: Cursor = Cursor()
    complete: bool = False

    def tokens(self, part: Part) -> int:
        """Tokens in one part."""
        return sum(shard.tokens for shard in self.shards if shard.part == part)


def read_index(folder: str, storage_options: StorageOptions | None = None) -> TokenIndex:
    """The index of a folder of tokens.

    Args:
        folder: Its path or URL.
        storage_options: What ``s3://`` is reached with, by s3fs's names; default: the process's own means.

    Raises:
        ValueError: There is none, it is damaged, or the folder is not complete yet.
    """
    index = find_index(folder, storage_options)
    if index is None:
        raise ValueError(f"{folder!r} holds no tokens ({INDEX} is missing); make them with: boost data tokenize")
    if not index.complete:
        raise ValueError(f"{folder!r} is not complete; run the same boost data tokenize again, and it goes on")
    return index


def find_index(folder: str, storage_options: StorageOptions | None = None) -> TokenIndex | None:
    """The index of a folder of tokens, complete or not; ``None`` if there is none.

    Args:
        folder: Its path or URL.
        storage_options: What ``s3://`` is reached with; default: the process's own means.

    Raises:
        ValueError: It is damaged, too large, no regular file, or cannot be read.
    """
    try:
        filesystem, path = fsspec.url_to_fs(folder, **options_at(folder, storage_options))
        return TokenIndex.model_validate_json(read_small(filesystem, f"{path}/{INDEX}", _MOST_INDEX_BYTES))
    except FileNotFoundError:
        return None
    except Unreadable:
        raise
    except ValidationError as error:
        raise ValueError(f"{folder}/{INDEX} is damaged; make the tokens anew with: boost data tokenize") from error
    except OSError as error:
        raise ValueError(f"cannot read {folder}/{INDEX}: {error}") from error
