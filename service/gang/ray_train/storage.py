"""A job's checkpoint folder as Ray Train's storage: read by whoever has a ``Result``, and never written to."""

import io
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow
from pyarrow.fs import FileInfo, FileType, FSSpecHandler

from service.security.secrets import SecretReference, configure_fsspec, load

MARKER = ".validate_storage_marker"  # Ray Train writes it to find out whether all nodes see the same storage
SNAPSHOT = "checkpoint_manager_snapshot.json"  # its list of checkpoints; manifests are ours


class RunStorage(FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """Handler of a pyarrow file system for one job's folder, on whichever node it is used.

    A checkpoint is in the folder by the time that Ray Train hears of it. What Ray Train would write besides is taken
    and forgotten: its list would still have the checkpoints that retention has removed since, with which it refuses to
    start, and a store that is away for a while is no reason for a run to end.

    Args:
        url: The folder.
        secret: What it is reached with; read on the node, so that only the reference travels.
    """

    def __init__(self, url: str, secret: SecretReference | None) -> None:
        self._url, self._secret = url, secret
        self._opened: Any = None

    def __reduce__(self) -> tuple[type["RunStorage"], tuple[str, SecretReference | None]]:
        return RunStorage, (self._url, self._secret)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunStorage) and (self._url, self._secret) == (other._url, other._secret)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self._url, self._secret))

    @property
    def fs(self) -> Any:
        """The file system that the URL names, opened when it is first needed."""
        if self._opened is None:
            if self._secret is not None:
                configure_fsspec(load(self._secret))
            self._opened, _ = fsspec.url_to_fs(self._url)
        return self._opened

    def get_type_name(self) -> str:
        """What people see of it."""
        return f"boost+{fsspec.utils.get_protocol(self._url)}"

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        """What is at paths."""
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
        """Do nothing; the trainer makes the folder."""

    def open_output_stream(self, path: str, metadata: object) -> Any:
        """Take what is written, and forget it."""
        return pyarrow.PythonFile(io.BytesIO(), mode="w")


def folder_of(url: str) -> str:
    """The path of a folder on the file system that its URL names, for example ``bucket/job``; reaches no store."""
    path: str = fsspec.core.strip_protocol(url)
    return path
