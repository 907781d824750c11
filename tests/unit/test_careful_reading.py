"""A checkpoint's index is data: it runs nothing, and names files of its own folder only."""

import os
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata

from boost_core.checkpoint.folder import CheckpointFolder, files_named
from boost_core.checkpoint.manifest import StoredFile
from boost_core.checkpoint.resharding import _portable
from tests.checkpoints import load_whole, save_whole
from tests.jobs import tiny_job

JOB = tiny_job("/corpus", "/checkpoints")


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    written = CheckpointFolder(str(tmp_path))
    written.commit_written(JOB, JOB.parallelism, 1, 4, save_whole(written, 1, tensors(1.0)))
    return written


def load(folder: CheckpointFolder, into: dict[str, torch.Tensor]) -> None:
    """Load what somebody has put there who also knows what a manifest is."""
    manifest, content = folder.manifest(1), index(folder).read_bytes()
    stored = StoredFile(bytes=len(content), crc32=zlib.crc32(content))
    folder.commit(manifest.model_copy(update={"files": manifest.files | {".metadata": stored}}))
    load_whole(folder, folder.manifest(1), into)


def tensors(value: float) -> dict[str, torch.Tensor]:
    types = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
    return {str(dtype): torch.full((2, 3), value, dtype=dtype) for dtype in types} | {"scalar": torch.tensor(value)}


def index(folder: CheckpointFolder) -> Path:
    return Path(folder.step_url(1)) / ".metadata"


def test_what_was_saved_is_loaded(folder: CheckpointFolder) -> None:
    got = tensors(0.0)
    load(folder, got)
    assert all(torch.equal(got[name], saved) for name, saved in tensors(1.0).items())


class RunsSomething:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_runs_nothing(folder: CheckpointFolder, tmp_path: Path, protocol: int) -> None:
    index(folder).write_bytes(pickle.dumps(RunsSomething(tmp_path / "ran"), protocol))
    with pytest.raises(ValueError, match=r"would run .*mkdir; it is not one of ours"):
        load(folder, tensors(0.0))
    assert not (tmp_path / "ran").exists()


def test_no_way_round_through_what_is_allowed(folder: CheckpointFolder) -> None:
    # From protocol 4 on names may have dots, by which a class leads to all of its module's globals.
    module, name = (bytes([0x8C, len(text)]) + text.encode() for text in (metadata.__name__, "Metadata.__module__"))
    index(folder).write_bytes(b"\x80\x04" + module + name + b"\x93.")
    with pytest.raises(ValueError, match=r"would run .*Metadata.__module__"):
        load(folder, tensors(0.0))


def test_an_index_names_no_files_of_others(folder: CheckpointFolder) -> None:
    content = pickle.loads(index(folder).read_bytes())
    for file in content.storage_data.values():
        file.relative_path = "../step-00000002/__0_0.distcp"
    index(folder).write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match="names a file of another folder"):
        load(folder, tensors(0.0))


def test_an_index_that_would_run_something_is_no_index_where_there_is_no_torch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a torch checkpoint index"):
        files_named(pickle.dumps(RunsSomething(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


def test_without_torch_an_index_names_its_files(folder: CheckpointFolder) -> None:
    assert files_named(index(folder).read_bytes()) == {"__0_0.distcp"}


class _TwoArguments(OSError):
    def __init__(self, answer: dict[str, str], call: str) -> None:
        super().__init__(f"{call}: {answer['code']}")


def test_an_error_that_cannot_be_pickled_reaches_other_ranks_in_words() -> None:
    plain = ValueError("as it is")
    assert _portable(plain) is plain
    sent = _portable(_TwoArguments({"code": "SlowDown"}, "GetObject"))
    assert (type(sent), str(sent)) == (OSError, "_TwoArguments: GetObject: SlowDown")
