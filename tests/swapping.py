"""A hostile tenant on a shared file system: a folder of its own becomes a link, and a folder again."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def swapping(path: Path, target: Path, pause: float = 0.0) -> Iterator[None]:
    """Replace a folder with a link and back, over and over, each state lasting for ``pause`` seconds."""
    aside, link, done = path.with_name("aside"), path.with_name("link"), threading.Event()
    link.symlink_to(target)

    def swap() -> None:
        while not done.wait(pause):
            with suppress(OSError):  # something has been made in its place meanwhile
                path.rename(aside)
                link.rename(path)
                done.wait(pause)
                path.rename(link)
                aside.rename(path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def snapshot(folder: Path) -> dict[str, bytes]:
    """All that is below a folder, with the files' contents."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}
