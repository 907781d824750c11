"""The files that a source names, how they are split, and whether there is enough to train on.

Checked before a job is accepted, and again by the trainer; both see the same split.
"""

import functools
import hashlib
import json
import math
import os
import re
import struct
import sysconfig
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from errno import EACCES, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import fsspec
from fsspec import AbstractFileSystem
from fsspec.core import has_magic
from pydantic import Field, ValidationError, field_validator

from boost_core.config.base import Config, StoreUnusable, UnfitField
from boost_core.config.storage import Disk, StorageOptions, Unreadable, info_of, is_local, options_at, read_small
from boost_core.config.training import BYTE_TOKENS, BYTES, DataConfig, SourceConfig
from boost_core.config.user_files import (
    ARROW_FILE,
    MOST_TOKENIZER_BYTES,
    PARQUET,
    count_tokens,
    no_text_field,
    problems_of_schemas,
)

# Checks of files of rows by their ends.

_END = 1 << 16  # bytes read of each end at first; most footers are shorter
_MOST_FOOTER_BYTES = 1 << 24  # larger ones, of files with very many row groups and columns, are left to the readers
_CONTINUES = 0xFFFFFFFF  # begins messages of Arrow's streams


def schema_of(filesystem: AbstractFileSystem, path: str, size: int) -> bytes | None:
    """The part of a file that holds its schema, see ``problems_of_schemas``; ``None`` if it is too large."""

    def read(begin: int, end: int) -> bytes:
        return bytes(filesystem.cat_file(path, start=begin, end=end)) if end > begin else b""

    end = read(max(0, size - _END), size)
    for magic in (PARQUET, ARROW_FILE):
        if end.endswith(magic) and len(end) >= 4 + len(magic):
            (length,) = struct.unpack_from("<i", end, len(end) - 4 - len(magic))
            length += 4 + len(magic)
            if not 0 < length <= min(size, _MOST_FOOTER_BYTES):
                return None if 0 < length <= size else end
            return end[-length:] if length <= len(end) else read(size - length, size)
    beginning = read(0, _END) if size > _END else end
    first = struct.unpack_from("<Ii", beginning) if len(beginning) >= 8 else (0, 0)
    if first[0] != _CONTINUES or not 0 < first[1] <= _MOST_FOOTER_BYTES:
        return beginning
    length = 8 + first[1]
    return beginning[:length] if length <= len(beginning) else read(0, length)


# The index of a folder of tokens, as written by ``boost data tokenize``.
#
# ::
#
#     <folder>/training-00000.bin …   token ids, little-endian; each document ends with its end-of-document token
#     <folder>/validation-00000.bin …
#     <folder>/inputs-00000.json …    which documents of which files the pair of shards holds
#     <folder>/quarantine-00000.jsonl …  the documents that were skipped for that pair, if any
#     <folder>/tokenizer.json         the tokenizer used, unless tokens are bytes
#     <folder>/settings.json          what the tokens were made with, to say what another run's settings differ in
#     <folder>/index.json             the finished shards; rewritten after each pair of shards

INDEX = "index.json"
_MOST_INDEX_BYTES = 16 * 2**20  # enough for some 70,000 shards

Part = Literal["training", "validation"]


class Shard(Config):
    """One file of tokens."""

    part: Part
    name: str = Field(pattern=r"^\w[\w.-]*$")  # in this folder: a path out of it is impossible
    tokens: int
    text_bytes: int | None = None  # size of the documents; missing in older folders
    sha256: str | None = None  # of the file; missing in older folders, too

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
    tokenizer: str | None = None  # SHA-256 of its tokenizer.json, empty for bytes; missing in older folders
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
    """Read the index of a complete folder of tokens; of an older folder, the tokenizer there is taken for its own.

    Args:
        folder: Its path or URL.
        storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.

    Raises:
        ValueError: The index is missing or damaged, or the folder is not complete yet.
    """
    index = index_of(folder, storage_options)
    if index is None:
        raise ValueError(f"{folder!r} holds no tokens ({INDEX} is missing); make them with: boost data tokenize")
    if not index.complete:
        raise ValueError(f"{folder!r} is not complete; run the same boost data tokenize again to continue it")
    if index.tokenizer is None:
        with suppress(OSError, ValueError):  # nothing is known of it
            filesystem, path = fsspec.url_to_fs(folder, **options_at(folder, storage_options))
            content = read_small(filesystem, f"{path}/tokenizer.json", MOST_TOKENIZER_BYTES)
            return index.model_copy(update={"tokenizer": hashlib.sha256(content).hexdigest()})
    return index


