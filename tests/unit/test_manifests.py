"""What a checkpoint says about itself is believed only as far as it is what was written, and outlives its writer."""

import json
import os
import pickle
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from boost_core.checkpoint.folder import CheckpointFolder, UnfitOrigin, refuse_unfit_origin
from boost_core.checkpoint.manifest import (
    FORMAT,
    CheckpointDamaged,
    Manifest,
    StoredFile,
    decode,
    model_facts,
)
from boost_core.config import Activation, ModelConfig
from tests.checkpoints import load_whole, save_whole
from tests.jobs import tiny_job

JOB = tiny_job("/corpus", "/checkpoints")
# As the version before wrote them, all of the job but the fields that have been read.
FORMAT_2 = """{
 "format": 2, "step": 5, "samples": 20,
 "parallelism": {
  "tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 3, "pipeline_schedule": "1f1b",
  "zero_stage": 1, "strategy": null, "norm": "fused", "group_projections": true, "recompute": "none",
  "split_micro_batch": false
 },
 "job": {
  "name": "tiny-test",
  "model": {
   "preset": null, "family": "cola", "lax": null, "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
   "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": null, "rank": 8, "gate_activation": null,
   "tie_embeddings": false, "rope_theta": 10000.0, "norm_epsilon": 1e-6
  },
  "training": {"steps": 8, "sequence_length": 32, "global_batch_size": 4},
  "checkpoint": {"url": "/checkpoints", "every_steps": 3, "a_field_that_has_gone": true},
  "queue": "default", "credentials": null, "priority": 0
 },
 "versions": {"boost": "0.1.0", "torch": "2.13.0+cpu"},
 "saved_at": "2026-11-22T04:19:35.121876Z",
 "files": {
  "__0_0.distcp": {"bytes": 1577, "crc32": 3591093911}, ".metadata": {"bytes": 806, "crc32": 777977005}
 }
}"""


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """With checkpoints of steps 1 and 2."""
    written = CheckpointFolder(str(tmp_path))
    for step in (1, 2):
        checksums = save_whole(written, step, tensors(float(step)))
        written.commit_written(JOB, JOB.parallelism, step, step * 4, checksums)
    return written


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((40, 50), value) for name in "abc"}


