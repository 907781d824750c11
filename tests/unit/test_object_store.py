"""What an object store's client does that s3fs alone would not: it follows no redirects, and each call ends."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from boost_core.config.base import StoreUnusable
from boost_core.config.s3 import ObjectStore, RedirectRefused, ShortAnswer, StoreTimeout
from boost_core.config.storage import giving_up_soon

TOKEN = "a-session-token"
SECONDS = 1.0

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """One that answers as it is told, and keeps the requests' headers."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.answer: Answer = lambda handler: send(handler, 200)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                server.headers.append(dict(self.headers))
                server.answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, content: bytes = b"", **headers: str) -> None:
    handler.send_response_only(status)
    for name, value in {"content-length": str(len(content)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(content)


def error(handler: BaseHTTPRequestHandler, status: int, code: str) -> None:
    send(handler, status, f"<Error><Code>{code}</Code><Message>It said so.</Message></Error>".encode())


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def elsewhere() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.fixture
def store(server: Server) -> ObjectStore:
    return connected(server, 30.0)


@pytest.fixture
def brief(server: Server) -> ObjectStore:
    return connected(server, SECONDS)


def connected(server: Server, seconds: float) -> ObjectStore:
    store: ObjectStore = fsspec.filesystem("s3", call_seconds=seconds, **reaching(server))
    store.connect()  # which takes a busy machine a while
    return store


def reaching(server: Server) -> dict[str, object]:
    return {
        "key": "k", "secret": "s", "token": TOKEN, "endpoint_url": f"http://{server.place}",
        "client_kwargs": {"region_name": "us-east-1"}, "use_listings_cache": False, "skip_instance_cache": True,
    }  # fmt: skip


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "list_objects_v2": lambda store: store.find("bucket/a"),
    "head_object": lambda store: store.info("bucket/a"),
    "get_object": lambda store: store.cat_file("bucket/a", start=0, end=100),
    "put_object": lambda store: store.pipe_file("bucket/a", b"content"),
    "delete_object": lambda store: store.rm_file("bucket/a"),
    "create_multipart_upload": lambda store: store.pipe_file("bucket/a", b"content" * 3, chunksize=8),
}


@pytest.mark.full
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_no_token_leaves(
    server: Server, elsewhere: Server, store: ObjectStore, status: int
) -> None:
    target = f"http://{elsewhere.place.replace('127.0.0.1', 'localhost')}/latest/meta-data?token=hidden"
    server.answer = lambda handler: send(handler, status, location=target, x_amz_bucket_region="eu-west-1")
    for name, call in CALLS.items():
        with pytest.raises(RedirectRefused) as refused:
            call(store)
        message = str(refused.value)
        assert f"http://{server.place} redirects to http://localhost:{elsewhere.place.partition(':')[2]}," in message
        assert message.endswith("; the bucket is in the region eu-west-1, so set that region")
        assert message.startswith(f"{name} of s3://bucket/a") and "hidden" not in message and TOKEN not in message
    assert elsewhere.headers == [] and len(server.headers) == len(CALLS)
    assert all(headers["X-Amz-Security-Token"] == TOKEN for headers in server.headers), "only the store gets it"


@pytest.mark.full
def test_every_way_to_a_store_leads_to_the_same_client(server: Server, elsewhere: Server) -> None:
    server.answer = lambda handler: send(handler, 307, location=f"http://{elsewhere.place}/a")
    with pytest.raises(RedirectRefused), fsspec.open("s3://bucket/a", "rb", **reaching(server)):
        pass
    brief, _ = fsspec.url_to_fs("s3a://bucket/a", **giving_up_soon(reaching(server)))
    with pytest.raises(RedirectRefused):
        brief.exists("bucket/a")
    assert elsewhere.headers == []


def on_container(server: Server, _folder: Path) -> dict[str, str]:
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{server.place}/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": TOKEN,
    }


def on_instance(server: Server, _folder: Path) -> dict[str, str]:
    return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{server.place}/"}


def with_web_identity(server: Server, folder: Path) -> dict[str, str]:
    (folder / "identity").write_text(TOKEN)
    return {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer", "AWS_WEB_IDENTITY_TOKEN_FILE": f"{folder}/identity",
        "AWS_ENDPOINT_URL_STS": f"http://{server.place}",
    }  # fmt: skip


