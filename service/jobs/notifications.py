"""Notifies followers of jobs of writes.

Followers in the same process are called directly. Other processes on the same PostgreSQL are notified by NOTIFY in the
writing transaction. Notifications may be lost, so followers must also poll the record now and then.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from psycopg import AsyncConnection
from sqlalchemy import ARRAY, Connection, Engine, Text, func, literal, select

from service.jobs.database import SILENT_MILLISECONDS, connect_arguments

Heard = Callable[[str, int], None]  # called with a job's id and its version after the write

_CHANNEL = "boost_jobs"
# Otherwise a connection on which nothing is sent would not detect that the other side is gone.
_KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 2}


class Notifications:
    """Calls all subscribers after each write of this process to a job. Threads may share it."""

    def __init__(self) -> None:
        self._subscribers: list[Heard] = []

    def subscribe(self, heard: Heard) -> None:
        """Register a function to be called in the thread that has written; it must not raise or block."""
        self._subscribers.append(heard)

    def publish(self, versions: Mapping[str, int]) -> None:
        """Announce that writes to jobs have been committed."""
        for job_id, version in versions.items():
            for heard in self._subscribers:
                heard(job_id, version)


def can_listen(engine: Engine) -> bool:
    """Whether the database can notify processes of each other's writes."""
    return engine.dialect.name == "postgresql"


def send_probe(engine: Engine, name: str) -> None:
    """Notify listeners of version 0 of a job of this name, on a connection other than theirs.

    A pooler may silently accept LISTEN and then pass nothing on.
    """
    with engine.begin() as connection:
        notify(connection, {name: 0})


def notify(connection: Connection, versions: Mapping[str, int]) -> None:
    """Notify other processes of writes to jobs on commit, if the database can do that."""
    if can_listen(connection.engine):
        payloads = [f"{job_id} {version}" for job_id, version in versions.items()]
        connection.execute(select(func.pg_notify(_CHANNEL, func.unnest(literal(payloads, ARRAY(Text))))))


@asynccontextmanager
async def listening(engine: Engine) -> AsyncGenerator[AsyncGenerator[tuple[str, int]]]:
    """Listen for the writes of all processes on a separate connection; yields jobs' ids and versions.

    Args:
        engine: Engine of a database that can notify.

    Raises:
        psycopg.OperationalError: The database cannot be reached.
    """
    arguments = connect_arguments(engine) | _KEEPALIVES
    async with await AsyncConnection.connect(autocommit=True, **arguments) as connection:
        # The database queues what this process does not read, for all; so it must end a stopped process's connection.
        await connection.execute(f"SET tcp_user_timeout = {SILENT_MILLISECONDS}")
        await connection.execute(f"LISTEN {_CHANNEL}")
        yield _notifications(connection)


async def _notifications(connection: AsyncConnection[Any]) -> AsyncGenerator[tuple[str, int]]:
    async for notification in connection.notifies():
        job_id, _, version = notification.payload.partition(" ")
        with suppress(ValueError):  # anyone with an account on the database may send anything
            yield job_id, int(version)
