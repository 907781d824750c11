"""Temporary folders that a killed process leaves for the next one to remove."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


class TemporaryFolder:
    """A temporary folder, removed when it is closed.

    The kernel drops its lock when this process and those forked from it have ended, however they did. Whoever next
    makes a folder with the same prefix removes what has no lock.

    Args:
        prefix: What its name begins with. Only ``TemporaryFolder`` may make folders with this prefix there.
        parent: Where to make it; default: the system's folder for temporary files.
        end_users: Called with each folder that was left, before it is removed.
    """

    def __init__(
        self, prefix: str, parent: Path | None = None, end_users: Callable[[Path], None] | None = None
    ) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for left in parent.glob(f"{prefix}*"):
            with suppress(OSError):  # it was just removed, or belongs to someone else
                descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(descriptor).st_uid != os.geteuid():
                        continue
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if end_users:
                        end_users(left)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(descriptor)
        folder = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
        self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks, on which nobody can remove it either
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        self.path = folder.rename(parent / folder.name[1:])  # never under its own name without its lock

    def close(self) -> None:
        """Remove it, unless it was renamed."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()
