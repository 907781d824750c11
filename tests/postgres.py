"""A real PostgreSQL for tests: Debian's, in a folder and on a port of its own."""

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.s3 import free_ports

_PROGRAMS = Path("/usr/lib/postgresql")
_USER = "boost"
# Crashes of processes are survived without fsync, and only a crash of the machine is not. The time zone is one that
# shows who forgets to ask for UTC.
_SETTINGS = {"fsync": "off", "listen_addresses": "127.0.0.1", "timezone": "Asia/Kolkata", "max_connections": "200"}


class PostgresServer:
    """A running server, with any number of databases."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port, self._numbers = folder, port, itertools.count(1)
        self._run("initdb", "--auth=trust", f"--username={_USER}", "--encoding=UTF8", "--no-sync")
        self.start()

    def url(self, database: str) -> str:
        return f"postgresql://{_USER}@127.0.0.1:{self._port}/{database}"

    def create_database(self, like: str = "template1") -> str:
        """Make a database; give its URL.

        Args:
            like: Which one to copy, by its name or URL; nobody may be connected to it.
        """
        name, template = f"boost_{os.getpid()}_{next(self._numbers)}", like.rpartition("/")[2]
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy")
        return self.url(name)

    def start(self) -> None:
        settings = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        options = f"-p {self._port} -k {self._folder} {settings}"
        self._run("pg_ctl", "-w", "-l", f"{self._folder}/log", "-o", options, "start")

    def stop(self, how: str = "immediate") -> None:
        """End it; ``immediate`` is without notice, as in a crash."""
        self._run("pg_ctl", "-w", "-m", how, "stop")

    def restart(self) -> None:
        """Crash it, and start it again."""
        self.stop()
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(_program(program)), f"--pgdata={self._folder}", *arguments]
        done = subprocess.run(
            _as_nobody(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Run a server whose folder goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="boost-postgres-"))
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody", "nogroup")
    try:
        server = PostgresServer(folder, *free_ports(1))
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def _program(name: str) -> Path:
    found = sorted(_PROGRAMS.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    assert found, "PostgreSQL is missing; run: make postgresql"
    return found[-1]


def _as_nobody(command: list[str]) -> list[str]:
    """PostgreSQL refuses to be run by root."""
    if os.geteuid() != 0:
        return command
    return ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *command]
