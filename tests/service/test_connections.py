"""Connections that are many, or on which nothing moves."""

import asyncio
import resource
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import httpx
import psutil
import pytest

from boost_core.messages import LogLine
from service.accounts.keys import KeyStore
from service.api import server
from service.api.server import Listener, Notes, listen, most_connections
from service.jobs.model import Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from service.settings import Settings
from tests.service.certificates import self_signed
from tests.service.conftest import RunningApi, With
from tests.service.hostile import until
from tests.service.records import a_spec, a_step, numbered, start

HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
HALF_A_BODY = (
    b"POST /session HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 30\r\n\r\n{"
)
DESCRIPTORS = 300


class SmallServer:
    """``tests.service.small_server``, which may have few descriptors."""

    def __init__(self, home: Path) -> None:
        self.log = home / "log"
        command = ["prlimit", f"--nofile={DESCRIPTORS}", sys.executable, "-m", "tests.service.small_server", str(home)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(source, 0))

    def lines(self) -> list[str]:
        """What the log says of connections."""
        return [line for line in self.log.read_text().splitlines() if "connections: " in line]

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) is not None


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    server = SmallServer(tmp_path_factory.mktemp("home"))
    yield server
    server.close()


@pytest.mark.nightly
def test_thousands_of_half_sent_headers_are_closed_and_others_are_answered(small: SmallServer) -> None:
    most = DESCRIPTORS // 2
    with ExitStack() as held:
        answers = []
        began = time.monotonic()
        for _ in range(2000):
            client = held.enter_context(small.connect())
            client.sendall(HALF_A_HEAD)
            if len(answers) < most:
                answers.append(client)
        assert psutil.Process(small.process.pid).num_fds() < DESCRIPTORS * 3 // 4, "the rest is for others"
        with small.connect("127.0.0.2") as other:  # of the other half
            other.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert other.recv(100).startswith(b"HTTP/1.1 200")
        heard = [client.recv(100)[:12] for client in answers]
        assert heard.count(b"HTTP/1.1 408") == most // 2, "those that were let in"
        assert heard.count(b"HTTP/1.1 503") == most - most // 2
        assert time.monotonic() - began >= server.HEAD_SECONDS
        assert httpx.get(f"{small.url}/healthz").status_code == 200, "there is room again"
    assert small.process.poll() is None
    assert "refused, because their address had 75 open" in small.lines()[0]
    assert len(small.lines()) <= 1 + (time.monotonic() - began) // 60
    assert len(small.log.read_text()) < 10_000


