"""Checkpoints: exact at any layout, and never half visible."""

import json
import logging
import resource
import shutil
import threading
import time
import zlib
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from boost_core.checkpoint import saver as saver_module
from boost_core.checkpoint.folder import CheckpointFolder, Origin
from boost_core.checkpoint.manifest import CheckpointDamaged, Manifest
from boost_core.checkpoint.peer_memory import SnapshotStore
from boost_core.checkpoint.saver import HostCopies, Saver, SaveRequest
from boost_core.checkpoint.shards import Chunk, SaveFailed, save_chunks
from boost_core.config import JobSpec
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.messages import Report
from boost_core.train import LastSaveFailed, Membership, train
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.distributed.recording import Recorder, losses, train_and_record, train_and_record_warnings
from tests.distributed.whole import Whole, whole_tensors
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def step_and_save(spec: JobSpec) -> tuple[Whole, float]:
    """What was saved after two steps, and the loss of the step after it."""
    state = TrainState.initial(spec, CPU)
    sampler = Sampler(load_corpus(spec.data, 32), 32, spec.training.seed)
    for _ in range(2):
        training_step(state, sampler)
    folder = CheckpointFolder(spec.checkpoint.url)
    saver = Saver(folder, spec.checkpoint, SnapshotStore(), (), lambda: None, lambda _: None, lambda: None)
    saver.start(state.step, HostCopies(1).take(state.chunks()), None, SaveRequest(state.manifest_writer(folder)))
    saved = whole_tensors(state)
    following = training_step(state, sampler).loss  # what is written is what was copied
    assert saver.outcome(wait=True).manifest.step == 2
    return saved, following


def load(spec: JobSpec) -> tuple[Whole, int, int, float]:
    """What was loaded, its step and samples, and the loss of the step after it."""
    state = TrainState.initial(spec, CPU)
    state.load(CheckpointFolder(spec.checkpoint.url), 2)
    loaded, step, samples = whole_tensors(state), state.step, state.samples
    return loaded, step, samples, training_step(state, Sampler(load_corpus(spec.data, 32), 32, spec.training.seed)).loss


LAYOUTS = [  # tensor, pipeline and data parallel ranks, schedule, ZeRO stage
    (2, 2, 1, "1f1b", 0), (1, 1, 2, "1f1b", 1), (4, 1, 1, "1f1b", 0), (1, 2, 2, "zero_bubble", 1), (2, 1, 2, "1f1b", 2),
    (1, 1, 3, "1f1b", 1), (1, 1, 1, "1f1b", 0),
]  # fmt: skip


OPTIMIZERS = {"loro": {"kind": "loro", "loro": {"exact_every_steps": 50}}, "muon": {"kind": "muon"}}


def at_layout(corpus: Path, folder: Path, layout: tuple[int, int, int, str, int], kind: str) -> JobSpec:
    tensor, pipeline, data, schedule, zero = layout
    return tiny_job(
        corpus, folder,
        model={"num_hidden_layers": 4, "family": "svd" if kind == "loro" else "cola", "tie_embeddings": kind == "tied"},
        parallelism={
            "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "data_parallel_size": data,
            "pipeline_schedule": schedule, "zero_stage": zero,
        },
        training={"global_batch_size": 24},
        optimizer=OPTIMIZERS.get(kind, {}),
    )  # fmt: skip


EACH = range(len(LAYOUTS))
FEW = [1, 3, 6]  # replicas with ZeRO, a pipeline of other stages, one process


