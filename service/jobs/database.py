"""Opening the database, bringing its tables up to date, and what its errors mean."""

import json
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import psycopg
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.abc import Buffer
from psycopg.types.string import StrDumperUnknown
from pydantic import BaseModel
from pydantic_core import to_json
from sqlalchemy import URL, Engine, Row, Select, create_engine, event, func, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.sql.selectable import TypedReturnsRows

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

T = TypeVar("T")
Columns = TypeVarTuple("Columns")
Model = TypeVar("Model", bound=BaseModel)


class DatabaseTooNew(SQLAlchemyError):
    """A newer version has migrated the database."""


class DatabaseGone(OperationalError):
    """The file of a SQLite database is missing or was replaced; SQLite would keep writing to the unlinked file."""


class DatabaseSlow(OperationalError):
    """A read took longer than requests wait for the database.

    Args:
        seconds: How long was waited.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(None, None, TimeoutError(f"no answer within {seconds:g} s"))


def open_engine(database_url: str | URL, seconds: float | None = WAIT_SECONDS) -> Engine:
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
    file = Path(url.database) if url.database and url.database != ":memory:" else None
    waiting = {"pool_timeout": WAIT_SECONDS if seconds is None else seconds} if file else {}
    engine = create_engine(url, json_serializer=_json, **waiting)
    busy_milliseconds = round(1000 * (_MIGRATION_SECONDS if seconds is None else seconds))
    event.listen(engine, "connect", partial(_set_up_sqlite, busy_milliseconds=busy_milliseconds))
    if file:
        # Readable only by its owner, whatever its folder allows; SQLite's log inherits the mode.
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.chmod(0o600)
        watch_file(engine, str(file))
    return engine


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
    short = open_engine(engine.url, 0)

    def bound_work(connection: sqlite3.Connection, *_: object) -> None:
        """Interrupt statements once a connection has done a certain amount of work since it left the pool."""
        work = count(1)
        connection.set_progress_handler(lambda: next(work) > _MOST_COUNTED, _INSTRUCTIONS)

    event.listen(short, "checkout", bound_work)
    with suppress(OperationalError):  # locked for a moment; then a read opens it
        short.connect().close()  # opened now, since that takes longer than a short read, and later the file may be gone
    return short.execution_options(**{SHORT_READS: True})


def watch_file(engine: Engine, file: str) -> None:
    """Make an engine remember its SQLite file on first use, and raise ``DatabaseGone`` for another in its place."""
    path = Path(file)  # made once: it is looked at whenever a connection is used
    known: tuple[int, int] | None = None

    def check_file(*_: object) -> None:
        nonlocal known
        present = None
        with suppress(OSError):
            status = path.stat()
            present = status.st_dev, status.st_ino
        if known is not None and present != known:
            remedy = "restore it, and restart the service if it is a copy"
            raise DatabaseGone(None, None, FileNotFoundError(f"{path} is missing or was replaced; {remedy}"))
        known = present

    for moment in ("do_connect", "connect", "checkout", "commit"):
        event.listen(engine, moment, check_file)


class _WithoutNul(StrDumperUnknown):
    """Text for PostgreSQL, which cannot store NUL."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(obj.replace(_NUL, _REPLACEMENT))


def _json(value: Any) -> str:
    """Encode JSON. In models, numbers that JSON lacks become strings such as ``"NaN"``, which read back as numbers."""
    if isinstance(value, BaseModel):  # in a third of the time
        return to_json(value.model_dump(), inf_nan_mode="strings").decode()
    return json.dumps(value, default=lambda model: json.loads(to_json(model.model_dump(), inf_nan_mode="strings")))


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
    """Let readers work during writes, let writers wait for each other, and check foreign keys.

    Searches in whichever case are for all alphabets; SQLite's own ``lower`` knows ASCII.
    """
    connection.create_function("lower", 1, lambda text: text and text.lower(), deterministic=True)
    for setting in (f"busy_timeout = {busy_milliseconds}", "journal_mode = WAL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {setting}")


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
                    problem = f"which BOOST {__version__} does not know: a newer version has migrated it"
                    remedy = "Run that version again, or restore the backup that was taken before the upgrade"
                    raise DatabaseTooNew(f"its tables are at revision {revision}, {problem}. {remedy}")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def read_rows(
    engine: Engine, query: TypedReturnsRows[*Columns], parameters: Mapping[str, Any] | None = None
) -> Sequence[Row[*Columns]]:
    """The rows that a query selects."""
    with engine.connect() as connection:
        return connection.execute(query, parameters).all()


