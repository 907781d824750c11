import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from service.jobs.database import migrate, open_engine
from service.jobs.ids import new_job_id
from service.jobs.states import IllegalTransition, JobState, Reason
from service.jobs.store import AlreadyFinished, JobNotFound, JobStore
from service.jobs.tables import Table
from tests.service.records import (
    a_checkpoint,
    a_log_line,
    a_spec,
    a_start,
    a_step,
    an_evaluation,
    finish,
    numbered,
    run_to_the_end,
    start,
)

ROOT = "file:///checkpoints/"


def in_threads(count: int, work: Callable[[int], object]) -> list[Exception]:
    """Do the same in many threads at once; return what was raised."""
    together, raised = threading.Barrier(count), []

    def run(index: int) -> None:
        together.wait()
        try:
            work(index)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def states(store: JobStore, job_id: str) -> list[str]:
    return [event.data["state"] for event in store.events(job_id) if event.kind == "state"]


def test_migration_makes_the_tables_that_the_code_expects(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/deep/in/boost.db"
    migrate(url)
    migrate(url)
    with open_engine(url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["0001"]


def test_migration_keeps_what_is_there(store: JobStore, database_url: str) -> None:
    job = store.create(a_spec(), ROOT)
    migrate(database_url)
    assert store.get(job.id) == job


def test_sqlite_is_set_up_for_several_threads(database_url: str) -> None:
    with open_engine(database_url).connect() as connection:
        pragmas = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")]
    assert pragmas == ["wal", 1]


def test_a_new_job_is_queued(store: JobStore) -> None:
    before = datetime.now(UTC)
    job = store.create(a_spec(), ROOT)
    assert store.get(job.id) == job
    assert (job.state, job.reason, job.attempt, job.version) == ("QUEUED", "SUBMITTED", 0, 1)
    assert job.spec == a_spec()
    assert job.checkpoint_url == f"file:///checkpoints/{job.id}"
    assert before <= job.submitted_at <= datetime.now(UTC)
    assert job.submitted_at.utcoffset() == timedelta(0)
    (event,) = store.events(job.id)
    assert event.data == {"state": "QUEUED", "reason": "SUBMITTED", "message": job.message}
    assert event.time == job.submitted_at


def test_the_spec_may_say_where_checkpoints_go(store: JobStore) -> None:
    job = store.create(a_spec(checkpoint={"url": "s3://bucket/folder/"}), ROOT)
    assert job.checkpoint_url == f"s3://bucket/folder/{job.id}"


def test_ids_sort_by_time() -> None:
    ids = [new_job_id() for _ in range(1000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 1000
    assert all(len(job_id) == 20 and job_id == job_id.lower() for job_id in ids)


def test_jobs_are_listed_newest_first_page_by_page(store: JobStore) -> None:
    ids = [store.create(a_spec(), ROOT).id for _ in range(5)]
    start(store, ids[0])
    run_to_the_end(store, ids[1])
    assert [job.id for job in store.list()] == ids[::-1]
    first = store.list(limit=2)
    assert [job.id for job in store.list(limit=2, cursor=first[-1].id)] == [ids[2], ids[1]]
    assert [job.id for job in store.list(states={JobState.RUNNING, JobState.SUCCEEDED})] == [ids[1], ids[0]]
    assert [job.id for job in store.active()] == [ids[0], *ids[2:]]
    assert store.counts() == dict.fromkeys(JobState, 0) | {
        JobState.QUEUED: 3, JobState.RUNNING: 1, JobState.SUCCEEDED: 1,
    }  # fmt: skip


def test_a_job_from_queue_to_end(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    running = start(store, job.id)
    assert running.attempt == 1
    assert running.started_at is not None
    assert running.finished_at is None
    ended = finish(store, job.id)
    assert ended.finished
    assert ended.finished_at is not None
    assert states(store, job.id) == ["QUEUED", "SCHEDULING", "SCHEDULING", "RUNNING", "SUCCEEDED"]
    assert ended.version == len(states(store, job.id))


def test_a_restart_keeps_the_first_start(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    first = start(store, job.id)
    assert store.change(job.id, Reason.GANG_LOST, "a node went away").state == "QUEUED"
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    again = store.change(job.id, Reason.GANG_STARTED, "trains again", attempt=2)
    assert (again.attempt, again.started_at) == (2, first.started_at)


def test_a_change_that_the_table_lacks_writes_nothing(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    with pytest.raises(IllegalTransition):
        store.change(job.id, Reason.TRAINING_FINISHED, "how?")
    assert store.get(job.id) == job
    assert len(store.events(job.id)) == 1


def test_waiting_on_for_the_same_reason_writes_nothing(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    waiting = store.change(job.id, Reason.WAITING_FOR_RESOURCES, "needs 2 CPUs, 1 is free")
    assert store.change(job.id, Reason.WAITING_FOR_RESOURCES, "needs 2 CPUs, 1 is free") == waiting
    assert store.change(job.id, Reason.WAITING_FOR_RESOURCES, "needs 2 CPUs, 0 are free").version == waiting.version + 1


def test_unknown_jobs(store: JobStore) -> None:
    for call in (
        lambda: store.get("job-0"),
        lambda: store.change("job-0", Reason.HEAD_OF_QUEUE, ""),
        lambda: store.request_cancel("job-0"),
        lambda: store.append_reports("job-0", 1, numbered(a_step(1))),
    ):
        with pytest.raises(JobNotFound, match="no job 'job-0'"):
            call()
    assert store.events("job-0") == []


def test_cancelling_a_queued_job_ends_it(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    cancelled = store.request_cancel(job.id)
    assert (cancelled.state, cancelled.reason, cancelled.cancel_requested) == ("CANCELLED", "CANCELLED_BY_USER", True)
    assert cancelled.finished_at is not None
    assert store.request_cancel(job.id) == cancelled


def test_cancelling_a_running_job_asks_for_it_once(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    running = start(store, job.id)
    asked = store.request_cancel(job.id)
    assert asked == running.model_copy(update={"cancel_requested": True, "version": running.version + 1})
    assert store.request_cancel(job.id) == asked
    assert store.change(job.id, Reason.CANCELLED_BY_USER, "cancelled").state == "CANCELLED"


def test_cancelling_a_job_that_lost_its_gang_ends_it_even_when_asked_before(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    store.request_cancel(job.id)
    store.change(job.id, Reason.GANG_LOST, "a node went away")
    assert store.request_cancel(job.id).state == "CANCELLED"


def test_a_finished_job_cannot_be_cancelled(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    run_to_the_end(store, job.id)
    with pytest.raises(AlreadyFinished, match="already SUCCEEDED"):
        store.request_cancel(job.id)


def test_racing_changes_are_each_decided_on_the_newest_record(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    raised = in_threads(8, lambda index: store.change(job.id, Reason.HEAD_OF_QUEUE, f"thread {index}"))
    assert len(raised) == 7
    assert all(isinstance(error, IllegalTransition) for error in raised), raised
    assert states(store, job.id) == ["QUEUED", "SCHEDULING"]


def test_no_racing_write_is_lost(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")

    def wait_five_times(index: int) -> None:
        for turn in range(5):
            store.change(job.id, Reason.WAITING_FOR_RESOURCES, f"{index} {turn}")

    assert in_threads(6, wait_five_times) == []
    assert store.get(job.id).version == 2 + 6 * 5
    assert len(states(store, job.id)) == 2 + 6 * 5


def test_processes_share_a_database(database_url: str) -> None:
    stores = [JobStore(database_url) for _ in range(4)]
    jobs: list[str] = []
    assert in_threads(4, lambda index: jobs.append(stores[index].create(a_spec(), ROOT).id)) == []
    assert sorted(jobs) == [job.id for job in stores[0].active()]


def test_reports_become_events_and_the_newest_numbers(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    time = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=5)))
    reports = [a_start(), a_step(1), a_step(2), an_evaluation(2), a_checkpoint(2), a_log_line("fine")]
    record = store.append_reports(job.id, 1, [(number, time, report) for number, report in enumerate(reports, 1)])
    assert record.progress == a_step(2)
    assert record.evaluation == an_evaluation(2)
    assert record.checkpoint == a_checkpoint(2)
    assert record == store.get(job.id)
    events = [event for event in store.events(job.id) if event.kind != "state"]
    assert [event.data for event in events] == [report.model_dump() for report in reports]
    assert {event.time for event in events} == {time}
    assert store.last_sequence(job.id, 1) == 6
    assert store.last_sequence(job.id, 2) == 0


def test_a_report_is_stored_exactly_once(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    reports = numbered(*(a_step(step) for step in range(1, 21)))

    def append_overlapping(index: int) -> None:
        for first in range(0, 20, 2):
            store.append_reports(job.id, 1, reports[: first + 2 + index])

    assert in_threads(4, append_overlapping) == []
    steps = [event.data["step"] for event in store.events(job.id) if event.kind == "progress"]
    assert steps == list(range(1, 21))
    before = store.get(job.id)
    assert store.append_reports(job.id, 1, reports) == before
    assert store.append_reports(job.id, 1, []) == before


def test_reports_of_a_replaced_gang_are_left_out(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_step(1)))
    store.change(job.id, Reason.GANG_LOST, "a node went away")
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    store.change(job.id, Reason.GANG_STARTING, "starts", attempt=2)
    store.append_reports(job.id, 1, numbered(a_step(2), first=2))
    record = store.append_reports(job.id, 2, numbered(a_step(1, loss=9.0)))
    assert record.progress == a_step(1, loss=9.0)
    assert [event.data["loss"] for event in store.events(job.id) if event.kind == "progress"] == [4.9, 9.0]


def test_numbers_that_json_lacks_survive(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_step(1, gradient_norm=float("inf"), loss=float("nan"))))
    progress = store.get(job.id).progress
    assert progress is not None
    assert progress.gradient_norm == float("inf")
    assert progress.loss != progress.loss
    assert store.events(job.id)[-1].data["loss"] == "NaN"


def test_events_are_read_in_portions(store: JobStore) -> None:
    job, other = store.create(a_spec(), ROOT), store.create(a_spec(), ROOT)
    run_to_the_end(store, job.id)
    run_to_the_end(store, other.id)
    everything = store.events(job.id)
    assert {event.job_id for event in everything} == {job.id}
    first = store.events(job.id, limit=3)
    assert [*first, *store.events(job.id, after_id=first[-1].id)] == everything