def refuse_mixed(indices: Mapping[str, TokenIndex]) -> None:
    """Refuse folders of tokens that were made by different tokenizers, as far as is known.

    Raises:
        ValueError: They were.
    """
    for field_name, label in (("vocabulary", "tokens"), ("end_of_document", "end"), ("tokenizer", "SHA-256")):
        known = {getattr(index, field_name): folder for folder, index in indices.items()}
        known.pop(None, None)
        if len(known) > 1:
            (one, folder), (another, other), *_ = known.items()
            differing = f"{label} {one!s:.12} and {another!s:.12}"
            made = f"{folder} and {other} were made by different tokenizers ({differing})"
            raise ValueError(f"{made}; make them with the same one")


def index_of(folder: str, storage_options: StorageOptions | None = None) -> TokenIndex | None:
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
        raise _unread(error, f"cannot read {folder}/{INDEX}: {error}") from error


# Errors that are users' mistakes, also those that stores' clients make of answers; any other may pass.
_MISTAKES = {None, EACCES, EINVAL, EISDIR, ELOOP, ENAMETOOLONG, ENOTDIR, EPERM}


def _unread(error: OSError, problem: str) -> ValueError | StoreUnusable:
    """The error to raise for a user's file that cannot be read: it is the user's mistake, or it may pass."""
    return (ValueError if error.errno in _MISTAKES else StoreUnusable)(problem)


def distinct_folders(paths: Iterable[str]) -> list[str]:
    """Paths and URLs of folders, each folder once, under the first of its names."""
    names = dict[str, str]()
    for path in paths:
        there = os.path.realpath(path.removeprefix("file://")) if is_local(path) else path.rstrip("/")
        names.setdefault(there, path)
    return [*names.values()]


_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# Compressed inside, beside other columns: their files' sizes say little about the text.
_IN_COLUMNS = ("parquet", "arrow", "dataset")
HUB = "hf://"
_BY_URL = attrgetter("url")
_BEGINNING = 1 << 20  # bytes of a file that are looked at for its first line
_MOST_SCHEMAS = 4  # files of a source whose schemas are looked at
WHOLE_DISK: StorageOptions = {"beneath": None}  # for what is part of the product, and not of a tenant
_NO_FILE = "there is no file at {!r}; check the path, and that every node can read it"
_LEADS_OUT = "is a symbolic link to a place that this tenant may not use"
_MOST_STATE_BYTES = 2**18  # of a saved dataset's JSON, enough for 4,000 files; parsed within milliseconds
# Names by which fsspec would read another file, or that nobody can print; and what Spark writes beside its files.
_NO_NAME = re.compile("::|[\ud800-\udfff]")
_OF_SPARK = re.compile(r"_[^.]*")
_HIDDEN = re.compile(r"(?:^|/)(\.[^/]*)")  # the parts of a path that begin with a dot
_STANDARD_LIBRARY_SKIPS = ("/site-packages/", "/dist-packages/", "/test/", "/tests/", "/idlelib/")


@dataclass(frozen=True)
class SourceFile:
    """One file of documents.

    Attributes:
        url: Where it is.
        size: Its size as stored, in bytes.
        stamp: Changes when the file is written: its ETag or modification time.
        identity: The same under every name of the file: on a disk its device and inode, on the hub its path and blob,
            elsewhere its URL. Equality ignores it.
    """

    url: str
    size: int
    stamp: str = ""
    identity: str = field(default="", compare=False)


@dataclass(frozen=True)
class SourceSplit:
    """The files to train on and to validate on. A lone file is in both and is split by position."""

    training: Sequence[SourceFile]
    validation: Sequence[SourceFile]

    @property
    def lone_file(self) -> bool:
        """Whether the source is a single file whose last part is for validation."""
        return self.training == self.validation


