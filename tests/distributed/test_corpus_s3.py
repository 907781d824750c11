"""A corpus whose documents and shards lie on S3."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.s3 import BUCKET, s3_server
from tests.unit.test_corpus import corpus, make, shards, texts, write

pytestmark = pytest.mark.nightly


def test_shards_on_s3_are_those_on_a_disk(tmp_path: Path) -> None:
    source = write(tmp_path / "in", texts(40))
    (tmp_path / "store").mkdir()
    with s3_server(tmp_path / "store") as server:
        there = f"s3://{BUCKET}/corpus"
        script = (
            "import fsspec, sys\n"
            "from boost_core.data.__main__ import main\n"
            "fsspec.filesystem('s3').put(sys.argv[1] + '/', sys.argv[2] + '/in/', recursive=True)\n"
            "options = ['--kind', 'jsonl', '--exact-dedup', '--shard-tokens', '20000', '--validation', '0.1']\n"
            "status = main(['tokenize', sys.argv[2] + '/in', sys.argv[2] + '/out', '--workers', '2', *options])\n"
            "again = main(['tokenize', sys.argv[2] + '/in', sys.argv[2] + '/out', '--workers', '2', *options])\n"
            "fsspec.filesystem('s3').get(sys.argv[2] + '/out/', sys.argv[3] + '/', recursive=True)\n"
            "sys.exit(status or again)\n"
        )
        (tmp_path / "script.py").write_text(f"if __name__ == '__main__':\n{_indented(script)}")
        command = [sys.executable, str(tmp_path / "script.py"), str(source), there, str(tmp_path / "fetched")]
        environment = os.environ | server.environment | {"PYTHONPATH": os.getcwd()}  # noqa: PTH109
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    make(corpus(source, exact_dedup=True), tmp_path / "out")
    assert shards(tmp_path / "fetched") == shards(tmp_path / "out")
    assert not (tmp_path / "fetched" / "building").exists()


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
