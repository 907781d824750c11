"""What a process has started, also what has another parent since."""

from contextlib import suppress

import psutil


def started_by(pid: int) -> list[psutil.Process]:
    """Its descendants, with the fork servers and the forks of the Ray nodes among them."""
    tree = psutil.Process(pid).children(recursive=True)
    raylets = {str(process.pid) for process in tree if name_of(process) == "raylet"}
    return [*tree, *(each for each in psutil.process_iter() if each not in tree and _raylet_of(each) in raylets)]


def name_of(process: psutil.Process) -> str:
    """The name of a process; empty once it has ended."""
    with suppress(psutil.Error):
        return process.name()
    return ""


def _raylet_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        return process.environ().get("RAY_RAYLET_PID")
    return None
