"""The scheduler's thread: it schedules while it holds the lease, and lets others do so when it does not."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service import logs as logs_module
from service.gang.status import GangKey
from service.jobs.database import migrate
from service.jobs.leases import Lease, LeaseLost, Leases
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.scheduler import loop as loop_module
from service.scheduler.loop import LEASE, ReconcileLoop
from service.scheduler.reconcile import Reconciler
from service.telemetry.process import ProcessMetrics
from tests.jobs import tiny_job
from tests.unit.test_reconcile import FakeGangs

PATIENCE_SECONDS = 30
SHORT_LEASE_SECONDS = 1.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Pass:
    """What passes do: note who made one, and wait where they are told to."""

    def __init__(self, name: str, store: JobStore, passes: list[str]) -> None:
        self._name, self._store, self._passes = name, store, passes
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.job_id: str | None = None
        self.fails_with: Exception | None = None
        self.always_fails: Exception | None = None
        self.updated: list[set[GangKey]] = []
        self.out_of_sight: dict[str, datetime | None] = {}

    def unseen(self, _seconds: float) -> dict[str, datetime | None]:
        return self.out_of_sight

    def store_updates(self, gangs: set[GangKey]) -> None:
        self.updated.append(gangs)
        if self.fails_with is not None:
            failure, self.fails_with = self.fails_with, None
            raise failure

    def tick(self) -> None:
        self.may_go_on.wait(PATIENCE_SECONDS)
        if self.always_fails is not None:
            raise self.always_fails
        if self.fails_with is not None:
            failure, self.fails_with = self.fails_with, None
            raise failure
        if self.job_id is not None:
            self._store.change(self.job_id, Reason.WAITING_FOR_RESOURCES, f"says {self._name} {time.monotonic()}")
        self._passes.append(self._name)


class Office:
    """Two services on one database."""

    def __init__(self, url: str) -> None:
        self.store = JobStore(url)
        self.passes: list[str] = []
        self.made: dict[str, list[Pass]] = {"one": [], "other": []}
        self.gangs = {name: FakeGangs() for name in self.made}
        self.metrics = {name: ProcessMetrics() for name in self.made}
        self.interval_seconds = 0.01
        self.loops = {name: self._loop(name) for name in self.made}
        self._running: list[str] = []

    def wait_long_between_passes(self, name: str) -> None:
        self.interval_seconds = 1000.0
        self.loops[name] = self._loop(name)

    def _loop(self, name: str) -> ReconcileLoop:
        def make(record: JobStore) -> Pass:
            self.made[name].append(Pass(name, record, self.passes))
            return self.made[name][-1]

        leases, metrics = Leases(self.store.engine, name), self.metrics[name].scheduler
        return ReconcileLoop(self.gangs[name], self.store, leases, make, self.interval_seconds, metrics)

    def start(self, *names: str) -> None:
        for name in names:
            self.loops[name].start()
            self._running.append(name)

    def stop(self, name: str) -> None:
        self._running.remove(name)
        for made in self.made[name]:
            made.may_go_on.set()
        self.loops[name].stop()

    def measured(self, name: str, metric: str, **labels: str) -> float:
        samples = (sample for family in self.metrics[name].collect() for sample in family.samples)
        return next(s.value for s in samples if (s.name, s.labels) == (f"boost_scheduler_{metric}", labels))

    def schedules(self, name: str) -> None:
        """Wait until one makes passes."""
        before = self.passes.count(name)
        until(lambda: self.passes.count(name) > before)

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)
        self.store.close()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    migrate(url)
    opened = Office(url)
    yield opened
    opened.close()


def test_one_schedules_and_the_other_takes_over_when_it_stops(office: Office) -> None:
    office.start("one")
    office.schedules("one")
    office.start("other")
    until(lambda: office.loops["other"].problem() is None)
    office.schedules("one")
    assert "other" not in office.passes
    before = time.monotonic()
    office.stop("one")
    office.schedules("other")
    assert time.monotonic() - before < loop_module.LEASE_SECONDS / 2, "it did not wait for the lease to run out"


@pytest.mark.full
def test_a_pass_that_takes_long_keeps_the_lease(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "LEASE_SECONDS", SHORT_LEASE_SECONDS)
    office.start("one")
    office.schedules("one")
    office.made["one"][0].may_go_on.clear()
    office.start("other")
    time.sleep(2 * SHORT_LEASE_SECONDS)
    assert "other" not in office.passes
    office.made["one"][0].may_go_on.set()
    office.schedules("one")
    assert len(office.made["one"]) == 1, "and what the reconciler remembers"


@pytest.mark.full
def test_a_pass_that_hangs_loses_it_and_steps_down(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "LEASE_SECONDS", SHORT_LEASE_SECONDS)
    monkeypatch.setattr(loop_module, "HUNG_SECONDS", 0.1)
    job_id = office.store.create(tiny_job("corpus", "elsewhere"), "file:///checkpoints").id
    office.store.change(job_id, Reason.HEAD_OF_QUEUE, "is next")
    office.start("one")
    office.schedules("one")
    hung = office.made["one"][0]
    hung.job_id = job_id
    hung.may_go_on.clear()
    office.start("other")
    office.schedules("other")
    assert "the scheduler has been busy for over" in caplog.text
    assert caplog.text.count("self.may_go_on.wait(PATIENCE_SECONDS)") == 1, "where it hangs is logged once"
    made = office.passes.count("one")
    hung.may_go_on.set()
    time.sleep(0.2)
    office.schedules("other")
    assert office.passes.count("one") == made, "its pass broke off at the first write"
    assert office.store.get(job_id).message == "is next"
    until(lambda: office.loops["one"].problem() is None)
    office.stop("other")
    office.schedules("one")
    assert len(office.made["one"]) == 2, "with a new reconciler"


@pytest.mark.full
def test_a_long_pause_between_passes_is_no_hang_and_keeps_the_lease(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "LEASE_SECONDS", 0.6)
    monkeypatch.setattr(loop_module, "HUNG_SECONDS", 0.3)
    for name in office.made:
        office.wait_long_between_passes(name)
    office.start("one")
    office.schedules("one")
    office.start("other")  # which has nothing to do
    time.sleep(1.5)
    held = Leases(office.store.engine, "third").take(LEASE, 1.0) is None
    assert held, "the lease was renewed all along"
    assert "the scheduler has been busy" not in caplog.text


def test_a_service_that_cannot_reach_ray_lets_another_try(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.05)
    refuse = threading.Event()
    refuse.set()

    def connect() -> None:
        if refuse.is_set():
            raise ConnectionError("no head")

    office.gangs["one"].connect = connect
    office.start("one")
    until(lambda: office.loops["one"].problem() == "Ray cannot be reached: no head")
    office.start("other")
    office.schedules("other")
    office.stop("other")
    refuse.clear()
    office.schedules("one")
    until(lambda: office.loops["one"].problem() is None)


@pytest.mark.full
def test_none_is_ready_while_none_can_reach_ray(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(loop_module, "NOTE_SECONDS", 0.1)
    away = threading.Event()

    def connect() -> None:
        if away.is_set():
            raise ConnectionError("no head")

    office.start("one", "other")
    for name, gangs in office.gangs.items():
        gangs.connect = connect
        until(lambda name=name: office.loops[name].problem() is None)
    away.set()
    for made in office.made.values():
        for each in made:
            each.fails_with = ConnectionError("its node has ended")
    until(lambda: all(loop.problem() for loop in office.loops.values()))
    for _ in range(100):
        assert all(loop.problem() for loop in office.loops.values())
        time.sleep(0.005)
    away.clear()
    until(lambda: not any(loop.problem() for loop in office.loops.values()))


def test_what_goes_on_failing_is_logged_once_until_it_works_again(
    office: Office, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(logs_module, "CHANGED_SECONDS", 0.0)
    tries, reason = 0, "no head"

    def connect() -> None:
        nonlocal tries
        tries += 1
        if reason:
            raise ConnectionError(reason)

    def logged(words: str) -> list[bool]:
        """Whether each line with these words has a traceback."""
        return [bool(record.exc_info) for record in caplog.records if words in record.getMessage()]

    office.gangs["one"].connect = connect
    office.start("one")
    until(lambda: tries > 10)
    assert logged("Ray cannot be reached") == [True]
    reason = "another version"
    before = tries
    until(lambda: tries > before + 10)
    assert logged("Ray cannot be reached") == [True, False]
    reason = ""
    office.schedules("one")
    until(lambda: logged("no longer: Ray cannot be reached") == [False])
    failing = office.made["one"][0]
    failing.always_fails = RuntimeError("odd")
    monkeypatch.setattr(loop_module, "STALE_SECONDS", 0.0)
    until(lambda: "its passes fail (RuntimeError)" in (office.loops["one"].problem() or ""))
    assert logged("a pass of the scheduler failed") == [True]
    failing.always_fails = None
    office.schedules("one")
    until(lambda: logged("no longer: a pass") == [False])


def test_what_is_not_seen_any_more_is_known_to_all_services_and_after_a_restart(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(loop_module, "NOTE_SECONDS", 0.05)
    office.start("one")
    office.schedules("one")
    seen = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    office.made["one"][0].out_of_sight = {"job-a": seen, "job-b": None}
    office.start("other")
    for loop in office.loops.values():
        until(lambda loop=loop: loop.outlook().unseen == {"job-a": seen, "job-b": None})
        assert loop.outlook().problem is None
    office.stop("other")
    office.stop("one")
    last = office.loops["one"].outlook().last_pass
    again = office.loops["one"] = office._loop("one")
    office.gangs["one"].out_of_reach = "no head"

    def connect() -> None:
        raise ConnectionError("no head")

    office.gangs["one"].connect = connect
    office.start("one")
    until(lambda: again.outlook().problem == "Ray cannot be reached: no head")
    noted = again.outlook().last_pass
    assert last is not None and noted is not None and abs(last - noted) < timedelta(seconds=10)


def test_a_service_that_has_lost_ray_leaves_it_and_comes_again(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.05)
    calls: list[str] = []
    office.gangs["one"].connect = lambda: calls.append("connect")
    office.gangs["one"].close = lambda: calls.append("close")
    office.start("one")
    office.schedules("one")
    office.made["one"][0].fails_with = ConnectionError("its node has ended")
    until(lambda: calls == ["connect", "close", "connect"])
    office.schedules("one")
    until(lambda: office.loops["one"].problem() is None)


def test_a_pass_that_fails_is_made_again(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    office.start("one")
    office.schedules("one")
    office.made["one"][0].fails_with = RuntimeError("the database is restarted")
    until(lambda: office.made["one"][0].fails_with is None)
    office.schedules("one")
    assert len(office.made["one"]) == 1
    monkeypatch.setattr(loop_module, "STALE_SECONDS", 0.0)
    office.made["one"][0].may_go_on.clear()
    until(lambda: "the scheduler's last good pass was" in (office.loops["one"].problem() or ""))


def test_a_cluster_that_is_out_of_reach_is_said_and_connected_anew(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "RETRY_SECONDS", 0.05)
    office.start("one")
    office.schedules("one")
    connect, may_connect = office.gangs["one"].connect, threading.Event()

    def connect_when_told() -> None:
        may_connect.wait(PATIENCE_SECONDS)
        connect()

    office.gangs["one"].connect = connect_when_told
    office.gangs["one"].out_of_reach = "Ray's head does not answer"
    until(lambda: office.loops["one"].problem() == "Ray cannot be reached: Ray's head does not answer")
    may_connect.set()
    office.schedules("one")
    until(lambda: office.loops["one"].problem() is None)
    assert office.gangs["one"].connections == 2
    assert len(office.made["one"]) == 2, "what was remembered of the gangs is forgotten"


@pytest.mark.full
def test_passes_are_measured_where_they_are_made(office: Office) -> None:
    assert office.measured("one", "leading") == 0
    office.start("one")
    office.schedules("one")
    office.start("other")
    until(lambda: office.loops["other"].problem() is None)
    assert [office.measured(name, "leading") for name in ("one", "other")] == [1, 0]
    office.made["one"][0].fails_with = RuntimeError("the database is restarted")
    until(lambda: office.measured("one", "passes_total", outcome="failed") == 1)
    office.schedules("one")
    office.stop("one")
    good = office.measured("one", "passes_total", outcome="ok")
    assert good == office.passes.count("one")
    assert office.measured("one", "pass_duration_seconds_count") == good + 1
    assert office.measured("one", "leading") == 0
    office.schedules("other")
    assert office.measured("other", "leading") == 1
    assert office.measured("other", "passes_total", outcome="failed") == 0


def test_what_gangs_report_is_stored_between_passes(office: Office) -> None:
    office.wait_long_between_passes("one")
    office.gangs["one"].updates.put({("job-a", 1)})
    office.start("one")
    until(lambda: office.made["one"] and office.made["one"][0].updated == [{("job-a", 1)}])
    office.gangs["one"].updates.put({("job-b", 2)})
    until(lambda: office.made["one"][0].updated == [{("job-a", 1)}, {("job-b", 2)}])
    assert office.passes == ["one"]


def test_updates_of_a_fast_gang_are_stored_a_few_times_a_second(office: Office) -> None:
    office.wait_long_between_passes("one")
    office.gangs["one"].wait_for_updates = lambda _seconds: {("job-a", 1)}
    office.start("one")
    until(lambda: office.passes == ["one"])
    begun = time.monotonic()
    until(lambda: len(office.made["one"][0].updated) == 5)
    assert time.monotonic() - begun >= 3 * loop_module.UPDATE_SECONDS


@pytest.mark.full
@pytest.mark.parametrize("failure", [RuntimeError("the database is restarted"), LeaseLost("the lease")])
def test_updates_that_cannot_be_stored_wait_for_the_next_pass(office: Office, failure: Exception) -> None:
    office.wait_long_between_passes("one")
    office.start("one")
    until(lambda: office.passes == ["one"])
    office.made["one"][0].fails_with = failure
    office.gangs["one"].updates.put({("job-a", 1)})
    until(lambda: office.made["one"][0].fails_with is None)
    office.gangs["one"].updates.put({("job-b", 1)})
    time.sleep(2 * loop_module.UPDATE_SECONDS)
    assert office.made["one"][0].updated == [{("job-a", 1)}]
    assert office.passes == ["one"]


@pytest.mark.full
def test_who_does_not_schedule_listens_to_no_gang(office: Office) -> None:
    office.start("one")
    office.schedules("one")
    office.gangs["other"].updates.put({("job-a", 1)})
    office.start("other")
    until(lambda: office.loops["other"].problem() is None)
    time.sleep(2 * loop_module.UPDATE_SECONDS)
    assert not office.gangs["other"].updates.empty()


def test_jobs_go_through_with_the_real_reconciler(office: Office) -> None:
    job_id = office.store.create(tiny_job("corpus", "elsewhere"), "file:///checkpoints").id
    gangs = FakeGangs()
    leases = Leases(office.store.engine, "third")
    loop = ReconcileLoop(gangs, office.store, leases, lambda record: Reconciler(record, gangs), 0.01)
    loop.start()
    until(lambda: gangs.launched == [(job_id, 1)])
    assert Leases(office.store.engine, "fourth").take(LEASE, 1) is None
    loop.stop()
    assert Leases(office.store.engine, "fourth").take(LEASE, 1) == Lease(LEASE, 2)
    assert office.store.get(job_id).state is JobState.SCHEDULING
