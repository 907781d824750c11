"""How data and checkpoints are opened: the local disk as fsspec sees it, options for stores, and small files.

The disk, of paths and ``file://``, may be confined to some folders.
A check of a path by its name says nothing about what is opened later: whoever may write to a folder on the way can
replace it with a symbolic link meanwhile. So a confined disk resolves a path, checks the result, and then opens exactly
that, from one of its folders downwards, component by component and without following any further link.
"""

import errno
import glob
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EACCES
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

_WRITE = os.O_WRONLY | os.O_CREAT
_FLAGS = {"r": os.O_RDONLY, "w": _WRITE | os.O_TRUNC, "x": _WRITE | os.O_EXCL, "a": _WRITE | os.O_APPEND}
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC  # macOS has no O_PATH
_OUTSIDE = "leads outside of what this tenant may use"
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory"}


def _if_confined(operation: Callable[..., Any] | None, name: str = "") -> Callable[..., Any]:
    """An operation of a confined disk, which has none of this name if it is ``None``; any other disk has fsspec's."""
    name = operation.__name__ if operation else name

    @wraps(operation or getattr(LocalFileSystem, name))
    def of_the_disk(self: "Disk", *arguments: Any, **named: Any) -> Any:
        if self.beneath is None:
            return getattr(super(Disk, self), name)(*arguments, **named)
        if operation is None:
            raise NotImplementedError("a confined disk has no such operation; nothing needs it")
        return operation(self, *arguments, **named)

    return of_the_disk


