"""Reading of files that are small by nature, such as an index or a tokenizer, whatever is really at the path.

``refuse_irregular`` is for large ones, which are read as a stream.
"""

import os
import stat

from fsspec import AbstractFileSystem

from boost_core.config.parsing.disk import Disk

# Opening must not block, as it would for a pipe without a writer or a terminal.
_WITHOUT_WAITING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Unreadable(ValueError):
    """The path is not a regular file, or the file is too large for its kind."""


def read_small(filesystem: AbstractFileSystem, path: str, most_bytes: int) -> bytes:
    """Read a regular file, following symbolic links.

    Args:
        filesystem: Where it is.
        path: Its path there.
        most_bytes: Maximum size; more is never read.

    Raises:
        FileNotFoundError: Nothing is there.
        Unreadable: It is a folder, a pipe, a device or a socket, or too large.
        OSError: It cannot be read.
    """
    if isinstance(filesystem, Disk):
        return _read_local(filesystem, path, most_bytes)
    found = filesystem.info(path)
    if found["type"] != "file":
        raise Unreadable(f"{path!r} is not a regular file; check the path")
    size = int(found["size"])
    _refuse_large(path, size, most_bytes)
    content: bytes = filesystem.cat_file(path, start=0, end=size) if size else b""
    return content


def refuse_irregular(filesystem: AbstractFileSystem, path: str) -> None:
    """Refuse what is not a regular file on a local disk, where opening a pipe would wait for a writer.

    Raises:
        FileNotFoundError: Nothing is there.
        Unreadable: It is a folder, a pipe, a device or a socket.
        OSError: It cannot be looked at.
    """
    if isinstance(filesystem, Disk):
        _refuse_irregular(path, filesystem.status(path))


def _read_local(disk: Disk, path: str, most_bytes: int) -> bytes:
    _refuse_irregular(path, disk.status(path))  # first, because opening a device may have side effects
    with os.fdopen(disk.descriptor(path, _WITHOUT_WAITING), "rb") as stream:
        found = os.fstat(stream.fileno())  # of the file opened, which may have replaced the one checked
        _refuse_irregular(path, found)
        _refuse_large(path, found.st_size, most_bytes)
        content = stream.read(most_bytes + 1)
    _refuse_large(path, len(content), most_bytes)
    return content


def _refuse_irregular(path: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise Unreadable(f"{path!r} is not a regular file; check the path")


def _refuse_large(path: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise Unreadable(f"{path!r} has {size} bytes, and {most_bytes} is the limit; check the path")
