import json
import stat
from datetime import UTC, datetime, timedelta, timezone
from operator import attrgetter
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from pydantic import ValidationError
from sqlalchemy import text, update
from sqlalchemy.exc import IntegrityError

import service.accounts.tables  # noqa: F401  # its tables are among those expected
from boost_core.config import DataParallelRange, Layout
from boost_core.messages import Cause, Drill, Fault, FaultReport, Profile
from service.jobs.database import migrate, open_engine
from service.jobs.model import JobFilter, Owner, TooManyJobs, new_id
from service.jobs.patch import JobPatch
from service.jobs.queries import JobNotFound
from service.jobs.states import IllegalTransition, JobState, Reason
from service.jobs.store import JobStore
from service.jobs.tables import JobRow, Table
from service.jobs.writes import AlreadyFinished, Overtaken, WrongState
from tests.service.concurrency import in_threads
from tests.service.records import (
    a_checkpoint,
    a_fault,
    a_log_line,
    a_restart,
    a_shape,
    a_spare,
    a_spec,
    a_start,
    a_step,
    an_evaluation,
    an_interruption,
    finish,
    numbered,
    run_to_the_end,
    start,
)

ROOT = "file:///checkpoints/"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


def states(store: JobStore, job_id: str) -> list[str]:
    return [event.data["state"] for event in store.events(job_id) if event.kind == "state"]


@pytest.mark.full
def test_migration_makes_the_tables_that_the_code_expects(empty_database_url: str) -> None:
    url = empty_database_url
    migrate(url)
    migrate(url)
    with open_engine(url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all() == ["0021"]


@pytest.mark.parametrize("there_before", [False, True])
def test_nobody_else_can_read_a_sqlite_file(tmp_path: Path, there_before: bool) -> None:
    tmp_path.chmod(0o755)
    file = tmp_path / "boost.db"
    if there_before:
        file.touch(mode=0o644)
    migrate(f"sqlite:///{file}")
    with open_engine(f"sqlite:///{file}").connect() as connection:
        connection.execute(text("SELECT 1 FROM jobs"))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes and set(modes.values()) == {0o600}, modes


def test_migration_keeps_what_is_there(store: JobStore, database_url: str) -> None:
    job = store.create(a_spec(), ROOT)
    migrate(database_url)
    assert store.get(job.id) == job


def test_migration_of_older_jobs(empty_database_url: str) -> None:
    url = empty_database_url
    config = Config()
    config.set_main_option("script_location", "service.jobs:migrations")
    old_spec = a_spec().model_dump(mode="json", exclude={"fault_tolerance"}) | {"max_restarts": 7}
    values = {
        "name": "old", "spec": json.dumps(old_spec), "reason": "SUBMITTED", "message": "", "attempt": 1,
        "cancel_requested": False, "checkpoint_url": "/c", "submitted_at": "2020-01-01 00:00:00", "version": 1,
    }  # fmt: skip
    with open_engine(url).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for job_id, state, progress in (("job-1", "RUNNING", a_step(7).model_dump_json()), ("job-2", "FAILED", None)):
            row = values | {"id": job_id, "state": state, "progress": progress}
            names = ", ".join(row)
            connection.execute(text(f"INSERT INTO jobs ({names}) VALUES (:{names.replace(', ', ', :')})"), row)
    before = datetime.now(UTC)
    migrate(url)
    running, failed = JobStore(url).get("job-1"), JobStore(url).get("job-2")
    assert running.spec == a_spec(fault_tolerance={"max_restarts": 7})
    assert (running.goodput.phase, running.goodput.highest_step, failed.goodput.phase) == ("stepping", 7, "ended")
    assert running.goodput.since >= before, "what came before was not booked"
    assert (running.commands, running.restarts, running.restart_counts, running.pause_requested) == ([], [], {}, False)


@pytest.mark.full
def test_migration_dates_the_jobs_that_there_are(empty_database_url: str) -> None:
    url = empty_database_url
    migrate(url)
    store = JobStore(url)
    queued, running, ended = (store.create(a_spec(), ROOT).id for _ in range(3))
    for job_id in (running, ended):
        start(store, job_id)
        store.append_reports(job_id, 1, numbered(a_step(1), a_checkpoint(1), a_step(2), a_fault()))
    finish(store, ended)
    before = {job_id: store.get(job_id) for job_id in (queued, running, ended)}
    config = Config()
    config.set_main_option("script_location", "service.jobs:migrations")
    with open_engine(url).begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0003")
    migrate(url)
    store = JobStore(url)
    uncounted = {"fault_counts": {}}
    assert store.get(queued) == before[queued]
    assert store.get(running) == before[running].model_copy(update=uncounted)
    undated = {"progress_at": None, "checkpoint_at": None}
    assert store.get(ended) == before[ended].model_copy(update=uncounted | undated)


def test_sqlite_is_set_up_for_several_threads(tmp_path: Path) -> None:
    with open_engine(f"sqlite:///{tmp_path}/deep/in/boost.db").connect() as connection:
        pragmas = [connection.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "foreign_keys")]
    assert pragmas == ["wal", 1]


