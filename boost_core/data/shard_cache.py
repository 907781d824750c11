"""A node's cache of token shards from object stores: one copy, which all ranks and jobs on the node map.

Whoever maps a shard holds a shared lock on its file, which the kernel drops with the mapping, however the process ends.
Shards that nobody maps stay for later jobs as long as they take little of the disk.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from boost_core.config.parsing.disk import Disk
from boost_core.config.parsing.urls import options_at
from boost_core.config.sources.tokenized import Shard, TokenIndex

_UNUSED_SHARE = 0.1  # of the disk, for shards that nobody maps
_POLL_SECONDS = 0.2


def map_shard(folder: str, index: TokenIndex, shard: Shard) -> "np.memmap[Any, np.dtype[Any]]":
    """Map a shard's tokens into memory, from the node's cache if the folder is not on a disk.

    Args:
        folder: Path or URL of the folder of tokens.
        index: The folder's index.
        shard: One of its shards, not empty.

    Raises:
        OSError: It cannot be read, or the cache's disk is full.
        ValueError: It has another size than the index says.
    """
    dtype = np.dtype(index.dtype).newbyteorder("<")
    filesystem, path = fsspec.url_to_fs(folder, **options_at(folder, None))
    name, size = f"{path.rstrip('/')}/{shard.name}", shard.tokens * dtype.itemsize
    if isinstance(filesystem, Disk):
        with filesystem.open(name, "rb") as stream:
            return np.memmap(stream, dtype, "r", shape=(shard.tokens,))
    # Another folder of tokens at the same URL has another index.
    digest = hashlib.sha256(f"{folder}\n{index.model_dump_json()}\n{shard.name}".encode()).hexdigest()
    cached = _cache() / digest
    while True:
        with suppress(FileNotFoundError), cached.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
            os.utime(stream.fileno())
            # The mapping duplicates the descriptor, and with it the lock.
            return np.memmap(stream, dtype, "r", shape=(shard.tokens,))
        _copy(filesystem, name, size, cached)


def _cache() -> Path:
    folder = Path(tempfile.gettempdir()) / f"boost-tokens-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder that only this user can use; remove it, or set another TMPDIR")
    return folder


def _copy(filesystem: fsspec.AbstractFileSystem, name: str, size: int, cached: Path) -> None:
    """Copy a shard into the cache, or wait until another process has."""
    part = cached.with_suffix(".part")
    with part.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)
            return
        with suppress(FileNotFoundError):
            if cached.exists() or not os.path.samestat(part.stat(), os.fstat(stream.fileno())):
                return  # another process was faster
        _make_room(cached.parent, size)
        try:
            filesystem.get_file(name, str(part))
        except OSError as error:
            part.unlink()
            raise OSError(
                error.errno,
                f"cannot copy {name} to {part}, of which nothing is left: {error.strerror or error}; if that disk is "
                "full, make room or set TMPDIR to a folder on a larger one",
            ) from error
        if part.stat().st_size != size:
            actual = part.stat().st_size
            part.unlink()
            raise ValueError(f"{name} has {actual:,} bytes instead of {size:,}; make the tokens again")
        part.rename(cached)


def _make_room(cache: Path, needed: int) -> None:
    """Remove the shards that were not used for the longest until what is left unused and the new one have room."""
    unused = sorted(_unused(cache))
    total, disk = sum(size for _, size, _ in unused), shutil.disk_usage(cache)
    for _, size, path in unused:
        free = shutil.disk_usage(cache).free
        if free >= needed and total <= _UNUSED_SHARE * disk.total:
            break
        path.unlink(missing_ok=True)
        total -= size
    if (free := shutil.disk_usage(cache).free) < needed:
        raise OSError(
            f"{cache} has {free / 1e9:,.3f} GB free, and a shard of tokens takes {needed / 1e9:,.3f} GB; make room, or "
            "set TMPDIR to a folder on a larger disk"
        )


def _unused(cache: Path) -> Iterator[tuple[float, int, Path]]:
    for path in cache.iterdir():
        with suppress(OSError), path.open("rb") as stream:  # it was just removed
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(stream.fileno())
            yield status.st_mtime, status.st_size, path