@pytest.mark.parametrize(
    ("kind", "written_at", "read_at"),
    [
        pytest.param("cola", 0, EACH, marks=pytest.mark.nightly, id="cola by stages"),
        pytest.param("cola", 4, [1, 2, 5], id="cola by replicas"),
        pytest.param("loro", 0, FEW, marks=pytest.mark.nightly, id="loro"),
        pytest.param("muon", 4, FEW, marks=pytest.mark.nightly, id="muon"),
        pytest.param("tied", 0, FEW, marks=pytest.mark.nightly, id="tied"),
    ],
)
def test_loads_bit_equal_at_any_other_layout(
    ranks: Ranks, corpus: Path, tmp_path: Path, kind: str, written_at: int, read_at: Sequence[int]
) -> None:
    writer = at_layout(corpus, tmp_path, LAYOUTS[written_at], kind)
    (saved, following), *_ = ranks.run(writer.parallelism.world_size, step_and_save, writer)
    assert any(name.endswith("second_moment") and saved[name].abs().sum() > 0 for name in saved)
    for layout in (LAYOUTS[number] for number in read_at):
        reader = at_layout(corpus, tmp_path, layout, kind)
        for loaded, step, samples, loss in ranks.run(reader.parallelism.world_size, load, reader):
            assert (step, samples) == (2, 48)
            # Weights are bit-equal, so that fp32 sums in another order are all that differs: a few units of 6e-8.
            assert loss == pytest.approx(following, rel=2e-6)
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.full
def test_a_model_cut_otherwise_goes_on_bit_for_bit(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    def in_two(layers: list[int] | None) -> JobSpec:
        return tiny_job(
            corpus, tmp_path,
            model={"num_hidden_layers": 4},
            parallelism={
                "tensor_parallel_size": 1, "pipeline_parallel_size": 2, "pipeline_layers_per_stage": layers,
            },
            optimizer={"clip_norm": 1e6},  # its norm is summed up stage by stage
        )  # fmt: skip

    (saved, following), *_ = ranks.run(2, step_and_save, in_two([1, 3]))
    for loaded, *_, loss in ranks.run(2, load, in_two(None)):
        assert loss == following
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.full
def test_a_checkpoint_without_a_moment_is_refused_with_the_remedy(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    writer = at_layout(corpus, tmp_path, LAYOUTS[6], "muon")
    ranks.run(1, step_and_save, writer)
    with pytest.raises(
        Exception, match=r"has no tensor .*second_moment; if another optimizer\.kind wrote it, use that"
    ):
        ranks.run(1, load, at_layout(corpus, tmp_path, LAYOUTS[6], "cola"))


def uncommit(folder: Path, step: int) -> None:
    """Leave of a checkpoint what a save leaves that is cut off before its end."""
    for name in ("manifest.json", "committed"):
        (folder / f"step-{step:08d}" / name).unlink()


@pytest.mark.full
def test_a_checkpoint_that_has_not_been_committed_does_not_exist(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_job(corpus, tmp_path)
    full, _ = ranks.run(2, train_and_record, spec)
    folder = CheckpointFolder(str(tmp_path))
    assert folder.steps() == [3, 6, 8]
    for step in (6, 8):
        uncommit(tmp_path, step)
    (tmp_path / "step-00000006" / "__0_0.distcp").write_bytes(b"half of a sh")
    assert folder.steps() == [3]
    resumed, _ = ranks.run(2, train_and_record, spec)
    assert resumed[0].resumed_from == f"{tmp_path}/step-00000003"
    assert losses(resumed) == {step: loss for step, loss in losses(full).items() if step > 3}
    assert folder.steps() == [3, 6, 8]


@pytest.mark.full
def test_the_manifest_says_what_was_saved(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_job(corpus, tmp_path)
    ranks.run(2, step_and_save, spec)
    manifest = CheckpointFolder(str(tmp_path)).manifest(2)
    assert (manifest.format, manifest.step, manifest.samples) == (3, 2, 8)
    assert JobSpec.model_validate(manifest.job) == spec
    assert manifest.versions["torch"] == version("torch")
    stored = {path.name: path.stat().st_size for path in (tmp_path / "step-00000002").iterdir()}
    stored.pop("manifest.json")
    assert stored.pop("committed") == 0
    assert {name: file.bytes for name, file in manifest.files.items()} == stored
    checksums = {name: zlib.crc32((tmp_path / "step-00000002" / name).read_bytes()) for name in stored}
    assert {name: file.crc32 for name, file in manifest.files.items()} == checksums


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-7])
    else:
        path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])


