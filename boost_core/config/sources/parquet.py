"""Whether Parquet files are whole, by how they end: nothing can be read of one that lacks its end."""

import os
from collections.abc import Iterable
from pathlib import Path

_MAGIC = b"PAR1"  # begins and ends a file


def refuse_cut_off(urls: Iterable[str]) -> None:
    """Refuse Parquet files on a disk that are cut off, or of another kind.

    Those in object stores are left to whoever reads them: each would cost a request.

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
            raise ValueError(f"{path!r} is not a whole Parquet file, but cut off or of another kind; copy it again")


def _is_whole(path: str) -> bool:
    with Path(path).open("rb") as stream:
        if stream.seek(0, os.SEEK_END) < 3 * len(_MAGIC):  # the length of its footer is as long, and stands between
            return False
        stream.seek(-len(_MAGIC), os.SEEK_END)
        end = stream.read()
        stream.seek(0)
        return stream.read(len(_MAGIC)) == end == _MAGIC