class Disk(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The local disk, or some folders of it.

    Args:
        beneath: The folders; ``None``: the whole disk. Links may lead from one to another. A process that works for one
            tenant sets it for all its disks by ``confine``.
        options: fsspec's own.
    """

    def __init__(self, beneath: Sequence[str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.beneath = None if beneath is None else tuple(os.path.realpath(folder) for folder in beneath)

    def descriptor(self, path: str, flags: int) -> int:
        """Open a file or folder and return its descriptor; what may be created is not followed if it is a link.

        Raises:
            PermissionError: It is outside of the folders, or its permissions forbid it.
            OSError: It cannot be opened, or a part of its path was replaced meanwhile.
        """
        if self.beneath is None:
            return os.open(path, flags | os.O_CLOEXEC, 0o666)
        with self._place(path, follow=not flags & os.O_CREAT) as (folder, name):
            return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666, dir_fd=folder)

    def status(self, path: str) -> os.stat_result:
        """What ``os.stat`` returns for a path, following links."""
        if self.beneath is None:
            return Path(path).stat()
        with self._place(path, follow=True) as (folder, name):
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                raise PermissionError(EACCES, _OUTSIDE, path)  # it has just become one
            return status

    def entries(self, path: str) -> "list[os.DirEntry[str]]":
        """The entries of a folder, by name; each has its name only, as its path is not to be trusted."""
        folder = self.descriptor(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(folder) as scan:
                listed = sorted(scan, key=lambda entry: entry.name)
            for entry in listed:  # while the folder is open
                with suppress(FileNotFoundError):
                    entry.stat(follow_symlinks=False)
            return listed
        finally:
            os.close(folder)

    def allows(self, path: str) -> bool:
        """Whether a path leads into the folders at present."""
        return self.beneath is None or self._root(os.path.realpath(path)) is not None

    def _root(self, real: str) -> str | None:
        """The folder that a resolved path is in."""
        return next((top for top in self.beneath or () if real == top or real.startswith(f"{top.rstrip('/')}/")), None)

    @contextmanager
    def _place(self, path: str, follow: bool) -> Iterator[tuple[int, str]]:
        """Hold the folder that a path is in, and give the path's name there.

        Args:
            path: The path.
            follow: Whether a link at the path itself is followed.
        """
        folder, name = os.path.split(path)
        itself = follow or name in ("", ".", "..")
        real = os.path.realpath(path) if itself else f"{os.path.realpath(folder).rstrip('/')}/{name}"
        root = self._root(real)
        if root is None:
            raise PermissionError(EACCES, _OUTSIDE, path)
        *folders, name = real[len(root) :].strip("/").split("/")
        try:
            descriptor = os.open(root, _FOLDER)
            try:
                for each in folders:
                    below = os.open(each, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
                    os.close(descriptor)
                    descriptor = below
                yield descriptor, name or "."
            finally:
                os.close(descriptor)
        except OSError as error:
            error.filename = path  # otherwise it is the name of one component
            raise

    # fsspec's operations.

    @_if_confined
    def info(self, path: Any, **_: Any) -> dict[str, Any]:
        """What is known of a file or folder, or of what a link leads to."""
        path = self._strip_protocol(path)
        return info_of(path, self.status(path), islink=Path(path).is_symlink())

    @_if_confined
    def ls(self, path: str, detail: bool = False, **_: Any) -> list[Any]:
        """A folder's entries."""
        path = self._strip_protocol(path)
        here = self.info(path)
        if here["type"] != "directory":
            return [here] if detail else [path]
        infos = []
        for entry in self.entries(path):
            info = info_of(f"{path.rstrip('/')}/{entry.name}", entry.stat(follow_symlinks=False))
            if info["islink"]:  # as for fsspec, the size of what it leads to
                with suppress(OSError):
                    info["size"] = self.status(info["name"]).st_size
            infos.append(info)
        return infos if detail else [info["name"] for info in infos]

    def exists(self, path: str, **_: Any) -> bool:
        """Whether something is there that may be seen."""
        try:
            self.info(path)
        except OSError:
            return False
        return True

    # By ``info``, unlike the local disk's: what may not be seen is neither.
    isfile: ClassVar[Callable[..., bool]] = fsspec.AbstractFileSystem.isfile
    isdir: ClassVar[Callable[..., bool]] = fsspec.AbstractFileSystem.isdir

    def _open(self, path: str, mode: str = "rb", **named: Any) -> Any:
        """Open a file; what is read has to be a regular one, at which nobody waits, as at a pipe without a writer."""
        path = self._strip_protocol(path)
        if mode == "rb":
            refuse_irregular(self, path)  # first, because opening a device may have side effects
            descriptor = self.descriptor(path, _WITHOUT_WAITING)
            try:
                refuse_irregular(self, path, descriptor)  # the file opened, which may have replaced that one
            except Unreadable:
                os.close(descriptor)
                raise
            return os.fdopen(descriptor, mode)
        if self.beneath is None:
            return super()._open(path, mode, **named)
        flags = _FLAGS[mode[0]]
        if "+" in mode:
            flags = flags & ~os.O_WRONLY | os.O_RDWR
        return os.fdopen(self.descriptor(path, flags), mode)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Make a folder."""
        if self.exists(path):
            raise FileExistsError(path)
        if create_parents:
            self.makedirs(path)
        else:
            self._at(path, os.mkdir)

    @_if_confined
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder and those above it."""
        path = self._strip_protocol(path)
        real = os.path.realpath(path)
        if real in (self.beneath or ()):
            Path(real).mkdir(parents=True, exist_ok=exist_ok)
            return
        if not self.isdir(parent := self._parent(path)) and parent != path:
            self.makedirs(parent, exist_ok=True)
        try:
            self._at(path, os.mkdir)
        except FileExistsError:
            if not exist_ok or not self.isdir(path):
                raise

    def rm_file(self, path: str) -> None:
        """Remove a file, or a link and not what it leads to."""
        self._at(path, os.unlink)

    @_if_confined
    def rm(self, path: str | list[str], recursive: bool = False, **_: Any) -> None:
        """Remove files, and folders with all that is in them."""
        for each in path if isinstance(path, list) else [path]:
            with self._place(self._strip_protocol(each), follow=False) as (folder, name):
                if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=folder)
                elif not recursive:
                    raise ValueError("Cannot delete directory, set recursive=True")
                else:
                    shutil.rmtree(name, dir_fd=folder)

    @_if_confined
    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """Rename a file or folder."""
        with (
            self._place(self._strip_protocol(path1), follow=False) as (folder, name),
            self._place(self._strip_protocol(path2), follow=False) as (other_folder, other_name),
        ):
            os.replace(name, other_name, src_dir_fd=folder, dst_dir_fd=other_folder)

    @_if_confined
    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy a file."""
        with self.open(path1, "rb") as source, self.open(path2, "wb") as target:
            shutil.copyfileobj(source, target)

    @_if_confined
    def get_file(self, rpath: str, lpath: Any, **_: Any) -> None:
        """Copy a file of this disk to a place of the process's own."""
        with self.open(rpath, "rb") as source, Path(lpath).open("wb") as target:
            shutil.copyfileobj(source, target)

    @_if_confined
    def put_file(self, lpath: Any, rpath: str, **_: Any) -> None:
        """Copy a file of the process's own to this disk."""
        with Path(lpath).open("rb") as source, self.open(rpath, "wb") as target:
            shutil.copyfileobj(source, target)

    def _at(self, path: str, change: Callable[..., None]) -> None:
        path = self._strip_protocol(path)
        if self.beneath is None:
            change(path)
            return
        with self._place(path, follow=False) as (folder, name):
            change(name, dir_fd=folder)

    # What nothing needs on a confined disk.
    lexists, chmod, link, symlink, touch, rmdir = (
        _if_confined(None, name) for name in ("lexists", "chmod", "link", "symlink", "touch", "rmdir")
    )


def confine(folders: Sequence[str] | None) -> None:
    """Confine all disks that this process opens through fsspec; for processes that work for one tenant only.

    Args:
        folders: The folders; ``None``: the whole disk.
    """
    fsspec.config.conf["file"] = {} if folders is None else {"beneath": tuple(folders)}


