"""Records are made once for each version, and what readers see is never older than what the database says."""

import json

import httpx
import pytest

from service.jobs.model import JobFilter, JobPage, JobRecord, Owner
from service.jobs.patch import JobPatch
from service.jobs.queries import UNFINISHED, JobCache
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.models.access import Scope
from tests.service.conftest import RunningApi, With
from tests.service.records import a_spec, a_step, numbered, start

ROOT = "file:///checkpoints"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def other(store: JobStore, database_url: str) -> JobStore:
    """The same record as another process sees it."""
    return JobStore(database_url)


def test_a_record_is_made_once_for_each_version(store: JobStore) -> None:
    job_id = store.create(a_spec(), ROOT).id
    first = store.get(job_id)
    assert store.get(job_id) is first
    assert store.page()[0][0] is store.active()[0] is first
    store.request_pause(job_id)
    assert store.get(job_id) is not first


def test_what_another_process_writes_is_seen_at_once(store: JobStore, other: JobStore) -> None:
    job_id = store.create(a_spec(), ROOT).id
    before = store.get(job_id)
    assert b'"priority":0' in before.as_json
    other.patch(job_id, JobPatch(priority=7))
    found = store.get(job_id)
    assert found.etag != before.etag
    assert b'"priority":7' in found.as_json
    other.request_cancel(job_id)
    assert (store.get(job_id).state, store.page()[0][0].state, store.active()) == ("CANCELLED", "CANCELLED", [])


def test_what_a_job_waits_for_changes_without_its_version(store: JobStore, other: JobStore) -> None:
    job_id = store.create(a_spec(), ROOT).id
    for reason in ("2 GPUs", "1 GPU"):
        other.explain({job_id: reason})
        for found in (store.get(job_id), store.page()[0][0]):
            assert (found.waiting_for, found.version) == (reason, 1)
            assert json.loads(found.as_json)["waiting_for"] == reason
            assert found == other.get(job_id)


def test_a_job_that_moves_on_waits_no_longer(store: JobStore, other: JobStore) -> None:
    job_id = store.create(a_spec(), ROOT).id
    other.explain({job_id: "2 GPUs"})
    assert store.get(job_id).waiting_for == "2 GPUs"
    other.change(job_id, Reason.HEAD_OF_QUEUE, "")
    assert store.get(job_id).waiting_for is None


def test_what_gangs_report_together_is_seen_at_once(store: JobStore) -> None:
    record = start(store, store.create(a_spec(), ROOT).id)
    assert b'"progress":null' in record.as_json
    store.append_many([(record, [(1, record.submitted_at, a_step(3, steps=10))])])
    found = store.get(record.id)
    assert (found.progress.step, json.loads(found.as_json)["progress"]["step"]) == (3, 3)
    assert found == JobStore(store.engine).get(record.id)


def test_filters_go_together(store: JobStore) -> None:
    ids = [store.create(a_spec(name=name), ROOT, Owner(tenant)).id for name in ("ab", "b_") for tenant in ("a", "b")]
    store.request_cancel(ids[0])
    cancelled = {JobState.CANCELLED}
    expected = [
        (JobFilter(), ids[::-1]),
        (JobFilter(cancelled), ids[:1]),
        (JobFilter(cancelled, "b"), []),
        (JobFilter(tenant="a"), [ids[2], ids[0]]),
        (JobFilter(tenant="b", name="_"), [ids[3]]),
        (JobFilter(queue="default", submitted_by="anonymous", name="B"), ids[::-1]),
        (JobFilter(states=[]), []),
    ]
    for wanted, found in expected:
        assert [job.id for job in store.page(wanted)[0]] == found, wanted
        assert [job.id for job in store.page(wanted, cursor=ids[2])[0]] == [each for each in found if each < ids[2]], (
            wanted
        )


def test_few_records_are_kept(store: JobStore) -> None:
    known = JobCache(most=3)
    ids = [store.create(a_spec(), ROOT).id for _ in range(5)]
    with store.engine.connect() as connection:
        first = known.read(connection, UNFINISHED)
        again = known.read(connection, UNFINISHED)
    assert [job.id for job in first] == [job.id for job in again] == ids
    assert len(known._known) == 3
    # Reading more than that does not forget each record before it is read again.
    assert [one is other for one, other in zip(first, again, strict=True)] == [True, True, True, False, False]


def test_records_that_are_read_again_and_again_outlast_those_that_are_read_once(database_url: str) -> None:
    store = JobStore(database_url, known=JobCache(most=3))
    ended = [store.create(a_spec(), ROOT).id for _ in range(5)]
    for job_id in ended:
        store.request_cancel(job_id)
    store.create(a_spec(), ROOT)
    (waits,) = store.active()
    for job_id in ended:
        store.get(job_id)
        assert store.active()[0] is waits


def test_equal_parts_of_specs_are_kept_once(store: JobStore) -> None:
    for changes in ({"name": "one"}, {"name": "two"}, {"training": {"steps": 20, "sequence_length": 64}}):
        store.create(a_spec(**changes), ROOT)
    specs = [job.spec for job in JobStore(store.engine).active()]
    assert [spec.name for spec in specs] == ["one", "two", "tiny"]
    assert specs[0].model is specs[1].model is specs[2].model
    assert specs[0].training is specs[1].training is not specs[2].training


def test_equal_sets_of_fields_are_kept_once(store: JobStore) -> None:
    jobs = [store.create(a_spec(), ROOT).id for _ in range(2)]
    one, other = (store.get(job_id) for job_id in jobs)
    assert one.model_fields_set is other.model_fields_set
    assert one.spec.model_fields_set is other.spec.model_fields_set
    paused = store.request_pause(jobs[0])
    assert paused.model_fields_set == one.model_fields_set


def test_json_is_what_pydantic_writes(store: JobStore) -> None:
    jobs = [store.create(a_spec(name=name), ROOT) for name in ("one", "another")]
    start(store, jobs[0].id)
    store.append_reports(jobs[0].id, 1, numbered(a_step(1, loss=float("nan"), gradient_norm=float("inf"))))
    page = JobPage(jobs=list(store.page()[0]), next_cursor=jobs[0].id)
    assert page.as_json.decode() == page.model_dump_json()
    assert JobPage(jobs=[], next_cursor=None).as_json == b'{"jobs":[],"next_cursor":null}'
    assert jobs[1].as_json == store.get(jobs[1].id).as_json, "as it was created, and as it is read"


@pytest.mark.full
def test_over_http(guarded: RunningApi, client_with: With, other: JobStore) -> None:
    http = client_with(Scope.SUBMIT, Scope.READ, tenant="a")
    submitted = http.post("/v1/jobs", json={**json.loads(a_spec().model_dump_json()), "data": {}, "checkpoint": {}})
    assert submitted.status_code == 201, submitted.text
    path, etag = submitted.headers["location"], submitted.headers["etag"]

    def shown() -> httpx.Response:
        answer = http.get(path)
        assert answer.json() == http.get("/v1/jobs").json()["jobs"][0]
        assert JobRecord.model_validate_json(answer.content).etag == answer.headers["etag"]
        return answer

    assert (shown().content, shown().headers["etag"]) == (submitted.content, etag)
    other.patch(path.rsplit("/", 1)[1], JobPatch(priority=7))
    assert shown().json()["spec"]["priority"] == 7
    assert shown().headers["etag"] != etag
    stranger = client_with(Scope.READ, tenant="b")
    assert (stranger.get(path).status_code, stranger.get("/v1/jobs").json()["jobs"]) == (404, [])
