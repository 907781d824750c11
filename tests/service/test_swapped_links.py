"""A tenant who swaps its own folders for links, at any time after they were checked, reaches nothing of another's."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.data.pipeline.engine import LocalEngine
from service.accounts.keys import KeyStore
from service.jobs.model import JobRecord, Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from service.security.access import Access
from service.settings import Settings
from tests.jobs import tiny_job
from tests.ranks import Ranks
from tests.service.conftest import RunningApi
from tests.service.records import GOOD, a_spec, run_to_the_end, write_checkpoints
from tests.swapping import build_while_swapping, snapshot, swapping

SWAPPING_SECONDS = 1.0
PAUSE_SECONDS = 0.0005  # less than a request takes


@pytest.fixture
def shared(store: JobStore, database_url: str, tmp_path: Path) -> Iterator[RunningApi]:
    running = RunningApi(
        store,
        Settings(
            home=tmp_path / "home",
            database_url=database_url,
            checkpoint_root=f"{tmp_path}/runs",
            allowed_prefixes=(f"{tmp_path}/data/{{tenant}}",),
            rate_per_second=10_000,
        ),
    )
    yield running
    running.stop()


@pytest.fixture
def lab(shared: RunningApi, database_url: str) -> Iterator[httpx.Client]:
    key = KeyStore(database_url).create("lab's", "lab", [Scope.SUBMIT]).key
    with httpx.Client(base_url=f"{shared.url}/v1", headers={"Authorization": f"Bearer {key}"}) as opened:
        yield opened


def finished(store: JobStore, tenant: str, tmp_path: Path) -> JobRecord:
    job = store.create(a_spec(), f"{tmp_path}/runs", Owner(tenant, "somebody"))
    run_to_the_end(store, job.id)
    write_checkpoints(job, 10, 20)
    return job


@pytest.mark.full
def test_checkpoints_of_others_are_not_listed_pinned_or_deleted(
    lab: httpx.Client, store: JobStore, tmp_path: Path
) -> None:
    own, others = finished(store, "lab", tmp_path), finished(store, "others", tmp_path)
    folder, there = Path(own.checkpoint_url), Path(others.checkpoint_url)
    before = snapshot(there)
    at = f"/jobs/{own.id}/checkpoints"
    assert [each["step"] for each in lab.get(at).json()["checkpoints"]] == [20, 10]
    folder.rename(folder.with_name("aside"))
    folder.symlink_to(there)
    asked = [lab.get(at), lab.get(f"{at}/20"), lab.put(f"{at}/20/pin"), lab.delete(f"{at}/20/pin")]
    for answer in (*asked, lab.delete(f"{at}/20")):
        assert answer.status_code == 503, answer.text
        assert "leads outside of what this tenant may use" in answer.json()["detail"]
    folder.unlink()
    folder.with_name("aside").rename(folder)
    CheckpointFolder(str(folder)).remove(20)
    CheckpointFolder(str(there)).remove(10)
    before, until = snapshot(there), time.monotonic() + SWAPPING_SECONDS
    with swapping(folder, there, PAUSE_SECONDS):
        while time.monotonic() < until:
            answer = lab.get(at)
            assert (answer.status_code == 200 and [each["step"] for each in answer.json()["checkpoints"]] == [10]) or (
                answer.status_code in (200, 503) and answer.json().get("checkpoints", []) == []
            ), answer.text
            answers = [lab.get(f"{at}/20"), lab.put(f"{at}/20/pin"), lab.delete(f"{at}/20/pin"), lab.delete(f"{at}/20")]
            assert {answer.status_code for answer in answers} <= {404, 409, 503}  # 409: its manifest cannot be read
            assert snapshot(there) == before


@pytest.mark.full
def test_data_and_checkpoints_of_others_are_no_start(lab: httpx.Client, store: JobStore, tmp_path: Path) -> None:
    own, others = tmp_path / "data" / "lab" / "corpus", tmp_path / "data" / "others" / "corpus"
    for folder, name in ((own, "mine"), (others, "private")):
        folder.mkdir(parents=True)
        (folder / f"{name}.txt").write_text("a sentence of some length. " * 200)
    theirs = finished(store, "others", tmp_path)
    own.with_name("origin").symlink_to(theirs.checkpoint_url)
    spec = GOOD | {"data": {"source": {"kind": "text", "paths": [str(own)]}}}
    assert lab.post("/jobs/dry-run", json=spec).status_code == 200
    origin = spec | {"checkpoint": {"weights_from": f"{own.parent}/origin"}}
    refused = lab.post("/jobs/dry-run", json=origin)
    assert refused.status_code == 422 and "step" not in refused.text.replace("this tenant may use", "")
    until, seen = time.monotonic() + SWAPPING_SECONDS, set()
    with swapping(own, others, PAUSE_SECONDS):
        while time.monotonic() < until:
            answer = lab.post("/jobs/dry-run", json=spec)
            seen.add(answer.status_code)
            assert "private" not in answer.text
    assert seen <= {200, 422}


def train_with(access: Access, job: object) -> None:
    from tests.distributed.recording import train_and_record  # which imports torch

    try:
        access.configure()
        train_and_record(job)  # type: ignore[arg-type]
    finally:
        Access().configure()


@pytest.mark.full
def test_ranks_do_not_read_or_write_what_became_a_link(ranks: Ranks, tmp_path: Path) -> None:
    own, others = tmp_path / "lab", tmp_path / "others"
    for folder in (own, others):
        (folder / "corpus").mkdir(parents=True)
        for number in range(4):
            (folder / "corpus" / f"{number}.txt").write_text("a sentence of some length. " * 200)
    before, access = snapshot(others), Access(folders=(str(own),))
    job = tiny_job(own / "corpus", own / "runs", training={"steps": 2})
    ranks.run(2, train_with, access, job)
    (own / "elsewhere").symlink_to(others / "corpus")
    with pytest.raises(ValueError, match="a place that this tenant may not use"):
        ranks.run(2, train_with, access, tiny_job(own / "elsewhere", own / "runs-2"))
    (own / "runs-3").symlink_to(others)
    with pytest.raises(OSError, match="leads outside of what this tenant may use"):
        ranks.run(2, train_with, access, tiny_job(own / "corpus", own / "runs-3", training={"steps": 2}))
    assert snapshot(others) == before


@pytest.mark.full
def test_datasets_are_not_built_from_what_became_a_link(tmp_path: Path) -> None:
    _, refused = build_while_swapping(tmp_path, LocalEngine(1), SWAPPING_SECONDS)
    assert refused
