"""Processes of an embedded Ray that it has lost sight of, as when its raylet or its GCS has died."""

import os
from contextlib import suppress
from pathlib import Path

import psutil

END_SECONDS = 5.0


def end_processes_of(folder: str) -> None:
    """End all other processes that write to files in a folder, as all of Ray's do, and wait for their end."""
    found = [process for process in psutil.process_iter() if process.pid != os.getpid() and _writes_to(process, folder)]
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=END_SECONDS)


def _writes_to(process: psutil.Process, folder: str) -> bool:
    """Whether a process has a file in a folder open for writing; false where we may not look."""
    with suppress(psutil.Error):
        return any(file.mode != "r" and Path(file.path).is_relative_to(folder) for file in process.open_files())
    return False
