"""The database under the record: started, changed and restarted while the service goes on."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import event, inspect, text, update
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

import service.accounts.tables  # noqa: F401  # its tables are among those expected
from boost_core.messages import LogLine
from service.jobs import database as database_module
from service.jobs.database import fault_of, migrate, open_engine
from service.jobs.queries import EventFilter, JobNotFound
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.jobs.tables import JobRow, Table
from service.settings import Settings
from tests.postgres import PostgresServer
from tests.service.command_line import process as boost_process
from tests.service.command_line import run_boost
from tests.service.concurrency import in_threads
from tests.service.conftest import RunningApi, free_port
from tests.service.records import GOOD, a_log_line, a_spec, numbered, start

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


@pytest.mark.full
def test_of_several_services_that_start_one_migrates(empty_database_url: str) -> None:
    processes = [migrating(empty_database_url, NEVER) for _ in range(3)]
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    statements = sorted(int(process.communicate(timeout=60)[0]) for process in processes)
    assert statements[0] == statements[1] < statements[2] / 3
    assert_up_to_date(empty_database_url)


@pytest.mark.full
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


@pytest.mark.full
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


# What is wrong with a database, by what really goes wrong


class Troubled(RunningApi):
    """A server over a database of which something goes wrong, which waits only for a moment."""

    def __init__(self, url: str, home: Path) -> None:
        self.store = JobStore(url, seconds=0.5)
        self.job = self.store.create(a_spec(), ROOT)
        super().__init__(self.store, Settings(home=home, database_url=url, auth=False, database_seconds=0.5))

    def request(self, method: str, path: str) -> tuple[int, str, float]:
        began = time.monotonic()
        answer = httpx.request(method, f"{self.url}{path}", json=GOOD if method == "POST" else None, timeout=30)
        assert "Retry-After" in answer.headers or answer.status_code != 503 or "damaged" in answer.text
        return answer.status_code, answer.json().get("code", ""), time.monotonic() - began


@pytest.fixture
def troubled(database_url: str, tmp_path: Path) -> Iterator[Troubled]:
    server = Troubled(database_url, tmp_path / "home")
    yield server
    server.stop()
    server.store.close()


def _sqlite(server: Troubled, pragma: str) -> None:
    event.listen(server.store.engine, "checkout", lambda connection, *_: connection.execute(f"PRAGMA {pragma}"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("database", "pragma", "status", "code"),
    [
        ("sqlite", "max_page_count = 1", 507, "database-full"),
        ("sqlite", "query_only = ON", 503, "database-read-only"),
    ],
)
def test_a_file_that_takes_nothing_is_said_to_be_so(troubled: Troubled, pragma: str, status: int, code: str) -> None:
    _sqlite(troubled, pragma)
    answers = [troubled.request("POST", "/v1/jobs") for _ in range(12)]  # pages that are free are used first
    assert answers[-1][:2] == (status, code)
    assert troubled.request("GET", "/v1/jobs")[0] == 200, "what is stored can be read"


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite"])
def test_a_file_that_another_writer_locks(troubled: Troubled) -> None:
    with troubled.store.engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        status, code, seconds = troubled.request("POST", "/v1/jobs")
        assert (status, code) == (503, "database-locked") and seconds < 5
        assert troubled.request("GET", "/v1/jobs")[0] == 200
        other.rollback()
    assert troubled.request("POST", "/v1/jobs")[0] == 201


_FULL = """
CREATE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER no_space BEFORE INSERT OR UPDATE ON jobs FOR EACH ROW EXECUTE FUNCTION no_space();
"""


@pytest.mark.full
@pytest.mark.parametrize("database", ["postgresql"])
@pytest.mark.parametrize(
    ("statement", "status", "code"),
    [
        (_FULL, 507, "database-full"),
        ("ALTER DATABASE {name} SET default_transaction_read_only = on", 503, "database-read-only"),
    ],
)
def test_a_postgresql_that_takes_nothing_is_said_to_be_so(
    troubled: Troubled, database_url: str, statement: str, status: int, code: str
) -> None:
    with psycopg.connect(database_url, autocommit=True) as operator:
        operator.execute(statement.format(name=database_url.rpartition("/")[2]))
    troubled.store.engine.dispose()
    assert troubled.request("POST", "/v1/jobs")[:2] == (status, code)
    assert troubled.request("GET", f"/v1/jobs/{troubled.job.id}")[0] == 200


@pytest.mark.full
@pytest.mark.parametrize("database", ["postgresql"])
def test_requests_behind_a_locked_table_are_answered_in_time(troubled: Troubled, database_url: str) -> None:
    with psycopg.connect(database_url) as operator:
        operator.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
        paths = ["/v1/jobs", f"/v1/jobs/{troubled.job.id}", "/metrics", f"/v1/jobs/{troubled.job.id}/events"]
        answers: list[tuple[int, str, float]] = []
        in_threads(40, lambda index: answers.append(troubled.request("GET", paths[index % len(paths)])))
    assert len(answers) == 40
    assert {answer[0] for answer in answers} == {503}
    assert {answer[1] for answer in answers} <= {"database-locked", "database-slow", "database-too-many-connections"}
    assert "database-locked" in {answer[1] for answer in answers}
    assert max(answer[2] for answer in answers) < 10
    assert troubled.request("GET", "/v1/jobs")[0] == 200


@pytest.mark.full
@pytest.mark.parametrize("database", ["postgresql"])
def test_a_postgresql_without_connections_or_with_another_password(troubled: Troubled, database_url: str) -> None:
    def fault(url: str) -> str | None:
        with pytest.raises(OperationalError) as caught, open_engine(url, 0.5).connect():
            pass
        found = fault_of(caught.value)
        return found and found.code

    with psycopg.connect(database_url, autocommit=True) as operator:
        operator.execute("DROP ROLE IF EXISTS few")
        operator.execute("CREATE ROLE few LOGIN CONNECTION LIMIT 0")
        assert fault(database_url.replace("boost@", "few@", 1)) == "database-too-many-connections"
        assert fault(database_url.replace("boost@", "nobody@", 1)) == "database-refuses"
        assert fault(f"{database_url}_other") == "database-refuses"
        operator.execute("DROP ROLE few")
    held = [troubled.store.engine.connect() for _ in range(15)]
    try:
        status, code, seconds = troubled.request("POST", "/v1/jobs")
        assert (status, code) == (503, "database-too-many-connections") and seconds < 5
    finally:
        for connection in held:
            connection.close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "boost.db"
    file.write_bytes(b"not a database " * 1000)
    done = run_boost("migrate", BOOST_DATABASE_URL=f"sqlite:///{file}", BOOST_HOME=str(tmp_path))
    assert (done.exit_code, "its file is damaged" in " ".join(done.stderr.split())) == (1, True), done.stderr


@pytest.mark.full
def test_characters_that_databases_lack(store: JobStore) -> None:
    with pytest.raises(JobNotFound):
        store.get("what\0ever")
    job = store.create(a_spec(), ROOT)
    start(store, job.id)
    line = LogLine(rank=1, level="INFO", message="a \0 \\\0 \\u0000")
    store.append_reports(job.id, 1, numbered(a_log_line("fine"), line))
    (line_event,) = store.events(job.id, wanted=EventFilter(kinds=["log"], rank=1))[1:]
    assert line_event.data["message"].replace("\ufffd", "\0") == line.message
    ended = store.change(job.id, Reason.TRAINING_FAILED, "no file caf\udce9 or \0")
    assert ended.message == "no file caf? or \ufffd"
    assert store.count_changes(job.id, Reason.TRAINING_FAILED, job.queued_at) == 1


@pytest.mark.full
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
