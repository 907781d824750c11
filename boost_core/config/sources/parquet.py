"""Checks of files of rows by their ends: that Parquet files are not truncated, and that there is a column of text."""

import os
import struct
from collections.abc import Iterable, Mapping
from typing import IO

import fsspec
from fsspec import AbstractFileSystem

from boost_core.config.parsing.urls import StorageOptions, is_local, options_at
from boost_core.config.sources.columns import ARROW_FILE, PARQUET, problems_of_schemas

_END = 1 << 16  # bytes read of each end at first; most footers are shorter
_MOST_FOOTER_BYTES = 1 << 24  # larger ones, of files with very many row groups and columns, are left to the readers
_CONTINUES = 0xFFFFFFFF  # begins messages of Arrow's streams


def refuse_cut_off(urls: Iterable[str], storage_options: StorageOptions | None = None) -> None:
    """Refuse Parquet files on a disk that are truncated or not Parquet.

    Files in object stores are left to their readers, since each check would cost a request.

    Args:
        urls: The files' paths and URLs.
        storage_options: Options for the disk; default: the process's own.

    Raises:
        ValueError: One does not begin and end as Parquet files do, or cannot be read.
    """
    for url in urls:
        if not is_local(url):
            continue
        filesystem, path = fsspec.url_to_fs(url, **options_at(url, storage_options))
        try:
            with filesystem.open(path, "rb") as stream:
                whole = _is_whole(stream)
        except OSError as error:
            raise ValueError(f"cannot read {path!r}: {error.strerror or error}; check the path") from error
        if not whole:
            raise ValueError(
                f"{path!r} is not a complete Parquet file: it is truncated, or a file of another kind; copy it again"
            )


def _is_whole(stream: IO[bytes]) -> bool:
    if stream.seek(0, os.SEEK_END) < 3 * len(PARQUET):  # the footer's length, between them, is also 4 bytes
        return False
    stream.seek(-len(PARQUET), os.SEEK_END)
    end = stream.read()
    stream.seek(0)
    return stream.read(len(PARQUET)) == end == PARQUET


def refuse_without_text_column(
    sizes: Mapping[str, int], field: str, storage_options: StorageOptions | None = None
) -> None:
    """Refuse Parquet and Arrow files whose schema has no column of text of this name.

    Args:
        sizes: The files' paths or URLs, and their sizes in bytes; a few, since each costs one request or two.
        field: The name of the column.
        storage_options: Options for ``s3://`` and for disks; default: the process's own.

    Raises:
        ValueError: One has no such column, or is damaged.
        OSError: One cannot be read.
    """
    parts = {}
    for url, size in sizes.items():
        filesystem, path = fsspec.url_to_fs(url, **options_at(url, storage_options))
        part = schema_of(filesystem, path, size)
        if part is not None:
            parts[url] = part
    if not parts:
        return
    try:
        problems = problems_of_schemas([*parts.values()], field)
    except ValueError as error:
        raise ValueError(f"{', '.join(map(repr, parts))}: {error}; copy them again") from error
    if wrong := next(((url, problem) for url, problem in zip(parts, problems, strict=True) if problem), None):
        raise ValueError(f"{wrong[0]!r} {wrong[1]}")


def schema_of(filesystem: AbstractFileSystem, path: str, size: int) -> bytes | None:
    """The part of a file that holds its schema, see ``problems_of_schemas``; ``None`` if it is too large."""

    def read(begin: int, end: int) -> bytes:
        content: bytes = filesystem.cat_file(path, start=begin, end=end) if end > begin else b""
        return content

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
