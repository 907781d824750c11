"""A hostile tenant on a shared file system: a folder of its own becomes a link, and a folder again."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from boost_core.config.storage import confine
from boost_core.config.training import CorpusConfig, SourceConfig
from boost_core.data.pipeline.build import Build, Engine

PAUSES = (0.0002, 0.005, 0.1)  # seconds between two swaps: during one call, one file, or all files


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


def build_while_swapping(tmp_path: Path, engine: Engine, seconds: float) -> tuple[int, int]:
    """Build datasets of a tenant's folder that becomes another tenant's, and return how many builds ended each way.

    Args:
        tmp_path: Where both tenants get their folders.
        engine: Its processes may use the folder ``lab`` there only, as this one may while datasets are built.
        seconds: For how long.

    Returns:
        Builds that have finished, and builds that were refused. Nothing that any of them wrote is of the other tenant.
    """
    own, others, finished, refused = tmp_path / "lab" / "corpus", tmp_path / "others" / "corpus", 0, 0
    for folder, word in ((own, "mine "), (others, "private ")):
        folder.mkdir(parents=True)
        for number in range(40):
            (folder / f"{number}.txt").write_text(word * 200)
    confine([str(tmp_path / "lab")])
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            out = tmp_path / "lab" / f"out-{finished + refused}"
            own.with_name("link").unlink(missing_ok=True)
            with swapping(own, others, pause=PAUSES[(finished + refused) % len(PAUSES)]):
                try:
                    source = SourceConfig(kind="text", paths=(str(own),))
                    Build(CorpusConfig(source=source, on_error="skip"), str(out), engine, id).run()
                    finished += 1
                except (OSError, ValueError):
                    refused += 1
            for content in (snapshot(out) if out.exists() else {}).values():
                assert b"private" not in content
    finally:
        confine(None)
    return finished, refused
