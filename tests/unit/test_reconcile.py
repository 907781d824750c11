"""The reconciler against the real store, with a cluster that does as it is told and dies when it is told."""

import queue
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from boost_core.config import JobSpec, Layout
from boost_core.config.job import MOST_LOSSES
from boost_core.messages import Cause, CheckpointReport, Drill, LogLine, Profile, ShapeReport, Steer, WorkerCommand
from boost_core.plan.machine import NOMINAL, Basis
from service.gang.status import (
    Bundle,
    GangKey,
    GangPhase,
    GangReport,
    GangStatus,
    JobTag,
    NodeCapacity,
    Orders,
    PollRequest,
    PollResult,
)
from service.jobs.database import migrate
from service.jobs.model import JobRecord, Owner
from service.jobs.patch import JobPatch, ReplicasPatch
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.models.cluster import StoredProfile
from service.scheduler.cluster_snapshot import ResizePolicy
from service.scheduler.decisions import decide
from service.scheduler.quotas import Limits
from service.scheduler.reconcile import Reconciler
from tests.jobs import tiny_job
from tests.service.records import PROFILE, a_step


class Crash(BaseException):
    """The service dies here: nothing catches it."""


class FakeGangs:
    """Gangs in memory. ``fail[method]`` holds what a method raises, before or after it took effect."""

    def __init__(self) -> None:
        self.gangs: dict[tuple[str, int], GangStatus] = {}
        self.launched: list[tuple[str, int]] = []
        self.specs: list[JobSpec] = []
        self.tags: list[JobTag] = []
        self.orders: dict[str, Orders] = {}  # the newest of each job
        self.commands: list[tuple[str, int, WorkerCommand]] = []
        self.asked: list[list[Bundle]] = []
        self.polls: list[list[PollRequest]] = []
        self.updates: queue.SimpleQueue[set[GangKey]] = queue.SimpleQueue()
        self.connections = 0
        self.out_of_reach: str | None = None  # at the next check
        self.cpus = [2.0]  # of each node
        self.free: list[float] | None = None
        self.fail_before: dict[str, BaseException] = {}
        self.fail_after: dict[str, BaseException] = {}
        self.bases: list[Basis] = []

    def connect(self) -> None:
        self.connections += 1

    def close(self) -> None: ...

    def check(self) -> None:
        if self.out_of_reach is not None:
            why, self.out_of_reach = self.out_of_reach, None
            raise ConnectionError(why)

    def nodes(self) -> list[NodeCapacity]:
        return [
            NodeCapacity(f"node-{number}", {"CPU": cpus}, {"CPU": free})
            for number, (cpus, free) in enumerate(zip(self.cpus, self.free or self.cpus, strict=True))
        ]

    def request_nodes(self, bundles: Sequence[Bundle]) -> None:
        self.asked.append(list(bundles))

    def refused(self) -> bool:
        return False

    def alive(self) -> set[tuple[str, int]]:
        return set(self.gangs)

    def launch(self, tag: JobTag, spec: JobSpec, orders: Orders, basis: Basis = NOMINAL) -> None:
        self._maybe(self.fail_before, "launch")
        if (tag.job_id, tag.attempt) not in self.gangs:
            self.gangs[tag.job_id, tag.attempt] = GangStatus(GangPhase.STARTING, "placing", [])
            self.launched.append((tag.job_id, tag.attempt))
            self.tags.append(tag)
            self.specs.append(spec)
            self.bases.append(basis)
            self.orders[tag.job_id] = orders
        self._maybe(self.fail_after, "launch")

    def poll(self, requests: Sequence[PollRequest]) -> list[PollResult]:
        self.polls.append(list(requests))
        return [self._poll(request) for request in requests]

    def _poll(self, request: PollRequest) -> PollResult:
        job_id, _ = request.gang
        if f"poll {job_id}" in self.fail_before:
            return self.fail_before.pop(f"poll {job_id}")
        status = self.gangs.get(request.gang)
        if status is None:
            return None
        self.orders[job_id] = request.orders
        fresh = [report for report in status.reports if report.sequence > request.after_sequence]
        return replace(status, reports=fresh)

    def wait_for_updates(self, seconds: float) -> set[GangKey]:
        try:
            return self.updates.get(timeout=seconds)
        except queue.Empty:
            return set()

    def ask(self, job_id: str, attempt: int, command: WorkerCommand) -> None:
        self.commands.append((job_id, attempt, command))

    def end(self, job_id: str, attempt: int) -> None:
        self._maybe(self.fail_before, "end")
        self.gangs.pop((job_id, attempt), None)

    def end_hung(self, job_id: str, attempt: int) -> None:
        self._maybe(self.fail_before, "end_hung")
        self.gangs.pop((job_id, attempt), None)

    def now(
        self, job: JobRecord, phase: GangPhase, message: str = "", logs: int = 0, layout: Layout | None = None
    ) -> None:
        told = self.gangs.get((job.id, job.attempt), GangStatus(phase, message, [])).reports
        layouts = [report for report in told if isinstance(report.report, ShapeReport)]
        lines = [
            GangReport(
                len(layouts) + number, datetime.now(UTC), LogLine(rank=0, level="INFO", message=f"line {number}")
            )
            for number in range(1, logs + 1)
        ]
        self.gangs[job.id, job.attempt] = GangStatus(phase, message, layouts + lines, layout)

    def _maybe(self, failures: dict[str, BaseException], method: str) -> None:
        if method in failures:
            raise failures.pop(method)


