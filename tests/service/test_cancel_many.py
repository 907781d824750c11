"""Many jobs cancelled by one request."""

import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, select
from sqlalchemy.exc import OperationalError

from service.jobs.model import JobRecord, Owner
from service.jobs.queries import JobCache
from service.jobs.states import JobState
from service.jobs.store import JobStore
from service.jobs.tables import JobRow
from service.models.access import Scope
from tests.service.conftest import With
from tests.service.records import a_spec, a_step, numbered, run_to_the_end, start

LAB, OTHERS = Owner("lab", "ann"), Owner("others", "eve")
PATH = "/v1/jobs/cancel"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def http(client_with: With) -> Iterator[httpx.Client]:
    return client_with(Scope.SUBMIT, tenant="lab", name="ann")


def submitted(store: JobStore, number: int, owner: Owner = LAB, **changes: Any) -> list[str]:
    return [store.create(a_spec(**changes), "file:///checkpoints", owner).id for _ in range(number)]


def cancelled(http: httpx.Client, **which: Any) -> dict[str, Any]:
    answer = http.post(PATH, json=which)
    assert answer.status_code == 202, answer.text
    return answer.json()


def as_cancelled(store: JobStore, job: JobRecord) -> tuple[Any, ...]:
    """What a cancelled job shows, but for its id and times."""
    last = store.events(job.id)[-1]
    shown = job.model_dump(exclude={"id", "arrival", "goodput", "checkpoint_url"})
    times = {name for name in shown if name.endswith(("_at", "_since"))}
    known = {name: shown[name] is not None for name in times}
    return {**shown, **known}, job.goodput.phase, last.kind, last.data, last.time == job.finished_at


