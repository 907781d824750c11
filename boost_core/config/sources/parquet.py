"""Checks that Parquet files are not truncated: without its end, nothing in such a file can be read."""

import os
from collections.abc import Iterable
from typing import IO

import fsspec

from boost_core.config.parsing.urls import StorageOptions, is_local, options_at

_MAGIC = b"PAR1"  # begins and ends a file


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
    if stream.seek(0, os.SEEK_END) < 3 * len(_MAGIC):  # the footer's length, between them, is also 4 bytes
        return False
    stream.seek(-len(_MAGIC), os.SEEK_END)
    end = stream.read()
    stream.seek(0)
    return stream.read(len(_MAGIC)) == end == _MAGIC
