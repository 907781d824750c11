"""Telling those who follow jobs that one has been written.

Within a process they are called directly. Other processes on the same PostgreSQL are told by NOTIFY, in the transaction
that writes. A notification may be lost on the way, so that who follows has to look at the record now and then as well.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from psycopg import AsyncConnection
from sqlalchemy import ARRAY, Connection, Engine, Text, func, literal, select

from service.jobs.database import SILENT_MILLISECONDS, connect_arguments

Heard = Callable[[str, int], None]  # is given a job's id, and its version after the write

_CHANNEL = "boost_jobs"
# A connection on which nothing is ever sent would not notice that the other side is gone.
_KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 2}


class Notifications:
    """Calls all subscribers after each write of this process to a job. Threads may share it."""

    def __init__(self) -> None:
        self._subscribers: list[Heard] = []

    def subscribe(self, heard: Heard) -> None:
        """Have something called from now on, in the thread that has written; it must not raise or wait."""
        self._subscribers.append(heard)

    def publish(self, versions: Mapping[str, int]) -> None:
        """Say that writes to jobs have been committed."""
        for job_id, version in versions.items():
            for heard in self._subscribers:
                heard(job_id, version)


def can_listen(engine: Engine) -> bool:
    """Whether the database tells processes of each other's writes."""
    return engine.dialect.name == "postgresql"


def send_probe(engine: Engine, name: str) -> None:
    """Send what who listens hears as version 0 of a job of this name, on another connection than theirs.

    A pooler may take LISTEN without a word, and then pass nothing on.
    """
    with engine.begin() as connection:
        notify(connection, {name: 0})


def notify(connection: Connection, versions: Mapping[str, int]) -> None:
    """Have other processes told of writes to jobs when they are committed, where the database can do that."""
    if can_listen(connection.engine):
        payloads = [f"{job_id} {version}" for job_id, version in versions.items()]
        connection.execute(select(func.pg_notify(_CHANNEL, func.unnest(literal(payloads, ARRAY(Text))))))


@asynccontextmanager
async def listening(engine: Engine) -> AsyncGenerator[AsyncGenerator[tuple[str, int]]]:
    """Listen to the writes of all processes on a connection of one's own: gives jobs' ids and versions as they come.

    Args:
        engine: Of a database that can listen.

    Raises:
        psycopg.OperationalError: The database cannot be reached.
    """
    arguments = connect_arguments(engine) | _KEEPALIVES
    async with await AsyncConnection.connect(autocommit=True, **arguments) as connection:
        # The database keeps what this process does not take, for all; it ends the connection of one that is stopped.
        await connection.execute(f"SET tcp_user_timeout = {SILENT_MILLISECONDS}")
        await connection.execute(f"LISTEN {_CHANNEL}")
        yield _notifications(connection)


async def _notifications(connection: AsyncConnection[Any]) -> AsyncGenerator[tuple[str, int]]:
    async for notification in connection.notifies():
        job_id, _, version = notification.payload.partition(" ")
        with suppress(ValueError):  # whoever has an account on the database may send anything
            yield job_id, int(version)
