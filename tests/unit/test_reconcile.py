"""The reconciler against the real store, with a cluster that does as it is told and dies when it is told."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from boost_core.config import JobSpec
from boost_core.config.reports import LogLine
from service.gang.status import GangPhase, GangReport, GangStatus, NodeCapacity
from service.jobs.database import migrate
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.scheduler.reconcile import Reconciler
from tests.jobs import tiny_job


class Crash(BaseException):
    """The service dies here: nothing catches it."""


class FakeGangs:
    """Gangs in memory. ``fail[method]`` holds what a method raises, before or after it took effect."""

    def __init__(self) -> None:
        self.gangs: dict[tuple[str, int], GangStatus] = {}
        self.launched: list[tuple[str, int]] = []
        self.specs: list[JobSpec] = []
        self.fail_before: dict[str, BaseException] = {}
        self.fail_after: dict[str, BaseException] = {}

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def nodes(self) -> list[NodeCapacity]:
        return [NodeCapacity("node", {"CPU": 2.0}, {"CPU": 2.0})]

    def alive(self) -> set[tuple[str, int]]:
        return set(self.gangs)

    def launch(self, job_id: str, attempt: int, spec: JobSpec) -> None:
        self._maybe(self.fail_before, "launch")
        if (job_id, attempt) not in self.gangs:
            self.gangs[job_id, attempt] = GangStatus(GangPhase.STARTING, "placing", [])
            self.launched.append((job_id, attempt))
            self.specs.append(spec)
        self._maybe(self.fail_after, "launch")

    def poll(self, job_id: str, attempt: int, after_sequence: int) -> GangStatus | None:
        self._maybe(self.fail_before, f"poll {job_id}")
        status = self.gangs.get((job_id, attempt))
        if status is None:
            return None
        fresh = [report for report in status.reports if report.sequence > after_sequence]
        return GangStatus(status.phase, status.message, fresh)

    def end(self, job_id: str, attempt: int) -> None:
        self._maybe(self.fail_before, "end")
        self.gangs.pop((job_id, attempt), None)

    def now(self, job: JobRecord, phase: GangPhase, message: str = "", logs: int = 0) -> None:
        reports = [
            GangReport(number, datetime.now(UTC), LogLine(rank=0, level="INFO", message=f"line {number}"))
            for number in range(1, logs + 1)
        ]
        self.gangs[job.id, job.attempt] = GangStatus(phase, message, reports)

    def _maybe(self, failures: dict[str, BaseException], method: str) -> None:
        if method in failures:
            raise failures.pop(method)


class Service:
    def __init__(self, folder: Path) -> None:
        url = f"sqlite:///{folder}/jobs.db"
        migrate(url)
        self.store, self.gangs, self.folder = JobStore(url), FakeGangs(), folder
        self.reconciler = Reconciler(self.store, self.gangs)

    def submit(self, **changes) -> str:
        return self.store.create(tiny_job("corpus", "elsewhere", **changes), str(self.folder / "checkpoints")).id

    def tick(self) -> None:
        self.reconciler.tick()

    def logs(self, job_id: str) -> list[str]:
        return [event.data["message"] for event in self.store.events(job_id) if event.kind == "log"]

    def started(self, **changes) -> JobRecord:
        job_id = self.submit(**changes)
        self.tick()
        self.gangs.now(self.store.get(job_id), GangPhase.TRAINING, "2 workers are training")
        self.tick()
        job = self.store.get(job_id)
        assert job.state is JobState.RUNNING
        return job


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
    service.gangs.now(job, GangPhase.SUCCEEDED, "trained 8 steps", logs=3)
    service.tick()
    job = service.store.get(job_id)
    assert (job.state, job.message) == (JobState.SUCCEEDED, "trained 8 steps")
    assert service.logs(job_id) == ["line 1", "line 2", "line 3"]
    assert not service.gangs.gangs


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


def test_lost_gangs_come_again_until_restarts_are_exhausted(service: Service) -> None:
    job = service.started(fault_tolerance={"max_restarts": 1})
    service.gangs.gangs.clear()
    service.tick()  # sees the loss, and starts the next gang at once
    job = service.store.get(job.id)
    assert (job.state, job.reason, job.attempt) == (JobState.SCHEDULING, Reason.GANG_STARTING, 2)
    service.gangs.gangs.clear()
    service.tick()
    job = service.store.get(job.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.RESTARTS_EXHAUSTED)
    assert job.checkpoint_url in job.message
    reasons = [event.data["reason"] for event in service.store.events(job.id) if event.kind == "state"]
    assert reasons.count("GANG_LOST") == 1


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


def test_dying_after_reports_are_stored_stores_none_twice(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.started()
    service.gangs.now(job, GangPhase.SUCCEEDED, "trained 8 steps", logs=3)
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
    service.gangs.now(job, GangPhase.SUCCEEDED, "trained 8 steps")
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


def test_one_job_that_goes_wrong_does_not_stop_the_others(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    one = {"parallelism": {"tensor_parallel_size": 1}}
    bad, good = service.submit(**one), service.submit(**one)
    service.tick()
    service.gangs.now(service.store.get(good), GangPhase.SUCCEEDED, "trained 8 steps")
    service.gangs.fail_before[f"poll {bad}"] = RuntimeError("no route to host")
    service.tick()
    assert service.store.get(good).state is JobState.SUCCEEDED
    assert service.store.get(bad).state is JobState.SCHEDULING
    assert "no route to host" in caplog.text