DAMAGE = [
    ("missing", "__1_0.distcp is missing"),
    ("truncated", "__1_0.distcp has {less} bytes of {size}"),
    ("flipped", "__1_0.distcp is not what was written (CRC-32 differs)"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(*damage, marks=() if damage[0] == "flipped" else pytest.mark.nightly, id=damage[0])
        for damage in DAMAGE
    ],
)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_is_used(
    ranks: Ranks, corpus: Path, tmp_path: Path, how: str, words: str
) -> None:
    spec = tiny_job(corpus, tmp_path)
    full, _ = ranks.run(2, train_and_record, spec)
    shard = tmp_path / "step-00000008" / "__1_0.distcp"
    size = shard.stat().st_size
    damaged(shard, how)
    (problem,) = CheckpointFolder(str(tmp_path)).damage(8)
    assert problem.endswith(words.format(less=size - 7, size=size))
    (resumed, warnings), (_, others) = ranks.run(2, train_and_record_warnings, spec)
    assert resumed[0].resumed_from == f"{tmp_path}/step-00000006"
    assert losses(resumed) == {step: loss for step, loss in losses(full).items() if step > 6}
    assert warnings == [f"checkpoint {tmp_path}/step-00000008 is damaged and skipped: {problem}"]
    assert others == []


def files_read_for_their_checksums_alone(spec: JobSpec) -> list[str]:
    named, original = [], CheckpointFolder.damage_of

    def damage_of(folder: CheckpointFolder, manifest: Manifest, names: Iterable[str]) -> list[str]:
        named.extend(names)
        return original(folder, manifest, named)

    state = TrainState.initial(spec, CPU)
    with patch.object(CheckpointFolder, "damage_of", damage_of):
        state.load(CheckpointFolder(spec.checkpoint.url), 2)
    return named


def bytes_read_to_load(spec: JobSpec) -> int:
    state, folder = TrainState.initial(spec, CPU), CheckpointFolder(spec.checkpoint.url)
    state.load(folder, 2)  # what is imported for it is read as well
    before = psutil.Process().io_counters().read_chars
    state.load(folder, 2)
    return psutil.Process().io_counters().read_chars - before


