"""Checkpoints that are pinned, damaged or cut off, on disk and on a real S3 server."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from boost_core.checkpoint.folder import CheckpointFolder, CheckpointPinned
from boost_core.checkpoint.manifest import CheckpointDamaged
from boost_core.config import JobSpec
from boost_core.train.checkpoint_manager import load_newest
from tests.checkpoints import load_whole, save_whole
from tests.distributed.recording import train_and_record
from tests.distributed.test_checkpoint import step_and_save
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.s3 import BUCKET, CREDENTIALS, S3Server, s3_server

WEIGHTS = {"a": torch.arange(5000.0), "b": torch.arange(64.0).view(8, 8)}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict | None]:
    """URL of a folder, and what it is reached with; nothing of the environment is needed for it."""
    if request.param == "file":
        return f"file://{tmp_path}/runs", None
    server: S3Server = request.getfixturevalue("s3")
    return f"s3://{BUCKET}/{tmp_path.name}", {
        "key": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "secret": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        "endpoint_url": server.environment["AWS_ENDPOINT_URL"],
        "client_kwargs": {"region_name": "us-east-1"},
    }


@pytest.fixture
def job(tmp_path: Path) -> JobSpec:
    return tiny_job(tmp_path / "corpus", tmp_path / "runs")


def written(store: tuple[str, dict | None], job: JobSpec, *steps: int) -> CheckpointFolder:
    folder = CheckpointFolder(*store)
    for step in steps:
        folder.commit_written(job, job.parallelism, step, step * 4, save_whole(folder, step, WEIGHTS))
    return folder


@pytest.mark.parametrize("beneath", [False, True])
def test_a_checkpoint_that_is_a_link_counts_and_is_never_written_through(
    tmp_path: Path, job: JobSpec, beneath: bool
) -> None:
    other = written((str(tmp_path / "other"), None), job, 100, 200)
    links = tmp_path / "runs"
    links.mkdir()
    for step in (100, 200):
        (links / f"step-{step:08d}").symlink_to(other.step_url(step))
    (links / "step-00000300").symlink_to(links / "step-00000300")
    (links / "step-00000400").symlink_to(tmp_path / "not there")
    if beneath:
        (links / "step-00000500").symlink_to(written((str(tmp_path.parent / "outside"), None), job, 500).step_url(500))
    folder = CheckpointFolder(str(links), {"beneath": [str(tmp_path)]} if beneath else None)
    assert (folder.steps(), folder.newest_intact()) == ([100, 200], 200)
    folder.pin(100)
    with pytest.raises(CheckpointPinned):
        folder.remove(100)
    folder.unpin(100)
    folder.remove(100)
    assert folder.steps() == [200]
    folder.prepare(200)
    assert (links / "step-00000200").is_dir() and not (links / "step-00000200").is_symlink()
    assert [other.damage(step) for step in other.steps()] == [[], []]


@pytest.mark.full
def test_a_folders_name_is_no_pattern(store: tuple[str, dict | None], job: JobSpec) -> None:
    url, options = store
    other, folder = (written((f"{url}/{name}", options), job, 100, 200) for name in ("run1", "run[1]"))
    folder.pin(200)
    assert (folder.pinned(), other.pinned()) == ({200}, set())
    folder.remove(100)
    folder.prepare(200)  # removes what is there
    assert folder.steps() == [200] and other.steps() == [100, 200]
    assert [other.damage(step) for step in other.steps()] == [[], []]


def test_a_pinned_checkpoint_is_neither_pruned_nor_removed(store: tuple[str, dict | None], job: JobSpec) -> None:
    folder = written(store, job, 100, 200, 300, 400)
    assert folder.pinned() == set()
    folder.pin(200)
    folder.pin(200)
    other = CheckpointFolder(*store)
    assert other.pinned() == {200}
    assert other.prune(1, None) == [100, 300]
    assert other.steps() == [200, 400]
    with pytest.raises(CheckpointPinned, match=r"step 200 in .* is pinned; unpin it to remove it"):
        other.remove(200)
    assert other.damage(200) == []

    other.unpin(200)
    other.unpin(200)
    assert folder.pinned() == set()
    folder.remove(200)
    assert folder.steps() == [400]
    filesystem, path = fsspec.url_to_fs(folder.step_url(200), **folder.storage_options)
    assert filesystem.glob(f"{path}/*") == []  # some S3 servers keep empty folders


def test_only_what_is_there_can_be_pinned_or_removed(store: tuple[str, dict | None], job: JobSpec) -> None:
    folder = written(store, job, 100)
    for refused in (folder.pin, folder.remove):
        with pytest.raises(FileNotFoundError):
            refused(200)
    assert folder.pinned() == set()
    assert folder.prune(1, None) == []


class Pinning(CheckpointFolder):
    """Somebody else pins what is being removed, right after it was found not to be pinned."""

    def _refuse_pinned(self, step: int) -> None:
        super()._refuse_pinned(step)
        CheckpointFolder(self.url, self.storage_options).pin(step)


def test_a_pin_that_comes_while_a_checkpoint_is_removed_holds(store: tuple[str, dict | None], job: JobSpec) -> None:
    folder = written(store, job, 100, 200)
    before = folder.manifest(100)
    with pytest.raises(CheckpointPinned):
        Pinning(*store).remove(100)
    assert (folder.steps(), folder.pinned(), folder.damage(100)) == ([100, 200], {100}, [])
    assert folder.manifest(100) == before

    folder.unpin(100)
    assert Pinning(*store).prune(1, None) == []
    assert folder.steps() == [100, 200]


class RemovedMeanwhile(CheckpointFolder):
    """Somebody else removes what is being pinned, right after it was found to be there."""

    def _refuse_uncommitted(self, step: int) -> None:
        super()._refuse_uncommitted(step)
        CheckpointFolder(self.url, self.storage_options).remove(step)


def test_what_is_removed_while_it_is_pinned_is_not_said_to_be_pinned(
    store: tuple[str, dict | None], job: JobSpec
) -> None:
    folder = written(store, job, 100, 200)
    with pytest.raises(FileNotFoundError, match="no committed checkpoint of step 100"):
        RemovedMeanwhile(*store).pin(100)
    assert (folder.steps(), folder.pinned()) == ([200], set())


@pytest.mark.full
def test_a_trainer_spares_what_is_pinned(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    ranks.run(2, train_and_record, tiny_job(corpus, tmp_path / "runs"))
    folder = CheckpointFolder(str(tmp_path / "runs"))
    assert folder.steps() == [3, 6, 8]
    folder.pin(3)
    longer = tiny_job(corpus, tmp_path / "runs", training={"steps": 11}, checkpoint={"keep_last": 1})
    ranks.run(2, train_and_record, longer)
    assert folder.steps() == [3, 11]


def spoil(folder: CheckpointFolder, step: int, name: str) -> None:
    """Cut a file of a checkpoint off."""
    filesystem, path = fsspec.url_to_fs(f"{folder.step_url(step)}/{name}", **folder.storage_options)
    content = filesystem.cat_file(path)
    filesystem.pipe_file(path, content[: len(content) // 2])


def delete(folder: CheckpointFolder, step: int, name: str) -> None:
    filesystem, path = fsspec.url_to_fs(f"{folder.step_url(step)}/{name}", **folder.storage_options)
    filesystem.rm_file(path)


def test_damaged_checkpoints_are_told_of_and_do_not_count(store: tuple[str, dict | None], job: JobSpec) -> None:
    folder = written(store, job, 100, 200, 300, 400, 500)
    spoil(folder, 500, "manifest.json")
    delete(folder, 400, "manifest.json")
    spoil(folder, 300, "__0_0.distcp")
    assert folder.steps() == [100, 200, 300, 400, 500]
    told = {found.step: found.damage.partition("step-00000")[2] for found in folder.checkpoints()}
    assert told.pop(500).startswith("500/manifest.json is not JSON")
    assert told.pop(300).startswith("300/__0_0.distcp has ")
    assert told == {400: "400/manifest.json is missing", 200: "", 100: ""}
    assert [len(folder.damage(step)) for step in folder.steps()] == [0, 0, 1, 1, 1]

    assert folder.prune(2, None) == []
    assert folder.prune(1, None) == [100]
    folder.remove(400)
    folder.remove(500)
    assert folder.steps() == [200, 300]


def test_those_that_a_job_has_left_out_do_not_count_either(store: tuple[str, dict | None], job: JobSpec) -> None:
    folder = written(store, job, 100, 200, 300)
    assert folder.prune(1, None, newest=200) == [100]
    assert folder.steps() == [200, 300]


def test_what_saves_that_never_ended_have_left_goes_with_the_next_checkpoint(
    store: tuple[str, dict | None], job: JobSpec
) -> None:
    folder = written(store, job, 100)
    for step in (150, 300):
        save_whole(folder, step, WEIGHTS)
    folder.prune(None, None)  # by someone else, while the job may be saving
    assert folder._sizes(150)
    written(store, job, 200)
    assert folder.prune(None, None, newest=200) == []
    assert (folder.steps(), folder._sizes(150), bool(folder._sizes(300))) == ([100, 200], {}, True)
    assert [folder.damage(step) for step in folder.steps()] == [[], []]


def newest_loaded(folder: CheckpointFolder, most: int) -> tuple[int | None, list[int]]:
    loaded: list[int] = []
    return load_newest(loaded.append, folder, most=most), loaded


@pytest.mark.full
@pytest.mark.parametrize(("most", "step"), [(250, 200), (200, 200), (99, None)])
def test_who_rolls_back_never_goes_forward(
    ranks: Ranks, tmp_path: Path, job: JobSpec, most: int, step: int | None
) -> None:
    folder = written((f"file://{tmp_path}/runs", None), job, 100, 200, 300)
    assert ranks.run(1, newest_loaded, folder, most) == [(step, [] if step is None else [step])]


def test_a_job_behind_a_checkpoint_keeps_the_one_that_it_has_just_saved(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    spec = tiny_job(corpus, tmp_path / "runs", checkpoint={"keep_last": 1})
    folder = written((str(tmp_path / "runs"), None), spec, 1, 100)
    ranks.run(2, step_and_save, spec)
    assert folder.steps() == [2, 100]


def test_a_byte_that_has_changed_counts_where_files_are_read(store: tuple[str, dict | None], job: JobSpec) -> None:
    folder = written(store, job, 100, 200)
    filesystem, path = fsspec.url_to_fs(f"{folder.step_url(200)}/__0_0.distcp", **folder.storage_options)
    content = filesystem.cat_file(path)
    filesystem.pipe_file(path, content[:2000] + bytes([content[2000] ^ 1]) + content[2001:])
    into = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    with pytest.raises(CheckpointDamaged, match=r"step-00000200/__0_0.distcp is not what was written"):
        load_whole(folder, folder.manifest(200), into)
    assert folder.prune(1, None, read_files=True) == []
    load_whole(folder, folder.manifest(100), into)
    assert all(torch.equal(into[name], tensor) for name, tensor in WEIGHTS.items())


def test_a_save_that_is_cut_off_leaves_what_was_committed_before(store: tuple[str, dict | None], job: JobSpec) -> None:
    folder = CheckpointFolder(*store)
    save_whole(folder, 100, WEIGHTS)  # the first ever; cut off before its manifest
    assert folder.steps() == []
    written(store, job, 100)
    save_whole(folder, 100, WEIGHTS)  # the same step once more
    assert folder.steps() == [100]
    with pytest.raises(CheckpointDamaged, match=r"step-00000100/manifest.json is missing"):
        folder.manifest(100)
    written(store, job, 100)
    assert folder.damage(100) == []
    assert folder.manifest(100).step == 100
