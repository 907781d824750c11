"""What leaves as a model is what was trained, or nothing leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from boost_core.convert.__main__ import main
from tests.distributed.recording import train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks


def flip_a_bit(checkpoint: Path) -> Path:
    shard = checkpoint / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1 << 6
    shard.write_bytes(content)
    return shard


def swap_shards(checkpoint: Path) -> Path:
    first, second = checkpoint / "__0_0.distcp", checkpoint / "__1_0.distcp"
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    return first


def flip_a_bit_of_the_index(checkpoint: Path) -> Path:
    index = checkpoint / ".metadata"
    content = bytearray(index.read_bytes())
    content[-200] ^= 1
    index.write_bytes(content)
    return index


def cut_the_manifest_off(checkpoint: Path) -> Path:
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-30])
    return manifest


DAMAGE: list[Callable[[Path], Path]] = [flip_a_bit, swap_shards, flip_a_bit_of_the_index, cut_the_manifest_off]


@pytest.mark.full
def test_a_damaged_checkpoint_is_not_exported(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tiny_job(write_corpus(tmp_path / "corpus"), tmp_path / "runs", model={"family": "dense", "rank": None})
    ranks.run(2, train_and_record, job)
    newest = tmp_path / "runs" / "step-00000008"
    intact = {path.name: path.read_bytes() for path in newest.iterdir()}

    def export(model: Path, *more: str) -> int:
        return main(["export", f"{tmp_path}/runs", str(model), *more])

    assert export(tmp_path / "model") == 0
    for damage in DAMAGE:
        damaged = damage(newest)
        assert export(tmp_path / damage.__name__) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"the checkpoint of step 8 is damaged: {damaged} ")
        assert said.endswith("; restore it, or choose another with --step: 3, 6\n")
        assert not (tmp_path / damage.__name__).exists()
        for name, content in intact.items():
            (newest / name).write_bytes(content)

    flip_a_bit(newest)
    assert export(tmp_path / "before", "--step", "6") == 0
    exported, trained = (load_file(tmp_path / model / "model.safetensors") for model in ("before", "model"))
    assert exported.keys() == trained.keys()
    assert not all(torch.equal(exported[name], trained[name]) for name in exported)
