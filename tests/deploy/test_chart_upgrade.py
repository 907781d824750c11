"""An upgrade keeps the jobs: the hook's own command on a real PostgreSQL with the tables of the release before.

There is no chart before this one, so what is upgraded is the release that the images would have held: its database, as
revision 0003 has it, with jobs in all states.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, MetaData, func, inspect, select, text
from sqlalchemy.engine import Connection

from service.accounts.keys import KeyStore
from service.client import Client
from service.jobs.database import migrate, open_engine
from service.jobs.model import JobRecord, Owner
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.models.access import Scope
from service.scheduler.reconcile import Reconciler
from service.settings import Settings
from tests.deploy.chart import environment, nested, render, the
from tests.postgres import PostgresServer, postgres_server
from tests.service.conftest import RunningApi
from tests.service.file_cluster import FileCluster
from tests.service.records import a_checkpoint, a_restart, a_spec, a_start, a_step, numbered, run_to_the_end, start

pytestmark = pytest.mark.nightly

BEFORE = "0003"
OWNER = Owner("lab", "ann")
MOST_PASSES = 60


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


def fill(store: JobStore) -> dict[str, str]:
    """A job in each state; their ids by what they are called. Their names say what becomes of their next gangs."""
    ids = {what: store.create(a_spec(name=name), "file:///checkpoints", OWNER).id for what, name in NAMES.items()}
    store.change(ids["scheduling"], Reason.HEAD_OF_QUEUE, "is next")
    start(store, ids["running"])
    reports = numbered(a_start(), a_step(1), a_checkpoint(1), a_restart(2), a_step(3))
    store.append_reports(ids["running"], 1, reports)
    start(store, ids["paused"])
    store.request_pause(ids["paused"])
    store.change(ids["paused"], Reason.PAUSED_BY_USER, "its state is kept")
    start(store, ids["failed"])
    store.change(ids["failed"], Reason.TRAINING_FAILED, "it diverges")
    run_to_the_end(store, ids["succeeded"])
    store.request_cancel(ids["cancelled"])
    return ids


NAMES = {
    "queued": "succeeds", "scheduling": "succeeds", "running": "is-lost", "paused": "is-lost", "failed": "is-lost",
    "succeeded": "succeeds", "cancelled": "succeeds",
}  # fmt: skip


def copy_into_the_release_before(new: Engine, old_url: str) -> None:
    """All rows of a database into one with the tables of the release before, as far as these have the columns."""
    config = Config()
    config.set_main_option("script_location", "service.jobs:migrations")
    old = open_engine(old_url)
    with new.connect() as source, old.begin() as target:
        config.attributes["connection"] = target
        command.upgrade(config, BEFORE)
        tables, there = MetaData(), MetaData()
        tables.reflect(target)
        there.reflect(source)
        for table in tables.sorted_tables:
            if table.name != "alembic_version":
                columns = [there.tables[table.name].c[column.name] for column in table.columns]
                target.execute(table.delete())  # what the migration itself has put there
                rows = [dict(row) for row in source.execute(select(*columns)).mappings()]
                if rows:
                    target.execute(table.insert(), rows)
                _count_on(target, table.name)
    old.dispose()


def _count_on(connection: Connection, table: str) -> None:
    for column in inspect(connection).get_columns(table):
        sequence = connection.scalar(select(func.pg_get_serial_sequence(table, column["name"])))
        if sequence:
            connection.execute(
                text(f"SELECT setval('{sequence}', (SELECT COALESCE(MAX({column['name']}), 0) + 1 FROM {table}))")
            )


def run_the_hook(url: str, folder: Path) -> str:
    """Run the command of the Job that Helm would, where it would find its program, with what it is told."""
    job = the(render(nested("database.existingSecret", "boost-database")), "Job")["spec"]["template"]
    (container,) = job["spec"]["containers"]
    said = environment(job)
    assert said["BOOST_DATABASE_URL"] == "secret:boost-database/url"
    program, *arguments = container["command"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / program), *arguments, *container.get("args", [])],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        | said
        | {"BOOST_DATABASE_URL": url, "HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_upgrade_keeps_the_jobs(postgres: PostgresServer, tmp_path: Path) -> None:
    template, url = postgres.create_database(), postgres.create_database()
    migrate(template)
    before = JobStore(template)
    ids = fill(before)
    key = KeyStore(before.engine).create("ann", "lab", [Scope.SUBMIT]).key
    copy_into_the_release_before(before.engine, url)
    added = columns(before.engine) - columns(open_engine(url))
    assert added, "there is something to migrate"

    for _ in range(2):  # a Job may be tried again
        assert "is up to date" in run_the_hook(url, tmp_path)
    store = JobStore(url)
    assert columns(store.engine) == columns(before.engine)
    for job_id in ids.values():
        assert _dump(store.get(job_id), added) == _dump(before.get(job_id), added)
        assert store.events(job_id) == before.events(job_id)
    before.close()

    api = RunningApi(store, Settings(home=tmp_path / "home", database_url=url, host="127.0.0.1"))
    try:
        with Client(api.url, api_key=key) as client:
            assert {job.id: job.state for job in client.list().jobs} == {
                job_id: JobState[what.upper()] for what, job_id in ids.items()
            }
            client.resume(ids["paused"])
            client.retry(ids["failed"])
            scheduler = Reconciler(store, FileCluster(tmp_path / "cluster.db"))
            for _ in range(MOST_PASSES):
                scheduler.tick()
            assert {what: client.get(job_id).state for what, job_id in ids.items()} == dict.fromkeys(
                ids, JobState.SUCCEEDED
            ) | {"cancelled": JobState.CANCELLED}
            assert client.get(ids["running"]).attempt == 2, "its gang of before was lost, and it went on"
    finally:
        api.stop()
        store.close()


def columns(engine: Engine) -> set[str]:
    found = inspect(engine)
    return {column["name"] for table in found.get_table_names() for column in found.get_columns(table)}


def _dump(job: JobRecord, without: set[str]) -> dict[str, object]:
    return {name: value for name, value in job.model_dump(mode="json").items() if name not in without}
