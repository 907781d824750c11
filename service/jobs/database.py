"""Opening the database and bringing its tables up to date."""

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.abc import Buffer
from psycopg.types.string import StrDumperUnknown
from pydantic import BaseModel
from sqlalchemy import URL, Engine, create_engine, event, func, make_url, select
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError

from boost_core import __version__

WAIT_SECONDS = 10.0  # for a lock, a connection, or the end of a statement
_MIGRATION_SECONDS = 30.0  # for another process's lock on a SQLite file
SILENT_MILLISECONDS = 10_000  # then the other side is taken to be gone
SHORT_READS = "short_reads"  # the execution option of connections for short reads
_INSTRUCTIONS, _MOST_COUNTED = 1_000, 50  # of SQLite's virtual machine: a millisecond; listing 100 jobs takes a tenth

TO_POSTGRESQL = {"connect_timeout": 5, "tcp_user_timeout": SILENT_MILLISECONDS}  # in seconds and milliseconds
_NUL, _REPLACEMENT = "\0", "\ufffd"
_ESCAPED_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # and no backslash that is escaped, before u0000
_MIGRATION_LOCK = 0x626F6F7374  # any number, the same in all processes


class DatabaseTooNew(SQLAlchemyError):
    """A newer version has migrated the database.

    Args:
        revision: Revision of its tables.
    """

    def __init__(self, revision: str) -> None:
        super().__init__(
            f"its tables are at revision {revision}, which BOOST {__version__} does not know: a newer version has "
            "migrated it. Run that version again, or restore the backup that was taken before the upgrade"
        )


class DatabaseGone(OperationalError):
    """The file of a SQLite database is missing or was replaced; SQLite would keep writing to the unlinked file.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        problem = f"{path} is missing or was replaced; restore it, and restart the service if it is a copy"
        super().__init__(None, None, FileNotFoundError(problem))


class DatabaseSlow(OperationalError):
    """A read took longer than requests wait for the database.

    Args:
        seconds: How long was waited.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(None, None, TimeoutError(f"no answer within {seconds:g} s"))