class Service:
    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder}/jobs.db"
        migrate(url)
        self.store, self.gangs, self.folder = JobStore(url), FakeGangs(), folder
        self.seconds, self.limits = 0.0, Limits()
        self.start_again()

    def start_again(self) -> None:
        """As a new process would, which remembers nothing."""
        policy = ResizePolicy(cooldown_seconds=30, settle_seconds=5)
        self.reconciler = Reconciler(
            self.store, self.gangs, policy, lambda: self.seconds, lambda: self.limits, autoscales=True
        )

    def submit(self, **changes) -> str:
        return self.store.create(tiny_job("corpus", "elsewhere", **changes), str(self.folder / "checkpoints")).id

    def tick(self, seconds: float = 0.5) -> None:
        self.seconds += seconds
        self.reconciler.tick()

    def reasons(self, job_id: str) -> list[str]:
        return [event.data["reason"] for event in self.store.events(job_id) if event.kind == "state"]

    def logs(self, job_id: str) -> list[str]:
        return [event.data["message"] for event in self.store.events(job_id) if event.kind == "log"]

    def started(self, **changes) -> JobRecord:
        job_id = self.submit(**changes)
        self.tick()
        self.trains(self.store.get(job_id), self.gangs.orders[job_id].target)
        self.tick()
        job = self.store.get(job_id)
        assert job.state is JobState.RUNNING
        return job

    def trains(self, job: JobRecord, layout: Layout | None, keeps: bool = False) -> None:
        report = ShapeReport(
            tensor_parallel_size=layout.tp, pipeline_parallel_size=layout.pp, data_parallel_size=layout.dp,
            nodes=["node-0"] * layout.world_size, keeps=keeps,
        )  # fmt: skip
        reports = [GangReport(self.store.last_sequences([job.id])[job.id] + 1, datetime.now(UTC), report)]
        message = f"{layout} trains"
        self.gangs.gangs[job.id, job.attempt] = GangStatus(GangPhase.TRAINING, message, reports, layout)


ELASTIC = {
    "parallelism": {"tensor_parallel_size": 1},
    "training": {"global_batch_size": 24},
    "elasticity": {"data_parallel_size": {"min": 1, "max": 3}},
}
ONE, TWO, THREE = (Layout(1, 1, size) for size in (1, 2, 3))


@pytest.fixture
def service(tmp_path: Path):
    service = Service(tmp_path)
    yield service
    service.store.close()


def test_a_job_from_post_to_success(service: Service) -> None:
    job_id = service.submit()
    service.tick()
    job = service.store.get(job_id)
    assert (job.state, job.reason, job.attempt) == (JobState.SCHEDULING, Reason.GANG_STARTING, 1)
    assert service.gangs.specs[0].checkpoint.url == job.checkpoint_url
    service.gangs.now(job, GangPhase.TRAINING, "2 workers are training", logs=2)
    service.tick()
    assert service.store.get(job_id).state is JobState.RUNNING
    service.gangs.now(job, GangPhase.SUCCEEDED, "trained up to step 8", logs=3)
    service.tick()
    job = service.store.get(job_id)
    assert (job.state, job.message) == (JobState.SUCCEEDED, "trained up to step 8")
    assert service.logs(job_id) == ["line 1", "line 2", "line 3"]
    assert not service.gangs.gangs


def test_a_gang_is_told_what_its_job_is_planned_by(service: Service) -> None:
    stored = StoredProfile(
        kind="H100", stored_at=datetime.now(UTC), stored_by="ops",
        profile=PROFILE.model_copy(update={"precision": "fp32"}),
    )  # fmt: skip
    service.store.create(tiny_job("corpus", "elsewhere"), str(service.folder / "checkpoints"), profile=stored)
    service.tick()
    assert service.gangs.bases == [Basis(profile=stored.profile)]


def test_a_gang_that_ends_between_two_passes(service: Service) -> None:
    succeeds, fails = service.submit(), service.submit()
    for job_id, phase, state in (
        (succeeds, GangPhase.SUCCEEDED, JobState.SUCCEEDED),
        (fails, GangPhase.FAILED, JobState.FAILED),
    ):
        service.tick()
        service.gangs.now(service.store.get(job_id), phase, "so it ended", logs=1)
        service.tick()
        job = service.store.get(job_id)
        assert (job.state, job.message, service.logs(job_id)) == (state, "so it ended", ["line 1"])


def test_cancel_ends_the_gang(service: Service) -> None:
    job = service.started()
    service.store.request_cancel(job.id)
    service.tick()
    assert service.store.get(job.id).state is JobState.CANCELLED
    assert not service.gangs.gangs


def test_cancel_while_waiting(service: Service) -> None:
    job_id = service.submit(parallelism={"tensor_parallel_size": 4})
    service.tick()
    assert service.store.get(job_id).reason is Reason.WAITING_FOR_RESOURCES
    service.store.request_cancel(job_id)
    service.tick()
    assert service.store.get(job_id).state is JobState.CANCELLED


def test_cancelled_between_reading_and_acting(service: Service) -> None:
    job_id = service.submit()
    nodes = service.gangs.nodes

    def cancel_meanwhile() -> list[NodeCapacity]:
        service.store.request_cancel(job_id)
        return nodes()

    service.gangs.nodes = cancel_meanwhile
    service.tick()
    assert service.store.get(job_id).state is JobState.CANCELLED
    assert not service.gangs.launched


