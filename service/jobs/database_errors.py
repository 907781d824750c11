"""What is wrong with a database, by the codes of the errors that SQLite and PostgreSQL raise."""

import sqlite3
from dataclasses import dataclass

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from service.jobs.database import DatabaseGone, DatabaseSlow


@dataclass(frozen=True)
class DatabaseFault:
    """A kind of problem with the database.

    Attributes:
        code: Its stable name, for programs.
        message: What is wrong and what to do, for people; names neither hosts nor statements.
        transient: Whether it may go away without an operator, so that clients should retry.
    """

    code: str
    message: str
    transient: bool


UNKNOWN_FAULT = DatabaseFault(
    "database-unavailable",
    "the service's database does not respond; a change in progress may or may not have been made; try again",
    transient=True,
)
_GONE = DatabaseFault(
    "database-unavailable",
    "the service's database file is missing or was replaced, so nothing is stored; tell the operator",
    transient=True,
)
_FULL = DatabaseFault(
    "database-full",
    "the disk of the service's database is full, so nothing can be stored; the operator has to make room there",
    transient=False,
)
_READ_ONLY = DatabaseFault(
    "database-read-only",
    "the service's database can only be read, so nothing can be stored; the operator has to make it writable: the "
    "file's permissions and mount, or a PostgreSQL that has become a standby",
    transient=True,
)
_TOO_MANY_CONNECTIONS = DatabaseFault(
    "database-too-many-connections",
    "the service's database has no connection left; try again; if it stays so, the operator has to allow more "
    "connections or to run fewer services on it",
    transient=True,
)
_LOCKED = DatabaseFault(
    "database-locked",
    "the service's database is locked by another writer for longer than requests wait; nothing was changed; try again",
    transient=True,
)
_SLOW = DatabaseFault(
    "database-slow",
    "the service's database did not answer in time; a change in progress may or may not have been made; try again",
    transient=True,
)
_REFUSES = DatabaseFault(
    "database-refuses",
    "the service's database does not accept the service's login or has no such database; the operator has to correct "
    "BOOST_DATABASE_URL or the database's accounts",
    transient=True,
)
_DAMAGED = DatabaseFault(
    "database-damaged",
    "the service's database cannot be read, because its disk fails or its file is damaged; the operator has to restore "
    "it from a backup",
    transient=False,
)
_STARTING = DatabaseFault(
    "database-unavailable", "the service's database is starting or stopping; try again in some seconds", transient=True
)

_OF_SQLITE = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_IOERR: _DAMAGED,
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}
# By SQLSTATE, or its first two digits, which name the class.
_OF_POSTGRESQL = {
    "53100": _FULL,
    "53300": _TOO_MANY_CONNECTIONS,
    "25006": _READ_ONLY,
    "55P03": _LOCKED,
    "40P01": _LOCKED,
    "57014": _SLOW,
    "57P01": _STARTING,
    "57P02": _STARTING,
    "57P03": _STARTING,
    "28": _REFUSES,
    "3D": _REFUSES,
    "42501": _REFUSES,
    "58030": _DAMAGED,
    "XX001": _DAMAGED,
    "XX002": _DAMAGED,
}
# Of refused connections, psycopg knows only the text, in the server's language.
_REFUSED_CONNECTIONS = {
    "too many clients already": _TOO_MANY_CONNECTIONS,
    "remaining connection slots": _TOO_MANY_CONNECTIONS,
    "too many connections": _TOO_MANY_CONNECTIONS,
    "authentication failed": _REFUSES,
    "no pg_hba.conf entry": _REFUSES,
    "does not exist": _REFUSES,
    "the database system is": _STARTING,
}


def fault_of(error: Exception) -> DatabaseFault | None:
    """Return what is wrong with the database; ``None`` if the error is of another kind, or unknown."""
    if isinstance(error, DatabaseGone):
        return _GONE
    if isinstance(error, PoolTimeout):
        return _TOO_MANY_CONNECTIONS
    if isinstance(error, DatabaseSlow):
        return _SLOW
    cause = error.orig if isinstance(error, DBAPIError) else None
    if isinstance(cause, sqlite3.Error):
        return _OF_SQLITE.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
    if isinstance(cause, psycopg.Error):
        state = cause.sqlstate or ""
        if found := _OF_POSTGRESQL.get(state) or _OF_POSTGRESQL.get(state[:2]):
            return found
        text = "" if state else str(cause)
        return next((fault for part, fault in _REFUSED_CONNECTIONS.items() if part in text), None)
    return None


def in_words(error: Exception) -> str:
    """What is wrong, for people; the error's own text if that is not known."""
    fault = fault_of(error)
    return fault.message if fault else str(error)
