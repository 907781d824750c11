"""A checkpoint's index is data: it runs nothing, and names files of its own folder only."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.shards import load_whole, save_whole


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    written = CheckpointFolder(str(tmp_path))
    save_whole(written, 1, tensors(1.0))
    return written


def tensors(value: float) -> dict[str, torch.Tensor]:
    types = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
    return {str(dtype): torch.full((2, 3), value, dtype=dtype) for dtype in types} | {"scalar": torch.tensor(value)}


def index(folder: CheckpointFolder) -> Path:
    return Path(folder.step_url(1)) / ".metadata"


def test_what_was_saved_is_loaded(folder: CheckpointFolder) -> None:
    got = tensors(0.0)
    load_whole(folder, 1, got)
    assert all(torch.equal(got[name], saved) for name, saved in tensors(1.0).items())


class RunsSomething:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_runs_nothing(folder: CheckpointFolder, tmp_path: Path, protocol: int) -> None:
    index(folder).write_bytes(pickle.dumps(RunsSomething(tmp_path / "ran"), protocol))
    with pytest.raises(CheckpointException, match=r"would run .*mkdir; it is none of ours"):
        load_whole(folder, 1, tensors(0.0))
    assert not (tmp_path / "ran").exists()


def test_no_way_round_through_what_is_allowed(folder: CheckpointFolder) -> None:
    # From protocol 4 on names may have dots, by which a class leads to all of its module's globals.
    module, name = (bytes([0x8C, len(text)]) + text.encode() for text in (metadata.__name__, "Metadata.__module__"))
    index(folder).write_bytes(b"\x80\x04" + module + name + b"\x93.")
    with pytest.raises(CheckpointException, match=r"would run .*Metadata.__module__"):
        load_whole(folder, 1, tensors(0.0))


def test_an_index_names_no_files_of_others(folder: CheckpointFolder) -> None:
    content = pickle.loads(index(folder).read_bytes())
    for file in content.storage_data.values():
        file.relative_path = "../step-00000002/__0_0.distcp"
    index(folder).write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointException, match="names a file of another folder"):
        load_whole(folder, 1, tensors(0.0))
