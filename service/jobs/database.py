"""Opening the database and bringing its tables up to date."""

import sqlite3
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, create_engine, event, make_url

_BUSY_MILLISECONDS = 30_000


def open_engine(database_url: str) -> Engine:
    """An engine for a database URL of SQLAlchemy; for a SQLite file its folder is made.

    Raises:
        sqlalchemy.exc.ArgumentError: The URL is malformed.
        OSError: The folder of a SQLite file cannot be made.
    """
    url = make_url(database_url)
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True)
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url)
    event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    """Let readers go on beside the one writer, let writers wait for each other, and check foreign keys."""
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_MILLISECONDS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def migrate(database_url: str) -> None:
    """Bring the tables to the newest revision, from whichever they are at; safe to repeat.

    Raises:
        sqlalchemy.exc.SQLAlchemyError: The database cannot be reached or changed.
    """
    config = Config()
    config.set_main_option("script_location", "service.jobs:migrations")
    engine = open_engine(database_url)
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()
