"""A job's checkpoint folder as Ray Train's storage: read through a ``Result``, and never written to."""

import io
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow
from pyarrow.fs import FileInfo, FileType, FSSpecHandler

from service.security.access import Access

MARKER = ".validate_storage_marker"  # written by Ray Train to check that all nodes see the same storage
SNAPSHOT = "checkpoint_manager_snapshot.json"  # Ray Train's list of checkpoints; the manifests are ours


class RunStorage(FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """Handler of a pyarrow file system for one job's folder, usable on any node.

    A checkpoint is in the folder by the time Ray Train learns of it. Anything that Ray Train writes itself is accepted
    and discarded: its list would still contain checkpoints that retention has removed, with which it refuses to
    start, and a store that is temporarily unavailable is no reason for a run to end.

    Args:
        url: The folder.
        access: What may be reached; a secret is read on the node, so that only the reference travels.
    """

    def __init__(self, url: str, access: Access) -> None:
        self._url, self._access = url, access
        self._opened: Any = None

    def __reduce__(self) -> tuple[type["RunStorage"], tuple[str, Access]]:
        return RunStorage, (self._url, self._access)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunStorage) and (self._url, self._access) == (other._url, other._access)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self._url, self._access))

    @property
    def fs(self) -> Any:
        """The file system of the URL, opened on first use."""
        if self._opened is None:
            self._access.configure()
            self._opened, _ = fsspec.url_to_fs(self._url)
        return self._opened

    def get_type_name(self) -> str:
        """Return its name, as shown to people."""
        return f"boost+{fsspec.utils.get_protocol(self._url)}"

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        """Return what is at these paths."""
        return [self._file_info(path) for path in paths]

    def _file_info(self, path: str) -> FileInfo:
        match PurePosixPath(path).name:
            case name if name == MARKER:
                return FileInfo(path, FileType.File)
            case name if name == SNAPSHOT:
                return FileInfo(path, FileType.NotFound)
        (found,) = super().get_file_info([path])
        return found

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing; the trainer creates the folder."""

    def open_output_stream(self, path: str, metadata: object) -> Any:
        """Accept and discard what is written."""
        return pyarrow.PythonFile(io.BytesIO(), mode="w")


def folder_of(url: str) -> str:
    """Return a folder's path on its URL's file system, for example ``bucket/job``, without contacting the store."""
    path: str = fsspec.core.strip_protocol(url)
    return path