def info_of(path: str, status: os.stat_result, islink: bool = False) -> dict[str, Any]:
    """What fsspec's ``info`` returns for a path.

    Args:
        path: The path.
        status: Its status.
        islink: Whether it is a link, of which this is the status of what it leads to.
    """
    return {
        "name": path, "size": status.st_size, "type": _KINDS.get(stat.S_IFMT(status.st_mode), "other"),
        "created": status.st_ctime, "mtime": status.st_mtime, "mode": status.st_mode, "ino": status.st_ino,
        "nlink": status.st_nlink, "uid": status.st_uid, "gid": status.st_gid,
        "islink": islink or stat.S_ISLNK(status.st_mode),
    }  # fmt: skip


fsspec.register_implementation("file", Disk, clobber=True)
fsspec.register_implementation("local", Disk, clobber=True)


# How fsspec opens the URLs that are served (``base.refuse_unserved``).

# For s3:// by s3fs's names (key, secret, token, endpoint_url, client_kwargs); for a disk ``beneath``, see ``Disk``.
StorageOptions = Mapping[str, Any]

# Timeouts in seconds and attempts for look-ups that a user waits for. Training and saving use longer ones.
_BRIEF = {"connect_timeout": 3, "read_timeout": 10}
_BRIEF_CALLS = {"call_seconds": 15.0, "attempts": 1}


def is_local(url: str) -> bool:
    """Whether a URL is on a disk."""
    return "://" not in url.removeprefix("file://")


def options_at(url: str, storage_options: StorageOptions | None) -> dict[str, Any]:
    """Options to pass to fsspec along with a URL.

    Args:
        url: The URL, or a plain path.
        storage_options: Options for ``s3://`` and for disks; default: the process's own.
    """
    options = dict(storage_options or {})
    beneath = {"beneath": options.pop("beneath")} if "beneath" in options else {}
    if is_local(url):
        options = beneath
    elif not url.startswith("s3://"):
        options = {}
    # Other processes write to the same places, so a cached listing could be stale.
    return {"use_listings_cache": False, **options}


def literal(filesystem: fsspec.AbstractFileSystem, path: str) -> str:
    """A path as ``rm`` of a file system takes it: stores' clients expand wildcards, so that others' files would go."""
    return path if "file" in filesystem.protocol else glob.escape(path)


def giving_up_soon(storage_options: StorageOptions | None) -> StorageOptions:
    """Add short timeouts to storage options, for look-ups that a user waits for.

    Args:
        storage_options: Options for ``s3://``; default: the process's own.
    """
    of_the_node = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})  # such as the addressing style
    return {**(storage_options or {}), **_BRIEF_CALLS, "config_kwargs": {**_BRIEF, **of_the_node}}


for _protocol in ("s3", "s3a"):  # by name, because importing it takes a while
    fsspec.register_implementation(_protocol, "boost_core.config.s3.ObjectStore", clobber=True)


def no_room(error: BaseException, folder: str, again: str) -> str | None:
    """The message for an error from writing to a folder because a disk is full; ``None`` for another error.

    Args:
        error: The error.
        folder: The folder.
        again: What to do once there is room.
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"{error.filename or folder}: {error.strerror}; make room and {again}, which keeps what is done"


# Reading of files that are small by nature, such as an index or a tokenizer, whatever is really at the path.

# Opening must not block, as it would for a pipe without a writer or a terminal.
_WITHOUT_WAITING = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Unreadable(ValueError):
    """The path is not a regular file, or the file is too large for its kind."""


def read_small(filesystem: fsspec.AbstractFileSystem, path: str, most_bytes: int) -> bytes:
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
        with filesystem.open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            content = bytes(stream.read(most_bytes + 1)) if size <= most_bytes else b""
        size = max(size, len(content))  # it may have grown
    else:
        info = filesystem.info(path)
        if info["type"] != "file":
            raise Unreadable(f"{path!r} is not a regular file; check the path")
        size = int(info["size"])
        content = bytes(filesystem.cat_file(path, start=0, end=size)) if 0 < size <= most_bytes else b""
    if size > most_bytes:
        raise Unreadable(f"{path!r} has {size} bytes, and {most_bytes} is the limit; check the path")
    return content


def refuse_irregular(filesystem: fsspec.AbstractFileSystem, path: str, descriptor: int | None = None) -> None:
    """Refuse what is not a regular file on a local disk, where opening a pipe would wait for a writer.

    Args:
        filesystem: Where it is.
        path: Its path there.
        descriptor: Of the file opened there; default: whatever is there now.

    Raises:
        FileNotFoundError: Nothing is there.
        Unreadable: It is a folder, a pipe, a device or a socket.
        OSError: It cannot be looked at.
    """
    if isinstance(filesystem, Disk):
        status = filesystem.status(path) if descriptor is None else os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(f"{path!r} is not a regular file; check the path")
