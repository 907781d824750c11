"""Which files a text source names. Looked up at the door, before a job is accepted, and again by the trainer."""

import sysconfig
from collections.abc import Sequence

import fsspec

from boost_core.config.data import TextSource

_STANDARD_LIBRARY_SKIPS = ("/site-packages/", "/dist-packages/", "/test/", "/tests/", "/idlelib/")


def list_files(source: TextSource) -> list[str]:
    """The files a source names, sorted, as fsspec URLs or local paths.

    Raises:
        ValueError: A path, glob or URL names no file.
    """
    if source.kind == "standard_library":
        return _standard_library_files()
    files: set[str] = set()
    for pattern in source.paths:
        found = _expand(pattern)
        if not found:
            raise ValueError(
                f"data.source.paths: no file is at {pattern!r}; check the path, and that every node can read it"
            )
        files.update(found)
    return sorted(files)


def _standard_library_files() -> list[str]:
    root = sysconfig.get_paths()["stdlib"]
    found = [path for path in _expand(f"{root}/**/*.py") if not _skipped(path.removeprefix(root))]
    if not found:
        raise ValueError(f"data.source: no Python source text is under {root}; use kind=text with paths of your own")
    return found


def _skipped(relative_path: str) -> bool:
    return any(skip in relative_path for skip in _STANDARD_LIBRARY_SKIPS)


def _expand(pattern: str) -> list[str]:
    """Files under a path: itself, all files of a folder, or the matches of a glob."""
    try:
        filesystem, path = fsspec.url_to_fs(pattern)
        if filesystem.isdir(path):
            found: Sequence[str] = filesystem.find(path)
        else:
            found = [match for match in filesystem.glob(path) if filesystem.isfile(match)]
    except (OSError, ValueError) as error:
        raise ValueError(f"data.source.paths: cannot look up {pattern!r}: {error}") from error
    return sorted(filesystem.unstrip_protocol(match) if "://" in pattern else match for match in found)
