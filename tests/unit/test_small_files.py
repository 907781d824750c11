"""Files that the service reads whole, and what may lie in their place."""

import json
import os
from pathlib import Path

import fsspec
import pytest

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import SourceConfig
from boost_core.config.data_files import SourceFile, index_of, tokenizer_vocabulary
from boost_core.config.storage import Disk, Unreadable, read_small
from boost_core.data.documents import documents
from boost_core.data.tokenizers import open_tokenizer

LOCAL, MEMORY = fsspec.filesystem("file"), fsspec.filesystem("memory")


def test_a_regular_file_is_read_and_a_larger_one_is_not(tmp_path: Path) -> None:
    for filesystem, folder in ((LOCAL, str(tmp_path)), (MEMORY, "/small")):
        filesystem.pipe_file(f"{folder}/it", b"1234")
        filesystem.pipe_file(f"{folder}/empty", b"")
        assert read_small(filesystem, f"{folder}/it", 4) == b"1234"
        assert read_small(filesystem, f"{folder}/empty", 4) == b""
        with pytest.raises(Unreadable, match="has 4 bytes, and 3 is the limit"):
            read_small(filesystem, f"{folder}/it", 3)
        with pytest.raises(Unreadable, match="is not a regular file"):
            read_small(filesystem, folder, 4)
        with pytest.raises(FileNotFoundError):
            read_small(filesystem, f"{folder}/absent", 4)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    assert read_small(LOCAL, str(tmp_path / "link"), 4) == b"1234"


def test_what_only_says_that_it_is_empty_is_read_no_further_than_the_limit() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    with pytest.raises(Unreadable, match="has 11 bytes, and 10 is the limit"):
        read_small(LOCAL, "/proc/self/status", 10)


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    for name in ("index.json", "tokenizer.json", "step-00000001/manifest.json"):
        os.mkfifo(tmp_path / name)
    for read in (
        lambda: index_of(str(tmp_path)),
        lambda: tokenizer_vocabulary(str(tmp_path / "tokenizer.json")),
        lambda: open_tokenizer(str(tmp_path / "tokenizer.json"), None),
        lambda: CheckpointFolder(str(tmp_path)).manifest(1),
        # As if it had replaced a file that was listed.
        lambda: list(documents(SourceFile(f"{tmp_path}/index.json", 1), SourceConfig(kind="text", paths=("a",)))),
        lambda: Disk(beneath=[str(tmp_path)]).open(f"{tmp_path}/index.json", "rb"),
    ):
        with pytest.raises(ValueError, match="is not a regular file"):
            read()


@pytest.mark.full
def test_a_large_tokenizer_is_counted_like_a_small_one(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for tokens in (100, 100_000):
        path.write_text(json.dumps({"model": {"vocab": {f"token {i}": i for i in range(tokens)}}}))
        assert tokenizer_vocabulary(str(path)) == tokens
    for content in ("x" * 2**20, "[" * 2**20, "[[]," * 2**22):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
            tokenizer_vocabulary(str(path))