def test_a_new_job_is_queued(store: JobStore) -> None:
    before = datetime.now(UTC)
    job = store.create(a_spec(), ROOT)
    assert store.get(job.id) == job
    assert (job.state, job.reason, job.attempt, job.version) == ("QUEUED", "SUBMITTED", 0, 1)
    assert job.spec == a_spec()
    assert job.checkpoint_url == f"file:///checkpoints/default/{job.id}"
    assert before <= job.submitted_at <= datetime.now(UTC)
    assert job.submitted_at.utcoffset() == timedelta(0)
    (event,) = store.events(job.id)
    assert event.data == {"state": "QUEUED", "reason": "SUBMITTED", "message": job.message}
    assert event.time == job.submitted_at


def test_the_spec_may_say_where_checkpoints_go(store: JobStore) -> None:
    job = store.create(a_spec(checkpoint={"url": "s3://bucket/folder/"}), ROOT)
    assert job.checkpoint_url == f"s3://bucket/folder/{job.id}"


def test_ids_sort_by_time() -> None:
    ids = [new_id("job") for _ in range(1000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 1000
    assert all(len(job_id) == 20 and job_id == job_id.lower() for job_id in ids)


@pytest.mark.parametrize("jump", [timedelta(days=31), -timedelta(days=31)], ids=["ahead", "back"])
def test_the_queue_does_not_follow_the_clock(store: JobStore, monkeypatch: pytest.MonkeyPatch, jump: timedelta) -> None:
    class JumpedClock(datetime):
        @classmethod
        def now(cls, tz=None) -> datetime:
            return datetime.now(tz) + jump

    first = store.create(a_spec(), ROOT)
    with monkeypatch.context() as jumped:
        for module in ("store", "writes", "model"):
            jumped.setattr(f"service.jobs.{module}.datetime", JumpedClock, raising=False)
        second = store.create(a_spec(), ROOT)
        store.request_cancel(first.id)
        first = store.retry(first.id)
    third = store.create(a_spec(), ROOT)
    assert abs(second.queued_at - third.queued_at) > timedelta(days=30)
    expected = [second.id, first.id, third.id]
    assert [job.id for job in store.active()] == expected
    assert [job.id for job in sorted(store.active(), key=attrgetter("queue_order"))] == expected


def test_a_job_from_a_release_before_gets_its_number_in_the_queue(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    with store.engine.begin() as connection:
        connection.execute(update(JobRow).values(arrival=None))
    assert store.number(job.id).arrival == 1
    assert store.number(job.id).version == job.version + 1


def test_jobs_are_listed_newest_first_page_by_page(store: JobStore) -> None:
    ids = [store.create(a_spec(), ROOT).id for _ in range(5)]
    start(store, ids[0])
    run_to_the_end(store, ids[1])
    assert [job.id for job in store.page()[0]] == ids[::-1]
    first, _ = store.page(limit=2)
    assert [job.id for job in store.page(limit=2, cursor=first[-1].id)[0]] == [ids[2], ids[1]]
    assert [job.id for job in store.page(JobFilter({JobState.RUNNING, JobState.SUCCEEDED}))[0]] == [ids[1], ids[0]]
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
        lambda: store.request_pause("job-0"),
        lambda: store.resume("job-0"),
        lambda: store.patch("job-0", JobPatch()),
        lambda: store.ask("job-0", Drill(kind="kill_rank")),
        lambda: store.take_commands("job-0"),
        lambda: store.append_reports("job-0", 1, numbered(a_step(1))),
    ):
        with pytest.raises(JobNotFound, match="no job 'job-0'"):
            call()
    assert store.events("job-0") == []


def test_a_tenant_has_so_many_unfinished_jobs(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.store.MOST_UNFINISHED", 2)
    first, second = (store.create(a_spec(), "/c", Owner("lab")) for _ in range(2))
    with pytest.raises(TooManyJobs, match="the tenant 'lab' has 2 jobs that have not ended"):
        store.create(a_spec(), "/c", Owner("lab"))
    store.create(a_spec(), "/c", Owner("other"))
    store.request_cancel(first.id)
    store.create(a_spec(), "/c", Owner("lab"))
    assert next(job.id for job in store.active()) == second.id


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


def test_cancelling_a_paused_job_ends_it(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    store.request_pause(job.id)
    assert store.request_cancel(job.id).state == "CANCELLED"


def test_a_job_without_a_gang_is_paused_at_once(store: JobStore) -> None:
    queued, waiting = store.create(a_spec(), ROOT), store.create(a_spec(), ROOT)
    store.change(waiting.id, Reason.HEAD_OF_QUEUE, "is next")
    store.change(waiting.id, Reason.WAITING_FOR_RESOURCES, "needs 2 CPUs")
    for job in (queued, waiting):
        paused = store.request_pause(job.id)
        assert (paused.state, paused.reason, paused.pause_requested) == ("PAUSED", "PAUSED_BY_USER", True)
        assert store.request_pause(job.id) == paused
        assert paused in store.active()
        resumed = store.resume(job.id)
        assert (resumed.state, resumed.reason, resumed.pause_requested) == ("QUEUED", "RESUMED_BY_USER", False)


def test_pausing_a_gang_asks_for_it_once(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    starting = store.change(job.id, Reason.GANG_STARTING, "2 workers start", attempt=1)
    asked = store.request_pause(job.id)
    assert asked == starting.model_copy(update={"pause_requested": True, "version": starting.version + 1})
    assert store.request_pause(job.id) == asked
    assert store.resume(job.id).pause_requested is False
    store.change(job.id, Reason.GANG_STARTED, "2 workers train")
    store.request_pause(job.id)
    paused = store.change(job.id, Reason.PAUSED_BY_USER, "its state is saved")
    assert (paused.state, paused.has_gang) == ("PAUSED", False)
    assert store.resume(job.id).state == "QUEUED"


def test_what_cannot_be_paused_or_resumed(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    with pytest.raises(WrongState, match=r"is QUEUED \(SUBMITTED\); only a paused job can be resumed"):
        store.resume(job.id)
    run_to_the_end(store, job.id)
    for call, verb in ((store.request_pause, "paused"), (store.resume, "resumed")):
        with pytest.raises(AlreadyFinished, match=f"has already SUCCEEDED and cannot be {verb}"):
            call(job.id)


def test_a_patch_changes_the_spec_and_says_how(store: JobStore) -> None:
    job = store.create(a_spec(training={"steps": 10, "micro_batch_size": 4}), ROOT)
    limits = {"data_parallel_size": {"max": 3}}
    changed = store.patch(job.id, JobPatch.model_validate({"name": "other", "priority": 5} | limits))
    assert (changed.name, changed.spec.name, changed.spec.priority) == ("other", "other", 5)
    assert changed.spec.elasticity is not None
    assert changed.spec.elasticity.data_parallel_size == DataParallelRange(min=1, max=3)
    assert store.events(job.id)[-1].data == {
        "name": {"from": "tiny", "to": "other"},
        "priority": {"from": 0, "to": 5},
        "data_parallel_size": {"from": None, "to": {"min": 1, "max": 3}},
    }
    assert store.patch(job.id, JobPatch(name="other", priority=5)) == changed, "it is like that already"
    assert store.patch(job.id, JobPatch()) == changed
    again = store.patch(job.id, JobPatch.model_validate({"data_parallel_size": {"min": 2}}))
    assert again.spec.elasticity is not None
    assert again.spec.elasticity.data_parallel_size == DataParallelRange(min=2, max=3)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"priority": 1001}, ("priority",), "less than or equal to 1000"),
        ({"name": "-"}, ("name",), "pattern"),
        (
            {"data_parallel_size": {"min": 2}},
            ("elasticity", "data_parallel_size"),
            r"min \(2\) must not exceed max \(1\)",
        ),
        ({"data_parallel_size": {"min": 5, "max": 7}}, ("elasticity", "data_parallel_size"), "legal with no number"),
    ],
)
def test_a_patch_that_makes_the_job_illegal_changes_nothing(
    store: JobStore, changes: dict, field: tuple[str, ...], message: str
) -> None:
    job = store.create(a_spec(), ROOT)
    with pytest.raises(ValidationError, match=message) as caught:
        store.patch(job.id, JobPatch.model_validate(changes))
    assert caught.value.errors()[0]["loc"] == field
    assert store.get(job.id) == job


def test_a_finished_job_cannot_be_changed(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    run_to_the_end(store, job.id)
    with pytest.raises(AlreadyFinished, match="cannot be changed"):
        store.patch(job.id, JobPatch(priority=1))


def test_drills_are_told_once(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    drills = [Drill(kind="kill_rank", rank=1, at_step=5), Drill(kind="fill_store")]
    for drill in drills:
        store.ask(job.id, drill)
    assert store.get(job.id).commands == drills
    assert store.take_commands(job.id) == drills
    assert store.take_commands(job.id) == []
    events = [event.data for event in store.events(job.id) if event.kind == "drill"]
    assert events == [drill.model_dump() for drill in drills]


def test_a_drill_needs_a_running_job_and_one_of_its_ranks(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    with pytest.raises(WrongState, match="a drill needs a job that is RUNNING"):
        store.ask(job.id, Drill(kind="kill_rank"))
    start(store, job.id)
    with pytest.raises(ValidationError, match="2 is not a rank of a gang of tp 2 × pp 1 × dp 1; use 0 to 1"):
        store.ask(job.id, Drill(kind="kill_rank", rank=2))
    store.append_reports(job.id, 1, numbered(a_shape(data=2)))
    assert store.get(job.id).present_layout == Layout(2, 1, 2)
    store.ask(job.id, Drill(kind="kill_rank", rank=3))
    store.ask(job.id, Profile(ranks=(3,)))
    assert store.change(job.id, Reason.GANG_LOST, "a node went away").commands == [], "they were for that gang"


def test_a_profile_needs_a_running_job_and_its_ranks(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    with pytest.raises(WrongState, match="a profile needs a job that is RUNNING"):
        store.ask(job.id, Profile())
    start(store, job.id)
    with pytest.raises(ValidationError, match="ranks\n  3 is not a rank of a gang of tp 2 × pp 1 × dp 1; use 0 to 1"):
        store.ask(job.id, Profile(ranks=(1, 3)))
    asked = store.ask(job.id, Profile(steps=20, ranks=(0, 1)))
    assert asked.commands == [Profile(steps=20, ranks=(0, 1))]
    assert store.take_commands(job.id) == asked.commands
    assert store.take_commands(job.id) == []


def test_racing_changes_are_each_decided_on_the_newest_record(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    raised = in_threads(8, lambda index: store.change(job.id, Reason.HEAD_OF_QUEUE, f"thread {index}"))
    assert len(raised) == 7
    assert all(isinstance(error, IllegalTransition) for error in raised), raised
    assert states(store, job.id) == ["QUEUED", "SCHEDULING"]


@pytest.mark.full
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
    assert sorted(jobs) == sorted(job.id for job in stores[0].active())


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
    assert [event.data for event in events] == [report.model_dump(mode="json") for report in reports]
    assert {event.time for event in events} == {time}
    assert store.last_sequences([job.id]) == {job.id: 6}


def test_shapes_and_restarts_are_kept_with_the_job(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    reports = [a_shape(), a_step(3), an_interruption(), a_shape(2), a_restart(), a_step(3), a_fault()]
    record = store.append_reports(job.id, 1, numbered(*reports))
    assert record.shape == a_shape(2)
    (restart,) = record.restarts
    assert restart.model_dump(exclude={"time"}) == a_restart().model_dump()
    kinds = [event.kind for event in store.events(job.id) if event.kind != "state"]
    assert kinds == ["shape", "progress", "interruption", "shape", "restart", "progress", "fault"]
    assert restart.time == next(event.time for event in store.events(job.id) if event.kind == "restart")
    many = [a_restart(step, Cause.HANG) for step in range(10, 70)]
    record = store.append_reports(job.id, 1, numbered(*many, first=8))
    assert [restart.step for restart in record.restarts] == list(range(20, 70))
    assert record.restart_counts == {Cause.WORKER_LOST: 1, Cause.HANG: 60}
    assert record.fault_counts == {"slow_rank": 1}
    full = FaultReport(what=Fault.STORE, step=6, message="the store is full")
    record = store.append_reports(job.id, 1, numbered(a_fault(), full, a_fault(), first=68))
    assert record.fault_counts == {"slow_rank": 3, "store": 1}
    assert record == store.get(job.id)


def test_a_spare_copy_is_the_newest_gangs(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    assert store.append_reports(job.id, 1, numbered(a_spare(3), a_spare(8))).spare == a_spare(8)
    assert store.get(job.id).spare_step == 8
    assert store.append_reports(job.id, 1, numbered(a_spare(None), first=3)).spare_step is None
    store.append_reports(job.id, 1, numbered(a_spare(13), first=4))
    store.change(job.id, Reason.GANG_LOST, "its supervisor was killed, and has said nothing")
    assert store.get(job.id).spare_step is None
    store.change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    store.change(job.id, Reason.GANG_STARTING, "starts", attempt=2)
    assert store.get(job.id).spare is None


@pytest.mark.full
def test_reports_of_many_jobs_are_stored_together_as_they_are_one_by_one(store: JobStore) -> None:
    said = [
        [a_start(), a_shape(), a_step(1), a_log_line("fine")],
        [a_step(2, loss=float("inf"))],
        [
            a_step(3),
            an_interruption(),
            a_shape(2),
            a_restart(),
            a_fault(),
            a_step(3),
            an_evaluation(3),
            a_checkpoint(3),
        ],
    ]
    alone, together = ([start(store, store.create(a_spec(), ROOT).id) for _ in said] for _ in range(2))
    told = list(zip(together, [numbered(*reports) for reports in said], strict=True))
    for job, (_, reports) in zip(alone, told, strict=True):
        store.append_reports(job.id, 1, reports)
    store.append_many(told)
    known = {job.id: job for job in store.some([job.id for job in together])}
    unlike = {"id", "checkpoint_url", "submitted_at", "queued_at", "started_at", "goodput"}
    for one, other in zip(alone, together, strict=True):
        assert known[other.id] == store.get(other.id), "what is remembered is what is in the database"
        assert known[other.id].model_dump(exclude=unlike) == store.get(one.id).model_dump(exclude=unlike)
        events = [[(event.kind, event.data) for event in store.events(job.id)] for job in (one, other)]
        assert events[0] == events[1]
    assert store.last_sequences([job.id for job in together]) == {
        job.id: len(reports) for job, reports in zip(together, said, strict=True)
    }
    store.append_many([(known[together[0].id], numbered(a_step(2), first=5))])
    assert [event.data["step"] for event in store.events(together[0].id) if event.kind == "progress"] == [1, 2]


def test_reports_of_many_jobs_are_stored_together_or_not_at_all(store: JobStore) -> None:
    jobs = [start(store, store.create(a_spec(), ROOT).id) for _ in range(3)]
    told = [(job, numbered(a_step(1))) for job in jobs]
    store.request_pause(jobs[1].id)

    def everything() -> list[object]:
        return [(store.get(job.id), store.events(job.id)) for job in jobs]

    before = everything()
    with pytest.raises(Overtaken, match="at least one of 3 jobs has been changed"):
        store.append_many(told)
    assert everything() == before
    store.append_reports(jobs[2].id, 1, numbered(a_step(1)))
    before = everything()
    with pytest.raises(IntegrityError):
        store.append_many([(store.get(job.id), reports) for job, reports in told])
    assert everything() == before


def test_some_jobs_are_those_that_have_not_ended(store: JobStore) -> None:
    ended, goes_on, other = (start(store, store.create(a_spec(), ROOT).id) for _ in range(3))
    finish(store, ended.id)
    assert store.some([ended.id, goes_on.id, "job-unknown"]) == [goes_on]
    assert store.last_sequences([other.id]) == {other.id: 0}


def test_all_time_is_booked(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    assert (job.goodput.since, job.goodput.booked_until) == (job.submitted_at, job.submitted_at)
    started = start(store, job.id).goodput
    assert started.total == started.booked_until - job.submitted_at
    assert started.waiting > 0
    now = datetime.now(UTC)
    times = [now + timedelta(seconds=seconds) for seconds in (1, 2, 3, 9)]
    reports = [a_step(1), a_step(2), an_interruption(), a_restart(seconds=6.0)]
    record = store.append_reports(job.id, 1, list(zip((1, 2, 3, 4), times, reports, strict=True)))
    assert (record.goodput.productive, record.goodput.recomputed, record.goodput.waiting > 1) == (1.5, 1.0, True)
    assert record.goodput.total == record.goodput.booked_until - job.submitted_at
    ended = store.change(job.id, Reason.TRAINING_FAILED, "it diverges")
    assert ended.goodput.phase == "ended"
    assert store.append_reports(job.id, 1, numbered(a_step(3), first=5)).goodput == ended.goodput


def test_a_gang_that_goes_on_for_the_same_reason_writes_nothing(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    recovering = store.change(job.id, Reason.GANG_RECOVERING, "rank 1 died")
    assert recovering.state == "RUNNING"
    assert store.change(job.id, Reason.GANG_RECOVERING, "rank 1 died") == recovering
    trains = store.change(job.id, Reason.GANG_STARTED, "2 workers train")
    assert store.change(job.id, Reason.GANG_STARTED, "2 workers train") == trains


@pytest.mark.full
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


@pytest.mark.full
def test_where_a_request_came_from_is_kept_and_not_shown(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    with store.engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET traceparent = '00-1234-56-01', version = version + 1"))
    record = store.get(job.id)
    assert record.traceparent == "00-1234-56-01"
    assert "traceparent" not in record.model_dump()
    assert "traceparent" not in record.model_json_schema(mode="serialization")["properties"]
