"""From an interruption to the first step after it: one report, whose parts add up."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from boost_core.config import Layout
from boost_core.messages import Cause, InterruptionReport, RankTimesReport, Report, RestartReport
from service.gang.assignment import WorkerPlace
from service.gang.control.port import Moment
from service.gang.control.record import REPORTS_A_POLL, GangRecord
from service.gang.status import GangPhase
from tests.service.records import a_checkpoint, a_log_line, a_start, a_step

LAYOUT = Layout(2, 1, 1)
BEGIN = Moment(1000.0, datetime(2026, 1, 1, tzinfo=UTC))


class Clock:
    """Seconds that pass when it is told to, for a record that looks at it."""

    def __init__(self, record: GangRecord) -> None:
        self._record = record

    @property
    def now(self) -> float:
        return self._record.now.seconds

    @now.setter
    def now(self, seconds: float) -> None:
        self._record.now = replace(self._record.now, seconds=seconds)


@pytest.mark.parametrize(("ranks", "message"), [(1, "1 worker is training"), (2, "2 workers are training")])
def test_one_worker_is_no_plural(ranks: int, message: str) -> None:
    record = GangRecord(BEGIN)
    form(record)
    hear(record, a_start().model_copy(update={"world_size": ranks}))
    assert record.status(0).message.endswith(message)


@pytest.fixture
def record() -> GangRecord:
    """Of a gang that has done a step."""
    record = GangRecord(BEGIN)
    form(record)
    hear(record, a_start(), a_step(1))
    record.status(10)
    return record


@pytest.fixture
def clock(record: GangRecord) -> Clock:
    return Clock(record)


def form(record: GangRecord, makes_copies: bool = False) -> None:
    places = [
        WorkerPlace("a", "10.0.0.5", (), pid, "host-a", metrics) for pid, metrics in ((1, "10.0.0.5:9400"), (2, None))
    ]
    record.formed(LAYOUT, places, makes_copies)


def hear(record: GangRecord, *reports: Report, kept_step: int | None = None) -> None:
    record.take([(datetime.now(UTC), report) for report in reports], kept_step)


def unread(record: GangRecord) -> list[Report]:
    return [each.report for each in record.status(0).reports]


def kinds(record: GangRecord) -> list[str]:
    return [report.kind for report in unread(record)]


def restarts(record: GangRecord) -> list[RestartReport]:
    return [report for report in unread(record) if isinstance(report, RestartReport)]


def resumed(step: int, source: str | None = "memory", load_seconds: float = 0.0) -> Report:
    return a_start(step).model_copy(update={"resumed_from": source, "load_seconds": load_seconds})


def test_a_restart_is_told_once_before_the_first_step(clock: Clock, record: GangRecord) -> None:
    clock.now += 2.0
    record.interrupted(Cause.WORKER_LOST, "rank 1 was lost", clock.now)
    clock.now += 1.0
    record.reached("stop")
    clock.now += 4.0
    record.waited(3.0)
    record.reached("place")
    form(record)
    clock.now += 8.0
    hear(record, resumed(0, load_seconds=2.0))
    clock.now += 16.0
    hear(record, a_step(1), a_step(2))
    assert kinds(record) == ["interruption", "shape", "started", "restart", "progress", "progress"]
    assert unread(record)[0] == InterruptionReport(cause=Cause.WORKER_LOST, message="rank 1 was lost", step=1)
    assert restarts(record) == [
        RestartReport(
            cause=Cause.WORKER_LOST, message="rank 1 was lost", step=1, resumed_step=0, recovered_from="memory",
            seconds=31.0, waiting_seconds=3.0,
            parts={"detect": 2.0, "stop": 1.0, "place": 4.0, "start": 6.0, "load": 2.0, "first_step": 16.0},
        )
    ]  # fmt: skip


def test_of_several_causes_the_first_counts_and_all_parts_add_up(clock: Clock, record: GangRecord) -> None:
    clock.now += 1.0
    record.interrupted(Cause.NODE_LOST, "node b was lost", clock.now)
    for attempt in (1.0, 2.0):
        clock.now += attempt
        record.reached("stop")
        clock.now += attempt
        record.reached("place")
        form(record)
        clock.now += attempt
        hear(record, resumed(1, "file:///checkpoints/step-1"))
        clock.now += attempt
        if attempt == 1.0:
            record.interrupted(Cause.WORKER_LOST, "rank 0 was lost", clock.now)
    hear(record, a_step(2))
    (restart,) = restarts(record)
    assert (restart.cause, restart.message) == (Cause.NODE_LOST, "node b was lost")
    assert restart.recovered_from == "storage"
    assert restart.parts["place"] == 3.0
    assert sum(restart.parts.values()) == restart.seconds == 13.0
    assert kinds(record).count("interruption") == 1


@pytest.mark.parametrize(
    ("source", "told"), [("memory", "memory"), ("s3://bucket/step-1", "storage"), (None, "start")], ids=str
)
def test_the_source_is_told(clock: Clock, record: GangRecord, source: str | None, told: str) -> None:
    record.interrupted(Cause.HANG, "no step", clock.now)
    form(record)
    hear(record, resumed(0, source), a_step(1))
    assert [restart.recovered_from for restart in restarts(record)] == [told]


def test_the_interruption_begins_with_the_last_sign_of_the_gang(clock: Clock, record: GangRecord) -> None:
    clock.now += 5.0
    hear(record, a_log_line("the others wait"))  # a rank that waits may still say so
    clock.now += 5.0
    record.interrupted(Cause.HANG, "no step for 10 s", clock.now)
    form(record)
    hear(record, resumed(1), a_step(2))
    (restart,) = restarts(record)
    assert (restart.seconds, restart.parts["detect"]) == (10.0, 10.0)


def test_what_comes_late_from_the_old_gang_ends_no_interruption(clock: Clock, record: GangRecord) -> None:
    record.interrupted(Cause.HANG, "no step for 10 s", clock.now)
    hear(record, a_step(2))
    assert restarts(record) == []
    form(record)
    hear(record, resumed(2), a_step(3))
    assert [restart.resumed_step for restart in restarts(record)] == [2]


def test_each_interruption_has_its_restart(clock: Clock, record: GangRecord) -> None:
    for step in (1, 2, 3):
        record.interrupted(Cause.NODE_DRAINED, "a node is about to leave", clock.now)
        form(record)
        hear(record, resumed(step), a_step(step + 1))
    assert [restart.resumed_step for restart in restarts(record)] == [1, 2, 3]


def test_a_gang_that_never_had_its_state_was_not_interrupted() -> None:
    record = GangRecord(BEGIN)
    form(record)
    record.interrupted(Cause.WORKER_LOST, "rank 1 was lost", BEGIN.seconds)
    form(record)
    hear(record, a_start(), a_step(1))
    assert kinds(record) == ["shape", "shape", "started", "progress"]


def test_waiting_is_part_of_the_restart(clock: Clock, record: GangRecord) -> None:
    record.interrupted(Cause.NODE_LOST, "node b was lost", clock.now)
    clock.now += 1.0
    record.waited(2.0)
    form(record)
    hear(record, resumed(1), a_step(2))
    assert [restart.waiting_seconds for restart in restarts(record)] == [1.0]


def test_it_knows_the_newest_step_and_checkpoint(record: GangRecord) -> None:
    hear(record, a_step(5), a_checkpoint(4), a_step(6))
    assert (record.step, record.stored_step) == (6, 4)
    form(record)
    assert record.start is None
    hear(record, resumed(4), a_checkpoint(2))
    assert (record.step, record.stored_step, record.start is not None) == (4, 4, True)


@pytest.mark.parametrize(
    ("makes_copies", "resumed_step", "settled"), [(False, 4, True), (True, 4, False), (True, 0, True)]
)
def test_a_gang_is_settled_with_its_state_and_a_copy_of_it(
    record: GangRecord, makes_copies: bool, resumed_step: int, settled: bool
) -> None:
    form(record, makes_copies)
    assert not record.settled
    hear(record, resumed(resumed_step), a_step(resumed_step + 1))
    assert record.settled is settled
    hear(record, kept_step=resumed_step)
    assert record.settled


def test_unread_reports_stay_until_they_are_acknowledged(record: GangRecord) -> None:
    hear(record, a_step(2), a_step(3))
    first = record.status(0)
    assert record.status(0) == first
    sequences = [each.sequence for each in first.reports]
    assert sequences == list(range(sequences[0], sequences[0] + 2))
    assert [each.report.step for each in record.status(sequences[0]).reports] == [3]
    assert record.status(sequences[1]).reports == []
    hear(record, a_step(4))
    assert [each.sequence for each in record.status(sequences[1]).reports] == [sequences[1] + 1]


def test_of_unread_times_of_all_ranks_only_the_newest_are_kept(record: GangRecord) -> None:
    for step in (2, 3, 4):
        record.add(RankTimesReport(step=step, busy_seconds=[0.5] * 4096))
        hear(record, a_step(step))
    assert [(each.kind, each.step) for each in unread(record)] == [
        ("progress", 2), ("progress", 3), ("ranks", 4), ("progress", 4),
    ]  # fmt: skip
    sequences = [each.sequence for each in record.status(0).reports]
    assert sequences == sorted(sequences) and record.status(sequences[-1]).reports == []


def test_the_final_phase_is_told_with_the_last_report(record: GangRecord) -> None:
    hear(record, *(a_log_line(str(number)) for number in range(2 * REPORTS_A_POLL + 1)))
    record.say(GangPhase.SUCCEEDED, "trained 10 steps")
    read, told = 0, []
    for _ in range(3):
        status = record.status(read)
        read = status.reports[-1].sequence
        told.append((status.phase, len(status.reports)))
    assert told == [
        (GangPhase.TRAINING, REPORTS_A_POLL), (GangPhase.TRAINING, REPORTS_A_POLL), (GangPhase.SUCCEEDED, 1),
    ]  # fmt: skip
    assert record.status(read).phase is GangPhase.SUCCEEDED


def test_the_status_says_what_the_gang_is_at() -> None:
    record = GangRecord(BEGIN)
    assert record.status(0).phase is GangPhase.STARTING
    form(record)
    hear(record, a_start())
    assert (record.status(0).phase, record.status(0).layout) == (GangPhase.TRAINING, LAYOUT)
    record.interrupted(Cause.NODE_DRAINED, "a node is about to leave", BEGIN.seconds)
    assert (record.status(0).phase, record.status(0).message) == (GangPhase.RECOVERING, "a node is about to leave")


def test_it_says_that_it_waits_for_the_store_and_for_how_long(clock: Clock, record: GangRecord) -> None:
    assert record.waited_seconds == 0
    record.saving("disk full")
    waits = GangPhase.SAVING, "all steps are done; waiting for the store: disk full"
    assert record.status_text == waits
    clock.now += 5
    record.interrupted(Cause.NODE_DRAINED, "a node is about to leave", clock.now)
    record.saving("heard late")
    assert record.status_text == (GangPhase.RECOVERING, "a node is about to leave")
    form(record)
    hear(record, resumed(1))
    record.saving("disk full")
    assert record.status_text == waits
    assert record.waited_seconds == 5


def test_a_step_that_is_repeated_ends_the_wait_for_the_store(clock: Clock, record: GangRecord) -> None:
    record.saving("disk full")
    clock.now += 5
    record.interrupted(Cause.NODE_LOST, "node b was lost", clock.now)
    form(record)
    hear(record, resumed(0))
    assert record.waited_seconds == 5
    hear(record, a_step(1))
    assert record.waited_seconds == 0


def test_an_update_is_what_was_not_told_yet(record: GangRecord) -> None:
    assert not record.has_more(10)
    hear(record, a_step(2))
    newest = record.status(0).reports[-1].sequence
    assert record.has_more(newest - 1)
    assert not record.has_more(newest)
    record.say(GangPhase.SUCCEEDED, "trained 2 steps")
    assert record.has_more(newest)
    record.status(newest)
    record.say(GangPhase.SUCCEEDED, "trained 2 steps")
    assert not record.has_more(newest), "that was told"


def test_who_waits_for_an_update_is_told_of_each(record: GangRecord) -> None:
    told: list[bool] = []
    record = GangRecord(BEGIN, changed=lambda: told.append(record.has_more(0)))
    form(record)
    assert told == [True]
    record.say(GangPhase.TRAINING, "trains")
    assert told == [True, True]
