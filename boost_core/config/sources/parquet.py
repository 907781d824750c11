"""Checks that Parquet files are not truncated: without its end, nothing in such a file can be read."""

import os
from collections.abc import Iterable
from pathlib import Path

_MAGIC = b"PAR1"  # begins and ends a file


def refuse_cut_off(urls: Iterable[str]) -> None:
    """Refuse Parquet files on a disk that are truncated or not Parquet.

    Files in object stores are left to their readers, since each check would cost a request.

    Args:
        urls: The files' paths and URLs.

    Raises:
        ValueError: One does not begin and end as Parquet files do, or cannot be read.
    """
    for url in urls:
        path = url.removeprefix("file://")
        if "://" in path:
            continue
        try:
            whole = _is_whole(path)
        except OSError as error:
            raise ValueError(f"cannot read {path!r}: {error.strerror or error}; check the path") from error
        if not whole:
            raise ValueError(
                f"{path!r} is not a complete Parquet file: it is truncated, or a file of another kind; copy it again"
            )


def _is_whole(path: str) -> bool:
    with Path(path).open("rb") as stream:
        if stream.seek(0, os.SEEK_END) < 3 * len(_MAGIC):  # the footer's length, between them, is also 4 bytes
            return False
        stream.seek(-len(_MAGIC), os.SEEK_END)
        end = stream.read()
        stream.seek(0)
        return stream.read(len(_MAGIC)) == end == _MAGIC
