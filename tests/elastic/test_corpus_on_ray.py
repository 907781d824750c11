"""The same corpora by Ray Data: the same shards, the same refusals."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from boost_core.config.storage import confine
from boost_core.data.pipeline.build import Build, BuildProgress, KeyColumns
from boost_core.data.pipeline.engine import LocalEngine
from boost_core.data.pipeline.ray_engine import RayEngine
from tests.elastic.ray_cluster import BOOST, local_ray
from tests.swapping import build_while_swapping
from tests.unit.test_corpus import corpus, documents, make, shards, texts, write

SWAPPING_SECONDS = 10.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray on this machine, which this process is connected to."""
    with local_ray(num_cpus=2) as address:
        yield address


@pytest.mark.nightly
def test_ray_data_makes_the_same_shards(tmp_path: Path, cluster: str) -> None:
    source = write(tmp_path / "in", texts())
    wanted = corpus(source, exact_dedup=True, near_dedup={}, filters=[{"measure": "words", "min": 70}])
    seen: list[BuildProgress] = []
    by_ray = Build(wanted, str(tmp_path / "ray"), RayEngine(None), seen.append).run()
    assert by_ray == make(wanted, tmp_path / "here")
    assert by_ray.counts.exact_duplicates and by_ray.counts.near_duplicates and by_ray.counts.filtered["words"]
    assert shards(tmp_path / "ray") == shards(tmp_path / "here")
    assert [each.stage for each in seen] == ["files"] * 5 + ["duplicates"] + ["shards"] * (
        len(by_ray.shards) // 2 + 1
    ) + ["done"]


@pytest.mark.full
def test_small_files_share_tasks(tmp_path: Path, cluster: str) -> None:
    source, calls = tmp_path / "in", tmp_path / "calls"
    source.mkdir()
    for number, text in enumerate(texts(200)):
        (source / f"{number:03}.jsonl").write_text(json.dumps({"text": text}))
    wanted = corpus(source, exact_dedup=True, shard_tokens=1 << 20)

    def count() -> None:
        with calls.open("a") as stream:
            stream.write("1")

    assert Build(wanted, str(tmp_path / "ray"), RayEngine(None, count), id).run() == make(wanted, tmp_path / "here")
    assert calls.stat().st_size == 4 + 1 + 1, "tasks for 208 files, for duplicates and for shards"


@pytest.mark.full
def test_keys_in_several_partitions_are_tied_as_by_processes(tmp_path: Path, cluster: str) -> None:
    runs = tuple(f"run-{number}" for number in range(5))
    for number, run in enumerate(runs):
        keys = np.random.default_rng(number).integers(0, 60, 40).astype(np.uint64)
        rows = pa.table({"document": np.arange(40) | number << 32, "one": keys, "two": keys[::-1]})
        with pa.ipc.new_file(str(tmp_path / f"{run}.arrow"), rows.schema) as writer:
            writer.write_table(rows)
    columns = KeyColumns(str(tmp_path), runs, (1 << 21,) * 5, ("one", "two"), partitions=3)
    by_ray, here = (
        sorted(pair for tied in engine.ties(columns) for pair in zip(*tied, strict=True))
        for engine in (RayEngine(None), LocalEngine(1))
    )
    assert here
    assert by_ray == here


@pytest.mark.full
def test_a_bad_document_is_said_as_by_processes_and_what_is_done_stays(tmp_path: Path, cluster: str) -> None:
    source = write(tmp_path / "in", texts(40))
    with (source / "3.jsonl").open("a") as stream:
        stream.write("broken\n")
    engine = RayEngine(1)
    with pytest.raises(ValueError, match=r"3\.jsonl, line 13: no JSON from character.*\nfix it"):
        Build(corpus(source), str(tmp_path / "out"), engine, id).run()
    seen: list[BuildProgress] = []
    Build(corpus(source, on_error="skip"), str(tmp_path / "out"), engine, seen.append).run()
    assert (seen[0].done, len(documents(tmp_path / "out"))) == (3, 48)


@pytest.mark.full
def test_a_worker_that_dies_has_its_file_done_by_another(tmp_path: Path, cluster: str) -> None:
    source, marker = write(tmp_path / "in", texts(40)), tmp_path / "died"

    def die_once() -> None:
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    lineage = Build(corpus(source), str(tmp_path / "ray"), RayEngine(None, die_once), id).run()
    assert marker.exists()
    assert lineage == make(corpus(source), tmp_path / "here")


@pytest.mark.nightly
def test_a_folder_that_becomes_a_link_to_anothers_is_not_read(tmp_path: Path, cluster: str) -> None:
    engine = RayEngine(2.0, partial(confine, [str(tmp_path / "lab")]), {"env_vars": {"BOOST_DATASET": "swapped"}})
    _, refused = build_while_swapping(tmp_path, engine, SWAPPING_SECONDS)
    assert refused


@pytest.mark.nightly
def test_the_command_reaches_a_cluster_by_its_address(tmp_path: Path, cluster: str) -> None:
    source = write(tmp_path / "in", texts(40))
    command = [str(BOOST), "data", "tokenize", str(source), str(tmp_path / "ray"), "--kind", "jsonl", "--ray"]
    done = subprocess.run([*command, "--address", cluster], capture_output=True, text=True)
    assert (done.returncode, "48 of 48 documents" in done.stderr) == (0, True), done.stderr
    assert sorted(documents(tmp_path / "ray")) == sorted(texts(40))


@pytest.mark.nightly
def test_a_cluster_that_is_not_there_is_said(tmp_path: Path) -> None:
    command = [
        str(BOOST),
        "data",
        "tokenize",
        str(tmp_path / "documents"),
        str(tmp_path / "out"),
        "--ray",
        "--address",
        "127.0.0.1:1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "there is no Ray cluster at 127.0.0.1:1" in done.stderr) == (2, True), done.stderr