class _File:
    """The file of a SQLite engine, to detect when it is replaced.

    Args:
        path: Its path.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)  # made once: it is looked at whenever a connection is used
        self._known: tuple[int, int] | None = None

    def note(self, *_: object) -> None:
        """Remember the file on first use."""
        self._known = self._known or self._identity()

    def check(self, *_: object) -> None:
        """Make sure that the file is still the same.

        Raises:
            DatabaseGone: It is missing or was replaced.
        """
        if self._known is not None and self._identity() != self._known:
            raise DatabaseGone(str(self._path))

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino


class _BoundedWork:
    """Interrupts statements once a connection has done a certain amount of work since it left the pool."""

    def __init__(self) -> None:
        self._done = 0

    def set_up(self, connection: sqlite3.Connection, record: Any) -> None:
        """Let a connection never wait, and watch its work."""
        _set_up_sqlite(connection, record, busy_milliseconds=0)
        connection.set_progress_handler(self._count, _INSTRUCTIONS)

    def begin(self, *_: object) -> None:
        """Begin to count."""
        self._done = 0

    def _count(self) -> bool:
        self._done += 1
        return self._done > _MOST_COUNTED


def open_engine(database_url: str, seconds: float | None = WAIT_SECONDS) -> Engine:
    """Create an engine for an SQLAlchemy database URL, and the folder of a SQLite file.

    Args:
        database_url: The URL.
        seconds: How long to wait for a connection, a lock or a statement of PostgreSQL, each; ``None``: as long as it
            takes, which migrations may.

    Raises:
        sqlalchemy.exc.ArgumentError: The URL is malformed, or its database is not supported.
        OSError: The folder of a SQLite file cannot be made.
    """
    url = make_url(database_url)
    if url.get_backend_name() == "postgresql":
        engine = create_engine(
            url.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,  # replaces connections from before a restart of the database
            pool_timeout=WAIT_SECONDS if seconds is None else seconds,
            connect_args=TO_POSTGRESQL,
            json_serializer=lambda value: _ESCAPED_NUL.sub(rf"\1{_REPLACEMENT}", _json(value)),  # PostgreSQL has no NUL
        )
        event.listen(engine, "connect", partial(_set_up_postgresql, milliseconds=round(1000 * (seconds or 0))))
        return engine
    if url.get_backend_name() != "sqlite":
        raise ArgumentError(f"{url.get_backend_name()!r} is not a supported database; use sqlite or postgresql")
    if url.database and url.database != ":memory:":
        # Readable only by its owner, whatever its folder allows; SQLite's log inherits the mode.
        file = Path(url.database)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.chmod(0o600)
    busy_milliseconds = round(1000 * (_MIGRATION_SECONDS if seconds is None else seconds))
    return _open_sqlite(url, partial(_set_up_sqlite, busy_milliseconds=busy_milliseconds), seconds)


def open_for_short_reads(engine: Engine) -> Engine | None:
    """Create an engine for reads that take well under a millisecond, which an event loop can do by itself.

    Its statements raise ``OperationalError`` rather than wait for a lock or run long. One thread may use it.

    Args:
        engine: The engine of the same database.

    Returns:
        The engine; ``None`` if the database is not a SQLite file; reads of others wait for a network.
    """
    if engine.dialect.name != "sqlite" or engine.url.database in (None, "", ":memory:"):
        return None
    work = _BoundedWork()
    short = _open_sqlite(engine.url, work.set_up)
    event.listen(short, "checkout", work.begin)
    with suppress(OperationalError):  # locked for a moment; then a read opens it
        short.connect().close()  # opened now, since that takes longer than a short read, and later the file may be gone
    return short.execution_options(**{SHORT_READS: True})


def _open_sqlite(url: URL, set_up: Callable[[sqlite3.Connection, Any], None], seconds: float | None = None) -> Engine:
    pooled = bool(url.database and url.database != ":memory:")
    waiting = {"pool_timeout": WAIT_SECONDS if seconds is None else seconds} if pooled else {}
    engine = create_engine(url, json_serializer=_json, **waiting)
    event.listen(engine, "connect", set_up)
    if url.database:
        file = _File(url.database)
        event.listen(engine, "connect", file.note)
        for moment in ("do_connect", "checkout", "commit"):
            event.listen(engine, moment, file.check)
    return engine


class _WithoutNul(StrDumperUnknown):
    """Text for PostgreSQL, which cannot store NUL."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace(_NUL, _REPLACEMENT))


def _json(value: Any) -> str:
    """Encode JSON; models encode themselves in a third of the time."""
    return value.model_dump_json() if isinstance(value, BaseModel) else json.dumps(value)


def _set_up_postgresql(connection: psycopg.Connection[Any], _record: Any, milliseconds: int) -> None:
    """Replace NUL in text, release the locks of a process that is stopped in mid-transaction, and bound statements."""
    connection.adapters.register_dumper(str, _WithoutNul)
    connection.add_notify_handler(lambda _: None)  # else psycopg keeps what a pooler lets come on the wrong connection
    connection.execute(f"SET idle_in_transaction_session_timeout = {SILENT_MILLISECONDS}")
    connection.execute(f"SET lock_timeout = {milliseconds}")  # 0: none
    # A little longer, so that a statement that only waits for a lock says so.
    connection.execute(f"SET statement_timeout = {milliseconds + milliseconds // 5}")
    connection.commit()


def _set_up_sqlite(connection: sqlite3.Connection, _record: Any, busy_milliseconds: int) -> None:
    """Let readers work during writes, let writers wait for each other, and check foreign keys."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {busy_milliseconds}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def migrate(database_url: str) -> None:
    """Upgrade the tables to the newest revision from any older one; safe to repeat.

    Raises:
        DatabaseTooNew: It is at a revision of a newer version.
        sqlalchemy.exc.SQLAlchemyError: The database cannot be reached or changed.
    """
    config = Config()
    config.set_main_option("script_location", "service.jobs:migrations")
    engine = open_engine(database_url, seconds=None)
    try:
        with engine.begin() as connection:
            # Of several starting processes, one migrates, completely or not at all.
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            else:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
            for revision in MigrationContext.configure(connection).get_current_heads():
                if revision not in known:
                    raise DatabaseTooNew(revision)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()