def path_of(folder: CheckpointFolder, step: int, name: str) -> Path:
    return Path(folder.step_url(step)) / name


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def of(stored: bytes) -> bytes:
        content = json.loads(stored)
        change(content)
        return json.dumps(content).encode()

    return of


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda stored: stored[: len(stored) // 2], "is not JSON, as when it is cut off"),
    "empty": (lambda _: b"", "is empty"),
    "no job": (
        lambda _: json.dumps({name: value for name, value in json.loads(FORMAT_2).items() if name != "job"}).encode(),
        "is not a manifest: its job lacks model or training.sequence_length",
    ),
    "zeros": (lambda stored: bytes(len(stored)), "is not JSON"),
    "a list": (lambda _: b"[]", "is not a manifest: it is not a JSON object"),
    "deep": (lambda _: b"[" * 200_000, "is not JSON"),
    "no format": (changed(lambda content: content.pop("format")), "is not a manifest of format 2 to 3"),
    "newer": (
        changed(lambda content: content.update(format=4)),
        "was written by a newer version: it has format 4; this reads up to 3",
    ),
    "older": (changed(lambda content: content.update(format=2)), "its own CRC-32 differs"),
    "step": (changed(lambda content: content.update(step=3)), "its own CRC-32 differs"),
    "samples": (changed(lambda content: content.update(samples=9)), "its own CRC-32 differs"),
    "an unknown field": (changed(lambda content: content.update(mood="good")), "its own CRC-32 differs"),
    "a field less": (changed(lambda content: content.pop("files")), "its own CRC-32 differs"),
    "a file less": (changed(lambda content: content["files"].pop("__0_0.distcp")), "its own CRC-32 differs"),
    "no checksum": (changed(lambda content: content.pop("crc32")), "its own CRC-32 differs"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_manifest_that_is_not_what_was_written_is_named_and_the_others_are_read(
    folder: CheckpointFolder, how: str
) -> None:
    path, (damage, words) = path_of(folder, 2, "manifest.json"), DAMAGE[how]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointDamaged) as raised:
        folder.manifest(2)
    assert str(raised.value).startswith(f"{path} ") and words in str(raised.value)
    assert folder.steps() == [1, 2]
    assert folder.damage(2) == [str(raised.value)]
    assert folder.damage(1) == []
    newest, before = folder.checkpoints()
    assert (newest.step, newest.manifest, newest.damage) == (2, None, str(raised.value))
    assert (before.step, before.manifest, before.damage) == (1, folder.manifest(1), "")


def test_any_flipped_bit_of_a_manifest_is_noticed_or_means_nothing(folder: CheckpointFolder) -> None:
    stored = path_of(folder, 2, "manifest.json").read_bytes()
    written = decode(stored, 2)
    for place in range(len(stored)):
        flipped = bytearray(stored)
        flipped[place] ^= 1 << place % 8
        try:
            assert decode(bytes(flipped), 2) == written
        except CheckpointDamaged:
            continue


def test_a_manifest_in_another_steps_folder_is_refused(folder: CheckpointFolder) -> None:
    path_of(folder, 2, "manifest.json").write_bytes(path_of(folder, 1, "manifest.json").read_bytes())
    with pytest.raises(
        CheckpointDamaged, match=r"step-00000002/manifest\.json is of step 1, but its folder is of step 2"
    ):
        folder.manifest(2)


def test_what_later_versions_add_stops_nothing(folder: CheckpointFolder) -> None:
    content = json.loads(path_of(folder, 2, "manifest.json").read_bytes())
    del content["crc32"]
    content["job"]["model"]["base_of_the_rope"] = content["job"]["model"].pop("rope_theta")  # a field renamed
    content["job"]["temper"] = "mild"
    content["temper"] = "mild"
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    path_of(folder, 2, "manifest.json").write_text(json.dumps(content | {"crc32": zlib.crc32(canonical)}))
    manifest = folder.manifest(2)
    assert manifest.job["temper"] == "mild"
    assert model_facts(manifest.read_model()) == model_facts(JOB.model)
    assert folder.damage(2) == []


def test_a_model_with_facts_that_this_version_does_not_know_is_not_taken_for_another() -> None:
    manifest = a_manifest().model_copy(update={"model": model_facts(JOB.model) | {"rope_scaling": 4.0}})
    with pytest.raises(
        ValueError, match=r"that this version cannot build: rope_scaling: .*; use the version that wrote"
    ):
        manifest.read_model()


def test_the_format_before_is_read() -> None:
    manifest = decode(FORMAT_2.encode(), 5)
    assert (manifest.format, manifest.step, manifest.samples, manifest.bytes) == (2, 5, 20, 1577 + 806)
    assert manifest.sequence_length == 32
    assert manifest.files["__0_0.distcp"] == StoredFile(bytes=1577, crc32=3591093911)
    assert (manifest.parallelism.tensor_parallel_size, manifest.parallelism.data_parallel_size) == (2, 3)
    assert model_facts(manifest.read_model()) == model_facts(JOB.model)
    with pytest.raises(CheckpointDamaged, match="is of step 5"):
        decode(FORMAT_2.encode(), 6)


@pytest.mark.parametrize("name", ["../step-00000001/__0_0.distcp", "\x1b[2Jshard", "..", ".", ""])
def test_files_of_others_and_names_that_a_terminal_obeys_are_refused(name: str) -> None:
    manifest = a_manifest().model_copy(update={"files": {name: StoredFile(bytes=1, crc32=1)}})
    with pytest.raises(CheckpointDamaged, match="names files that do not belong to a checkpoint"):
        decode(manifest.to_json().encode(), 5)


def a_manifest() -> Manifest:
    return decode(FORMAT_2.encode(), 5).model_copy(update={"format": FORMAT})


LATER = ("rope_scaling", "sliding_window", "qk_norm")  # what earlier versions know nothing of
MODELS = [
    {"family": "cola", "rank": 8},
    {"family": "dense", "num_key_value_heads": 2, "tie_embeddings": True},
    {"family": "svd", "rank": 4, "gate_activation": False, "rope_theta": 5e5, "norm_epsilon": 1e-5},
    {"family": "lax", "rank": 8, "lax": {"base": "svd", "gate": "tensor", "chain_length": 1}},
    {
        "family": "svd", "rank": 4, "sliding_window": 16, "qk_norm": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    },
]  # fmt: skip


@pytest.mark.parametrize("changes", MODELS, ids=lambda changes: changes["family"])
def test_all_that_makes_a_model_what_it_is_comes_back(changes: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = ModelConfig.model_validate(sizes | changes)
    facts = model_facts(model)
    # A field that is new, or has a new name, is to be told to ``model_facts``, whose names stay.
    without = {name for name in LATER if not getattr(model, name)}
    assert facts.keys() == ModelConfig.model_fields.keys() - {"preset"} - without
    stored = json.loads(json.dumps(facts))
    back = a_manifest().model_copy(update={"model": stored}).read_model()
    assert model_facts(back) == facts
    resolved = {
        "num_key_value_heads": model.key_value_heads,
        "gate_activation": model.mlp_activation is not Activation.LINEAR,
    }
    assert back == model.model_copy(update=resolved)


def test_a_shard_that_the_manifest_does_not_list_is_damage(folder: CheckpointFolder) -> None:
    """As the list of a format without a checksum may have lost it."""
    manifest = folder.manifest(2)
    less = {name: file for name, file in manifest.files.items() if name != "__0_0.distcp"}
    folder.commit(manifest.model_copy(update={"files": less}))
    shard, index = (path_of(folder, 2, name) for name in ("__0_0.distcp", ".metadata"))
    words = f"{index} names __0_0.distcp, which is not in the manifest"
    assert folder.damage(2) == [f"{shard} is not in the manifest", words]
    assert folder.checkpoint(2).damage == f"{shard} is not in the manifest"
    shard.unlink()
    assert folder.damage(2) == [words]
    with pytest.raises(CheckpointDamaged, match="which is not in the manifest"):
        load_whole(folder, folder.manifest(2), tensors(0.0))


def test_a_list_without_the_index_is_damage(folder: CheckpointFolder) -> None:
    manifest = folder.manifest(2)
    folder.commit(manifest.model_copy(update={"files": {"__0_0.distcp": manifest.files["__0_0.distcp"]}}))
    path_of(folder, 2, ".metadata").unlink()
    assert folder.damage(2) == [f"{path_of(folder, 2, 'manifest.json')} lists no .metadata"]


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_whatever_byte_is_changed_is_noticed_while_the_tensors_are_read(folder: CheckpointFolder, name: str) -> None:
    path = path_of(folder, 2, name)
    written, manifest, into = path.read_bytes(), folder.manifest(2), tensors(0.0)
    for place in range(0, len(written), max(1, len(written) // 60)):
        path.write_bytes(flipped(written, place))
        with pytest.raises(CheckpointDamaged, match=rf"{path} is not what was written \(CRC-32 differs\)"):
            load_whole(folder, manifest, into)
    path.write_bytes(written[:-1])
    with pytest.raises(CheckpointDamaged, match=rf"{path} has {len(written) - 1} bytes of {len(written)}"):
        load_whole(folder, manifest, into)
    path.write_bytes(written)
    load_whole(folder, manifest, into)
    assert all(torch.equal(tensor, tensors(2.0)[name]) for name, tensor in into.items())


def test_a_shard_of_another_checkpoint_is_noticed_also_where_one_tensor_is_read(folder: CheckpointFolder) -> None:
    first, second = (path_of(folder, step, "__0_0.distcp") for step in (1, 2))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    for step in (1, 2):
        with pytest.raises(CheckpointDamaged, match=f"step-0000000{step}/__0_0.distcp is not what was written"):
            load_whole(folder, folder.manifest(step), {"b": torch.zeros(40, 50)})


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_pipe_in_place_of_a_file_is_damage_and_nobody_waits_at_it(folder: CheckpointFolder, name: str) -> None:
    path = path_of(folder, 2, name)
    path.unlink()
    os.mkfifo(path)
    irregular = f"'{path}' is not a regular file"
    assert any(problem.startswith(irregular) for problem in folder.damage(2))
    for same in (folder, CheckpointFolder(f"file://{folder.url}")):
        with pytest.raises((CheckpointDamaged, OSError), match=irregular):
            load_whole(same, same.manifest(2), tensors(0.0))
        load_whole(same, same.manifest(1), tensors(0.0))


@pytest.mark.parametrize("index", [b"", b"no pickle", pickle.dumps({"storage_data": 1}), pickle.dumps(torch.float32)])
def test_an_index_that_is_none_is_damage_even_where_the_manifest_has_its_checksum(
    folder: CheckpointFolder, index: bytes
) -> None:
    manifest, path = folder.manifest(2), path_of(folder, 2, ".metadata")
    path.write_bytes(index)
    stored = StoredFile(bytes=len(index), crc32=zlib.crc32(index))
    folder.commit(manifest.model_copy(update={"files": manifest.files | {".metadata": stored}}))
    assert "is not a torch checkpoint index" in folder.damage(2)[0]
    with pytest.raises(CheckpointDamaged, match="is not a torch checkpoint index"):
        load_whole(folder, folder.manifest(2), tensors(0.0))


def test_a_manifest_that_a_disk_does_not_give_is_damage(folder: CheckpointFolder) -> None:
    path = path_of(folder, 2, "manifest.json")
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json' is not a regular file"):
        folder.manifest(2)
    assert [found.damage == "" for found in folder.checkpoints()] == [False, True]


def test_a_checkpoint_counts_from_its_manifest_on(folder: CheckpointFolder, caplog: pytest.LogCaptureFixture) -> None:
    checksums = save_whole(folder, 3, tensors(3.0))
    path_of(folder, 3, "committed").mkdir()  # so that the file of that name cannot be written
    folder.commit_written(JOB, JOB.parallelism, 3, 12, checksums)
    assert folder.newest_intact() == 3
    assert "step-00000003/committed cannot be written" in caplog.text


def test_who_has_other_work_parses_no_manifest_larger_than_its_checkpoint_calls_for(folder: CheckpointFolder) -> None:
    manifest = folder.manifest(2)
    folder.commit(manifest.model_copy(update={"job": manifest.job | {"x": "x" * 2**22}}))
    assert [found.damage for found in folder.checkpoints()] == ["", ""]
    brief = CheckpointFolder(folder.url, deadline=time.monotonic() + 60)
    assert ["manifest.json' has 4" in found.damage for found in brief.checkpoints()] == [True, False]
    with pytest.raises(TimeoutError, match="took too long"):
        CheckpointFolder(folder.url, deadline=time.monotonic() - 1).newest_intact()


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    assert CheckpointFolder(str(tmp_path / "nothing")).steps() == []
    (tmp_path / "loop").symlink_to(tmp_path / "loop")  # refused by the operating system, like a disk that has gone
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        CheckpointFolder(str(tmp_path / "loop")).steps()


def loro(every: int) -> dict[str, Any]:
    return {"kind": "loro", "loro": {"exact_every_steps": every}}


@pytest.mark.parametrize(
    ("step", "there", "here", "refused"),
    [
        (6, loro(3), {"kind": "adamw"}, "the moments at .* are of 0 steps, .* for those of 6 steps"),  # just zeroed
        (6, loro(3), loro(4), "of 0 steps, .* of 2 steps"),
        (6, {"kind": "adamw"}, loro(4), "of 6 steps, .* of 2 steps"),
        (6, loro(3), loro(3), None),
        (6, loro(3), loro(2), None),  # an exact step of either
        (2, {"kind": "adamw"}, loro(4), None),
        (
            2,
            {"kind": "muon"},
            {"kind": "adamw"},
            "kind=muon, which keeps one moment of each .* factor, and adamw needs",
        ),
        (2, {"kind": "muon"}, loro(4), "of optimizer.kind=muon, .*, and loro needs two; use muon, or start from"),
        (2, {"kind": "adamw"}, {"kind": "muon"}, None),
        (2, {"kind": "muon"}, {"kind": "muon"}, None),
    ],
)
def test_moments_are_not_taken_for_those_of_other_steps(
    tmp_path: Path, step: int, there: dict[str, Any], here: dict[str, Any], refused: str | None
) -> None:
    first, model = CheckpointFolder(str(tmp_path)), {"family": "svd"}
    writer = tiny_job("/corpus", tmp_path, model=model, optimizer=there)
    first.commit_written(writer, writer.parallelism, step, step * 4, save_whole(first, step, tensors(1.0)))
    for how in ("weights_from", "continue_from"):
        job = tiny_job("/corpus", "/elsewhere", model=model, optimizer=here, checkpoint={how: str(tmp_path)})
        if refused is None or how == "weights_from":
            refuse_unfit_origin(job)
        else:
            with pytest.raises(UnfitOrigin, match=refused):
                refuse_unfit_origin(job)