def read_models(engine: Engine, model: type[Model], query: Select[Any]) -> list[Model]:
    """The rows that a query selects, each as a model whose fields are among their columns."""
    return [model.model_validate(row._asdict()) for row in read_rows(engine, query)]


def retried_once(write: Callable[[], T]) -> T:
    """Carry out a transaction, a second time if another process has just inserted the same row.

    Raises:
        sqlalchemy.exc.IntegrityError: It cannot be carried out then, either.
    """
    try:
        return write()
    except IntegrityError:
        return write()


# What is wrong with a database, by the codes of the errors that SQLite and PostgreSQL raise.


class DatabaseFault(NamedTuple):
    """A kind of problem with the database.

    Attributes:
        code: Its stable name, for programs.
        message: What is wrong and what to do, for people; names neither hosts nor statements.
        transient: Whether it may go away without an operator, so that clients should retry.
        sqlite: SQLite's codes for it.
        sqlstates: PostgreSQL's: each an SQLSTATE, or its first two digits, which name the class.
        refusals: Parts of the text, in the server's language, which is all that psycopg knows of refused connections.
        raised: Errors that stand for it, whatever their cause.
    """

    code: str
    message: str
    transient: bool = True
    sqlite: tuple[int, ...] = ()
    sqlstates: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    raised: tuple[type[Exception], ...] = ()


UNKNOWN_FAULT = DatabaseFault(
    "database-unavailable",
    "the service's database does not respond; a change in progress may or may not have been made; try again",
)
_FAULTS = (
    DatabaseFault(
        "database-unavailable",
        "the service's database file is missing or was replaced, so nothing is stored; tell the operator",
        raised=(DatabaseGone,),
    ),
    DatabaseFault(
        "database-too-many-connections",
        "the service's database has no connection left; try again; if it stays so, the operator has to allow more "
        "connections or to run fewer services on it",
        sqlstates=("53300",),
        refusals=("too many clients already", "remaining connection slots", "too many connections"),
        raised=(PoolTimeout,),
    ),
    DatabaseFault(
        "database-slow",
        "the service's database did not answer in time; a change in progress may or may not have been made; try again",
        sqlstates=("57014",),
        raised=(DatabaseSlow,),
    ),
    DatabaseFault(
        "database-full",
        "the disk of the service's database is full, so nothing can be stored; the operator has to make room there",
        transient=False,
        sqlite=(sqlite3.SQLITE_FULL,),
        sqlstates=("53100",),
    ),
    DatabaseFault(
        "database-read-only",
        "the service's database can only be read, so nothing can be stored; the operator has to make it writable: the "
        "file's permissions and mount, or a PostgreSQL that has become a standby",
        sqlite=(sqlite3.SQLITE_READONLY,),
        sqlstates=("25006",),
    ),
    DatabaseFault(
        "database-locked",
        "the service's database is locked by another writer for longer than requests wait; nothing was changed; try "
        "again",
        sqlite=(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
        sqlstates=("55P03", "40P01"),
    ),
    DatabaseFault(
        "database-refuses",
        "the service's database does not accept the service's login or has no such database; the operator has to "
        "correct BOOST_DATABASE_URL or the database's accounts",
        sqlstates=("28", "3D", "42501"),
        refusals=("authentication failed", "no pg_hba.conf entry", "does not exist"),
    ),
    DatabaseFault(
        "database-damaged",
        "the service's database cannot be read, because its disk fails or its file is damaged; the operator has to "
        "restore it from a backup",
        transient=False,
        sqlite=(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB),
        sqlstates=("58030", "XX001", "XX002"),
    ),
    DatabaseFault(
        "database-unavailable",
        "the service's database is starting or stopping; try again in some seconds",
        sqlstates=("57P01", "57P02", "57P03"),
        refusals=("the database system is",),
    ),
)


def fault_of(error: Exception) -> DatabaseFault | None:
    """Return what is wrong with the database; ``None`` if the error is of another kind, or unknown."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    code, state = getattr(cause, "sqlite_errorcode", 0) & 0xFF, getattr(cause, "sqlstate", None) or ""
    refusal = str(cause) if isinstance(cause, psycopg.Error) and not state else ""
    for fault in _FAULTS:
        coded = code in fault.sqlite or state in fault.sqlstates or state[:2] in fault.sqlstates
        if coded or isinstance(error, fault.raised) or any(part in refusal for part in fault.refusals):
            return fault
    return None


def in_words(error: Exception) -> str:
    """What is wrong, for people; the error's own text if that is not known."""
    fault = fault_of(error)
    return fault.message if fault else str(error)
