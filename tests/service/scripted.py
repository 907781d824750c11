"""A little HTTP server that answers what a test has written down for it, and notes what it was asked."""

import json
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


DROP = Answer(status=0)  # reads the request, then closes the connection without a word


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    body: Any


def problem(status: int, code: str, **headers: str) -> Answer:
    body = {
        "type": f"urn:boost:problem:{code}", "title": code, "status": status, "detail": f"it is {code}",
        "instance": "/", "code": code,
    }  # fmt: skip
    return Answer(status, body, {name.replace("_", "-"): value for name, value in headers.items()})


def events(*sent: Mapping[str, Any], cut: bool = False) -> Answer:
    """Server-sent events; ``cut`` short of what the server has announced."""
    text = "".join(f"id: {event['id']}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n" for event in sent)
    length = len(text.encode()) + (1 if cut else 0)
    return Answer(200, text, {"Content-Type": "text/event-stream", "Content-Length": str(length)})


Script = Mapping[str, Answer | Sequence[Answer]]
_ALL = "*"


class ScriptedServer:
    """Gives the answers of a script, which names requests as ``GET /v1/jobs``; the last one again and again."""

    def __init__(self, script: Script, port: int, encrypt: ssl.SSLContext | None) -> None:
        self.asked: list[Asked] = []
        self._script = {
            request: [answers] if isinstance(answers, Answer) else list(answers) for request, answers in script.items()
        }
        self._lock = threading.Lock()
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(65537)
                if not self.raw_requestline or not self.parse_request():
                    self.close_connection = True
                    return
                scripted._handle(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        if encrypt:
            self._server.socket = encrypt.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"http{'s' if encrypt else ''}://127.0.0.1:{self._server.server_port}"

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        split = urlsplit(request.path)
        body = json.loads(content) if content else None
        with self._lock:
            self.asked.append(Asked(request.command, split.path, parse_qs(split.query), dict(request.headers), body))
            answer = self._next(f"{request.command} {split.path}")
        if answer is DROP:
            request.close_connection = True
            return
        text = answer.body if isinstance(answer.body, str) else "" if answer.body is None else json.dumps(answer.body)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(text.encode()))} | answer.headers
        request.send_response(answer.status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(text.encode())
        if int(headers["Content-Length"]) > len(text.encode()):
            request.close_connection = True

    def _next(self, request: str) -> Answer:
        answers = self._script.get(request) or self._script.get(_ALL) or [problem(404, "not-found")]
        return answers.pop(0) if len(answers) > 1 else answers[0]


@contextmanager
def serving(script: Script, port: int = 0, encrypt: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    """A server that answers each request as the script says, and 404 to what is not in it."""
    server = ScriptedServer(script, port, encrypt)
    thread = threading.Thread(target=server._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._server.shutdown()
        server._server.server_close()
        thread.join()


def scripted(
    *answers: Answer, port: int = 0, encrypt: ssl.SSLContext | None = None
) -> AbstractContextManager[ScriptedServer]:
    """A server that gives these answers in order, whatever is asked."""
    return serving({_ALL: answers}, port, encrypt)
