import asyncio
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from unittest.mock import patch

import httpx
import pytest
import uvicorn.server
from playwright.sync_api import Browser

from service.accounts.keys import KeyStore
from service.api.app import create_app
from service.api.server import ApiServer
from service.client import Client
from service.jobs.database import migrate
from service.jobs.outlook import Outlook
from service.jobs.store import JobStore
from service.models.access import Scope
from service.settings import Settings
from tests.postgres import PostgresServer, postgres_server
from tests.service.browser import Visit, open_browser, visit
from tests.service.routes import READABLE

PORTS = range(61_000, 65_500)
_ports = count(61 * os.getpid(), 997)  # apart from other processes', and from each other: some take a few in a row


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def database() -> str:
    """Which one to test with; a module whose tests are for both has parameters for it."""
    return "sqlite"


@pytest.fixture
def empty_database_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if database == "sqlite":
        return f"sqlite:///{tmp_path}/home/boost.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database()


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of SQLite with all tables, to be copied."""
    file = tmp_path_factory.mktemp("migrated") / "boost.db"
    migrate(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="session")
def migrated_database(postgres: PostgresServer) -> str:
    """The URL of a database of PostgreSQL with all tables, to be copied."""
    url = postgres.create_database()
    migrate(url)
    return url


@pytest.fixture
def database_url(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of the test's own, with all tables."""
    if database == "sqlite":
        file = tmp_path / "home" / "boost.db"
        file.parent.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(request.getfixturevalue("migrated_file"), file)
        return f"sqlite:///{file}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database(request.getfixturevalue("migrated_database"))


@pytest.fixture
def store(database_url: str) -> Iterator[JobStore]:
    opened = JobStore(database_url)
    yield opened
    opened.close()


class _HurriedAsyncio:
    """``asyncio`` for uvicorn, which sleeps for a tenth of a second twice before it has stopped."""

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@pytest.fixture(scope="session", autouse=True)
def _hurried() -> Iterator[None]:
    with patch.object(uvicorn.server, "asyncio", _HurriedAsyncio()):
        yield


class RunningApi:
    """A real server in a thread, over a store."""

    def __init__(self, store: JobStore, settings: Settings) -> None:
        self.outlook = Outlook()
        self.settings = settings
        self.app = create_app(store, settings, lambda: self.outlook)
        self.port = free_port()
        self.url = f"{'https' if settings.tls_cert else 'http'}://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.server = ApiServer(self.app, self.settings.model_copy(update={"port": self.port}))
        self.app.state.context.stopping.clear()
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.01)

    def stop(self) -> float:
        """Stop the server; say how many seconds that took."""
        before = time.monotonic()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        return time.monotonic() - before


def free_port() -> int:
    """A port that hardly anybody takes before it is bound: above those that Linux gives to connections by default."""
    while True:
        port = PORTS[next(_ports) % len(PORTS)]
        with socket.socket() as listener, suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            return port


@pytest.fixture
def api(store: JobStore, database_url: str, tmp_path: Path) -> Iterator[RunningApi]:
    """A server without authentication."""
    running = RunningApi(store, Settings(home=tmp_path / "home", database_url=database_url, auth=False))
    yield running
    running.stop()


@pytest.fixture(scope="module")
def looked_at(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    """One server without authentication for a file's tests whose requests leave nothing behind."""
    home = tmp_path_factory.mktemp("looked-at")
    url = f"sqlite:///{shutil.copy(migrated_file, home)}"
    store = JobStore(url)
    running = RunningApi(store, Settings(home=home, database_url=url, auth=False, rate_per_second=10_000))
    yield running
    running.stop()
    left = store.page()[0]
    store.close()
    assert left == []


@pytest.fixture
def guarded(store: JobStore, database_url: str, tmp_path: Path) -> Iterator[RunningApi]:
    """A server that asks for keys."""
    settings = Settings(
        home=tmp_path / "home",
        database_url=database_url,
        checkpoint_root=str(tmp_path / "checkpoints"),
        allowed_prefixes=(str(READABLE),),
    )
    running = RunningApi(store, settings)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def visitor(browser: Browser, api: RunningApi) -> Iterator[Visit]:
    with visit(browser, api.url) as visiting:
        yield visiting


class With:
    """Makes HTTP clients of a server, each with a key of its own."""

    def __init__(self, server: RunningApi) -> None:
        self._server = server
        self._open = ExitStack()

    def __call__(self, *scopes: Scope, tenant: str = "default", name: str = "tester") -> httpx.Client:
        key = KeyStore(self._server.app.state.context.store.engine).create(name, tenant, scopes).key
        return self.headers({"Authorization": f"Bearer {key}"})

    def headers(self, headers: dict[str, str]) -> httpx.Client:
        return self._open.enter_context(httpx.Client(base_url=self._server.url, headers=headers, timeout=10))

    def nothing(self) -> httpx.Client:
        return self.headers({})

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def client_with(guarded: RunningApi) -> Iterator[With]:
    made = With(guarded)
    yield made
    made.close()


@pytest.fixture
def client(api: RunningApi) -> Iterator[Client]:
    with Client(api.url) as opened:
        yield opened


@pytest.fixture
def unused_url() -> str:
    return f"http://127.0.0.1:{free_port()}"
