"""The folder next to a job's checkpoints where a tracker writes its files, on a disk or in an object store."""

import os

import fsspec

from boost_core.config.storage import Disk, StorageOptions, giving_up_soon, options_at
from service.jobs.model import JobRecord


class TrackerFolder:
    """The files of one tracker for one job.

    Args:
        checkpoint_url: Folder of the job's checkpoints.
        name: Name of the tracker's folder in it.
        storage_options: Credentials for ``s3://``; default: those of the process.
    """

    def __init__(self, checkpoint_url: str, name: str, storage_options: StorageOptions | None) -> None:
        options = options_at(checkpoint_url, giving_up_soon(storage_options))
        self._filesystem, folder = fsspec.url_to_fs(checkpoint_url, **options)
        self._folder = f"{folder}/{name}"

    def may_begin(self, job: JobRecord) -> bool:
        """Whether the job's folder exists, or its ranks have had time to create it under their own user."""
        if job.progress is not None or not isinstance(self._filesystem, Disk):
            return True
        return self._filesystem.isdir(self._folder.rpartition("/")[0])

    def write(self, name: str, at: int, content: bytes) -> bool:
        """Write ``content`` at offset ``at`` and end the file there; return whether the file reached up to ``at``.

        Raises:
            OSError: The store or the disk refused it, for example because it is full.
        """
        path = f"{self._folder}/{name}"
        if isinstance(self._filesystem, Disk):
            return _write_local(self._filesystem, path, at, content)
        before = b""
        if at:
            try:
                before = self._filesystem.cat_file(path, start=0, end=at)
            except FileNotFoundError:
                return False
        if len(before) < at:
            return False
        self._filesystem.pipe_file(path, before + content)
        return True


def _write_local(disk: Disk, path: str, at: int, content: bytes) -> bool:
    above, _, name = path.rpartition("/")
    disk.makedirs(above, exist_ok=True)
    # A link would lead the service outside of what the job's tenant may use.
    folder = disk.descriptor(above, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        try:
            if os.fstat(file).st_size < at:
                return False
            while content:
                written = os.pwrite(file, content, at)
                content, at = content[written:], at + written
            os.ftruncate(file, at)  # what was written before may have been longer
            os.fsync(file)
        finally:
            os.close(file)
    finally:
        os.close(folder)
    return True
