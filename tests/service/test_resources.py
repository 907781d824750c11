"""What the API has besides jobs' plain life: copies, retries, requests that come twice, checkpoints, queues, nodes."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.plan.machine import NOMINAL
from boost_core.plan.resolve import choose_layouts
from boost_core.plan.search import PlanSearch, search_report
from service.accounts.tenants_and_queues import QueueInUse
from service.api.errors import RateLimited
from service.api.routes.cluster import NODES
from service.api.routes.jobs import merged
from service.api.searches import Results, Searches
from service.jobs.datasets import DatasetBuilds, DatasetStore
from service.jobs.model import JobRecord, Owner
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.jobs.sweeps import SweepStore
from service.models.datasets import DatasetRequest
from service.models.jobs import QueueSettings
from service.models.sweeps import SweepRequest
from tests.service.command_line import boost_at
from tests.service.conftest import RunningApi
from tests.service.records import (
    GOOD,
    a_checkpoint,
    a_log_line,
    a_shape,
    a_spec,
    a_step,
    numbered,
    start,
    write_checkpoints,
)


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{api.url}/v1") as opened:
        yield opened


def submit(http: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = http.post("/jobs", json=GOOD | changes)
    assert answer.status_code == 201, answer.text
    return answer.json()


def code(answer: httpx.Response) -> tuple[int, str]:
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"urn:boost:problem:{problem['code']}"
    return answer.status_code, problem["code"]


@pytest.mark.full
def test_the_same_request_again_is_the_same_job(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "monday-1"}
    first = http.post("/jobs", json=GOOD, headers=headers)
    again = http.post("/jobs", json=GOOD, headers=headers)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json()
    assert len(http.get("/jobs").json()["jobs"]) == 1
    other = http.post("/jobs", json=GOOD | {"name": "other"}, headers=headers)
    assert code(other) == (422, "idempotency-key-reused")
    malformed = http.post("/jobs", json=GOOD, headers={"Idempotency-Key": "two words"})
    assert code(malformed) == (422, "invalid-request")
    assert malformed.json()["errors"][0]["field"] == "Idempotency-Key"


def test_an_answered_request_is_answered_again_when_its_data_is_gone(http: httpx.Client, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        (text / f"{number}.txt").write_text("some words " * 100)
    job = GOOD | {"data": {"source": {"kind": "text", "paths": [str(text)]}}}
    first = http.post("/jobs", json=job, headers={"Idempotency-Key": "k"})
    assert first.status_code == 201
    for file in text.iterdir():
        file.unlink()
    assert http.post("/jobs", json=job).status_code == 422
    assert http.post("/jobs", json=job, headers={"Idempotency-Key": "k"}).json() == first.json()


@pytest.mark.full
def test_a_dry_run_records_nothing(http: httpx.Client) -> None:
    answer = http.post("/jobs/dry-run", json=GOOD)
    assert answer.status_code == 200
    assert answer.json()["spec"]["training"]["steps"] == 10
    assert answer.json()["plan"]["shapes"][0]["tensor_parallel_size"] == 2
    assert http.get("/jobs").json()["jobs"] == []
    refused = http.post("/jobs/dry-run", json=GOOD | {"queue": "nowhere"})
    assert code(refused) == (422, "invalid-job")
    assert refused.json()["errors"] == [
        {"field": "queue", "message": "there is no queue 'nowhere'; there are: default", "value": "nowhere"}
    ]


@pytest.mark.full
def test_replicas_that_a_job_never_has_are_told_before_it_is_submitted(http: httpx.Client) -> None:
    for most, told in ((2, 0), (3, 1)):
        elastic = GOOD | {"elasticity": {"data_parallel_size": {"min": 1, "max": most}}}
        elastic["training"] = GOOD["training"] | {"global_batch_size": 16, "micro_batch_size": 2}
        notes = http.post("/jobs/dry-run", json=elastic).json()["plan"]["notes"]
        assert sum("allows 3 replicas, but the job never has more than 2" in note for note in notes) == told


def test_a_job_changes_only_as_it_was_looked_at(http: httpx.Client) -> None:
    job = submit(http)
    path = f"/jobs/{job['id']}"
    tag = http.get(path).headers["ETag"]
    changed = http.patch(path, json={"priority": 3}, headers={"If-Match": tag})
    assert (changed.status_code, changed.json()["spec"]["priority"]) == (200, 3)
    assert changed.headers["ETag"] not in ("", tag)
    late = http.patch(path, json={"priority": 4}, headers={"If-Match": tag})
    assert code(late) == (412, "precondition-failed")
    assert late.json()["detail"].endswith(f"read it again: its ETag is now {changed.headers['ETag']}")
    assert http.get(path).json()["spec"]["priority"] == 3
    assert http.patch(path, json={"priority": 5}, headers={"If-Match": "*"}).status_code == 200
    assert http.patch(path, json={"priority": 6}).status_code == 200


def test_progress_does_not_alter_the_tag(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "file:///checkpoints")
    start(store, job.id)
    tag = http.get(f"/jobs/{job.id}").headers["ETag"]
    store.append_reports(job.id, 1, numbered(a_step(1)))
    assert http.get(f"/jobs/{job.id}").headers["ETag"] == tag


@pytest.mark.full
def test_filters(http: httpx.Client, store: JobStore) -> None:
    assert http.put("/queues/night", json={}).status_code == 200
    night = submit(http, queue="night", name="Owl_1")
    other = store.create(a_spec(name="lark"), "file:///c", Owner("birds", "ci")).id

    def found(**query: str) -> list[str]:
        return [job["id"] for job in http.get("/jobs", params=query).json()["jobs"]]

    assert found() == [other, night["id"]]
    assert found(queue="night") == found(name="owl") == found(name="L_1") == found(tenant="default") == [night["id"]]
    assert found(tenant="birds") == found(submitted_by="ci") == found(name="LARK") == [other]
    assert found(name="o_l") == []


@pytest.mark.full
def test_cancelled_and_failed_jobs_are_retried(http: httpx.Client, store: JobStore) -> None:
    job = submit(http)
    path = f"/jobs/{job['id']}"
    assert code(http.post(f"{path}/retry")) == (409, "wrong-state")
    assert http.post(f"{path}/cancel").json()["state"] == "CANCELLED"
    again = http.post(f"{path}/retry")
    assert (again.status_code, again.json()["state"], again.json()["reason"]) == (202, "QUEUED", "RETRIED_BY_USER")
    assert again.json()["queued_at"] > again.json()["submitted_at"]
    assert (again.json()["finished_at"], again.json()["cancel_requested"]) == (None, False)
    start(store, job["id"])
    store.change(job["id"], Reason.TRAINING_FAILED, "a defect")
    assert http.post(f"{path}/retry").json()["state"] == "QUEUED"
    start_again(store, job["id"], attempt=2)
    store.change(job["id"], Reason.TRAINING_FINISHED, "all steps done")
    assert code(http.post(f"{path}/retry")) == (409, "wrong-state")


def start_again(store: JobStore, job_id: str, attempt: int) -> None:
    store.change(job_id, Reason.HEAD_OF_QUEUE, "is next")
    store.change(job_id, Reason.GANG_STARTING, "starts", attempt=attempt)
    store.change(job_id, Reason.GANG_STARTED, "trains")


@pytest.mark.full
def test_what_fits_no_gpu_is_refused_at_every_door(http: httpx.Client, store: JobStore) -> None:
    """7B on A100s of 40 GB: two tensor parallel ranks need 38 GB each where four replicas share the state, alone 49."""
    fits = {
        "name": "large",
        "model": {"preset": "7b", "vocab_size": 32_000},
        "parallelism": {"tensor_parallel_size": 2, "data_parallel_size": 4},
        "training": {
            "steps": 10, "sequence_length": 2048, "global_batch_size": 512, "micro_batch_size": 4, "precision": "bf16",
        },
        "resources": {"gpus_per_worker": 1, "accelerator_type": "A100-40G"},
        "elasticity": {"data_parallel_size": {"min": 2, "max": 8}},
    }  # fmt: skip
    too_large = fits | {"elasticity": None, "parallelism": {"tensor_parallel_size": 1}}
    job = store.create(JobSpec.model_validate(fits), "/tmp")
    path = f"/jobs/{job.id}"
    assert http.post("/jobs/dry-run", json=fits, timeout=60).status_code == 200  # it lists the standard library
    for answer, field in (
        (http.post("/jobs", json=too_large), "parallelism"),
        (http.post("/jobs/dry-run", json=too_large), "parallelism"),
        (http.post(f"{path}/clone", json={"changes": {"training": {"micro_batch_size": 32}}}), "elasticity"),
        (http.patch(path, json={"data_parallel_size": {"min": 1, "max": 1}}), "elasticity.data_parallel_size"),
    ):
        assert answer.status_code == 422, answer.text
        (error,) = answer.json()["errors"]
        assert error["field"] == field
        assert error["message"].startswith("no layout fits: tp")
        assert "of 37.3 GiB; raise parallelism.tensor_parallel_size" in error["message"]
    assert http.patch(path, json={"name": "larger"}).status_code == 200
    planned = http.post("/plans", json=too_large).json()
    assert planned["fastest"] is None
    assert any("no layout fits" in note for note in planned["notes"])


@pytest.mark.full
def test_a_clone_is_like_its_original_but_for_the_changes(http: httpx.Client, store: JobStore) -> None:
    job = submit(http, priority=3)
    path = f"/jobs/{job['id']}/clone"
    plain = http.post(path, json={}).json()
    assert (plain["spec"], plain["cloned_from"]) == (job["spec"], job["id"])
    assert plain["id"] != job["id"]
    changes = {"name": "longer", "training": {"steps": 20}, "priority": None}
    changed = http.post(path, json={"changes": changes}).json()
    assert (changed["name"], changed["spec"]["training"]["steps"], changed["spec"]["priority"]) == ("longer", 20, 0)
    assert changed["spec"]["training"]["sequence_length"] == 64
    refused = http.post(path, json={"changes": {"training": {"stepz": 20}}})
    assert code(refused) == (422, "invalid-job")
    assert refused.json()["errors"][0]["field"] == "training.stepz"
    assert code(http.post(path, json={"from_checkpoint": True})) == (409, "wrong-state")
    start(store, job["id"])
    store.append_reports(job["id"], 1, numbered(a_step(10), a_checkpoint(10)))
    gone = http.post(path, json={"from_checkpoint": True})
    assert code(gone) == (422, "invalid-job") and "no committed checkpoint is at" in gone.text
    write_checkpoints(store.get(job["id"]), 5, 10)
    done = http.post(path, json={"from_checkpoint": True, "changes": {"training": {"steps": 10}}})
    assert code(done) == (422, "invalid-job")
    assert done.json()["errors"][0]["field"] == "training.steps" and "is at step 10" in done.text
    onward = http.post(path, json={"from_checkpoint": True, "changes": {"training": {"steps": 11}}}).json()
    assert onward["spec"]["checkpoint"]["continue_from"] == job["checkpoint_url"]
    theta = {"model": {"rope_theta": 50_000}}
    anew = http.post(path, json={"from_weights": True, "changes": theta}).json()["spec"]
    assert (anew["checkpoint"]["weights_from"], anew["training"]["steps"]) == (job["checkpoint_url"], 10)
    other = {"checkpoint": {"continue_from": "/elsewhere"}}
    again = http.post(path, json={"from_weights": True, "changes": other}).json()["spec"]["checkpoint"]
    assert (again["weights_from"], again["continue_from"]) == (job["checkpoint_url"], None)
    tuned = http.post(path, json={"from_weights": True, "changes": theta}).json()
    start(store, tuned["id"])
    store.append_reports(tuned["id"], 1, numbered(a_step(5), a_checkpoint(5)))
    write_checkpoints(store.get(tuned["id"]), 5)
    tuned_on = http.post(f"/jobs/{tuned['id']}/clone", json={"from_checkpoint": True}).json()["spec"]["checkpoint"]
    assert (tuned_on["weights_from"], tuned_on["continue_from"]) == (None, tuned["checkpoint_url"])
    assert code(http.post(path, json={"from_weights": True, "from_checkpoint": True})) == (422, "invalid-request")


def test_a_clone_of_a_trial_is_not_in_its_sweep(http: httpx.Client) -> None:
    trial = submit(http, name="rates-4", group="rates", tags=["mine", "trial-4", "trial-5"])
    spec = http.post(f"/jobs/{trial['id']}/clone", json={}).json()["spec"]
    assert (spec["group"], spec["tags"]) == (None, ["mine", "trial-5"])
    other = submit(http, name="rates-4", group="rates", tags=["mine"])
    assert http.post(f"/jobs/{other['id']}/clone", json={}).json()["spec"]["group"] == "rates"


@pytest.mark.full
def test_a_change_in_a_clone_takes_effect_on_what_follows_from_it(http: httpx.Client) -> None:
    job = submit(http, model={"preset": "tiny", "family": "svd"}, optimizer={"kind": "loro"})

    def clone(**changes: dict) -> dict:
        answer = http.post(f"/jobs/{job['id']}/clone", json={"changes": changes})
        assert answer.status_code == 201, answer.text
        return answer.json()["spec"]

    adamw = clone(optimizer={"kind": "adamw"})["optimizer"]
    assert (job["spec"]["optimizer"]["learning_rate"], adamw["learning_rate"], adamw["loro"]) == (0.01, 0.003, None)
    dense = clone(optimizer={"kind": "adamw"}, model={"family": "dense"})["model"]
    assert (job["spec"]["model"]["rank"], dense["rank"], dense["hidden_size"]) == (32, None, 128)
    assert clone(model={"preset": "60m", "vocab_size": 256})["model"]["hidden_size"] == 512


@pytest.mark.full
@pytest.mark.parametrize("path", ["/jobs", "/jobs/dry-run"])
def test_what_a_job_starts_from_is_looked_up(http: httpx.Client, store: JobStore, tmp_path: Path, path: str) -> None:
    first = store.create(a_spec(), f"file://{tmp_path}")
    write_checkpoints(first, 5, 10)
    there = first.checkpoint_url
    Path(there.removeprefix("file://"), "step-00000010", "part").write_bytes(b"123")
    spec = a_spec().model_dump(mode="json", exclude_unset=True)

    def problem(field: str, checkpoint: dict, **changes: dict) -> str:
        sections = {name: spec[name] | values for name, values in changes.items()}
        refused = http.post(path, json=spec | sections | {"checkpoint": checkpoint})
        assert code(refused) == (422, "invalid-job"), refused.text
        (error,) = refused.json()["errors"]
        assert error["field"] == field
        return error["message"]

    few = {"steps": 5}
    # The newest is damaged, so that the one before it counts.
    assert "is at step 5 " in problem("training.steps", {"continue_from": there}, training=few)
    damaged = f"{there}/step-00000010"
    assert "part has 3 bytes of 5" in problem("checkpoint.weights_from", {"weights_from": damaged})
    absent = f"{there}/step-00000007"
    assert "no committed checkpoint is at" in problem("checkpoint.continue_from", {"continue_from": absent})
    narrow = {"model": {"rank": 4}}
    assert "rank is 32 there and 4 here" in problem("checkpoint.weights_from", {"weights_from": there}, **narrow)
    accepted = http.post(path, json=spec | {"training": spec["training"] | few, "checkpoint": {"weights_from": there}})
    assert accepted.is_success, accepted.text
    queued = store.create(a_spec(checkpoint={"continue_from": there}), f"file://{tmp_path}")
    refused = http.patch(f"/jobs/{queued.id}", json={"training": few})
    assert code(refused) == (422, "invalid-job") and refused.json()["errors"][0]["field"] == "training.steps"
    assert http.patch(f"/jobs/{queued.id}", json={"training": {"steps": 6}}).is_success


@pytest.fixture
def saved(store: JobStore, tmp_path: Path) -> JobRecord:
    """A job that trains, with checkpoints of steps 10, 20 and 30."""
    job = store.create(a_spec(), f"file://{tmp_path}")
    start(store, job.id)
    write_checkpoints(job, 10, 20, 30)
    return job


def test_checkpoints(http: httpx.Client, store: JobStore, saved: JobRecord) -> None:
    path = f"/jobs/{saved.id}/checkpoints"
    listed = http.get(path).json()["checkpoints"]
    assert [(each["step"], each["bytes"], each["pinned"], each["samples"]) for each in listed] == [
        (30, 5, False, 240), (20, 5, False, 160), (10, 5, False, 80),
    ]  # fmt: skip
    detail = http.get(f"{path}/20").json()
    assert (detail["files"], detail["url"]) == (
        {"part": {"bytes": 5, "crc32": 0xCBF53A1C}}, f"{saved.checkpoint_url}/step-00000020",
    )  # fmt: skip
    assert http.put(f"{path}/10/pin").json()["pinned"]
    assert code(http.delete(f"{path}/10")) == (409, "checkpoint-pinned")
    assert code(http.delete(f"{path}/30")) == (409, "checkpoint-in-use")
    assert code(http.get(f"{path}/15")) == code(http.put(f"{path}/15/pin")) == (404, "checkpoint-not-found")
    assert http.delete(f"{path}/20").status_code == 204
    assert not http.delete(f"{path}/10/pin").json()["pinned"]
    assert http.delete(f"{path}/10").status_code == 204
    store.change(saved.id, Reason.TRAINING_FINISHED, "all steps done")
    assert http.delete(f"{path}/30").status_code == 204
    assert http.get(path).json()["checkpoints"] == []


def test_what_another_job_starts_from_is_not_deleted(http: httpx.Client, store: JobStore, saved: JobRecord) -> None:
    store.change(saved.id, Reason.TRAINING_FINISHED, "all steps done")
    path, folder = f"/jobs/{saved.id}/checkpoints", saved.checkpoint_url
    newest = store.create(a_spec(checkpoint={"continue_from": f"{folder.removeprefix('file://')}/"}), "file:///c")
    middle = store.create(a_spec(checkpoint={"weights_from": f"{folder}/step-00000020"}), "file:///c")
    other = store.create(a_spec(checkpoint={"weights_from": folder}), "file:///c", Owner("lab", "ci"))
    for step, job in ((30, newest), (20, middle)):
        refused = http.delete(f"{path}/{step}")
        assert code(refused) == (409, "checkpoint-in-use") and job.id in refused.json()["detail"]
    assert http.delete(f"{path}/10").status_code == 204
    start(store, newest.id)
    assert code(http.delete(f"{path}/30")) == (409, "checkpoint-in-use")  # its first gang may be lost
    store.append_reports(newest.id, 1, numbered(a_checkpoint()))
    store.request_cancel(middle.id)
    sweeps, space = SweepStore(store), {"checkpoint.weights_from": {"choices": [f"{folder}/step-00000020"]}}
    request = SweepRequest(name="onward", job=a_spec(checkpoint={"continue_from": folder}), space=space, search="grid")
    sweeps.create(request, Owner("default", "ci"))
    for step in (30, 20):
        refused = http.delete(f"{path}/{step}")
        assert code(refused) == (409, "checkpoint-in-use") and "the sweep 'onward'" in refused.json()["detail"]
    sweeps.update(sweeps.get("onward", "default"), state="STOPPED")
    assert [http.delete(f"{path}/{step}").status_code for step in (30, 20)] == [204, 204]
    assert not store.get(other.id).finished  # of another tenant, which keeps nobody else's checkpoints


def test_retention_keeps_what_a_waiting_job_starts_from(http: httpx.Client, store: JobStore, tmp_path: Path) -> None:
    jobs = {}
    for tenant in ("default", "lab"):
        spec = a_spec(checkpoint={"keep_last": 1})
        jobs[tenant] = start(store, store.create(spec, f"file://{tmp_path}", Owner(tenant, "ci")).id)
        write_checkpoints(jobs[tenant], 10, 20, 30)
    body = {"training": GOOD["training"] | {"steps": 100}}
    for job in jobs.values():
        url = job.checkpoint_url.removeprefix("file://")
        origin = body | {"checkpoint": {"continue_from": f"{url}/step-00000010"}}
        assert http.post("/jobs/dry-run", json=GOOD | origin).status_code == 200
        assert CheckpointFolder(url).pinned() == set()
        submit(http, **origin)
        submit(http, **body, checkpoint={"weights_from": url})  # the newest, which is kept anyway
    removed = {tenant: CheckpointFolder(job.checkpoint_url).prune(1, None) for tenant, job in jobs.items()}
    assert removed == {"default": [20], "lab": [10, 20]}  # of another tenant, which keeps nobody else's checkpoints


@pytest.mark.full
def test_a_job_names_the_newest_of_its_checkpoints_that_is_left(
    http: httpx.Client, store: JobStore, saved: JobRecord
) -> None:
    store.append_reports(saved.id, 1, numbered(*(a_checkpoint(step) for step in (10, 20, 30))))
    store.change(saved.id, Reason.TRAINING_FINISHED, "all steps done")
    named = []
    for step in (20, 30, 10):
        assert http.delete(f"/jobs/{saved.id}/checkpoints/{step}").status_code == 204
        job = store.get(saved.id)
        named.append((job.checkpoint and job.checkpoint.step, job.checkpoint_at is None))
    assert named == [(30, False), (10, False), (None, True)]
    refused = http.post(f"/jobs/{saved.id}/clone", json={"from_checkpoint": True})
    assert code(refused) == (409, "wrong-state") and "has no checkpoint to start from" in refused.json()["detail"]


@pytest.mark.full
def test_damaged_checkpoints_are_listed_apart_and_can_be_deleted(
    http: httpx.Client, store: JobStore, saved: JobRecord
) -> None:
    path, folder = f"/jobs/{saved.id}/checkpoints", Path(saved.checkpoint_url.removeprefix("file://"))
    assert http.put(f"{path}/10/pin").json()["pinned"]
    (folder / "step-00000030" / "manifest.json").write_bytes(b"{")
    (folder / "step-00000010" / "part").write_bytes(b"1234")
    listed = http.get(path).json()
    assert [one["step"] for one in listed["checkpoints"]] == [20]
    assert [(one["step"], one["pinned"], one["url"]) for one in listed["damaged"]] == [
        (30, False, f"{saved.checkpoint_url}/step-00000030"), (10, True, f"{saved.checkpoint_url}/step-00000010"),
    ]  # fmt: skip
    assert "step-00000030/manifest.json is not JSON" in listed["damaged"][0]["damage"]
    assert listed["damaged"][1]["damage"].endswith("step-00000010/part has 4 bytes of 5")

    assert code(http.get(f"{path}/30")) == code(http.put(f"{path}/30/pin")) == (409, "checkpoint-damaged")
    assert "step-00000030/manifest.json is not JSON" in http.get(f"{path}/30").json()["detail"]
    assert code(http.delete(f"{path}/10")) == (409, "checkpoint-pinned")
    assert code(http.delete(f"{path}/10/pin")) == (409, "checkpoint-damaged")  # and unpinned
    assert code(http.delete(f"{path}/20")) == (409, "checkpoint-in-use")  # the newest that is intact
    assert [http.delete(f"{path}/{step}").status_code for step in (10, 30)] == [204, 204]
    left = http.get(path).json()
    assert ([one["step"] for one in left["checkpoints"]], left["damaged"]) == ([20], [])


def test_a_store_that_is_away_is_no_fault_of_the_service(http: httpx.Client, store: JobStore) -> None:
    spec = a_spec(checkpoint={"url": "s3://nowhere/at-all"})
    job = store.create(spec.model_copy(update={"credentials": "gone"}), "file:///c")
    answer = http.get(f"/jobs/{job.id}/checkpoints")
    assert code(answer) == (503, "store-unavailable")
    assert answer.headers["Retry-After"] == "5"


@pytest.mark.full
@pytest.mark.parametrize("path", ["", "/20"])
def test_a_defect_of_the_service_is_not_taken_for_the_stores(
    http: httpx.Client, saved: JobRecord, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_: object, **__: object) -> None:
        raise TypeError("a defect")

    monkeypatch.setattr("service.models.jobs.Checkpoint.of", defect)
    assert code(http.get(f"/jobs/{saved.id}/checkpoints{path}")) == (500, "internal-error")


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_no_job_gets_into_a_queue_that_is_being_deleted(api: RunningApi, store: JobStore) -> None:
    http, quotas = httpx.Client(base_url=f"{api.url}/v1"), api.app.state.context.quotas
    quotas.put_queue("night", QueueSettings())
    cancelled = submit(http, queue="night")["id"]
    store.request_cancel(cancelled)
    with ThreadPoolExecutor() as pool:

        def meanwhile(connection: Connection) -> None:
            quotas.keep_queue(connection, "night")
            deletions.append(pool.submit(quotas.delete_queue, "night"))
            wait(deletions, 0.5)

        deletions: list[Future[None]] = []
        last = store.create(a_spec(queue="night"), "file:///c", alongside=meanwhile)
        with pytest.raises(QueueInUse, match=last.id):
            deletions[0].result()
    store.request_cancel(last.id)

    with pytest.MonkeyPatch.context() as patches:  # the queue is deleted once the jobs have been checked
        for name in ("create", "retry"):
            done = getattr(JobStore, name)
            patches.setattr(JobStore, name, lambda *a, done=done, **k: (quotas.delete_queue("night"), done(*a, **k))[1])
        assert code(http.post("/jobs", json=GOOD | {"queue": "night"})) == (422, "invalid-job")
        quotas.put_queue("night", QueueSettings())
        assert code(http.post(f"/jobs/{cancelled}/retry")) == (404, "queue-not-found")
    assert not store.active()


def test_queues_and_tenants(http: httpx.Client, store: JobStore) -> None:
    assert [queue["name"] for queue in http.get("/queues").json()["queues"]] == ["default"]
    made = http.put("/queues/night", json={"description": "after eight", "gpus": 4}).json()
    assert (made["gpus"], made["cpus"], made["used_cpus"], made["jobs"]) == (4.0, None, 0.0, {})
    waiting = submit(http, queue="night")
    running = store.create(a_spec(queue="night"), "file:///c", Owner("birds", "ci"))
    start(store, running.id)
    store.append_reports(running.id, 1, numbered(a_shape(2)))
    night = http.get("/queues/night").json()
    assert (night["used_cpus"], night["used_gpus"], night["jobs"]) == (4.0, 0.0, {"QUEUED": 1, "RUNNING": 1})
    assert code(http.delete("/queues/night")) == (409, "queue-in-use")
    assert code(http.delete("/queues/default")) == (409, "queue-in-use")
    http.post(f"/jobs/{waiting['id']}/cancel")
    store.change(running.id, Reason.TRAINING_FINISHED, "all steps done")
    sweeps, space = SweepStore(store), {"queue": {"choices": ["default", "night"]}}
    sweeps.create(SweepRequest(name="queues", job=a_spec(), space=space, search="grid"), Owner("birds", "ci"))
    assert code(http.delete("/queues/night")) == (409, "queue-in-use")
    sweeps.update(sweeps.get("queues", "birds"), state="STOPPED")
    assert http.delete("/queues/night").status_code == 204
    assert code(http.get("/queues/night")) == code(http.delete("/queues/night")) == (404, "queue-not-found")
    assert code(http.post(f"/jobs/{waiting['id']}/retry")) == (404, "queue-not-found")
    assert http.put("/tenants/birds", json={"cpus": 2}).json() == {
        "name": "birds", "gpus": None, "cpus": 2.0, "used_gpus": 0.0, "used_cpus": 0.0, "jobs": {"SUCCEEDED": 1},
    }  # fmt: skip
    assert [tenant["name"] for tenant in http.get("/tenants").json()["tenants"]] == ["birds", "default"]


@pytest.mark.full
def test_nodes_and_what_runs_on_them(http: httpx.Client, store: JobStore) -> None:
    assert http.get("/nodes").json() == {"seen_at": None, "nodes": []}
    nodes = [
        {"node_id": name, "total": {"CPU": 4.0}, "free": {"CPU": 2.0}, "labels": {"zone": "a"}, "draining": False}
        for name in ("node-a", "node-b")
    ]
    store.keep_snapshot(NODES, nodes)
    job = store.create(a_spec(), "file:///c")
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_shape(2)))
    found = http.get("/nodes").json()
    assert found["seen_at"] is not None
    expected = {
        "unusable": None, "jobs": [{"id": job.id, "name": "tiny", "ranks": 2}], "other_ranks": 0, "dataset": None,
    }  # fmt: skip
    assert found["nodes"] == [node | expected for node in nodes]
    store.change(job.id, Reason.WAITING_FOR_RESOURCES, "its workers were lost")
    assert [node["jobs"] for node in http.get("/nodes").json()["nodes"]] == [[], []]


def test_a_build_is_shown_as_holder_of_cpus(http: httpx.Client, store: JobStore) -> None:
    nodes = [
        {"node_id": name, "total": {"CPU": 4.0}, "free": {"CPU": free}, "labels": {}, "draining": False}
        for name, free in (("node-a", 1.0), ("node-b", 2.0), ("node-c", 0.0))
    ]
    store.keep_snapshot(NODES, nodes)
    job = store.create(a_spec(), "file:///c")
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_shape(2)))  # two ranks of a CPU each on node-a, and on node-b
    for name, tenant in (("waits", "default"), ("corpus-v1", "default"), ("theirs", "other")):
        request = DatasetRequest.model_validate({"name": name, "source": {"kind": "standard_library"}})
        DatasetStore(store).create(request, "/checkpoints", Owner(tenant, "alice"))
    progress = {"stage": "files", "done": 1, "of": 6, "documents": 1, "bytes": 10, "seconds": 1.0}
    builds = {build.name: build for build in DatasetBuilds(store).waiting()}
    for name in ("corpus-v1", "theirs"):
        assert DatasetBuilds(store).update(builds[name], launches=1, progress=progress | {"cpus": 3.0})
        shown = {node["node_id"]: node["dataset"] for node in http.get("/nodes").json()["nodes"]}
        assert shown == {
            "node-a": {"name": name, "cpus": 1.0},
            "node-b": None,
            "node-c": {"name": name, "cpus": 3.0},
        }
        DatasetBuilds(store).update(builds[name], progress=progress | {"cpus": 0.0})


@pytest.mark.full
def test_log_lines_by_rank_level_and_time(api: RunningApi, http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "file:///c")
    start(store, job.id)
    lines = [a_log_line("one"), a_step(1), a_log_line("two").model_copy(update={"rank": 0, "level": "ERROR"})]
    store.append_reports(job.id, 1, numbered(*lines))
    store.change(job.id, Reason.TRAINING_FINISHED, "all steps done")

    def messages(**query: str) -> list[str]:
        text = http.get(f"/jobs/{job.id}/logs", params=query).text
        return [each for each in ("one", "two") if f'"message":"{each}"' in text.replace('": "', '":"')]

    assert messages() == messages(since="2020-01-01T00:00:00Z") == ["one", "two"]
    assert messages(rank="1") == messages(level="INFO") == ["one"]
    assert messages(level="ERROR") == ["two"]
    assert messages(since="2100-01-01T00:00:00Z") == messages(rank="7") == []
    assert code(http.get(f"/jobs/{job.id}/logs", params={"level": "WARNINGS"})) == (422, "invalid-request")
    boost = boost_at(api.url)
    refused = boost("logs", job.id, "--level", "warnings")
    known = "'DEBUG', 'INFO', 'WARNING', 'ERROR' or 'CRITICAL'"
    assert (refused.exit_code, refused.stderr) == (2, f"error: level[0]: should be {known}, not 'WARNINGS'\n")
    none = boost("logs", job.id, "--rank", "7")
    assert (none.exit_code, none.output) == (0, f"{job.id} has no log lines that fit these options\n")


@pytest.mark.nightly
def test_plans_are_searched_for_nodes_of_the_size_that_there_is(http: httpx.Client, store: JobStore) -> None:
    gpus = {"a": (2.0, "H200"), "b": (2.0, "H200"), "c": (2.0, "H200"), "d": (4.0, "H200"), "e": (64.0, "H100")}
    nodes = [
        {"node_id": name, "total": {"GPU": size, "CPU": 8 * size}, "free": {},
         "labels": {"ray.io/accelerator-type": kind}, "draining": False}
        for name, (size, kind) in gpus.items()
    ]  # fmt: skip
    job = GOOD | {"resources": {"gpus_per_worker": 1, "accelerator_type": "H200"}}

    def largest(**search: int) -> int:
        answer = http.post("/plans", json=job | {"search": {"gpus": 4, "top": 100} | search}, timeout=60).json()
        sizes = (each["patch"]["parallelism"]["tensor_parallel_size"] for each in answer["search"]["choices"])
        return max(sizes)

    left = job | {"parallelism": {}, "elasticity": {"layouts": "auto", "gpus": {"min": 4, "max": 4}}}  # of a batch of 1

    def seconds() -> float:
        (chosen,) = http.post("/jobs/dry-run", json=left, timeout=60).json()["chosen"]["layouts"]
        assert chosen["tensor_parallel_size"] == 4, "a larger node may come"
        return chosen["step_seconds"]

    on_one_node = seconds()
    assert largest() == 4
    store.keep_snapshot(NODES, nodes)
    assert largest() == 2
    assert seconds() > 1.01 * on_one_node
    assert largest(node_gpus=4) == 4
    submitted = http.post("/jobs", json=job).json()
    assert submitted["node_gpus"] == 2
    assert store.get(submitted["id"]).basis.node_gpus == 2
    assert submitted["node_memory_bytes"] is None
    for node, size in zip(nodes, (9e9, 8e9, 10e9, 1e3, 1e3), strict=True):
        node["total"]["memory"] = size
    store.keep_snapshot(NODES, nodes)
    assert http.post("/jobs", json=job).json()["node_memory_bytes"] is None, "nodes have 2 and 4 GPUs"
    nodes[3]["draining"] = True
    store.keep_snapshot(NODES, nodes)
    submitted = http.post("/jobs", json=job).json()
    assert submitted["node_memory_bytes"] == store.get(submitted["id"]).basis.node_memory_bytes == int(10e9)
    (shape,) = http.post("/plans", json=job).json()["shapes"]
    assert shape["node_memory_bytes"] == int(10e9)
    assert shape["fits_host"]
    for anywhere in ({"placement": "SPREAD"}, {"cpus_per_worker": 64}):  # a node may not take as many as it has GPUs
        (shape,) = http.post("/plans", json=job | {"resources": job["resources"] | anywhere}).json()["shapes"]
        assert shape["node_memory_bytes"] is None
    for node in nodes:
        node["total"]["memory"] = 1e3
    store.keep_snapshot(NODES, nodes)
    answer = http.post("/plans", json=job | {"search": {"gpus": 1}}, timeout=60).json()
    assert answer["search"]["node_memory_bytes"] == 1000
    assert answer["search"]["choices"] == []
    refused = http.post("/jobs", json=job)
    assert refused.status_code == 422
    assert "no layout fits the nodes: " in refused.text
    assert "set fault_tolerance.memory_copy_every_steps=null" in refused.text


@pytest.mark.full
def test_the_best_plan_for_some_gpus_is_searched(http: httpx.Client) -> None:
    gpu = {"resources": {"gpus_per_worker": 1, "accelerator_type": "A100"}, "parallelism": {"recompute": "auto"}}
    levels = [{"name": "node", "fan_out": 4, "gigabytes_per_second": 300}]
    plain = http.post("/plans", json=GOOD | gpu).json()
    assert plain.pop("search") is None
    asked = {"gpus": 4, "top": 2, "explain": True, "cluster": {"levels": levels}}
    both = http.post("/plans", json=GOOD | gpu | {"search": asked}).json()
    found = both.pop("search")
    assert both == plain
    assert len(found["choices"]) == 2
    assert found["why"]
    patched = http.post("/plans", json=merged(GOOD | gpu, found["choices"][0]["patch"])).json()
    assert patched["shapes"][0]["world_size"] == found["choices"][0]["world_size"]
    refused = http.post("/plans", json=GOOD | {"search": {"gpus": 0, "topp": 1}}).json()
    assert [error["field"] for error in refused["errors"]] == ["search.gpus", "search.topp"]
    profile = {
        "device": "A100", "commit": "a", "torch_version": "2", "triton_version": "3", "precision": "bf16", "cores": 1,
        "cases": [], "product_flops": 1e14, "attention_flops": 1e14, "bandwidth": 1e12, "start_seconds": 0,
        "block_seconds": 0, "correction": 1, "spread": 0.1,
    }  # fmt: skip
    wild = http.post("/plans", json=GOOD | {"search": {"gpus": 4, "profile": profile | {"spread": 1000}}}).json()
    assert [error["field"] for error in wild["errors"]] == ["search.profile.spread"]
    other = http.post("/plans", json=GOOD | {"search": {"gpus": 4, "profile": profile}})
    assert other.status_code == 422
    assert "the profile is of bf16" in other.json()["detail"]


@pytest.mark.full
def test_the_service_chooses_layouts_that_a_job_leaves_to_it(http: httpx.Client, store: JobStore) -> None:
    left = GOOD | {
        "model": {"preset": "7b", "vocab_size": 32_000}, "parallelism": {"recompute": "auto"},
        "training": GOOD["training"] | {"global_batch_size": 32, "micro_batch_size": 1, "precision": "bf16"},
        "resources": {"gpus_per_worker": 1, "accelerator_type": "A100"},
        "elasticity": {"layouts": "auto", "gpus": {"min": 2, "max": 8}},
    }  # fmt: skip
    tried = http.post("/jobs/dry-run", json=left).json()
    chosen = tried["chosen"]["layouts"]
    sizes = [[each[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline", "data")] for each in chosen]
    assert tried["spec"]["elasticity"]["resolved"] == sizes
    assert [shape["world_size"] for shape in tried["plan"]["shapes"]] == [each["world_size"] for each in chosen]
    assert {2, 8} <= {each["world_size"] for each in chosen} <= set(range(2, 9))
    assert all(each["why"] and each["memory_bytes"] < 80e9 and each["step_seconds"] > 0 for each in chosen)
    planned = http.post("/plans", json=left).json()
    assert (planned["chosen"], planned["shapes"]) == (tried["chosen"], tried["plan"]["shapes"])

    stale = merged(left, {"elasticity": {"resolved": [[1, 1, 4]]}})
    job = http.post("/jobs", json=stale).json()
    assert job["spec"]["elasticity"]["resolved"] == sizes, "what a file says was chosen is chosen anew"
    assert http.get(f"/jobs/{job['id']}").json()["spec"] == job["spec"]
    (told,) = [event.data for event in store.events(job["id"]) if event.kind == "layouts"]
    assert told == tried["chosen"]
    copy = http.post(f"/jobs/{job['id']}/clone", json={"changes": {"elasticity": {"gpus": {"max": 4}}}}).json()
    assert max(tp * pp * dp for tp, pp, dp in copy["spec"]["elasticity"]["resolved"]) == 4

    path = f"/jobs/{job['id']}"
    changed = http.patch(path, json={"gpus": {"max": 4}}).json()
    assert changed["spec"]["elasticity"] == copy["spec"]["elasticity"]
    assert [event.kind for event in store.events(job["id"])][-2:] == ["patch", "layouts"]
    by_replicas = http.patch(path, json={"data_parallel_size": {"max": 2}})
    assert (by_replicas.status_code, "change gpus instead" in by_replicas.json()["detail"]) == (422, True)
    empty = http.patch(path, json={"gpus": {"min": 5, "max": 4}}).json()
    assert [error["field"] for error in empty["errors"]] == ["elasticity.gpus"]

    large = merged(left, {"model": {"preset": "40b"}, "elasticity": {"gpus": {"min": 1, "max": 2}}})
    refused = http.post("/jobs", json=large).json()
    assert [error["field"] for error in refused["errors"]] == ["elasticity.gpus"]
    assert "raise elasticity.gpus.max" in refused["detail"]


@pytest.mark.full
def test_layouts_are_chosen_whatever_the_data_is() -> None:
    tokens = {"source": {"kind": "tokenized", "paths": ["/tokens"]}, "documents_apart": True}
    spec = a_spec(
        model={"preset": "tiny", "vocab_size": 100}, data=tokens, parallelism={},
        elasticity={"layouts": "auto", "gpus": {"max": 2}}, name="any", queue="other", priority=7,
    )  # fmt: skip
    searches = Searches()
    chosen = searches.layouts(spec, "a", NOMINAL)
    assert chosen == choose_layouts(spec)
    with searches.for_layouts.turn("a"):
        another = spec.training.model_copy(update={"seed": 7})
        assert (
            searches.layouts(spec.model_copy(update={"name": "another", "training": another}), "a", NOMINAL) is chosen
        )


@pytest.mark.full
def test_a_plan_that_was_searched_before_is_not_searched_again() -> None:
    spec, asked = a_spec(), PlanSearch(gpus=4, top=2)
    searches = Searches()
    found = searches.plans(spec, asked, "a")
    assert found == search_report(spec, asked)
    elastic = a_spec(name="another", elasticity={"data_parallel_size": {"max": 2}})
    with searches.for_plans.turn("a"):
        assert searches.plans(elastic, asked, "a") is found
        for other in (PlanSearch(gpus=4, top=1), PlanSearch(gpus=2, top=2)):
            with pytest.raises(RateLimited):
                searches.plans(spec, other, "a")
        longer = spec.training.model_copy(update={"sequence_length": 128})
        with pytest.raises(RateLimited):
            searches.plans(spec.model_copy(update={"training": longer}), asked, "a")


def test_a_defect_in_a_search_is_not_taken_for_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("service.api.searches.search_apart", defect)
    with pytest.raises(ValueError, match=r"^a defect$"):
        Searches().plans(a_spec(), PlanSearch(gpus=4), "a")


@pytest.mark.full
def test_a_tenant_whose_search_is_under_way_is_told_to_come_back(http: httpx.Client, api: RunningApi) -> None:
    left = GOOD | {"parallelism": {}, "elasticity": {"layouts": "auto", "gpus": {"max": 4}}}
    with api.app.state.context.searches.for_layouts.turn("default"):
        busy = http.post("/jobs", json=left)
        assert (busy.status_code, busy.headers["Retry-After"]) == (429, "5")
        assert http.post("/jobs", json=GOOD).status_code == 201, "others need no search"
    assert http.post("/jobs", json=left).status_code == 201
    with api.app.state.context.searches.for_layouts.turn("default"):
        assert http.post("/jobs/dry-run", json=left).status_code == 200, "what is known is not searched again"


def test_each_tenant_searches_one_at_a_time_and_all_together_two() -> None:
    results = Results[str](1)
    with results.turn("a"):
        with pytest.raises(RateLimited, match="another search of this tenant"), results.turn("a"):
            raise AssertionError
        with results.turn("b"), pytest.raises(RateLimited, match="of other tenants"), results.turn("c"):
            raise AssertionError
        with results.turn("c"):
            pass


def test_plans_presets_versions(http: httpx.Client) -> None:
    plan = http.post("/plans", json=GOOD | {"data": {"source": {"kind": "text", "paths": ["/not/read"]}}}).json()
    assert plan["parameters"] > 0
    assert plan["shapes"][0]["memory"]["total"] > 0
    assert [preset["name"] for preset in http.get("/presets").json()["presets"]][:2] == ["tiny", "60m"]
    examples = http.get("/examples").json()["examples"]
    assert [example["name"] for example in examples] == [
        "cola-tiny", "elastic-auto", "elastic-cola", "lax-tiny", "loro-tiny", "cola-30b", "cola-7b",
        "long-context",
    ]  # fmt: skip
    assert examples[0]["description"].startswith("A small CoLA model on two CPU workers")
    assert examples[0]["text"] == Path("examples/cola-tiny.yaml").read_text()
    versions = http.get("/versions").json()
    assert (versions["api"], versions["database"]) == ("v1", "sqlite")
    assert versions["ray"]
    assert versions["ray_dashboard_url"] is None
