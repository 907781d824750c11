"""Leases: one holder at a time, and nothing written by one who has lost it."""

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, update

from boost_core.messages import Drill
from service.jobs import leases as leases_module
from service.jobs.database import migrate
from service.jobs.leases import Lease, LeaseLost, Leases
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.jobs.tables import LeaseRow
from tests.postgres import PostgresServer
from tests.service.concurrency import in_threads
from tests.service.records import a_spec, a_step, numbered, start

ROOT = "file:///checkpoints"
WORK = "scheduler"
CONTENDER = """
import sys
from service.jobs.database import open_engine
from service.jobs.leases import Leases
engine = open_engine(sys.argv[1])
with engine.connect():
    print("ready", flush=True)
    sys.stdin.readline()
    print(Leases(engine, sys.argv[2]).take("scheduler", 60))
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def holders(store: JobStore) -> tuple[Leases, Leases]:
    return Leases(store.engine, "one"), Leases(store.engine, "other")


def run_out(engine: Engine) -> None:
    """Have all leases run out."""
    with engine.begin() as connection:
        connection.execute(update(LeaseRow).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))


def test_one_holds_it_and_the_other_waits(holders: tuple[Leases, Leases]) -> None:
    one, other = holders
    lease = one.take(WORK, 60)
    assert lease == Lease(WORK, 1)
    assert other.take(WORK, 60) is None
    assert one.take(WORK, 60) == lease, "it is renewed"
    assert other.take("other work", 60) == Lease("other work", 1)


def test_another_takes_over_when_it_has_run_out(store: JobStore, holders: tuple[Leases, Leases]) -> None:
    one, other = holders
    stale = one.take(WORK, 60)
    run_out(store.engine)
    assert other.take(WORK, 60) == Lease(WORK, 2)
    assert stale and not one.renew(stale, 60)
    one.renew(stale, 0.0)
    assert one.take(WORK, 60) is None, "what is not one's own is neither renewed nor given back"


def test_what_has_run_out_goes_on_if_nobody_else_took_it(store: JobStore, holders: tuple[Leases, Leases]) -> None:
    one, other = holders
    lease = one.take(WORK, 60)
    run_out(store.engine)
    assert one.take(WORK, 60) == lease
    run_out(store.engine)
    assert lease and one.renew(lease, 60)
    assert other.take(WORK, 60) is None


def test_what_is_given_back_is_had_at_once(holders: tuple[Leases, Leases]) -> None:
    one, other = holders
    lease = one.take(WORK, 60)
    assert lease
    one.renew(lease, 0.0)
    assert other.take(WORK, 60) == Lease(WORK, 2)


def test_a_lease_from_before_the_clock_was_set_back_is_taken_over(
    store: JobStore, holders: tuple[Leases, Leases]
) -> None:
    one, other = holders
    stale = one.take(WORK, 60)
    with store.engine.begin() as connection:
        connection.execute(update(LeaseRow).values(expires_at=datetime.now(UTC) + timedelta(days=3650)))
    assert other.take(WORK, 60) == Lease(WORK, 2)
    assert stale and not one.renew(stale, 60)


def test_renewing_in_another_thread_does_not_cost_the_holder_its_lease(holders: tuple[Leases, Leases]) -> None:
    one, _ = holders
    lease = one.take(WORK, 60)
    assert lease

    def take_and_renew(thread: int) -> None:
        for _ in range(40):
            if thread == 0:
                assert one.take(WORK, 60) == lease
            else:
                assert one.renew(lease, 60)

    assert in_threads(2, take_and_renew) == []


@pytest.mark.full
@pytest.mark.parametrize("before", ["never had", "run out"])
def test_of_many_threads_one_wins(store: JobStore, database_url: str, before: str) -> None:
    if before == "run out":
        assert Leases(store.engine, "dead").take(WORK, 60)
        run_out(store.engine)
    taken: list[Lease | None] = []
    engines = [JobStore(database_url).engine for _ in range(8)]
    assert in_threads(8, lambda index: taken.append(Leases(engines[index], f"{index}").take(WORK, 60))) == []
    assert [lease for lease in taken if lease] == [Lease(WORK, 2 if before == "run out" else 1)]


@pytest.mark.full
def test_of_several_processes_one_wins(store: JobStore, database_url: str) -> None:
    assert Leases(store.engine, "dead").take(WORK, 60)
    run_out(store.engine)
    contenders = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, database_url, f"process {number}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(3)
    ]  # fmt: skip
    for contender in contenders:
        assert contender.stdout and contender.stdout.readline() == "ready\n"
    for contender in contenders:
        assert contender.stdin
        contender.stdin.write("\n")
        contender.stdin.flush()
    said = sorted(contender.communicate(timeout=60)[0] for contender in contenders)
    assert said == ["Lease(name='scheduler', token=2)\n", "None\n", "None\n"]


class _HourAhead(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + timedelta(hours=1)


def test_postgresql_tells_the_time(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a process whose clock is wrong neither takes what is another's, nor holds it when it is dead."""
    url = postgres.create_database()
    migrate(url)
    engine = JobStore(url).engine
    one, ahead = Leases(engine, "one"), Leases(engine, "ahead")
    assert one.take(WORK, 60)
    with monkeypatch.context() as patch:
        patch.setattr(leases_module, "datetime", _HourAhead)
        assert ahead.take(WORK, 60) is None
        run_out(engine)
        assert ahead.take(WORK, -1), "a lease that runs out at once"
    assert one.take(WORK, 60)


Write = Callable[[JobStore, str, str], object]  # by a store, to a running and to a queued job
WRITES: dict[str, Write] = {
    "change": lambda store, running, _: store.change(running, Reason.TRAINING_FINISHED, "trained"),
    "append_reports": lambda store, running, _: store.append_reports(running, 1, numbered(a_step(1))),
    "append_many": lambda store, running, _: store.append_many([(store.get(running), numbered(a_step(1)))]),
    "take_commands": lambda store, running, _: store.take_commands(running),
    "explain": lambda store, _, queued: store.explain({queued: "waits for 2 CPUs"}),
    "keep_snapshot": lambda store, *_: store.keep_snapshot("nodes", ["node-b"]),
}


@pytest.mark.parametrize("name", WRITES)
def test_who_has_lost_a_lease_writes_nothing(store: JobStore, holders: tuple[Leases, Leases], name: str) -> None:
    one, other = holders
    running, queued = store.create(a_spec(), ROOT).id, store.create(a_spec(), ROOT).id
    start(store, running)
    store.ask(running, Drill(kind="kill_rank"))
    store.keep_snapshot("nodes", ["node-a"])

    def everything() -> list[object]:
        return [store.get(running), store.get(queued), store.events(running), store.snapshot("nodes")]

    lease = one.take(WORK, 60)
    run_out(store.engine)
    newer = other.take(WORK, 60)
    assert lease and newer
    before = everything()
    with pytest.raises(LeaseLost, match="'scheduler' was taken over by another process"):
        WRITES[name](store.under(lease), running, queued)
    assert everything() == before
    WRITES[name](store.under(newer), running, queued)
    assert everything() != before


def test_who_holds_a_lease_writes(store: JobStore, holders: tuple[Leases, Leases]) -> None:
    one, _ = holders
    job = store.create(a_spec(), ROOT)
    lease = one.take(WORK, 60)
    assert lease
    store.under(lease).change(job.id, Reason.HEAD_OF_QUEUE, "is next")
    run_out(store.engine)
    store.under(lease).change(job.id, Reason.WAITING_FOR_RESOURCES, "nobody else has come")
    assert store.get(job.id).message == "nobody else has come"
