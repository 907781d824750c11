"""A proxy before an S3 server that hangs, refuses, cuts, shortens or redirects the calls that a test chooses."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

_QUERIES = {"list-type": "list_objects_v2", "delete": "delete_objects", "uploads": "create_multipart_upload"}
_METHODS = {"HEAD": "head_object", "GET": "get_object", "PUT": "put_object", "DELETE": "delete_object"}
_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding")


class Fault(StrEnum):
    HANG = "hang"  # no answer
    BUSY = "busy"  # 503
    CUT = "cut"  # half of the answer, then the connection ends
    SHORT = "short"  # half of the content, as if that were all
    REDIRECT = "redirect"  # to ``elsewhere``
    DENIED = "denied"  # 403


@dataclass(frozen=True)
class Call:
    """A request by s3fs's name of its operation, and the object, prefix or bucket that it is about."""

    operation: str
    key: str


class StoreProxy:
    """What runs; ``fault`` says what goes wrong with a call, and ``calls`` are those so far."""

    def __init__(self, url: str) -> None:
        self.url, self.calls = url, list[Call]()
        self.elsewhere = "http://127.0.0.1:9/elsewhere?secret=1"
        self.fault: Callable[[Call], Fault | None] = lambda _: None
        self.ended = threading.Event()


@contextmanager
def store_proxy(upstream: str) -> Iterator[StoreProxy]:
    """Run one before the server at a URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            call = _call(self.command, self.path, self.headers)
            proxy.calls.append(call)
            with suppress(ConnectionError):
                self._answer(proxy.fault(call), body)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

        def _answer(self, fault: Fault | None, body: bytes) -> None:
            match fault:
                case Fault.HANG:
                    proxy.ended.wait()
                    self.close_connection = True
                case Fault.BUSY:
                    self._refuse(503, "SlowDown", "Please reduce your request rate.")
                case Fault.DENIED:
                    self._refuse(403, "AccessDenied", "Access Denied")
                case Fault.REDIRECT:
                    self.send_response(307)
                    self.send_header("Location", proxy.elsewhere)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                case _:
                    self._forward(fault, body)

        def _refuse(self, status: int, code: str, message: str) -> None:
            content = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self._send(status, [("Content-Type", "application/xml")], len(content), content)

        def _forward(self, fault: Fault | None, body: bytes) -> None:
            connection = HTTPConnection(urlsplit(upstream).netloc, timeout=30)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            left_out = (*_HOP_BY_HOP, "content-length")
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in left_out]
            size = int(answer.getheader("content-length") or len(content))
            if fault is Fault.SHORT:
                size, content = size // 2, content[: len(content) // 2]
            if fault is Fault.CUT:
                content = content[: len(content) // 2]
                self.close_connection = True
                if not content:  # nothing to cut
                    return
            self._send(answer.status, headers, size, content)

        def _send(self, status: int, headers: list[tuple[str, str]], size: int, content: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy = StoreProxy(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()


def _call(method: str, target: str, headers: object) -> Call:
    parts = urlsplit(target)
    query = parse_qs(parts.query, keep_blank_values=True)
    key = query["prefix"][0] if "prefix" in query else parts.path.strip("/").partition("/")[2]
    for name, operation in _QUERIES.items():
        if name in query:
            return Call(operation, key)
    if "uploadId" in query:
        return Call({"PUT": "upload_part", "POST": "complete_multipart_upload"}.get(method, "abort"), key)
    if method == "PUT" and headers.get("x-amz-copy-source"):
        return Call("copy_object", key)
    return Call(_METHODS[method], key)