@pytest.mark.full
def test_a_thousand_jobs_at_once(http: httpx.Client, client_with: With, store: JobStore) -> None:
    apart, *jobs = submitted(store, 1_004, group="study", tags=["a", "b"])
    kept = [*submitted(store, 2, OTHERS, group="study", tags=["a", "b"]), *submitted(store, 1, group="another")]
    running = [start(store, job_id) for job_id in jobs[:20]]
    ended = run_to_the_end(store, jobs[20])
    store.request_pause(jobs[21])
    http.delete(f"/v1/jobs/{apart}")
    told: list[tuple[str, int]] = []
    store.notifications.subscribers.append(lambda job_id, version: told.append((job_id, version)))
    study = {"group": "study", "tag": ["b"]}
    assert cancelled(http, **study) == {"cancelled": 1_000, "ended": 0, "not_found": [], "remaining": True}
    assert cancelled(http, **study) == {"cancelled": 2, "ended": 0, "not_found": [], "remaining": False}
    assert cancelled(http, **study) == {"cancelled": 0, "ended": 0, "not_found": [], "remaining": False}

    single = store.get(apart)
    now = {job.id: job for job in store.page(limit=2_000)[0]}
    assert all(now[job_id].state is JobState.CANCELLED for job_id in jobs[21:])
    assert all(as_cancelled(store, now[job_id]) == as_cancelled(store, single) for job_id in jobs[22::20])
    assert now[jobs[21]].message == "cancelled while it was paused"
    for job in running:
        assert now[job.id] == job.model_copy(update={"cancel_requested": True, "version": job.version + 1})
    assert now[ended.id] == ended
    assert all(now[job_id].state is JobState.QUEUED for job_id in kept)
    changed = {*jobs} - {ended.id}
    assert sorted(told) == sorted((job_id, now[job_id].version) for job_id in changed)

    entries, after = [], 0
    while after is not None:
        page = client_with(Scope.ADMIN).get("/v1/audit", params={"after": after, "limit": 500}).json()
        entries, after = entries + page["entries"], page["next_after"]
    alone, *many = [entry for entry in entries if entry["action"] == "job.cancel"]
    assert [each["resource"] for each in many if each["resource"] == PATH] == [PATH] * 3
    assert {each["resource"] for each in many} == {PATH, *(f"/v1/jobs/{job_id}" for job_id in changed)}
    assert len(many) == 3 + len(changed)
    whose = ("tenant", "key_id", "key_name", "action", "status", "address")
    assert all(each[name] == alone[name] for each in many for name in whose)
    assert len({each["request_id"] for each in many}) == 3


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_what_was_cancelled_before_a_failure_is_recorded(
    http: httpx.Client, client_with: With, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(store, 251)
    calls, write = count(), JobStore._store

    def fail_at_second(self: JobStore, connection: Connection, changes: Any) -> dict[str, int]:
        if next(calls):
            raise OperationalError("UPDATE", {}, sqlite3.OperationalError("database is locked"))
        return write(self, connection, changes)

    monkeypatch.setattr(JobStore, "_store", fail_at_second)
    assert http.post(PATH, json={"tenant": "lab"}).status_code == 503
    assert store.counts()[JobState.CANCELLED] == 250
    recorded = client_with(Scope.ADMIN).get("/v1/audit", params={"limit": 500}).json()["entries"]
    assert [(each["action"], each["status"]) for each in recorded] == [("job.cancel", 503)] * 251


@pytest.mark.full
def test_jobs_named_by_their_ids(http: httpx.Client, client_with: With, store: JobStore) -> None:
    waiting, again, done = submitted(store, 3)
    (foreign,) = submitted(store, 1, OTHERS)
    run_to_the_end(store, done)
    store.request_cancel(again)
    unknown = ["job-0", foreign]
    answer = cancelled(http, ids=[waiting, again, done, waiting, *unknown])
    assert answer == {"cancelled": 1, "ended": 2, "not_found": unknown, "remaining": False}
    assert [store.get(job_id).state for job_id in (waiting, done, foreign)] == ["CANCELLED", "SUCCEEDED", "QUEUED"]
    assert cancelled(client_with(Scope.ADMIN), ids=[foreign])["cancelled"] == 1


@pytest.mark.parametrize(
    ("which", "count"),
    [
        ({"state": ["PAUSED"]}, 1),
        ({"state": ["PAUSED", "QUEUED", "SUCCEEDED"], "name": "NIGHT"}, 2),
        ({"state": ["SUCCEEDED"]}, 0),
        ({"submitted_by": "ann", "tenant": "lab"}, 4),
        ({"search": "words"}, 1),
        ({"queue": "elsewhere"}, 0),
    ],
)
def test_the_fields_of_the_list(http: httpx.Client, store: JobStore, which: dict[str, Any], count: int) -> None:
    submitted(store, 1)
    submitted(store, 1, OTHERS, name="nightly", notes="words")
    jobs = submitted(store, 2, name="nightly") + submitted(store, 1, notes="some words")
    store.request_pause(jobs[0])
    run_to_the_end(store, *submitted(store, 1, name="nightly"))
    open_before = {job["id"] for job in http.get("/v1/jobs", params=which).json()["jobs"]}
    open_before -= {job.id for job in store.page()[0] if job.finished}
    assert cancelled(http, **which) == {"cancelled": count, "ended": 0, "not_found": [], "remaining": False}
    assert {job.id for job in store.page()[0] if job.state is JobState.CANCELLED} == open_before


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "ids", "would cancel all jobs"),
        ({"state": [], "group": None}, "ids", "would cancel all jobs"),
        ({"ids": []}, "ids", "at least 1 entry"),
        ({"ids": ["job-0"] * 1_001}, "ids", "at most 1000 entries"),
        ({"ids": ["job-0"], "group": "g"}, "ids", "leave out group"),
        ({"ids": ["job 0"]}, "ids[0]", "pattern"),
        ({"name": "", "queue": "default"}, "name", "is empty"),
        ({"name": "\0"}, "name", "text without control characters"),
        ({"search": "a\0"}, "search", "text without control characters"),
        ({"submitted_by": "ann\n"}, "submitted_by", "text without control characters"),
        ({"states": ["QUEUED"]}, "states", "did you mean state?"),
        ({"group": "g", "limit": 5}, "limit", "there is no such field"),
        ([], "body", "must be a JSON object"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_what_names_no_jobs_is_refused(
    http: httpx.Client, store: JobStore, body: Any, field: str, message: str
) -> None:
    submitted(store, 1)
    answer = http.post(PATH, json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-request")
    (error,) = answer.json()["errors"]
    assert (error["field"], message in error["message"]) == (field, True), error
    assert store.counts()[JobState.QUEUED] == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_list_searches_in_all_alphabets_and_for_no_control_characters(http: httpx.Client, store: JobStore) -> None:
    (job,) = submitted(store, 1, notes="für später")
    submitted(store, 1)
    found = http.get("/v1/jobs", params={"search": "FÜR SPÄTER"}).json()["jobs"]
    assert [each["id"] for each in found] == [job]
    for query in ("?name=%00", "?search=%00", "?submitted_by=%00", "/compare?search=%00"):
        assert http.get(f"/v1/jobs{query}").status_code == 422, query


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_who_may_cancel(http: httpx.Client, client_with: With, store: JobStore) -> None:
    submitted(store, 2, OTHERS)
    refused = http.post(PATH, json={"tenant": "others"})
    assert (refused.status_code, "leave tenant out or give lab" in refused.json()["detail"]) == (403, True)
    assert client_with(Scope.READ, tenant="others").post(PATH, json={"tenant": "others"}).status_code == 403
    assert client_with.nothing().post(PATH, json={"tenant": "others"}).status_code == 401
    assert store.counts()[JobState.QUEUED] == 2
    assert cancelled(client_with(Scope.ADMIN), tenant="others")["cancelled"] == 2


def test_jobs_that_others_write_to_meanwhile(store: JobStore, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = submitted(store, 5)
    start(store, jobs[0])
    read, other = JobCache.read, JobStore(store.engine)

    def read_and_report(self: JobCache, connection: Any, query: Any, *parameters: Any) -> list[JobRecord]:
        found = read(self, connection, query, *parameters)
        if database == "sqlite":  # whose readers hold no locks
            monkeypatch.undo()
            other.append_reports(jobs[0], 1, numbered(a_step(10)))
            other.request_cancel(jobs[1])
        return found

    monkeypatch.setattr(JobCache, "read", read_and_report)
    if database == "sqlite":
        assert sorted(store.cancel_many([*jobs, "job-0"])) == [jobs[0], *jobs[2:]]
    else:
        with ThreadPoolExecutor() as threads:
            with store.engine.begin() as connection:
                connection.execute(select(JobRow.id).where(JobRow.id == jobs[0]).with_for_update())
                cancelling = threads.submit(list, store.cancel_many([*jobs, "job-0"]))
                while store.get(jobs[4]).state is JobState.QUEUED:  # the others do not wait for it
                    time.sleep(0.01)
            assert sorted(cancelling.result()) == jobs
    assert store.get(jobs[0]).cancel_requested
    assert {store.get(job_id).state for job_id in jobs[1:]} == {JobState.CANCELLED}