@pytest.mark.full
def test_lost_gangs_come_again_after_ever_longer_pauses_but_not_endlessly(service: Service) -> None:
    job = service.started(fault_tolerance={"max_restarts": 0})  # the job has no fault
    service.gangs.gangs.clear()
    service.tick()  # sees the loss, and starts the next gang at once
    job = service.store.get(job.id)
    assert (job.state, job.reason, job.attempt) == (JobState.SCHEDULING, Reason.GANG_STARTING, 2)
    for lost in range(2, MOST_LOSSES + 1):
        service.gangs.gangs.clear()
        service.tick()
        pause = min(5 * 2 ** (lost - 2), 300)
        job = service.store.get(job.id)
        assert (job.state, job.reason) == (JobState.QUEUED, Reason.GANG_LOST)
        assert job.message.endswith(f"no fault of the job, which gets a new one in {pause} s")
        service.tick(pause - 1)
        assert service.store.get(job.id).state is JobState.QUEUED
        service.tick(2)
        assert service.store.get(job.id).attempt == lost + 1
    said = "the gang's supervisor failed: GetTimeoutError: the head is busy"
    service.gangs.gangs[job.id, service.store.get(job.id).attempt] = GangStatus(GangPhase.RECOVERING, said, [])
    service.tick()
    service.gangs.gangs.clear()
    service.tick()
    job = service.store.get(job.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.RESTARTS_EXHAUSTED)
    assert f"supervisors (the last message: {said}): see" in job.message
    assert "the 11th within 3600 s and without a new checkpoint" in job.message
    assert job.message.endswith(f"boost retry {job.id}")
    assert service.reasons(job.id).count(Reason.GANG_LOST) == MOST_LOSSES


@pytest.mark.full
def test_gangs_that_are_lost_with_checkpoints_in_between_always_come_again(service: Service) -> None:
    job = service.started(fault_tolerance={"max_restarts": 0})
    for step in range(MOST_LOSSES + 2):
        checkpoint = CheckpointReport(step=step, url=job.checkpoint_url, bytes=1, seconds=0.0)
        reports = [GangReport(service.store.last_sequences([job.id])[job.id] + 1, datetime.now(UTC), checkpoint)]
        service.gangs.gangs[job.id, job.attempt] = GangStatus(GangPhase.TRAINING, "trains", reports, ONE)
        service.tick()
        service.gangs.gangs.clear()
        service.tick()
        job = service.store.get(job.id)
        assert (job.state, job.attempt) == (JobState.SCHEDULING, step + 2)


def test_a_gang_that_does_not_answer_is_ended_and_replaced_once_it_is_gone(service: Service) -> None:
    job = service.started(fault_tolerance={"max_restarts": 0})

    def silent(seconds: float) -> JobRecord:
        status = GangStatus(GangPhase.STARTING, "waiting for the gang's supervisor to answer", [], None, seconds)
        service.gangs.gangs[job.id, service.store.get(job.id).attempt] = status
        service.tick()
        return service.store.get(job.id)

    assert silent(59).state is JobState.RUNNING
    service.gangs.fail_before["end_hung"] = RuntimeError("some of its processes cannot be killed")
    assert silent(61).state is JobState.RUNNING, "two gangs would write to the same folder"
    after = silent(62)
    assert (after.state, after.attempt, after.restart_counts) == (JobState.SCHEDULING, 2, {})
    (lost,) = [event.data for event in service.store.events(job.id) if event.data.get("reason") == Reason.GANG_LOST]
    assert lost["message"] == (
        "the supervisor of gang 1 did not answer for 62 s and was ended, through no fault of the job, "
        "which gets a new one"
    )
    assert silent(299).attempt == 2, "a new one takes its time to start"
    assert silent(301).state is JobState.QUEUED


@pytest.mark.parametrize("when", ["fail_before", "fail_after"])
def test_dying_around_a_launch_never_starts_two_gangs(service: Service, when: str) -> None:
    job_id = service.submit()
    getattr(service.gangs, when)["launch"] = Crash()
    with pytest.raises(Crash):
        service.tick()
    assert service.store.get(job_id).attempt == 1
    service.tick()
    job = service.store.get(job_id)
    assert (job.state, job.reason) == (JobState.SCHEDULING, Reason.GANG_STARTING)
    assert set(service.gangs.gangs) == {(job_id, job.attempt)}


def test_a_launch_that_the_service_did_not_live_to_make_is_made_up_for(service: Service) -> None:
    job_id = service.submit(fault_tolerance={"max_restarts": 0})
    service.gangs.fail_before["launch"] = Crash()
    with pytest.raises(Crash):
        service.tick()
    service.start_again()
    service.tick()
    assert service.gangs.launched == [(job_id, 1)]
    assert service.gangs.tags == [JobTag(job_id, 1, "tiny-test", "default", "anonymous")]
    assert service.gangs.orders[job_id].target == Layout(2, 1, 1)
    service.gangs.gangs.clear()
    service.tick()
    assert Reason.GANG_LOST in service.reasons(job_id), "this one was there and is gone"


def test_a_launch_that_was_not_made_is_not_made_up_for_when_its_user_wants_a_pause(service: Service) -> None:
    job_id = service.submit()
    service.gangs.fail_before["launch"] = Crash()
    with pytest.raises(Crash):
        service.tick()
    service.store.request_pause(job_id)
    service.start_again()
    service.tick()
    assert (service.store.get(job_id).state, service.gangs.launched) == (JobState.PAUSED, [])


