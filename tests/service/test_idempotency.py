"""A request with a key takes effect once, however often and from wherever it is sent."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from boost_core.messages import Drill
from service.jobs.model import KEPT, IdempotencyKeyReused, Owner, Request
from service.jobs.store import JobStore
from service.jobs.tables import EventRow, JobRow, RequestRow
from service.jobs.writes import WrongState
from tests.service.concurrency import in_threads
from tests.service.records import a_spec, start

ROOT = "file:///checkpoints"
SENDERS = 3
SENDER = """
import sys
from service.jobs.model import Request
from service.jobs.store import JobStore
from tests.service.records import a_spec
store = JobStore(sys.argv[1])
with store.engine.connect():
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(20):
        job = store.create(a_spec(), "file:///checkpoints", request=Request("default", f"key-{number}", "same"))
        print(job.id)
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


def asked(key: str = "key", fingerprint: str = "submit", tenant: str = "default") -> Request:
    return Request(tenant, key, fingerprint)


def rows(store: JobStore) -> tuple[int, int, int]:
    """How many jobs, events and requests there are."""
    with Session(store.engine) as session:
        jobs, events, requests = (
            session.scalar(select(func.count()).select_from(table)) for table in (JobRow, EventRow, RequestRow)
        )
    return jobs, events, requests


def test_the_same_request_gives_the_same_job(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT, request=asked())
    start(store, job.id)
    again = store.create(a_spec(), ROOT, request=asked())
    assert again == store.get(job.id), "as it is by now"
    assert rows(store) == (1, 4, 1)


def test_a_key_that_comes_with_another_request(store: JobStore) -> None:
    store.create(a_spec(), ROOT, request=asked())
    with pytest.raises(IdempotencyKeyReused, match="'key' was sent with another request before; use a new one"):
        store.create(a_spec(), ROOT, request=asked(fingerprint="another"))
    assert rows(store) == (1, 1, 1)


def test_keys_are_each_tenants_own(store: JobStore) -> None:
    ids = {store.create(a_spec(), ROOT, Owner(tenant), request=asked(tenant=tenant)).id for tenant in ("one", "other")}
    assert len(ids) == 2


def test_many_threads_make_one_job(store: JobStore) -> None:
    ids: list[str] = []
    assert in_threads(12, lambda _: ids.append(store.create(a_spec(), ROOT, request=asked()).id)) == []
    assert (len(ids), len(set(ids)), rows(store)) == (12, 1, (1, 1, 1))


def test_many_threads_with_different_requests_make_one_job(store: JobStore) -> None:
    ids: list[str] = []
    raised = in_threads(
        12, lambda index: ids.append(store.create(a_spec(), ROOT, request=asked(fingerprint=f"{index % 3}")).id)
    )
    assert (len(set(ids)), rows(store)) == (1, (1, 1, 1))
    assert (len(ids), len(raised)) == (4, 8)
    assert {type(error) for error in raised} == {IdempotencyKeyReused}


@pytest.mark.full
def test_several_processes_make_one_job_of_each_key(store: JobStore, database_url: str) -> None:
    senders = [
        subprocess.Popen(
            [sys.executable, "-c", SENDER, database_url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(SENDERS)
    ]
    for sender in senders:
        assert sender.stdout and sender.stdout.readline() == "ready\n"
    for sender in senders:
        assert sender.stdin
        sender.stdin.write("\n")
        sender.stdin.flush()
    answers = {sender.communicate(timeout=60)[0] for sender in senders}
    (ids,) = answers
    assert (len(set(ids.split())), rows(store)) == (20, (20, 20, 20))


def test_a_drill_takes_effect_once(store: JobStore) -> None:
    job, drill = store.create(a_spec(), ROOT), Drill(kind="kill_rank")
    with pytest.raises(WrongState):
        store.ask(job.id, drill, asked())
    start(store, job.id)  # what was refused may be asked for again
    assert in_threads(8, lambda _: store.ask(job.id, drill, asked())) == []
    assert store.take_commands(job.id) == [drill]
    assert store.ask(job.id, drill, asked()).commands == []
    assert [event.kind for event in store.events(job.id)].count("drill") == 1


def test_a_key_raced_for_by_drills_of_two_jobs_is_one_jobs(store: JobStore) -> None:
    jobs = [store.create(a_spec(), ROOT).id for _ in range(2)]
    for job_id in jobs:
        start(store, job_id)
    raised = in_threads(
        8, lambda index: store.ask(jobs[index % 2], Drill(kind="kill_rank"), asked("key", jobs[index % 2]))
    )
    assert [type(error) for error in raised] == [IdempotencyKeyReused] * 4
    assert sorted(len(store.take_commands(job_id)) for job_id in jobs) == [0, 1]


def test_old_requests_are_forgotten(store: JobStore) -> None:
    old, new = (store.create(a_spec(), ROOT, request=asked(key)) for key in ("old", "new"))
    before = datetime.now(UTC) - KEPT - timedelta(minutes=1)
    with Session(store.engine) as session, session.begin():
        session.execute(update(RequestRow).where(RequestRow.key == "old").values(time=before))
    store.forget_old_requests()
    assert store.create(a_spec(), ROOT, request=asked("new")).id == new.id
    assert store.create(a_spec(), ROOT, request=asked("old")).id != old.id
