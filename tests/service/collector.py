"""A collector of OpenTelemetry spans, as far as tests need one: OTLP over HTTP, kept in memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import decompress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span, with its ids as hexadecimal digits and its times in seconds."""

    name: str
    trace: str
    id: str
    parent: str
    start: float
    end: float
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector:
    """Takes spans at ``url``; ``spans`` are those that have come."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                packed = self.headers.get("Content-Encoding") == "gzip"
                known = self.path == "/v1/traces"
                if known:
                    collector.spans += _spans(decompress(body) if packed else body)
                self.send_response(200 if known else 404)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def named(self, name: str) -> list[Received]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def collector() -> Iterator[Collector]:
    opened = Collector()
    threading.Thread(target=opened.server.serve_forever, daemon=True).start()
    try:
        yield opened
    finally:
        opened.server.shutdown()
        opened.server.server_close()


def _spans(body: bytes) -> list[Received]:
    return [
        Received(
            span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
            span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9,
            _values(span.attributes), _values(group.resource.attributes),
        )
        for group in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]  # fmt: skip


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