def test_dying_after_reports_are_stored_stores_none_twice(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.started()
    service.gangs.now(job, GangPhase.SUCCEEDED, "trained up to step 8", logs=3)
    with monkeypatch.context() as patch:
        patch.setattr(JobStore, "change", lambda *_, **__: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            service.tick()
    assert service.store.get(job.id).state is JobState.RUNNING
    service.tick()
    assert service.store.get(job.id).state is JobState.SUCCEEDED
    assert service.logs(job.id) == ["line 1", "line 2", "line 3"]


def test_dying_before_the_end_of_a_finished_gang_leaves_none_behind(service: Service) -> None:
    job = service.started()
    service.gangs.now(job, GangPhase.SUCCEEDED, "trained up to step 8")
    service.gangs.fail_before["end"] = Crash()
    with pytest.raises(Crash):
        service.tick()
    assert service.store.get(job.id).state is JobState.SUCCEEDED
    assert service.gangs.gangs
    service.tick()
    assert not service.gangs.gangs


def test_gangs_of_another_service_are_left_alone(service: Service) -> None:
    service.gangs.gangs["job-of-another", 1] = GangStatus(GangPhase.TRAINING, "", [])
    service.tick()
    assert service.gangs.gangs


def test_a_forgotten_gang_whose_job_cannot_be_read_does_not_stop_the_others(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = service.submit()
    service.gangs.gangs["job-odd", 1] = GangStatus(GangPhase.TRAINING, "", [])
    get = JobStore.get
    monkeypatch.setattr(JobStore, "get", lambda store, name: get(store, name) if name == job_id else 1 / 0)
    service.tick()
    assert service.gangs.launched == [(job_id, 1)]
    assert "job-odd: this pass failed" in caplog.text


@pytest.mark.full
def test_one_job_that_goes_wrong_does_not_stop_the_others(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    one = {"parallelism": {"tensor_parallel_size": 1}}
    bad, good = service.submit(**one), service.submit(**one)
    service.tick()
    service.gangs.now(service.store.get(good), GangPhase.SUCCEEDED, "trained up to step 8")
    service.gangs.fail_before[f"poll {bad}"] = RuntimeError("no route to host")
    service.tick()
    assert service.store.get(good).state is JobState.SUCCEEDED
    assert service.store.get(bad).state is JobState.SCHEDULING
    assert "no route to host" in caplog.text


@pytest.mark.full
def test_jobs_that_never_fit_hold_up_neither_a_pass_nor_the_jobs_behind_them(service: Service) -> None:
    never = [service.submit(parallelism={"tensor_parallel_size": 4}) for _ in range(120)]
    fits = service.submit()
    moved = []
    for _ in range(3):
        service.tick()
        moved.append(sum(service.store.get(job_id).state is JobState.SCHEDULING for job_id in never))
        assert service.gangs.launched == [(fits, 1)]
    assert moved == [50, 100, 120]
    assert not [line for line in statements_of_a_pass(service) if not line.startswith("SELECT")]


def running(service: Service, jobs: int) -> list[JobRecord]:
    """Jobs whose gangs train."""
    service.gangs.cpus = [float(jobs)]
    job_ids = [service.submit(parallelism={"tensor_parallel_size": 1}) for _ in range(jobs)]
    service.tick()
    for job_id in job_ids:
        service.gangs.now(service.store.get(job_id), GangPhase.TRAINING, "trains", layout=ONE)
    service.gangs.free = [0.0]
    service.tick()
    return [service.store.get(job_id) for job_id in job_ids]


def statements_of_a_pass(service: Service) -> list[str]:
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(service.store.engine, "before_cursor_execute", note)
    service.tick(0)
    event.remove(service.store.engine, "before_cursor_execute", note)
    return statements


@pytest.mark.full
@pytest.mark.parametrize("lines", [0, 3])
def test_a_pass_over_many_gangs_asks_the_cluster_and_the_record_as_often_as_one_over_a_few(
    tmp_path: Path, lines: int
) -> None:
    counts = set()
    for jobs in (2, 40):
        (tmp_path / str(jobs)).mkdir()
        service = Service(tmp_path / str(jobs))
        for job in running(service, jobs):
            service.gangs.now(job, GangPhase.TRAINING, "trains", logs=lines, layout=ONE)
        service.gangs.polls.clear()
        counts.add(len(statements_of_a_pass(service)))
        assert [len(asked) for asked in service.gangs.polls] == [jobs]
        assert all(len(service.logs(job.id)) == lines for job in service.store.active())
        service.store.close()
    assert len(counts) == 1


def test_a_job_that_its_user_changes_meanwhile_is_stored_by_itself(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = running(service, 3)
    for job in jobs:
        service.gangs.now(job, GangPhase.SUCCEEDED, "trained up to step 8", logs=2, layout=ONE)
    append_many = JobStore.append_many

    def changed_meanwhile(store: JobStore, told: Sequence[tuple[JobRecord, object]]) -> None:
        monkeypatch.undo()
        service.store.patch(jobs[1].id, JobPatch(priority=5))
        append_many(store, told)

    monkeypatch.setattr(JobStore, "append_many", changed_meanwhile)
    service.tick()
    for job in jobs:
        assert service.store.get(job.id).state is JobState.SUCCEEDED
        assert service.logs(job.id) == ["line 1", "line 2"]
    assert service.store.get(jobs[1].id).spec.priority == 5


def test_reports_that_cannot_be_stored_keep_none_of_others_waiting(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = running(service, 2)
    for job in (bad, good):
        service.gangs.now(job, GangPhase.SUCCEEDED, "trained up to step 8", logs=2, layout=ONE)
    reports = service.gangs.gangs[bad.id, 1].reports
    reports[:] = [reports[0], reports[0]]
    service.tick()
    assert service.store.get(good.id).state is JobState.SUCCEEDED
    assert service.logs(good.id) == ["line 1", "line 2"]
    assert (service.store.get(bad.id).state, service.logs(bad.id)) == (JobState.RUNNING, [])
    assert f"{bad.id}: this pass failed" in caplog.text
    assert f"{good.id}: this pass failed" not in caplog.text


def test_a_gang_is_asked_for_what_is_not_stored_yet_also_by_a_new_service(service: Service) -> None:
    (job,) = running(service, 1)
    service.gangs.now(job, GangPhase.TRAINING, "trains", logs=3, layout=ONE)
    service.tick()
    for _ in range(2):
        service.tick()
        assert [request.after_sequence for request in service.gangs.polls[-1]] == [3]
        service.start_again()


def test_updates_are_stored_between_two_passes(service: Service) -> None:
    ends, goes_on, silent = running(service, 3)
    service.gangs.now(ends, GangPhase.SUCCEEDED, "trained up to step 8", logs=1, layout=ONE)
    for job in (goes_on, silent):
        service.gangs.now(job, GangPhase.TRAINING, "trains", logs=2, layout=ONE)
    updated = {(ends.id, 1), (goes_on.id, 1), (silent.id, 7), ("job-of-another", 1)}
    service.reconciler.store_updates(updated)
    assert {request.gang for request in service.gangs.polls[-1]} == {(ends.id, 1), (goes_on.id, 1)}
    assert service.store.get(ends.id).state is JobState.SUCCEEDED
    assert (ends.id, 1) not in service.gangs.gangs
    assert [service.logs(job.id) for job in (ends, goes_on, silent)] == [["line 1"], ["line 1", "line 2"], []]
    service.reconciler.store_updates(updated)
    service.tick()
    assert [service.logs(job.id) for job in (goes_on, silent)] == [["line 1", "line 2"]] * 2


def test_pause_and_resume(service: Service) -> None:
    job = service.started()
    service.store.request_pause(job.id)
    service.tick()
    assert service.gangs.orders[job.id] == Orders(None, (), Cause.PAUSED)
    assert service.store.get(job.id).state is JobState.RUNNING
    service.gangs.now(job, GangPhase.PAUSED, "paused after step 5")
    service.tick()
    paused = service.store.get(job.id)
    assert (paused.state, paused.reason, paused.message) == (
        JobState.PAUSED, Reason.PAUSED_BY_USER, "paused after step 5",
    )  # fmt: skip
    assert not service.gangs.gangs
    service.tick()
    assert len(service.gangs.launched) == 1
    service.store.resume(job.id)
    service.tick()
    assert service.gangs.launched == [(job.id, 1), (job.id, 2)]
    assert service.gangs.orders[job.id].target == Layout(2, 1, 1)


def test_a_pause_that_is_taken_back(service: Service) -> None:
    job = service.started()
    service.store.request_pause(job.id)
    service.tick()
    service.store.resume(job.id)
    service.tick()
    assert service.gangs.orders[job.id].target == Layout(2, 1, 1)
    service.gangs.now(job, GangPhase.PAUSED, "paused after step 5")
    service.tick()
    check_was_resumed_too_late(service, job)


def check_was_resumed_too_late(service: Service, job: JobRecord) -> None:
    """It has paused for its user, not for another job, and goes on."""
    paused = next(each.data for each in service.store.events(job.id) if each.data.get("reason") == "RESUMED_BY_USER")
    assert paused["message"] == "paused after step 5 for its user, who has resumed it since"
    assert Reason.PAUSED_FOR_PRIORITY not in service.reasons(job.id)
    assert service.gangs.launched == [(job.id, 1), (job.id, 2)]


def test_a_pause_is_taken_back_as_it_comes_about(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.started()
    service.store.request_pause(job.id)
    service.tick()
    service.gangs.now(job, GangPhase.PAUSED, "paused after step 5")
    poll = service.gangs.poll

    def resumed_meanwhile(requests: Sequence[PollRequest]) -> list[PollResult]:
        monkeypatch.undo()
        service.store.resume(job.id)
        return poll(requests)

    monkeypatch.setattr(service.gangs, "poll", resumed_meanwhile)
    service.tick()
    assert service.store.get(job.id).state is not JobState.PAUSED
    service.tick()
    check_was_resumed_too_late(service, job)


def test_a_gang_is_paused_while_it_starts(service: Service) -> None:
    job_id = service.submit()
    service.tick()
    service.store.request_pause(job_id)
    service.tick()
    assert service.gangs.orders[job_id].target is None
    service.gangs.now(service.store.get(job_id), GangPhase.PAUSED, "paused before the first step")
    service.tick()
    assert service.store.get(job_id).state is JobState.PAUSED


def test_a_job_that_waits_is_paused_at_once_and_one_whose_gang_is_lost_meanwhile(service: Service) -> None:
    job = service.started()
    waits = service.submit()
    service.tick()
    assert service.store.request_pause(waits).state is JobState.PAUSED
    service.store.request_pause(job.id)
    service.gangs.gangs.clear()
    service.tick()
    service.tick()
    assert service.store.get(job.id).state is JobState.PAUSED
    assert service.gangs.launched == [(job.id, 1)]


def test_a_higher_priority_pauses_and_what_it_pauses_comes_back(service: Service) -> None:
    low = service.started()
    high = service.submit(priority=1)
    service.tick()
    assert "makes room" in service.store.get(high).message
    service.tick()
    assert service.gangs.orders[low.id] == Orders(None, (), Cause.PREEMPTED)
    service.gangs.now(low, GangPhase.PAUSED, "paused after step 5")
    service.tick()
    assert service.reasons(low.id)[-3:] == ["PAUSED_FOR_PRIORITY", "HEAD_OF_QUEUE", "WAITING_FOR_RESOURCES"]
    assert service.gangs.launched == [(low.id, 1), (high, 1)]
    service.gangs.now(service.store.get(high), GangPhase.SUCCEEDED, "trained up to step 8")
    service.tick()
    assert service.gangs.launched[-1] == (low.id, 2)


@pytest.mark.full
@pytest.mark.parametrize("tenant", ["default", "lab"])
def test_a_job_that_makes_room_says_for_whom_unless_that_is_another_tenants(service: Service, tenant: str) -> None:
    low = service.started()
    spec = tiny_job("corpus", "elsewhere", name="secret-plan", priority=1)
    high = service.store.create(spec, "file:///checkpoints", Owner(tenant)).id
    service.tick()
    service.tick()
    service.gangs.now(low, GangPhase.PAUSED, "paused after step 5")
    service.tick()
    paused = next(
        event.data["message"]
        for event in service.store.events(low.id)
        if event.kind == "state" and event.data["reason"] == Reason.PAUSED_FOR_PRIORITY
    )
    if tenant == low.tenant:
        assert paused == f"paused after step 5 to make room for secret-plan ({high}), which has priority 1"
    else:
        assert paused == "paused after step 5 to make room for a job of higher priority"
        said = [event.model_dump_json() for event in service.store.events(low.id)]
        said.append(service.store.get(low.id).model_dump_json())
        assert not [words for words in said if high in words or "secret-plan" in words]


@pytest.mark.full
def test_a_gang_that_does_not_answer_is_out_of_sight(service: Service) -> None:
    job = service.started()
    service.gangs.now(job, GangPhase.STARTING, "waiting for the gang's supervisor to answer")
    service.tick(20)
    assert service.reconciler.unseen(30) == {}
    service.tick(20)
    seen = service.reconciler.unseen(30)[job.id]
    assert seen is not None and timedelta(seconds=39) < datetime.now(UTC) - seen < timedelta(seconds=70)
    assert all(service.reconciler.unseen(30) == {job.id: seen} for _ in range(20))
    service.gangs.now(job, GangPhase.TRAINING, "2 workers are training")
    service.tick()
    assert service.reconciler.unseen(30) == {}
    service.start_again()
    service.gangs.now(job, GangPhase.STARTING, "waiting for the gang's supervisor to answer")
    service.tick()
    service.tick(40)
    assert service.reconciler.unseen(30) == {job.id: None}


def test_a_pause_that_the_service_did_not_live_to_see(service: Service) -> None:
    job = service.started()
    service.start_again()
    service.gangs.now(job, GangPhase.PAUSED, "paused after step 5")
    service.tick()
    assert Reason.PAUSED_FOR_PRIORITY in service.reasons(job.id)
    paused = next(event for event in service.store.events(job.id) if event.data.get("reason") == "PAUSED_FOR_PRIORITY")
    assert paused.data["message"].startswith("paused after step 5 because another job")
    assert service.gangs.launched == [(job.id, 1), (job.id, 2)]


def test_a_gang_that_recovers_says_so_once_for_each_message(service: Service) -> None:
    job = service.started()
    before = len(service.reasons(job.id))
    for phase, message, cpus in (
        (GangPhase.RECOVERING, "worker 1 was lost", 2), (GangPhase.RECOVERING, "worker 1 was lost", 2),
        (GangPhase.WAITING, "waits for 2 CPU", 0), (GangPhase.STARTING, "does not answer", 0),
        (GangPhase.RECOVERING, "starting 2 CPU", 2), (GangPhase.WAITING, "waits for 2 CPU", 0),
        (GangPhase.TRAINING, "goes on", 2), (GangPhase.TRAINING, "goes on", 2),
    ):  # fmt: skip
        service.gangs.now(job, phase, message, layout=Layout(2, 1, 1))
        service.tick()
        present = service.store.get(job.id)
        assert (present.state, present.allocated.get("CPU", 0)) == (JobState.RUNNING, cpus)
    assert service.reasons(job.id)[before:] == [
        "GANG_RECOVERING", "WAITING_FOR_RESOURCES", "GANG_RECOVERING", "WAITING_FOR_RESOURCES", "GANG_STARTED",
    ]  # fmt: skip


def test_a_job_says_that_it_waits_for_the_store_and_goes_on_doing_so(service: Service) -> None:
    job = service.started(**ELASTIC)
    before, layout = len(service.reasons(job.id)), service.gangs.orders[job.id].target
    done = (service.store.last_sequences([job.id])[job.id] + 1, datetime.now(UTC), a_step(10, steps=10))
    service.store.append_reports(job.id, 1, [done])
    service.gangs.cpus, service.gangs.free = [2.0, 2.0], [0.0, 2.0]
    for phase, message in (
        (GangPhase.SAVING, "disk full"), (GangPhase.SAVING, "disk full"), (GangPhase.SAVING, "denied"),
        (GangPhase.RECOVERING, "rank 1 was lost"), (GangPhase.TRAINING, "trains"), (GangPhase.SAVING, "denied"),
    ):  # fmt: skip
        service.gangs.now(job, phase, message, layout=layout)
        service.tick(60)
        assert service.store.get(job.id).state is JobState.RUNNING
    waiting = service.store.get(job.id)
    assert (waiting.reason, waiting.message) == (Reason.WAITING_FOR_STORE, "denied")
    service.tick(60)
    assert service.gangs.orders[job.id].target == layout, "it does not grow any more"
    service.gangs.now(waiting, GangPhase.SUCCEEDED, "trained up to step 8", layout=layout)
    service.tick()
    assert service.reasons(job.id)[before:] == [
        "WAITING_FOR_STORE", "WAITING_FOR_STORE", "GANG_RECOVERING", "GANG_STARTED", "WAITING_FOR_STORE",
        "TRAINING_FINISHED",
    ]  # fmt: skip


def test_a_job_that_only_keeps_its_state_leaves_its_resources_to_others(service: Service) -> None:
    job, layout = service.started(), Layout(2, 1, 1)
    service.gangs.free = [0.0]
    service.trains(job, layout, keeps=True)
    service.gangs.free = [2.0]
    other = service.submit()
    service.tick()
    service.gangs.now(job, GangPhase.SAVING, "disk full", layout=layout)
    service.tick()
    assert (service.store.get(job.id).reason, service.store.get(job.id).allocated) == (Reason.WAITING_FOR_STORE, {})
    assert service.gangs.launched == [(job.id, 1), (other, 1)]
    assert [bundle.resources for bundle in service.gangs.asked[-1]] == [{"CPU": 2}], "nodes are asked for one of them"


def test_one_that_has_lost_the_state_that_it_kept_wants_them_again(service: Service) -> None:
    job, layout = service.started(), Layout(2, 1, 1)
    service.trains(job, layout, keeps=True)
    service.tick()
    service.gangs.now(job, GangPhase.WAITING, "waits for 2 × {CPU: 1}", layout=layout)
    service.submit()
    service.tick()
    assert service.gangs.launched == [(job.id, 1)], "who came first has the room"
    service.gangs.gangs.clear()
    service.tick()
    assert service.reasons(job.id)[-3:] == [Reason.GANG_LOST, Reason.HEAD_OF_QUEUE, Reason.GANG_STARTING]
    assert service.store.get(job.id).attempt == 2
    assert service.store.get(job.id).allocated == {"GPU": 0, "CPU": 2}


def test_a_gang_grows_when_there_has_been_room_for_a_while(service: Service) -> None:
    service.gangs.free = [2.0]
    job = service.started(**ELASTIC)
    assert service.gangs.orders[job.id] == Orders(TWO, (ONE, TWO), Cause.WORKER_BACK)
    service.gangs.cpus, service.gangs.free = [2.0, 2.0], [0.0, 2.0]
    service.tick(29)
    service.tick(4)
    assert service.gangs.orders[job.id].target == TWO
    service.tick(5)
    service.tick()
    assert service.gangs.orders[job.id] == Orders(THREE, (ONE, TWO, THREE), Cause.NODE_JOINED)
    service.trains(job, THREE)
    service.tick()
    service.tick()
    assert service.gangs.orders[job.id] == Orders(THREE, (ONE, TWO, THREE), Cause.WORKER_BACK)


def test_a_gang_that_lost_a_worker_is_to_come_back(service: Service) -> None:
    job = service.started(**ELASTIC)
    service.gangs.free = [0.0]
    service.trains(job, ONE)
    service.tick()
    service.tick()
    assert service.gangs.orders[job.id].target == TWO
    service.gangs.cpus = [1.0]  # and now it cannot
    service.tick()
    service.tick()
    assert service.gangs.orders[job.id] == Orders(ONE, (ONE,), Cause.WORKER_BACK)


def test_new_limits_are_followed_at_once(service: Service) -> None:
    service.gangs.cpus = [4.0]
    job = service.started(**ELASTIC)
    service.gangs.free = [1.0]
    service.store.patch(job.id, JobPatch(data_parallel_size=ReplicasPatch(max=2)))
    service.tick()
    service.tick()
    assert service.gangs.orders[job.id] == Orders(TWO, (ONE, TWO), Cause.LIMITS_CHANGED)
    service.trains(job, TWO)
    service.gangs.free = [2.0]
    service.tick()
    service.store.patch(job.id, JobPatch(data_parallel_size=ReplicasPatch(max=4)))
    service.tick()
    service.tick()
    assert service.gangs.orders[job.id].target == Layout(1, 1, 4)
    assert service.gangs.orders[job.id].cause is Cause.LIMITS_CHANGED


def test_a_new_service_leaves_gangs_as_they_are(service: Service) -> None:
    job = service.started(**ELASTIC)
    service.gangs.free = [0.0]
    starting = service.submit(parallelism={"tensor_parallel_size": 1})
    service.gangs.cpus, service.gangs.free = [3.0], [1.0]
    service.tick()
    service.start_again()
    service.tick()
    assert service.gangs.orders[job.id].target == TWO
    assert service.gangs.orders[starting].target == ONE
    assert service.gangs.launched == [(job.id, 1), (starting, 1)]


def test_a_new_service_lets_no_starting_gang_have_more_than_it_was_given(service: Service) -> None:
    own = ELASTIC | {"parallelism": {"tensor_parallel_size": 1, "data_parallel_size": 3}}
    service.gangs.cpus = [2.0, 2.0]
    service.limits = Limits(tenants={"default": {"CPU": 2}})
    service.start_again()
    starting = service.submit(**own)
    service.tick()
    assert service.gangs.orders[starting].target == TWO
    service.start_again()
    service.tick()
    assert service.gangs.orders[starting].target.world_size <= 2


def test_errands_are_handed_on_once(service: Service) -> None:
    job, drill, profile = service.started(), Drill(kind="kill_rank", rank=1), Profile(steps=2, ranks=(0, 1))
    service.store.ask(job.id, drill)
    service.store.ask(job.id, profile)
    service.tick()
    service.tick()
    assert service.gangs.commands == [(job.id, 1, drill), (job.id, 1, profile)]


def test_a_first_gang_has_the_values_that_were_changed_while_it_was_placed(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = service.submit()

    def meanwhile(*given):
        actions = decide(*given)
        service.store.patch(job_id, JobPatch.model_validate({"optimizer": {"learning_rate": 0.5}}))
        return actions

    monkeypatch.setattr("service.scheduler.reconcile.decide", meanwhile)
    service.tick()
    assert service.store.get(job_id).spec.optimizer.learning_rate == 0.5
    assert service.gangs.specs[0].optimizer.learning_rate == 0.5


def test_changes_of_values_are_repeated_until_the_gang_has_made_them(service: Service) -> None:
    job = service.started()
    service.store.patch(job.id, JobPatch.model_validate({"optimizer": {"learning_rate": 0.5}}), by="alice")
    service.store.patch(job.id, JobPatch.model_validate({"training": {"steps": 20}}), by="bob")
    service.tick()
    service.start_again()
    service.tick()
    first, second = service.gangs.orders[job.id].steers
    assert (first.number, first.by, first.steering.training.steps) == (1, "alice", 8)
    assert (second.number, second.by) == (2, "bob")
    assert (second.steering.training.steps, second.steering.optimizer.learning_rate) == (20, 0.5)
    assert service.store.get(job.id).spec == job.spec

    def report(steer: Steer, step: int) -> None:
        told = service.gangs.gangs[job.id, 1]
        report = steer.made(service.store.get(job.id).spec, step)[1]
        number = service.store.last_sequences([job.id])[job.id] + 1
        reports = [GangReport(number, datetime.now(UTC), report)]
        service.gangs.gangs[job.id, 1] = replace(told, reports=reports)
        service.tick()

    report(first, 3)
    assert service.store.get(job.id).steers == [second]
    report(second, 5)
    service.tick()
    after = service.store.get(job.id)
    assert (after.steers, service.gangs.orders[job.id].steers) == ([], ())
    assert [(stage.until_step, stage.changed_by) for stage in after.spec.steered] == [(3, "alice"), (5, "bob")]
    rates = [after.spec.at_step(step).optimizer.learning_rate for step in (1, 3, 4, 6)]
    assert rates == [0.01, 0.01, 0.5, 0.5]
    assert [after.spec.at_step(step).training.steps for step in (5, 6)] == [8, 20]
    events = [event.data for event in service.store.events(job.id) if event.kind == "steered"]
    assert [event["changes"] for event in events] == [
        {"optimizer.learning_rate": {"from": 0.01, "to": 0.5}}, {"training.steps": {"from": 8, "to": 20}},
    ]  # fmt: skip
    report(second, 7)  # of a gang that was replaced by one that has made it
    assert service.store.get(job.id).spec == after.spec


def test_nodes_are_asked_for_as_long_as_a_job_needs_them_and_again_by_a_new_service(service: Service) -> None:
    service.gangs.cpus = [0.0]
    job_id = service.submit()
    service.tick()
    service.tick()
    needed = [Bundle({"CPU": 2})]  # its two ranks share a node
    assert service.gangs.asked == [needed]
    service.start_again()
    service.tick()
    assert service.gangs.asked == [needed, needed]
    service.gangs.cpus = [2.0]
    service.tick()
    assert service.gangs.launched == [(job_id, 1)]
    service.store.request_cancel(job_id)
    service.tick()
    assert service.gangs.asked == [needed, needed, []]


def test_jobs_of_which_there_is_nothing_to_follow_cost_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = service.started()
    _, queued, paused = (service.submit() for _ in range(3))
    service.tick()
    service.store.request_pause(paused)
    entered: list[str] = []
    apart = service.reconciler._apart
    monkeypatch.setattr(service.reconciler, "_apart", lambda *about: (entered.append(about[0]), apart(*about))[1])
    service.tick()
    assert set(entered) == {job.id}
    service.store.request_cancel(queued)
    assert service.store.get(queued).state is JobState.CANCELLED


@pytest.mark.full
@pytest.mark.parametrize("alike", [True, False])
def test_of_a_long_queue_some_jobs_a_pass_are_told_of_what_changes_for_all(
    service: Service, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    written: list[int] = []
    explain = service.store.explain
    monkeypatch.setattr(service.store, "explain", lambda said: (written.append(len(said)), explain(said)))
    monkeypatch.setattr("service.scheduler.reconcile._MOST_EXPLAINED", 4)
    service.started()
    vocabularies = [256 if alike else 256 + 2 * number for number in range(33)]
    first, *others = [service.submit(model={"vocab_size": size}) for size in vocabularies]
    service.tick()
    assert written == [32], "new ones are told at once; the first has left the queue"
    ahead = [service.store.get(job_id).waiting_for for job_id in others]
    assert ahead[-1].endswith(f"behind {first} and 31 more")
    service.store.request_cancel(others.pop(5))
    for _ in range(8):
        service.tick()
    assert max(written[1:]) <= 4 + alike, "the first of few classes, and a share of 32 that is no more than 4"
    told = {job_id: service.store.get(job_id).waiting_for for job_id in others}
    assert told[others[-1]].endswith(f"behind {first} and 30 more"), "each has had its turn"
    service.tick()
    assert told == {job_id: service.store.get(job_id).waiting_for for job_id in others}
    assert len(written) <= 9, "what is as before is not written"