def issue(handler: BaseHTTPRequestHandler) -> None:
    """Answer as container and instance metadata and STS do."""
    until = "2099-01-01T00:00:00Z"
    if handler.command == "POST":
        content = (
            "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>issued"
            "</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>"
            f"{until}</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )
    elif handler.path.endswith(("/api/token", "/security-credentials/")):
        content = TOKEN  # or the name of the role
    else:
        content = json.dumps({"AccessKeyId": "issued", "SecretAccessKey": "s", "Token": "t", "Expiration": until})
    send(handler, 200, content.encode())


@pytest.mark.full
@pytest.mark.parametrize("issuer", [on_container, on_instance, with_web_identity])
def test_who_fetches_credentials_follows_no_redirect_either(
    server: Server, elsewhere: Server, tmp_path: Path, issuer: Callable[[Server, Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    credentials = Server()
    for name, value in issuer(credentials, tmp_path).items():
        monkeypatch.setenv(name, value)
    options = {name: value for name, value in reaching(server).items() if name not in ("key", "secret", "token")}
    try:
        target = f"http://{elsewhere.place}/"
        credentials.answer = lambda handler: (
            send(handler, 200, TOKEN.encode()) if handler.command == "PUT" else send(handler, 307, location=target)
        )
        with pytest.raises(
            RedirectRefused, match=rf"head_object of s3://bucket/a: http://{credentials.place} redirects"
        ):
            fsspec.filesystem("s3", **options).info("bucket/a")
        assert elsewhere.headers == server.headers == []
        credentials.answer = issue
        fsspec.filesystem("s3", **options).info("bucket/a")
        assert "Credential=issued/" in server.headers[0]["Authorization"]
    finally:
        credentials.stop()


@pytest.mark.full
@pytest.mark.parametrize(("status", "located"), [(301, False), (301, True), (307, True)])
def test_the_region_that_aws_names_is_tried_and_then_told(server: Server, status: int, located: bool) -> None:
    """The server is the proxy on the way to AWS."""
    aws = "http://s3.us-east-1.amazonaws.com"
    options = reaching(server) | {"config_kwargs": {"proxies": {"http": f"http://{server.place}"}}}
    location = {"location": "http://bucket.s3.eu-west-1.amazonaws.com/a"} if located else {}
    wrong = {"x_amz_bucket_region": "eu-west-1", **location}
    server.answer = lambda handler: send(handler, status, **wrong)
    for name, call in CALLS.items():
        with pytest.raises(OSError, match=rf"{name} of s3://bucket/a.*; the bucket is in the region eu-west-1, so set"):
            call(fsspec.filesystem("s3", **options | {"endpoint_url": aws}))
    assert "/eu-west-1/s3/" in server.headers[-1]["Authorization"]
    assert {headers["Host"] for headers in server.headers} <= {"s3.us-east-1.amazonaws.com"}
    # Without an endpoint of its own, the client goes to the one of that region.
    server.answer = lambda handler: (
        send(handler, 200) if "eu-west-1" in handler.headers["Host"] else send(handler, status, **wrong)
    )
    fsspec.filesystem("s3", **options | {"endpoint_url": None, "use_ssl": False}).info("bucket/a")
    assert server.headers[-1]["Host"] == "bucket.s3.eu-west-1.amazonaws.com"


@pytest.mark.full
@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_and_is_named(server: Server, brief: ObjectStore, call: str) -> None:
    ended = threading.Event()
    server.answer = lambda _: ended.wait()
    began = time.monotonic()
    try:
        with pytest.raises(StoreTimeout, match=rf"^{call} of s3://bucket/a.*: .* not answered in full within 1 s$"):
            CALLS[call](brief)
        assert time.monotonic() - began < SECONDS + 3
    finally:
        ended.set()


@pytest.mark.full
def test_a_body_that_trickles_ends(server: Server, brief: ObjectStore) -> None:
    ended = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response_only(206)
        handler.send_header("content-length", "100")
        handler.send_header("content-range", "bytes 0-99/100")
        handler.end_headers()
        while not ended.wait(0.1):
            handler.wfile.write(b"x")

    server.answer = trickle
    try:
        with pytest.raises(StoreTimeout, match=r"get_object of s3://bucket/a"):
            brief.cat_file("bucket/a", start=0, end=100)
    finally:
        ended.set()


@pytest.mark.full
def test_a_busy_store_is_tried_again_and_then_quoted(server: Server, store: ObjectStore, brief: ObjectStore) -> None:
    server.answer = lambda handler: error(handler, 503, "SlowDown") if len(server.headers) < 3 else send(handler, 200)
    store.pipe_file("bucket/a", b"content")
    server.answer = lambda handler: error(handler, 503, "SlowDown")
    with pytest.raises(StoreTimeout, match=r"the attempt before failed with: SlowDown: It said so\."):
        brief.pipe_file("bucket/a", b"content")


@pytest.mark.full
def test_the_answer_is_what_was_asked_for(server: Server, store: ObjectStore) -> None:
    server.answer = lambda handler: send(handler, 206, b"x" * 60, content_range="bytes 0-99/1000")
    with pytest.raises(ShortAnswer, match=r"get_object of s3://bucket/a: the store has sent 60 bytes of 100"):
        store.cat_file("bucket/a", start=0, end=100)
    server.answer = lambda handler: send(handler, 206, b"x" * 60, content_range="bytes 0-59/60")
    assert store.cat_file("bucket/a", start=0, end=100) == b"x" * 60, "that is all there is"
    server.answer = lambda handler: send(handler, 200, b"x" * 60)
    assert store.cat_file("bucket/a", start=0, end=100) == b"x" * 60, "nor does a server have to send parts"


def test_what_is_denied_is_named(server: Server, store: ObjectStore) -> None:
    server.answer = lambda handler: error(handler, 403, "AccessDenied")
    for name, call in CALLS.items():
        with pytest.raises(PermissionError, match=rf"^{name} of s3://bucket/a.*: .*; this takes s3:\w+"):
            call(store)


def test_credentials_that_are_refused_are_no_missing_permission(server: Server, store: ObjectStore) -> None:
    server.answer = lambda handler: error(handler, 403, "ExpiredToken")
    with pytest.raises(PermissionError, match=r"put_object of s3://bucket/a: ExpiredToken: It said so\.$"):
        store.pipe_file("bucket/a", b"content")


@pytest.mark.full
def test_files_that_are_not_deleted_are_told_of(server: Server, store: ObjectStore) -> None:
    refused = b"<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code><Message>No.</Message></Error></DeleteResult>"
    server.answer = lambda handler: send(handler, 200, refused)
    with pytest.raises(PermissionError, match=r"delete_objects of s3://bucket/a: No\.; this takes s3:DeleteObject"):
        store.rm(["bucket/a"])


def test_a_store_that_is_not_there_is_said_in_words() -> None:
    store = fsspec.filesystem("s3", key="k", secret="s", endpoint_url="http://127.0.0.1:9", attempts=1)
    with pytest.raises(StoreUnusable, match=r"cannot be used: head_object of s3://bucket/a: Could not connect"):
        store.info("bucket/a")
