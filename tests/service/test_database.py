"""The database under the record: started, changed and restarted while the service goes on."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text, update
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

import service.accounts.tables  # noqa: F401  # its tables are among those expected
from boost_core.messages import LogLine
from service.jobs import database as database_module
from service.jobs.database import migrate, open_engine
from service.jobs.queries import EventFilter, JobNotFound
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.jobs.tables import JobRow, Table
from tests.postgres import PostgresServer
from tests.service.command_line import process as boost_process
from tests.service.command_line import run_boost
from tests.service.conftest import free_port
from tests.service.records import a_log_line, a_spec, numbered, start

ROOT = "file:///checkpoints"
MIGRATES = """
import os, signal, sys
from sqlalchemy import Engine, event
from service.jobs.database import migrate
statements = 0
@event.listens_for(Engine, "before_cursor_execute")
def count(connection, cursor, statement, *_):
    global statements
    statements += 1
    if statements == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
sys.stdin.readline()
migrate(sys.argv[1])
print(statements)
"""
NEVER = 0


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


def migrating(url: str, kill_at: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MIGRATES, url, str(kill_at)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def assert_up_to_date(url: str) -> None:
    with open_engine(url).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []


def test_of_several_services_that_start_one_migrates(empty_database_url: str) -> None:
    processes = [migrating(empty_database_url, NEVER) for _ in range(3)]
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    statements = sorted(int(process.communicate(timeout=60)[0]) for process in processes)
    assert statements[0] == statements[1] < statements[2] / 3
    assert_up_to_date(empty_database_url)


def test_a_migration_that_is_killed_has_changed_nothing(empty_database_url: str) -> None:
    for kill_at in (8, 20, 30):
        process = migrating(empty_database_url, kill_at)
        process.communicate("\n", timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert inspect(open_engine(empty_database_url)).get_table_names() == []
    migrate(empty_database_url)
    assert_up_to_date(empty_database_url)


def test_databases_that_are_not_served() -> None:
    with pytest.raises(ArgumentError, match="'mysql' is not a supported database; use sqlite or postgresql"):
        open_engine("mysql://host/boost")


@pytest.fixture
def on_postgresql(postgres: PostgresServer) -> str:
    url = postgres.create_database()
    migrate(url)
    return url


def test_a_restart_of_the_database_is_survived(postgres: PostgresServer, on_postgresql: str) -> None:
    store = JobStore(on_postgresql)
    job = store.create(a_spec(), ROOT)
    postgres.restart()
    assert store.get(job.id) == job
    with store.engine.connect():
        postgres.stop()
        try:
            with pytest.raises(OperationalError):
                store.get(job.id)
        finally:
            postgres.start()
    assert store.change(job.id, Reason.HEAD_OF_QUEUE, "is next").version == job.version + 1


def test_a_process_that_is_stopped_in_mid_transaction_keeps_nobody_waiting(
    on_postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "SILENT_MILLISECONDS", 300)
    stopped, store = open_engine(on_postgresql), JobStore(on_postgresql)
    job = store.create(a_spec(), ROOT)
    with pytest.raises(DBAPIError, match="idle-in-transaction"), stopped.begin() as connection:
        connection.execute(update(JobRow).values(message="never said"))
        assert store.change(job.id, Reason.HEAD_OF_QUEUE, "is next").message == "is next"
    assert store.get(job.id).message == "is next"


def test_characters_that_databases_lack(store: JobStore) -> None:
    with pytest.raises(JobNotFound):
        store.get("what\0ever")
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    line = LogLine(rank=1, level="INFO", message="a \0 \\\0 \\u0000")
    store.append_reports(job.id, 1, numbered(a_log_line("fine"), line))
    (event,) = store.events(job.id, wanted=EventFilter(kinds=["log"], rank=1))[1:]
    assert event.data["message"].replace("\ufffd", "\0") == line.message
    ended = store.change(job.id, Reason.TRAINING_FAILED, "no file caf\udce9 or \0")
    assert ended.message == "no file caf? or \ufffd"
    assert store.count_changes(job.id, Reason.TRAINING_FAILED, job.queued_at) == 1


def test_a_database_of_a_newer_version_says_what_to_do(database_url: str, tmp_path: Path) -> None:
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    settings = {"BOOST_DATABASE_URL": database_url, "BOOST_HOME": str(tmp_path), "BOOST_RAY_ADDRESS": "127.0.0.1:1"}
    with boost_process("serve", "--port", str(free_port()), **settings) as serves:
        said = [serves.communicate(timeout=120)[0]]
    for command in (["migrate"], ["keys", "create", "ann", "--tenant", "lab", "--scope", "read", "--direct"]):
        done = run_boost(*command, **settings)
        assert done.exit_code == 1
        said.append(done.stderr)
    for words in said:
        plain = " ".join(words.split())
        assert "revision 9999" in plain and "restore the backup" in plain and "Traceback" not in plain, words
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