@pytest.mark.nightly
def test_without_descriptors_the_server_lives_and_is_quiet(small: SmallServer) -> None:
    process = psutil.Process(small.process.pid)
    assert httpx.get(f"{small.url}/healthz").status_code == 200
    soft = process.num_fds()
    process.rlimit(psutil.RLIMIT_NOFILE, (soft, DESCRIPTORS))
    with small.connect() as waiting:
        waiting.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(3)
        process.rlimit(psutil.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        assert waiting.recv(100).startswith(b"HTTP/1.1 200"), "it has only waited"
    assert "out of system resource" not in small.log.read_text(), "asyncio says so every second"
    assert small.process.poll() is None


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this process that waits for nobody for long."""
    for name in ("HEAD_SECONDS", "BODY_SECONDS", "READ_SECONDS", "TLS_SECONDS"):
        monkeypatch.setattr(server, name, 2.0)


def closed_after(client: socket.socket) -> tuple[float, bytes]:
    """When the server closes a connection, and what it has said before."""
    before, said = time.monotonic(), b""
    client.settimeout(20)
    while part := client.recv(2**16):
        said += part
    return time.monotonic() - before, said


@pytest.mark.full
def test_every_part_of_a_request_has_its_time(hurried: None, guarded: RunningApi) -> None:
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with ExitStack() as held:
        clients = {}
        for sent in (b"", b"GET", HALF_A_HEAD, HALF_A_BODY, whole + HALF_A_HEAD, whole + HALF_A_BODY):
            clients[sent] = held.enter_context(socket.create_connection(("127.0.0.1", guarded.port)))
            clients[sent].sendall(sent)
        for sent, client in clients.items():
            seconds, said = closed_after(client)
            assert seconds < 15, sent
            assert said.startswith(b"HTTP/1.1 408") != sent.startswith(whole), sent
            assert said.endswith(b"the request did not arrive in time; send it faster") or sent.startswith(whole)


@pytest.mark.nightly
def test_a_trickle_gains_no_time(hurried: None, guarded: RunningApi) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port)) as client:
        client.sendall(HALF_A_HEAD)
        with pytest.raises(OSError, match=r"(?i)broken pipe|reset"):
            for _ in range(200):
                client.sendall(b"x")
                time.sleep(0.1)


@pytest.mark.nightly
def test_what_is_in_time_is_answered_however_slowly(hurried: None, guarded: RunningApi) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port)) as client:
        for _ in range(3):
            for part in (b"GET /hea", b"lthz HTTP/1.1\r\n", b"Host: localhost\r\n", b"\r\n"):
                client.sendall(part)
                time.sleep(0.25)
            answer = HTTPResponse(client)  # which reads it whole, in however many parts it comes
            answer.begin()
            assert answer.status == 200 and answer.read() == b'{"status":"ok"}'


@pytest.mark.nightly
def test_a_handshake_has_its_time(hurried: None, store: JobStore, database_url: str, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    settings = Settings(home=tmp_path, database_url=database_url, tls_cert=certificate, tls_key=key)
    server = RunningApi(store, settings)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            seconds, said = closed_after(client)
            assert 1 < seconds < 15 and said == b""
        context = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{server.url}/healthz", verify=context).status_code == 200
    finally:
        server.stop()


CHUNKED = b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.full
@pytest.mark.parametrize(
    ("request_line", "status"), [(b"POST /nowhere", b"404"), (b"POST /session", b"400"), (b"GET /healthz", b"200")]
)
@pytest.mark.parametrize("at_once", [True, False])
def test_who_stops_speaking_http_is_cut_off_without_a_traceback(
    api: RunningApi, caplog: pytest.LogCaptureFixture, request_line: bytes, status: bytes, at_once: bool
) -> None:
    with socket.create_connection(("127.0.0.1", api.port)) as client:
        client.sendall(request_line + b" HTTP/1.1\r\n" + CHUNKED + (b"zz\r\n" if at_once else b""))
        if not at_once:
            if status != b"400":  # the others answer without the body
                assert client.recv(12) == b"HTTP/1.1 " + status
            client.sendall(b"zz\r\n")
        _, said = closed_after(client)
    assert b"HTTP/1.1" not in said or said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 " + status))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.full
@pytest.mark.parametrize(
    "head",
    [
        b"POST /session HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked",
        b"POST /session HTTP/1.1\r\ntransfer-encoding: chunked\r\nCONTENT-LENGTH: 3",
        b"POST /session HTTP/1.0\r\nTransfer-Encoding: chunked",
        b"POST /session HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4",
    ],
)
@pytest.mark.parametrize("second", [False, True], ids=["first", "later"])
def test_a_request_whose_end_is_ambiguous_is_refused_with_what_follows(
    api: RunningApi, head: bytes, second: bool
) -> None:
    smuggled = b"0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", api.port)) as client:
        if second:
            client.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += client.recv(65_536)
        client.sendall(head + b"\r\nHost: localhost\r\n\r\n" + smuggled)
        _, said = closed_after(client)
    assert said.startswith(b"HTTP/1.1 400") and said.count(b"HTTP/1.1") == 1


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_comes(api: RunningApi) -> None:
    with socket.create_connection(("127.0.0.1", api.port)) as client:
        client.sendall(b"POST /session HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000000\r\n\r\n")
        client.settimeout(20)
        assert client.recv(12) == b"HTTP/1.1 413"


@pytest.mark.nightly
def test_streams_stay_open_unless_nobody_reads_them(
    hurried: None, guarded: RunningApi, client_with: With, store: JobStore
) -> None:
    job = store.create(a_spec(), "/checkpoints", Owner("default", "ann"))
    start(store, job.id)
    key = KeyStore(store.engine).create("tester", "default", (Scope.READ,)).key
    request = (
        f"GET /v1/jobs/{job.id}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
    )
    with ExitStack() as held:
        reader, idler = (held.enter_context(socket.socket()) for _ in range(2))
        idler.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for client in (reader, idler):
            client.connect(("127.0.0.1", guarded.port))
            client.sendall(request)
        until(lambda: len(guarded.server.server_state.connections) == 2)
        reports = [LogLine(rank=0, level="INFO", message="x" * 50_000) for _ in range(200)]
        store.append_reports(job.id, 1, numbered(*reports))
        reader.settimeout(20)
        said = 0
        while said < 10_000_000:  # more than any buffer holds
            said += len(reader.recv(2**20))
        until(lambda: len(guarded.server.server_state.connections) == 1)
        time.sleep(2 * server.READ_SECONDS)
        store.append_reports(job.id, 1, numbered(a_step(7), first=len(reports) + 1))
        until(lambda: b'"step":7' in reader.recv(2**20))


def test_connections_are_counted_until_they_are_closed() -> None:
    busy = b"HTTP/1.1 503"

    async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"open")
        await reader.read()
        writer.close()

    async def serve() -> list[bytes]:
        listener = Listener(listen("127.0.0.1", 0), 4, ["127.0.0.9"], False, Notes())
        address = listener.getsockname()
        server = await asyncio.start_server(until_closed, sock=listener)
        opened: list[socket.socket] = []

        async def connect(source: str) -> bytes:
            client = socket.socket()
            client.bind((source, 0))
            client.setblocking(False)
            opened.append(client)
            await asyncio.get_running_loop().sock_connect(client, address)
            return (await asyncio.get_running_loop().sock_recv(client, 100))[:12]

        sources = ["127.0.0.1"] * 3 + ["127.0.0.2"] + ["127.0.0.9"] * 2
        heard = [await connect(source) for source in sources]
        for client in opened:
            client.close()
        while (again := await connect("127.0.0.1")) == busy:  # until the server has noticed
            await asyncio.sleep(0.01)
        heard.append(again)
        opened[-1].close()
        server.close()
        return heard

    assert asyncio.run(serve()) == [b"open", b"open", busy, b"open", b"open", busy, b"open"]


def test_a_refused_connection_may_have_been_reset() -> None:
    listener = Listener(listen("127.0.0.1", 0), 0, [], False, notes := Notes())
    with listener, socket.create_connection(listener.getsockname()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert notes.total() == 1


def test_half_of_the_descriptors_are_left_to_others() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert most_connections(10) == 10
    assert most_connections(10 * soft) == soft // 2


def test_the_log_has_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    for second in range(150):
        notes["closed"] += 1
        notes.write(float(second))
    assert [record.message for record in caplog.records] == [
        "connections: 1 closed", "connections: 60 closed", "connections: 60 closed"
    ]  # fmt: skip


@pytest.mark.full
def test_who_does_not_read_an_answer_does_not_keep_the_server_from_stopping(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.stop()
    grace = server.GRACE_SECONDS
    monkeypatch.setattr(server, "GRACE_SECONDS", 1)
    api.start()
    with socket.create_connection(("127.0.0.1", api.port)) as client:
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 60)  # more than buffers hold
        until(lambda: api.server.server_state.tasks)
        time.sleep(1)
        assert api.stop() < grace
    api.start()