class UnfitData(UnfitField):
    """Data that a job cannot train on."""


def check_data(
    data: DataConfig, vocab_size: int, sequence_length: int, storage_options: StorageOptions | None = None,
    new: bool = True,
) -> dict[str, TokenIndex]:  # fmt: skip
    """Refuse data that a job could not train on.

    Args:
        data: The data.
        vocab_size: The model's vocabulary size.
        sequence_length: Tokens per sequence.
        storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.
        new: Whether the job has not been accepted yet. One that was may read files by another kind than their names'.

    Returns:
        The index of each folder of tokens, by its path.

    Raises:
        UnfitData: A path names no file, a file is damaged or has no text where it should, a part is too small for one
            sequence, a new job would validate on more text than it trains on or on another source's, the model's
            vocabulary is smaller than the tokenizer's, or folders of tokens have several.
        OSError: A disk or store does not provide a file now; for a job that was accepted, also if it may not be read.
    """

    @contextmanager
    def at_fault(field: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            if not new and isinstance(error.__cause__, PermissionError):
                raise OSError(str(error)) from error
            raise UnfitData(field, str(error)) from error

    for named_at, name, written in data.datasets:
        if written is None or not written.paths:
            raise UnfitData(named_at, f"{name!r} is a dataset of a service; submit the job there, or name a source")
    # Sources that differ only in weight are looked up once.
    first = dict[tuple[object, ...], int]()
    for number, (source, _) in enumerate(data.sources):
        first.setdefault((source.kind, source.paths, source.text_field), number)
    indices = dict[str, TokenIndex]()
    # By source. Those that read the same lone file alike count as one, since they cut it at the same place.
    trained_on, validated_on = defaultdict[str, set[object]](set), list[tuple[SourceFile, object]]()
    for number in first.values():
        source, _ = data.sources[number]
        with at_fault(f"data.mixture[{number}].paths" if data.mixture else "data.source.paths"):
            if source.kind == "tokenized":
                _check_tokens(source, ("training", "validation"), indices, vocab_size, sequence_length, storage_options)
            else:
                split = split_source(source, data.validation_fraction, sequence_length, storage_options, new)
                if new:
                    refuse_misread(source, [*split.training, *split.validation])
                refuse_damaged(source, [*split.training, *split.validation], storage_options)
                if new:
                    _refuse_lopsided(split, data.validation_fraction)
                by = (source.kind, source.text_field) if split.lone_file else number
                for file in split.training:
                    trained_on[file.identity].add(by)
                validated_on += [(file, by) for file in split.validation]
    leaks = (file.url for file, by in validated_on if trained_on.get(file.identity, {by}) - {by})
    if new and (both := next(leaks, None)):
        problem = "is validated on as part of one source and trained on as part of another; name each file in one only"
        raise UnfitData("data.mixture", f"{both} {problem}")
    for number, named in enumerate(data.validation):
        with at_fault(f"data.validation[{number}].paths"):
            if named.kind == "tokenized":
                _check_tokens(named, ("validation",), indices, vocab_size, sequence_length, storage_options)
                continue
            files = list_files(named, storage_options, new)
            if both := next((file.url for file in files if file.identity in trained_on), None):
                raise ValueError(f"{both} is also trained on; validate on other files")
            if new:
                refuse_misread(named, files)
            refuse_damaged(named, files, storage_options)
            # Otherwise the trainer counts.
            if named.kind not in _IN_COLUMNS and not any(compression(file.url) for file in files):
                refuse_too_little("validation", sum(file.size for file in files), "bytes", sequence_length)
    if not data.tokenized:
        with at_fault("data.tokenizer"):
            vocabulary = tokenizer_vocabulary(data.tokenizer, storage_options)
            _check_vocabulary(data.tokenizer or BYTES, vocabulary, vocab_size)
    return indices


def _check_tokens(
    source: SourceConfig, parts: Sequence[Part], indices: dict[str, TokenIndex], vocab_size: int, sequence_length: int,
    storage_options: StorageOptions | None,
) -> None:  # fmt: skip
    """Check folders of tokens, and that they and those of ``indices``, which they are added to, have one tokenizer."""
    for path in distinct_folders(source.paths):
        index = indices[path] = indices.get(path) or read_index(path, storage_options)
        _check_vocabulary(path, index.vocabulary, vocab_size)
        for part in parts:
            refuse_too_little(part, index.tokens(part), "tokens", sequence_length)
    refuse_mixed(indices)


def refuse_damaged(
    source: SourceConfig, files: Sequence[SourceFile], storage_options: StorageOptions | None = None
) -> None:
    """Refuse files whose beginning or end shows that they are damaged, or that their documents are elsewhere.

    Raises:
        ValueError: A file is damaged, or ``text_field`` does not hold text: in the first line of the first file, or in
            the schema of the first file, the last, or some between them.
        OSError: One of these cannot be read.
    """
    if source.kind == "parquet":
        # On a disk alone, as each check would cost a request to an object store, whose files are left to their readers.
        for url in dict.fromkeys(file.url for file in files if is_local(file.url)):
            filesystem, path = fsspec.url_to_fs(url, **options_at(url, storage_options))
            try:
                with filesystem.open(path, "rb") as stream:
                    beginning, size = stream.read(len(PARQUET)), stream.seek(0, os.SEEK_END)
                    stream.seek(max(0, size - len(PARQUET)))
                    # The footer's length, between beginning and end, is also 4 bytes.
                    whole = size >= 3 * len(PARQUET) and beginning == stream.read() == PARQUET
            except OSError as error:
                raise _unread(error, f"cannot read {path!r}: {error.strerror or error}; check the path") from error
            if not whole:
                problem = "is not a complete Parquet file: it is truncated, or a file of another kind; copy it again"
                raise ValueError(f"{path!r} {problem}")
    if source.kind in _IN_COLUMNS:
        # Of a few files, since each costs one request or two.
        sizes = {file.url: file.size for file in files}
        places = {place * (len(sizes) - 1) // (_MOST_SCHEMAS - 1) for place in range(_MOST_SCHEMAS)}
        parts = {}
        for url in (url for place, url in enumerate(sorted(sizes)) if place in places):
            filesystem, path = fsspec.url_to_fs(url, **options_at(url, storage_options))
            with _hub_in_words(url):
                part = schema_of(filesystem, path, sizes[url])
            if part is not None:
                parts[url] = part
        try:
            problems = problems_of_schemas([*parts.values()], source.text_field) if parts else []
        except ValueError as error:
            raise ValueError(f"{', '.join(map(repr, parts))}: {error}; copy them again") from error
        for url, problem in zip(parts, problems, strict=True):
            if problem:
                raise ValueError(f"{url!r} {problem}")
    elif source.kind == "jsonl" and files and files[0].size and not compression(files[0].url):
        url = files[0].url
        filesystem, path = fsspec.url_to_fs(url, **options_at(url, storage_options))
        with _hub_in_words(url):
            beginning = filesystem.cat_file(path, start=0, end=_BEGINNING).lstrip()
        try:
            first = json.loads(beginning.partition(b"\n")[0])
        except (ValueError, RecursionError):  # whatever it is, the reader says it better
            return
        if isinstance(first, dict) and (problem := no_text_field(first, source.text_field)):
            raise ValueError(f"{url!r}: its first line {problem}")


def tokenizer_vocabulary(tokenizer: str | None, storage_options: StorageOptions | None = None) -> int:
    """Number of tokens in a tokenizer's vocabulary.

    Args:
        tokenizer: ``bytes``, or the path or URL of a ``tokenizer.json``; ``None`` for bytes.
        storage_options: Options for ``s3://``; default: the process's own.

    Raises:
        ValueError: The file is missing, is not a ``tokenizer.json``, or is implausibly large.
    """
    if tokenizer is None or tokenizer == BYTES:
        return BYTE_TOKENS
    try:
        filesystem, path = fsspec.url_to_fs(tokenizer, **options_at(tokenizer, storage_options))
        content = read_small(filesystem, path, MOST_TOKENIZER_BYTES)
    except FileNotFoundError as error:
        raise ValueError(_NO_FILE.format(tokenizer)) from error
    except StoreUnusable:  # which may pass
        raise
    except OSError as error:
        raise _unread(error, f"cannot read {tokenizer!r}: {error.strerror or error}; check the path") from error
    try:
        return count_tokens(content)
    except ValueError as error:
        problem = f"{tokenizer!r} is not a tokenizer.json of Hugging Face's tokenizers; save it again, or use {BYTES}"
        raise ValueError(problem) from error


def _check_vocabulary(name: str, vocabulary: int, vocab_size: int) -> None:
    if vocabulary > vocab_size:
        sizes = f"{name} has {vocabulary} tokens and model.vocab_size is {vocab_size}"
        raise ValueError(f"{sizes}; raise it to {vocabulary} or more")


def split_source(
    source: SourceConfig, validation_fraction: float, sequence_length: int,
    storage_options: StorageOptions | None = None, new: bool = True,
) -> SourceSplit:  # fmt: skip
    """Look up a source's files and split them, each as a whole, into training and validation text.

    The split is by a hash of each file's path below the folder that all files have in common, so it is the same on
    every node and changes little as other files come and go.

    Args:
        source: The source.
        validation_fraction: Share of the files kept for validation.
        sequence_length: Tokens per sequence.
        storage_options: Options for ``s3://``; default: the process's own.
        new: As of ``list_files``.

    Raises:
        ValueError: A path names no file, or either part has too little text for one sequence.
        StoreUnusable: A disk or store cannot be read now.
    """
    files = list_files(source, storage_options, new)
    if len(files) == 1:
        split = SourceSplit(files, files)
    else:
        urls = [file.url for file in files]
        # Paths and URLs have no folder in common.
        folder = "" if len({url.startswith("/") for url in urls}) > 1 else os.path.commonpath(urls)
        by_hash = sorted(files, key=lambda file: hashlib.sha256(file.url.removeprefix(folder).encode()).hexdigest())
        count = min(math.ceil(validation_fraction * len(files)), len(files) - 1)
        split = SourceSplit(sorted(by_hash[count:], key=_BY_URL), sorted(by_hash[:count], key=_BY_URL))
    # Otherwise the trainer counts.
    if source.kind not in _IN_COLUMNS and not any(compression(file.url) for file in files):
        training, validation = (sum(file.size for file in part) for part in (split.training, split.validation))
        if split.lone_file:
            validation = validation_tail(training, validation_fraction)
            training -= validation
        refuse_too_little("training", training, "bytes", sequence_length)
        refuse_too_little("validation", validation, "bytes", sequence_length)
    return split


def list_files(
    source: SourceConfig, storage_options: StorageOptions | None = None, new: bool = True
) -> list[SourceFile]:  # fmt: skip
    """The files that a source names, sorted by URL, each once, under the first of its names.

    Symbolic links are followed. Hidden files and folders, whose names begin with a dot, are left out of folders and
    globs that do not name them, as in shells, Spark and ``datasets``; beside Parquet and Arrow files also those such as
    ``_SUCCESS``, as in Spark. A path is a glob only if nothing has that name.

    Args:
        source: The source.
        storage_options: Options for ``s3://`` and for disks; default: the process's own.
        new: Whether to refuse globs that match folders, in which they read nothing; jobs that were accepted go on.

    Raises:
        ValueError: A path, glob or URL names no file, a symbolic link is broken or leads out of a confined disk, a
            folder is not one saved dataset, or a file's name has ``::`` or is not UTF-8.
        StoreUnusable: A disk or store cannot be read now.
    """
    if source.kind == "standard_library":
        return list(_standard_library_files())
    files: list[SourceFile] = []
    for pattern in dict.fromkeys(source.paths):
        matches = _expand(pattern, storage_options, source.kind, new)
        if not matches:
            raise ValueError(_NO_FILE.format(pattern))
        files += matches
    return sorted({file.identity: file for file in sorted(files, key=_BY_URL, reverse=True)}.values(), key=_BY_URL)


@functools.cache  # it does not change, and with the packages next to it there are tens of thousands of files
def _standard_library_files() -> tuple[SourceFile, ...]:
    root = sysconfig.get_paths()["stdlib"]
    files = sorted(_expand(f"{root}/**/*.py", WHOLE_DISK), key=_BY_URL)
    read = (each for each in files if not any(skip in each.url.removeprefix(root) for skip in _STANDARD_LIBRARY_SKIPS))
    if listed := tuple(read):
        return listed
    raise ValueError(f"there is no Python source text under {root}; use kind=text with paths of your own")


def _expand(pattern: str, options: StorageOptions | None, kind: str = "text", new: bool = False) -> list[SourceFile]:
    """Files at a path: the file itself, all files in a folder, those of a saved dataset, or the matches of a glob."""
    try:
        with _hub_in_words(pattern):
            filesystem, path = fsspec.url_to_fs(pattern, **options_at(pattern, options))
            if isinstance(filesystem, Disk):
                filesystem = _Links(beneath=filesystem.beneath)
                path = re.sub("/{2,}", "/", path)  # which patterns would take literally
            magic, files = has_magic(path), []
            if (pattern.startswith(HUB) or is_local(pattern)) and not magic:  # ``isdir`` takes errors for a no
                is_folder = filesystem.info(path)["type"] == "directory"
            else:
                is_folder = filesystem.isdir(path)
            is_glob = not is_folder and magic and not filesystem.isfile(path)
            above = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0] if is_glob else path.rstrip("/")
            if not is_folder and not is_glob:
                listed = {path: filesystem.info(path)}
            elif kind == "dataset":
                names = _saved_datasets(filesystem, path.rstrip("/"), is_folder)
                listed = {name: filesystem.info(name) for name in names}
            else:
                listed = filesystem.find(path, detail=True) if is_folder else filesystem.glob(path, detail=True)
            shown = _HIDDEN.findall(path.removeprefix(above))
            for name, info in listed.items():
                below = name.removeprefix(above)
                hidden = [part for part in _HIDDEN.findall(below) if not any(fnmatchcase(part, each) for each in shown)]
                if hidden or (kind in ("parquet", "arrow") and _OF_SPARK.fullmatch(below.rpartition("/")[2])):
                    continue
                if info["type"] == "unreadable":
                    raise ValueError(f"{info['name']!r} {info['problem']}")
                if info["type"] == "directory" and new and "**" not in path:
                    problem = "is a folder, of which this glob reads nothing; name its files by a glob of their own"
                    raise ValueError(f"{name!r} {problem}")
                if info["type"] != "file":
                    continue
                if _NO_NAME.search(name):
                    raise ValueError(f"{name!r} has '::' or bytes that are not UTF-8 in its name; rename it")
                identity = info.get("identity") or filesystem.unstrip_protocol(name)
                if pattern.startswith(HUB):  # the same in all revisions that have it
                    at = filesystem.resolve_path(name)
                    identity = f"{at.repo_id}/{at.path_in_repo} {info['blob_id']}"
                url = filesystem.unstrip_protocol(name) if "://" in pattern else name
                stamp = info.get("ETag") or info.get("blob_id") or info.get("mtime", "")
                files.append(SourceFile(url, int(info["size"]), str(stamp), identity))
    except FileNotFoundError:
        return []
    except StoreUnusable:  # which may pass
        raise
    except OSError as error:
        where = f" at {error.filename!r}" if error.filename else ""
        raise _unread(error, f"cannot look up {pattern!r}: {error.strerror or error}{where}; check the path") from error
    except ValueError as error:
        raise ValueError(f"cannot look up {pattern!r}: {error}; check the path") from error
    except ImportError as error:
        raise ValueError(f"cannot look up {pattern!r}: {error}; install boost-service[trainer]") from error
    return files


def _saved_datasets(filesystem: AbstractFileSystem, path: str, is_folder: bool) -> list[str]:
    """The files of the saved dataset in a folder, or of those that a glob matches, as folders or files of theirs."""
    if is_folder:
        return _files_of_saved_dataset(filesystem, path)
    ends = ("/state.json", "/dataset_dict.json")
    whole = {name.removesuffix(end) for end in ends for name in filesystem.glob(path + end)}
    whole -= {name.rpartition("/")[0] for name in whole}  # whose splits are matched, too
    files = {name for name in filesystem.glob(path) if name.endswith(".arrow")}
    beside = {name.rpartition("/")[0] for name in files} - whole
    of_files = [name for folder in beside for name in _files_of_saved_dataset(filesystem, folder) if name in files]
    return [name for folder in whole for name in _files_of_saved_dataset(filesystem, folder)] + of_files


def _files_of_saved_dataset(filesystem: AbstractFileSystem, folder: str) -> list[str]:
    """The files that ``datasets.load_from_disk`` would read; next to them are caches of other datasets made from it."""
    with suppress(FileNotFoundError):
        splits = _listed(filesystem, f"{folder}/dataset_dict.json", "splits")
        if len(splits) != 1:
            problem = f"it has the splits {', '.join(splits) or '(none)'}"
            raise ValueError(f"{problem}; name the folder of one, as in {folder}/train")
        folder = f"{folder}/{splits[0]}"
    try:
        names = _listed(filesystem, f"{folder}/state.json", "_data_files")
    except FileNotFoundError:
        raise ValueError("it has no state.json: no dataset was saved there; use kind=arrow for Arrow files") from None
    if outside := next((name for name in names if "/" in name), None):
        raise ValueError(f"{folder}/state.json names {outside!r}, which is not in its folder")
    return [f"{folder}/{name}" for name in names]


def _listed(filesystem: AbstractFileSystem, path: str, field: str) -> list[str]:
    """The names that a file of a saved dataset lists in a field, by themselves or as those of files."""
    try:
        content = json.loads(read_small(filesystem, path, _MOST_STATE_BYTES))
        return [str(each["filename"] if isinstance(each, dict) else each) for each in content[field]]
    except Unreadable:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


class _Links(Disk):
    """A disk whose symbolic links are followed, also in folders, where fsspec takes them for no files.

    ``unreadable`` is the type of links that are broken or lead out of a confined disk, and of folders that may not be
    read.
    """

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """What is known of a file or folder, or of what a link leads to."""
        if not self.allows(path):
            return self._unreadable(path, _LEADS_OUT)
        return self._info(path, self.status(path))

    def find(self, path: str, maxdepth: int | None = None, **_: Any) -> dict[str, dict[str, Any]]:
        """All files below a folder; with a limit to the depth, as of a glob, also folders.

        Without one each folder is read once, so that loops end.
        """
        files: dict[str, dict[str, Any]] = {}
        read: set[str] = set()
        folders = deque([(path.rstrip("/") or "/", 1)])
        while folders:
            folder, depth = folders.popleft()
            try:
                identity = self._info(folder, self.status(folder))["identity"]
                entries = self.entries(folder)
            except PermissionError as error:
                files[folder] = self._unreadable(folder, f"may not be read: {error.strerror}")
                continue
            if maxdepth is None and identity in read:
                continue
            read.add(identity)
            for entry in entries:
                name = f"{folder.rstrip('/')}/{entry.name}"
                descends = maxdepth is None or depth < maxdepth
                if entry.is_symlink() and not self.allows(name):
                    if descends and Path(name).is_dir():  # no glob matches the folder itself, but what is in it
                        raise ValueError(f"{name!r} {_LEADS_OUT}")
                    files[name] = self._unreadable(name, _LEADS_OUT)
                    continue
                try:
                    status = self.status(name) if entry.is_symlink() else entry.stat(follow_symlinks=False)
                except OSError as error:
                    if entry.is_symlink():
                        problem = f"is a symbolic link to {str(Path(name).readlink())!r}: {error.strerror}"
                        files[name] = self._unreadable(name, problem)
                    continue  # otherwise it was just removed
                info = self._info(name, status)
                if info["type"] == "file" or (info["type"] == "directory" and maxdepth is not None):
                    files[name] = info
                if info["type"] == "directory" and descends:
                    # Links last, so that a folder that is there itself is read under its own name.
                    (folders.append if entry.is_symlink() else folders.appendleft)((name, depth + 1))
        return files

    def _info(self, name: str, status: os.stat_result) -> dict[str, Any]:
        return info_of(name, status) | {"identity": f"{status.st_dev}:{status.st_ino}"}

    def _unreadable(self, name: str, problem: str) -> dict[str, Any]:
        return {"name": name, "type": "unreadable", "size": 0, "problem": problem}


@contextmanager
def _hub_in_words(url: str) -> Iterator[None]:
    """Raise ``StoreUnusable`` for an error of the hub's client that may pass: the hub is busy, or out of reach."""
    try:
        yield
    except (ValueError, ImportError):
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        final = isinstance(error, OSError) and (status is None or (status not in (408, 429) and status < 500))
        if url.startswith(HUB) and not final:
            raise StoreUnusable(f"cannot look up {url!r}: {hub_problem(error)}") from error
        raise


def hub_problem(error: Exception) -> str:
    """The message for an error of the hub's client, whose HTTP library and its errors differ between versions."""
    return f"the hub does not answer ({error}); check the network and HF_ENDPOINT, and try again"


def compression(url: str) -> str | None:
    """The compression of a file of text or JSON lines, by its name; ``None`` if it is not compressed."""
    return _COMPRESSIONS.get(PurePosixPath(url.lower()).suffix)


def kind_by_names(files: Iterable[str]) -> Literal["text", "jsonl", "parquet", "arrow"]:
    """The kind of a source whose files' names all end in the same way; text, unless they say otherwise.

    Raises:
        ValueError: The files are of several kinds.
    """
    urls = {_kind_by_name(url): url for url in files}
    if len(urls) > 1:
        named = ", ".join(f"{url!r} is {kind}" for kind, url in sorted(urls.items()))
        raise ValueError(f"{named}; tokenize each kind by itself, or say --kind")
    return next(iter(urls), "text")


def _kind_by_name(url: str) -> Literal["text", "jsonl", "parquet", "arrow"]:
    """The kind of a file, by its name.

    Raises:
        ValueError: It is CSV.
    """
    name = PurePosixPath(url.lower())
    suffix = PurePosixPath(name.stem).suffix if name.suffix in _COMPRESSIONS else name.suffix
    if suffix in (".csv", ".tsv"):
        raise ValueError(f"{url!r} is a table, whose columns are not read; convert it to Parquet or JSON lines")
    if suffix in (".jsonl", ".ndjson") or (suffix == ".json" and suffix != name.suffix):  # .json alone may be anything
        return "jsonl"
    return "parquet" if suffix == ".parquet" else "arrow" if suffix in (".arrow", ".feather") else "text"


def refuse_misread(source: SourceConfig, files: Sequence[SourceFile]) -> None:
    """Refuse files that would be read as text, and by their names are not.

    Raises:
        ValueError: There is such a file.
    """
    for file in files if source.kind == "text" else ():
        if (kind := _kind_by_name(file.url)) != "text":
            raise ValueError(f"{file.url!r} is {kind} by its name, and would be read as text; write kind: {kind}")


def _refuse_lopsided(split: SourceSplit, validation_fraction: float) -> None:
    """Refuse files of which more text would be for validation than to train on, unless that is asked for.

    Files that are all compressed in the same way are judged by their compressed sizes.

    Raises:
        ValueError: They would be split so.
    """
    files = [*split.training, *split.validation]
    comparable = len({compression(file.url) for file in files}) == 1
    share = sum(file.size for file in split.validation) / max(1, sum(file.size for file in files))
    if comparable and not split.lone_file and share > 0.5 > validation_fraction:
        much = f"{share:.0%} of the text would be for validation, not validation_fraction={validation_fraction:g}"
        why = f"each of the {len(files)} files goes to one part as a whole, by a hash of its name"
        remedy = "tokenize them beforehand (boost data tokenize), which splits documents, or make them one file"
        raise ValueError(f"{much}: {why}; {remedy}")


def refuse_too_little(part: str, size: int, unit: str, sequence_length: int) -> None:
    """Refuse a part that is too small for one sequence.

    Raises:
        ValueError: The part is too small.
    """
    if size <= sequence_length:
        little = f"too little for one sequence of {sequence_length} tokens and the token after it"
        remedy = "give more text, or shorten training.sequence_length"
        raise ValueError(f"the {part} text is {size} {unit}, {little}; {remedy}")


def validation_tail(size: int, validation_fraction: float) -> int:
    """The length of the end of a lone file that is for validation."""
    return math.ceil(size * validation_fraction)
