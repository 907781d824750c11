"""The node's cache of token shards: one copy, kept while it is mapped, whoever is killed."""

import errno
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from boost_core.config.data_files import Shard, TokenIndex
from boost_core.data import corpus
from boost_core.data.corpus import map_shard
from tests.unit.test_object_store import Server, reaching, send

URL = "memory://tokens"
SHARDS = tuple(Shard(part="training", name=f"training-{number:05}.bin", tokens=1000) for number in range(3))
INDEX = TokenIndex(dtype="uint16", vocabulary=512, end_of_document=0, shards=SHARDS, source="a", complete=True)


@pytest.fixture(autouse=True)
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three shards in an object store, and a folder for temporary files of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = fsspec.filesystem("memory")
    for number, shard in enumerate(SHARDS):
        store.pipe_file(f"/tokens/{shard.name}", (np.arange(1000, dtype="<u2") + number).tobytes())
    yield
    store.rm("/tokens", recursive=True)


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / f"boost-tokens-{os.geteuid()}").iterdir())


def hold(number: int, ready: Any) -> None:
    mapped = map_shard(URL, INDEX, SHARDS[number])
    ready.put(int(mapped[1]))
    time.sleep(60)


def test_all_processes_map_one_copy_and_a_killed_one_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = multiprocessing.get_context("fork")
    ready: Any = fork.Queue()
    ranks = [fork.Process(target=hold, args=(0, ready)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    assert [ready.get(timeout=30) for _ in ranks] == [1, 1, 1, 1]
    (copy,) = cached(tmp_path)
    monkeypatch.setattr(corpus, "_UNUSED_SHARE", 0.0)  # nothing may stay that nobody maps
    assert map_shard(URL, INDEX, SHARDS[1])[1] == 2
    assert copy in cached(tmp_path)
    for rank in ranks:
        os.kill(rank.pid or 0, signal.SIGKILL)
        rank.join()
    last = map_shard(URL, INDEX, SHARDS[2])
    assert last[1] == 3
    assert copy not in cached(tmp_path)
    assert len(cached(tmp_path)) == 1


def test_a_copy_that_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    map_shard(URL, INDEX, SHARDS[0])
    (copy,) = cached(tmp_path)
    copy.rename(copy.with_suffix(".part")).write_bytes(b"half")
    assert map_shard(URL, INDEX, SHARDS[0])[999] == 999
    assert cached(tmp_path) == [copy]


def test_another_folder_at_the_same_url_is_not_the_cached_one(tmp_path: Path) -> None:
    map_shard(URL, INDEX, SHARDS[0])
    fsspec.filesystem("memory").pipe_file(f"/tokens/{SHARDS[0].name}", np.full(1000, 7, "<u2").tobytes())
    assert map_shard(URL, INDEX.model_copy(update={"source": "b"}), SHARDS[0])[0] == 7


@pytest.mark.full
def test_other_content_and_another_store_are_not_the_cached_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [Server() for _ in range(2)]

    def first_token(store: Server, token: int, shard: Shard = SHARDS[0]) -> int:
        content = np.full(1000, token, "<u2").tobytes()
        store.answer = lambda handler: send(handler, 200, content, ETag=f'"{token}"')
        monkeypatch.setitem(fsspec.config.conf, "s3", reaching(store) | {"skip_instance_cache": False})
        return int(map_shard("s3://bucket/tokens", INDEX.model_copy(update={"shards": (shard,)}), shard)[0])

    try:
        assert [first_token(store, token) for token, store in enumerate(stores)] == [0, 1]
        written = [SHARDS[0].model_copy(update={"sha256": digest}) for digest in "ab"]
        assert [first_token(stores[0], token, shard) for token, shard in enumerate(written, 3)] == [3, 4]
        asked = len(stores[0].headers)
        assert [first_token(stores[0], 9, shard) for shard in (SHARDS[0], *written)] == [0, 3, 4]
        assert len(stores[0].headers) == asked
    finally:
        for store in stores:
            store.stop()


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"00000\.bin has 2,000 bytes instead of 2,002"):
        map_shard(URL, INDEX, SHARDS[0].model_copy(update={"tokens": 1001}))
    assert not cached(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="set TMPDIR to a folder on a larger disk"):
        map_shard(URL, INDEX, SHARDS[0])


def test_of_a_copy_that_fills_the_disk_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_: object, name: str, local: str) -> None:
        Path(local).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(type(fsspec.filesystem("memory")), "get_file", fill)
        with pytest.raises(OSError, match=r"/training-00000.bin to .*\.part, .*: No space left on device; .* TMPDIR"):
            map_shard(URL, INDEX, SHARDS[0])
    assert not cached(tmp_path)
    assert map_shard(URL, INDEX, SHARDS[0])[1] == 1


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"boost-tokens-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"boost-tokens-{os.geteuid()}").chmod(0o777)
    with pytest.raises(PermissionError, match="is not a folder that only this user can use"):
        map_shard(URL, INDEX, SHARDS[0])


def test_a_folder_on_a_disk_is_not_copied(tmp_path: Path) -> None:
    for tokens in (999, 1001):
        np.arange(tokens, dtype="<u2").tofile(tmp_path / SHARDS[0].name)
        with pytest.raises(ValueError, match=rf"00000\.bin has {2 * tokens:,} bytes instead of 2,000; make the tokens"):
            map_shard(f"file://{tmp_path}", INDEX, SHARDS[0])
    np.arange(1000, dtype="<u2").tofile(tmp_path / SHARDS[0].name)
    assert map_shard(f"file://{tmp_path}", INDEX, SHARDS[0])[5] == 5
    assert not (tmp_path / f"boost-tokens-{os.geteuid()}").exists()