@pytest.mark.full
def test_no_file_is_read_twice_to_resume_in_the_layout_that_wrote_it(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = at_layout(corpus, tmp_path, (2, 1, 2, "1f1b", 1), "cola")
    ranks.run(4, step_and_save, spec)
    assert ranks.run(4, files_read_for_their_checksums_alone, spec) == [[]] * 4
    stored = sum(file.bytes for file in CheckpointFolder(spec.checkpoint.url).manifest(2).files.values())
    first, *others = ranks.run(4, bytes_read_to_load, spec)  # by the kernel's count
    shards = [(tmp_path / "step-00000002" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert all(read < 1.02 * size for read, size in zip(others, shards[1:], strict=True))
    assert first + sum(others) < 1.1 * stored  # index and manifest are read by one rank, which tells the others


@pytest.mark.nightly
def test_a_file_of_which_no_rank_needs_much_is_verified_as_well(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    alone, four = ((1, 1, 1, "1f1b", 1), (1, 4, 1, "1f1b", 1))
    ranks.run(1, step_and_save, at_layout(corpus, tmp_path, alone, "cola"))
    spec, shard = at_layout(corpus, tmp_path, four, "cola"), tmp_path / "step-00000002" / "__0_0.distcp"
    assert sorted(ranks.run(4, files_read_for_their_checksums_alone, spec)) == [[], [], [], [shard.name]]
    damaged(shard, "flipped")
    with pytest.raises(CheckpointDamaged, match=rf"{shard} is not what was written"):
        ranks.run(4, load, spec)


@pytest.mark.full
def test_with_no_checkpoint_intact_a_job_does_not_start_anew_by_itself(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = tiny_job(corpus, tmp_path)
    ranks.run(2, step_and_save, spec)
    damaged(tmp_path / "step-00000002" / ".metadata", "truncated")
    with pytest.raises(ValueError, match="is intact; restore its files, or remove the folder"):
        ranks.run(2, train_and_record, spec)


@pytest.mark.full
def test_damaged_manifests_are_named_and_the_checkpoint_before_them_is_used(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = tiny_job(corpus, tmp_path)
    full, _ = ranks.run(2, train_and_record, spec)
    newest, before = (tmp_path / f"step-0000000{step}" / "manifest.json" for step in (8, 6))
    newest.write_bytes(newest.read_bytes()[:100])
    before.unlink()
    (resumed, warnings), (_, others) = ranks.run(2, train_and_record_warnings, spec)
    assert resumed[0].resumed_from == f"{tmp_path}/step-00000003"
    assert losses(resumed) == {step: loss for step, loss in losses(full).items() if step > 3}
    assert [line.partition(": ")[0] for line in warnings] == [
        f"checkpoint {tmp_path}/step-0000000{step} is damaged and skipped" for step in (8, 6)
    ]
    assert f"{newest} is not JSON" in warnings[0]
    assert warnings[1].endswith(f"{before} is missing")
    assert others == []
    folder = CheckpointFolder(str(tmp_path))  # both steps have been taken again
    assert [found.damage for found in folder.checkpoints()] == ["", "", ""]


@pytest.mark.full
def test_a_job_whose_only_checkpoint_has_lost_its_manifest_does_not_begin_anew(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = tiny_job(corpus, tmp_path / "runs", training={"steps": 3})
    full, _ = ranks.run(2, train_and_record, spec)
    (tmp_path / "runs" / "step-00000003" / "manifest.json").unlink()
    another = {"continue_from": str(tmp_path / "others"), "url": spec.checkpoint.url}
    shutil.copytree(tmp_path / "runs", tmp_path / "others")  # nor does it begin with another job's weights
    for job in (spec, tiny_job(corpus, tmp_path / "runs", training={"steps": 3}, checkpoint=another)):
        with pytest.raises(
            ValueError, match=r"is intact; restore .* step 3: .*step-00000003/manifest\.json is missing"
        ):
            ranks.run(2, train_and_record, job)

    # Cut off while it was saved for the first time, it has never been there: all its files but the manifest may be.
    (tmp_path / "runs" / "step-00000003" / "committed").unlink()
    anew, _ = ranks.run(2, train_and_record, spec)
    assert (anew[0].step, anew[0].resumed_from) == (0, None)
    assert losses(anew) == losses(full)


@pytest.mark.full
@pytest.mark.parametrize(
    ("keep", "left"),
    [
        pytest.param({}, [3, 6, 8], marks=pytest.mark.nightly),
        pytest.param({"keep_last": 1}, [8], marks=pytest.mark.nightly),
        ({"keep_last": 1, "keep_every": 6}, [6, 8]),
    ],
    ids=str,
)
def test_old_checkpoints_go_as_the_job_says(
    ranks: Ranks, corpus: Path, tmp_path: Path, keep: dict, left: list[int]
) -> None:
    ranks.run(2, train_and_record, tiny_job(corpus, tmp_path, checkpoint=keep))
    assert CheckpointFolder(str(tmp_path)).steps() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in left]


@pytest.mark.full
def test_another_model_is_refused_by_name(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks.run(2, step_and_save, tiny_job(corpus, tmp_path))
    with pytest.raises(ValueError, match="is of another model: rank is 8 there and 4 here"):
        ranks.run(2, load, tiny_job(corpus, tmp_path, model={"rank": 4}))


@pytest.mark.full
def test_another_length_of_sequences_is_refused(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks.run(2, step_and_save, tiny_job(corpus, tmp_path))
    with pytest.raises(ValueError, match=r"counts sequences of 32 tokens, and training\.sequence_length is 16"):
        ranks.run(2, load, tiny_job(corpus, tmp_path, training={"sequence_length": 16}))


@pytest.mark.full
def test_a_job_continues_from_another_jobs_checkpoint(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks.run(2, step_and_save, tiny_job(corpus, tmp_path / "first"))
    second = tiny_job(corpus, tmp_path / "second", checkpoint={"continue_from": str(tmp_path / "first")})
    reports, _ = ranks.run(2, train_and_record, second)
    assert reports[0].step == 2
    assert CheckpointFolder(str(tmp_path / "second")).steps() == [3, 6, 8]
    assert CheckpointFolder(str(tmp_path / "first")).steps() == [2]


def first_weights(spec: JobSpec, url: str) -> tuple[Whole, Whole, int, int]:
    """What a checkpoint holds, and what a job that starts from its weights does, with its step and data cursor."""
    there, here = TrainState.initial(spec, CPU), TrainState.initial(spec, CPU)
    there.load(CheckpointFolder(url), 2)
    origin = Origin.of(spec.checkpoint)
    here.load(origin.folder, 2, origin)
    return whole_tensors(there), whole_tensors(here), here.step, here.samples


@pytest.mark.full
def test_a_job_starts_from_another_jobs_weights_alone(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    ranks.run(2, step_and_save, tiny_job(corpus, first))
    same = tiny_job(corpus, tmp_path / "second", checkpoint={"weights_from": str(first)}, training={"steps": 2})
    there, here, step, samples = ranks.run(2, first_weights, same, str(first))[0]
    assert (step, samples) == (0, 0)
    for name, tensor in there.items():
        expected = tensor if name.endswith(".master") else torch.zeros_like(tensor)
        assert torch.equal(here[name], expected), name
    # It trains all its steps, which may be fewer, with another context, and then has checkpoints of its own.
    longer = tiny_job(
        corpus,
        tmp_path / "second",
        model={"rope_theta": 50_000.0},
        checkpoint={"weights_from": f"{first}/step-00000002"},
        training={"steps": 2, "sequence_length": 64},
    )
    reports, _ = ranks.run(2, train_and_record, longer)
    assert (reports[0].step, reports[0].resumed_from) == (0, f"{first}/step-00000002")
    assert list(losses(reports)) == [1, 2]
    again, _ = ranks.run(2, train_and_record, longer)
    assert again[0].resumed_from == f"{tmp_path}/second/step-00000002"


@pytest.mark.full
def test_only_the_context_may_be_another_and_only_for_weights(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    first = str(tmp_path / "first")
    ranks.run(2, step_and_save, tiny_job(corpus, first))
    theta, narrow = {"rope_theta": 50_000.0}, {"rank": 4}
    for how, model, problem in (
        ("continue_from", theta, r"rope_theta is 10000.0 there and 50000.0 here; .* checkpoint\.weights_from"),
        ("weights_from", theta | narrow, "of another model: rank is 8 there and 4 here; use the same model"),
    ):
        spec = tiny_job(corpus, tmp_path / "second", model=model, checkpoint={how: first})
        with pytest.raises(ValueError, match=rf"checkpoint\.{how}: .*{problem}"):
            ranks.run(2, train_and_record, spec)


@pytest.mark.full
def test_a_checkpoint_past_the_last_step_is_refused(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks.run(2, step_and_save, tiny_job(corpus, tmp_path / "first"))
    for steps, warmup in ((1, 0), (2, 1)):
        done = tiny_job(
            corpus,
            tmp_path / "second",
            checkpoint={"continue_from": str(tmp_path / "first")},
            training={"steps": steps},
            optimizer={"warmup_steps": warmup},
        )
        with pytest.raises(ValueError, match=rf"is at step 2 .*training\.steps={steps}; set training\.steps above 2"):
            ranks.run(2, train_and_record, done)


def test_an_origin_without_checkpoints_is_refused(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_job(corpus, tmp_path / "own", checkpoint={"continue_from": str(tmp_path / "nothing")})
    with pytest.raises(ValueError, match=r"checkpoint\.continue_from: no committed checkpoint is at"):
        ranks.run(2, train_and_record, spec)


@pytest.mark.full
def test_the_manifest_appears_in_one_piece(tmp_path: Path, ranks: Ranks, corpus: Path) -> None:
    """The commit never truncates or extends a visible file: it appears under its name once it is whole."""
    ranks.run(2, step_and_save, tiny_job(corpus, tmp_path))
    folder = CheckpointFolder(str(tmp_path))
    manifest = folder.manifest(2)
    visible = tmp_path / "step-00000002" / "manifest.json"
    visible.unlink()
    seen: list[bool] = []
    original = type(manifest).model_dump

    class Watched(type(manifest)):
        def model_dump(self, **options) -> dict:
            seen.append(visible.exists())
            return original(self, **options)

    folder.commit(Watched.model_validate(manifest.model_dump()))
    assert seen == [False]
    assert json.loads(visible.read_text())["step"] == 2


def train_blocked(spec: JobSpec, folder: Path, unblock_at: str, when: str = "training continues") -> list[Report]:
    """Train with a file where the checkpoints' folder should be, until something is logged about one of them."""

    class Unblocking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if unblock_at in message and when in message:
                folder.unlink(missing_ok=True)

    handler = Unblocking()
    logging.getLogger("boost_core").addHandler(handler)
    try:
        with patch.object(saver_module, "RETRY_SECONDS", (0.01, 0.01)):
            return train_and_record(spec)
    finally:
        logging.getLogger("boost_core").removeHandler(handler)


@pytest.mark.full
def test_training_goes_on_without_a_checkpoint_that_cannot_be_written(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("a file")
    reports, _ = ranks.run(2, train_blocked, tiny_job(corpus, folder), folder, "step-00000003")
    assert [report.step for report in reports if report.kind == "progress"] == list(range(1, 9))
    written = [report.step for report in reports if report.kind == "checkpoint"]
    assert written in ([6, 8], [7, 8]), "a step late where a try for the one before was just under way"
    (fault,) = [report for report in reports if report.kind == "fault"]
    assert (fault.what, fault.step) == ("store", 3)
    assert fault.message.startswith(f"{folder}/step-00000003 cannot be written: ")
    assert CheckpointFolder(str(folder)).steps() == written


@pytest.mark.full
def test_a_job_waits_for_the_store_with_its_last_checkpoint(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("a file")
    arguments = (tiny_job(corpus, folder), folder, "step-00000008", "the next try is")
    reports, _ = ranks.run(2, train_blocked, *arguments)
    assert [report.step for report in reports if report.kind == "checkpoint"] == [8]
    assert CheckpointFolder(str(folder)).damage(8) == []


@pytest.mark.nightly
def test_without_its_last_checkpoint_a_job_fails_in_the_end(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("a file")
    spec = tiny_job(corpus, folder, checkpoint={"final_save_timeout_seconds": 3})
    with pytest.raises(
        LastSaveFailed, match=f"the last checkpoint, {folder}/step-00000008 cannot be written: NotADirectoryError"
    ):
        ranks.run(2, train_blocked, spec, folder, "never")


def train_with_a_store_that_loses_a_file(spec: JobSpec) -> list[Report]:
    """The second rank's is gone when the last checkpoint is read back for the first time."""
    original, lost = CheckpointFolder.damage, [dist.get_rank() == 1]

    def damage(folder: CheckpointFolder, step: int, part: int = 0, parts: int = 1) -> list[str]:
        if lost and lost.pop():
            Path(folder.step_url(step), "__1_0.distcp").unlink()
        dist.barrier()  # the loop is over and makes no collectives; else it would be read before it is gone
        return original(folder, step, part, parts)

    with patch.object(CheckpointFolder, "damage", damage), patch.object(saver_module, "RETRY_SECONDS", (0.01,)):
        return train_and_record(spec)


@pytest.mark.full
def test_a_last_checkpoint_that_does_not_come_back_is_written_again(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    reports, _ = ranks.run(2, train_with_a_store_that_loses_a_file, tiny_job(corpus, tmp_path))
    assert [report.step for report in reports if report.kind == "checkpoint"] == [3, 6, 8]
    assert CheckpointFolder(str(tmp_path)).damage(8) == []


def save_with_a_small_limit(folder: str) -> str:
    """What a save fails with when the second rank may write no large files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        chunk = Chunk.whole(f"tensor {dist.get_rank()}", torch.zeros(100_000))
        with pytest.raises(SaveFailed) as failure:
            save_chunks(CheckpointFolder(folder), 1, [chunk])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return str(failure.value)


def test_all_ranks_know_what_the_system_has_said(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(2, save_with_a_small_limit, str(tmp_path)) == ["rank 1: OSError: [Errno 27] File too large"] * 2


def halt_while_a_slow_store_takes_a_checkpoint(spec: JobSpec) -> list[str]:
    """What was said meanwhile; the store has the checkpoint once something was said three times."""
    said, calls = list[str](), threading.Semaphore(0)

    def goes_on(failure: str) -> None:
        said.append(failure)
        calls.release()

    def before_save() -> None:
        assert all(calls.acquire(timeout=60) for _ in range(3))

    def after_step(times) -> None:
        if times.step == spec.checkpoint.every_steps:
            membership.halt.set()  # after the next one

    membership = Membership(before_save=before_save, goes_on=goes_on, after_step=after_step)
    train(spec, Recorder(), membership)
    return said


@pytest.mark.full
def test_a_halt_that_a_slow_store_holds_up_is_no_hang(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_job(corpus, tmp_path, parallelism={"tensor_parallel_size": 1})
    (said,) = ranks.run(1, halt_while_a_slow_store_takes_a_checkpoint, spec)
    assert len(said) >= 3 and set(said) == {""}
    assert CheckpointFolder(str(tmp_path)).steps() == [3]


TRY_SECONDS = 0.5


def train_with_a_store_that_times_out(spec: JobSpec, until_step: int) -> tuple[list[Report], float]:
    """What is reported, and how long the loop has stood still; the store takes nothing until a step is done."""
    recorder, done = Recorder(), [0]

    def before_save() -> None:
        if done[0] < until_step:
            time.sleep(TRY_SECONDS)
            raise TimeoutError("the store does not answer")

    def after_step(times) -> None:
        done[0] = times.step
        time.sleep(0.02)

    with patch.object(saver_module, "RETRY_SECONDS", (0.2,)):
        train(spec, recorder, Membership(before_save=before_save, after_step=after_step))
    return recorder.reports, sum(report.held_seconds for report in recorder.reports if report.kind == "progress")


@pytest.mark.nightly
def test_a_store_that_fails_does_not_hold_the_step(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = tiny_job(corpus, tmp_path, training={"steps": 60}, checkpoint={"every_steps": 2})
    (reports, held), _ = ranks.run(2, train_with_a_store_that_times_out, spec, 50)
    # The first try is waited for, as of a store that is only slow; thirty copies of so small a state are no time.
    assert held < 2 * TRY_SECONDS
    (fault,) = [report for report in reports if report.kind == "fault"]
    assert fault.message.endswith(" cannot be written: TimeoutError: the store does not answer")
    assert fault.step in (2, 4), "the first, or the one that took its place"
    assert CheckpointFolder(str(tmp_path)).steps()[-1] == 60
