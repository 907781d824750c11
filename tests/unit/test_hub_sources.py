"""Documents on a hub, by its own client."""

import gzip
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import fsspec
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import HfHubHTTPError

from boost_core.config.base import StoreUnusable
from boost_core.config.data_files import check_data, read_index
from boost_core.config.training import DataConfig
from boost_core.data.pipeline.build import Lineage
from tests.hub import LocalHub, local_hub
from tests.unit.test_corpus import documents

TEXTS = [f"document {number} of the hub" for number in range(40)]


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        rows = io.BytesIO()
        pq.write_table(pa.table({"text": TEXTS[20:]}), rows)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:20]).encode()
        hub.files["org/corpus"] = {
            "lines/a.jsonl.gz": gzip.compress(lines), "rows/b.parquet": rows.getvalue(), "README.md": b"about"
        }  # fmt: skip
        yield hub


def tokenize(
    hub: LocalHub | str, folder: Path, source: str, kind: str, *options: str
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, because the client looks for the hub when it is imported."""
    there = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"} if isinstance(hub, str) else hub.environment
    command = [sys.executable, "-m", "boost_core.data", "tokenize", source, str(folder), "--kind", kind, *options]
    return subprocess.run(command, env=os.environ | there, capture_output=True, text=True, timeout=120)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "kind", "texts"),
    [
        ("hf://datasets/org/corpus/lines/*.jsonl.gz", "jsonl", TEXTS[:20]),
        ("hf://datasets/org/corpus/rows", "parquet", TEXTS[20:]),
    ],
)
def test_files_and_folders_of_a_dataset(
    hub: LocalHub, tmp_path: Path, source: str, kind: str, texts: list[str]
) -> None:
    done = tokenize(hub, tmp_path / "out", source, kind, "--shuffle", "0")
    assert done.returncode == 0, done.stderr
    assert sorted(documents(tmp_path / "out")) == sorted(texts)
    (file,) = Lineage.model_validate_json((tmp_path / "out" / "lineage.json").read_bytes()).files
    assert file.file.startswith("hf://datasets/org/corpus/")
    assert file.stamp  # so that it is not read again


@pytest.mark.full
def test_in_one_stream_too(hub: LocalHub, tmp_path: Path) -> None:
    assert tokenize(hub, tmp_path / "out", "hf://datasets/org/corpus/rows/b.parquet", "parquet").returncode == 0
    assert read_index(str(tmp_path / "out")).documents == 20


@pytest.mark.full
def test_rows_without_text_are_refused_at_the_door(hub: LocalHub) -> None:
    script = """if True:
        import sys
        from boost_core.config.training import DataConfig
        from boost_core.config.data_files import check_data
        source = {"kind": "parquet", "paths": ["hf://datasets/org/corpus/rows"], "text_field": sys.argv[1]}
        check_data(DataConfig.model_validate({"source": source, "validation_fraction": 0.5}), 256, 8)"""
    for field, problem in (
        ("text", ""),
        ("content", "has no column 'content', but 'text'; set text_field (--text-field) to a column"),
    ):
        command = [sys.executable, "-c", script, field]
        done = subprocess.run(command, env=os.environ | hub.environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode == 0, problem in done.stderr) == (not problem, True), done.stderr


@pytest.mark.full
def test_a_file_is_the_same_in_all_revisions_that_have_it(hub: LocalHub) -> None:
    script = """if True:
        from boost_core.config import SourceConfig
        from boost_core.config.data_files import list_files
        spelled = [f"hf://datasets/org/corpus{at}/rows/b.parquet" for at in ("", "@main", "@refs/pr/1")]
        found = list_files(SourceConfig(kind="parquet", paths=[*spelled, "hf://datasets/org/corpus@main/rows"]))
        assert [file.url for file in found] == spelled[:1], found"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | hub.environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_what_the_hub_lacks_is_named(hub: LocalHub, tmp_path: Path) -> None:
    absent = tokenize(hub, tmp_path / "out", "hf://datasets/org/corpus/none/*.jsonl", "jsonl")
    assert (absent.returncode, "there is no file at 'hf://datasets/org/corpus/none/*.jsonl'" in absent.stderr) == (
        2,
        True,
    )
    other = tokenize(hub, tmp_path / "out", "hf://datasets/org/other/*.jsonl", "jsonl")
    assert (other.returncode, "org/other" in other.stderr, "Traceback" in other.stderr) == (2, True, False)


@pytest.mark.full
def test_a_hub_that_is_away_is_said(tmp_path: Path) -> None:
    done = tokenize("http://127.0.0.1:1", tmp_path / "out", "hf://datasets/org/corpus/rows", "parquet")
    assert done.returncode == 2
    assert "the hub does not answer" in done.stderr
    assert "check the network and HF_ENDPOINT" in done.stderr


@pytest.mark.parametrize(("status", "final"), [(503, False), (429, False), (403, True), (410, True)])
def test_an_error_of_the_hub_may_pass_unless_it_is_its_answer(status: int, final: bool) -> None:
    data = DataConfig.model_validate({"source": {"kind": "text", "paths": ["hf://datasets/org/corpus/rows"]}})
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub"))
    error = HfHubHTTPError("it says no", response=response)
    with (
        patch.object(fsspec, "url_to_fs", side_effect=error),
        pytest.raises(ValueError if final else StoreUnusable, match="cannot look up"),
    ):
        check_data(data, 256, 8)


@pytest.mark.full
def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    done = tokenize("http://127.0.0.1:1", tmp_path / "out", "hf://org/model", "text")
    assert (done.returncode, "such as hf://datasets/organization/name" in done.stderr) == (2, True)
