"""Requests, and the progress of the jobs they submit, as OpenTelemetry spans, sent by OTLP over HTTP.

This is imported only if an endpoint is set. A job's trace is that of the request that submitted it: the
record keeps that request's ``traceparent``, and later spans are children of it, with times from the record.
So no span is open while a job waits or trains, and a restarted service continues the same trace.
"""

import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boost_core import __version__
from boost_core.messages import RestartReport
from service.jobs.model import JobEvent, JobRecord
from service.jobs.states import JobState, Reason
from service.logs import about
from service.security.redaction import redact

EXPORT_SECONDS = 3.0  # for a collector to accept spans
CLOSE_SECONDS = 5.0  # for the remaining spans when the service stops

_FAILED = 500
_TRACED = "/v1"
_w3c = TraceContextTextMapPropagator()

Attributes = Mapping[str, str | int | float]


class Phase(NamedTuple):
    """A phase of a job on the way to its first step."""

    name: str
    start: datetime
    end: datetime


def phases(events: Sequence[JobEvent]) -> Iterator[Phase]:
    """Yield a job's phases since it was last queued, up to its newest change of state.

    Args:
        events: Its changes of state, in order.
    """
    begun: list[tuple[str, datetime]] = []
    for event in events:
        match event.data["state"], event.data["reason"]:
            case JobState.SCHEDULING, reason:
                name = "start gang" if reason == Reason.GANG_STARTING else "place"
            case state, _:
                name = "queued" if state == JobState.QUEUED else str(state)
        if not begun or name != begun[-1][0]:
            begun = [*(begun if name != "queued" else ()), (name, event.time)]
    for (name, start), (_, end) in pairwise(begun):
        yield Phase(name, start, end)


class Tracing:
    """Creates spans and sends them from its own thread; an unavailable collector blocks nothing.

    Args:
        exporter: Where spans are sent, or a collector's URL for OTLP over HTTP, such as ``http://collector:4318``.

    Attributes:
        requests: Returns an app whose requests are traced.
    """

    def __init__(self, exporter: SpanExporter | str) -> None:
        if isinstance(exporter, str):
            exporter = OTLPSpanExporter(f"{exporter.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
        about_us = {"service.name": "boost", "service.version": __version__, "host.name": socket.gethostname()}
        self._provider = TracerProvider(resource=Resource.create(about_us), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._exporter = exporter
        self._tracer = self._provider.get_tracer("boost", __version__)
        self.requests = partial(TracedRequests, tracer=self._tracer)

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            self._exporter.shutdown()  # or its thread retries, and logs each failure

    def left_queue(self, job: JobRecord, events: Sequence[JobEvent]) -> None:
        """Record how a job got from the queue to its first step, or to an earlier end.

        Args:
            job: The job's present record.
            events: Its changes of state since it began to wait.
        """
        if job.traceparent:
            parent = _w3c.extract({"traceparent": job.traceparent})
            for phase in phases(events):
                self._record(*phase, parent, _about(job))

    def restarted(self, job: JobRecord, time: datetime, restart: RestartReport) -> None:
        """Record an interruption and its parts.

        Args:
            job: The job whose gang was interrupted.
            time: When training resumed.
            restart: The gang's report of it.
        """
        if not job.traceparent:
            return
        parent = _w3c.extract({"traceparent": job.traceparent})
        begun = time - timedelta(seconds=restart.seconds)
        attributes: dict[str, str | int | float] = {
            f"boost.{name}": getattr(restart, name)
            for name in ("cause", "step", "resumed_step", "recovered_from", "waiting_seconds")
        } | {"boost.message": redact(restart.message)}
        span = self._record("restart", begun, time, parent, _about(job) | attributes)
        for part, seconds in restart.parts.items():
            ended = begun + timedelta(seconds=seconds)
            self._record(part, begun, ended, set_span_in_context(span), {})
            begun = ended

    def _record(self, name: str, start: datetime, end: datetime, parent: Context, attributes: Attributes) -> Span:
        begun, ended = (round(time.timestamp() * 1e6) * 1000 for time in (start, end))  # in nanoseconds
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=begun)
        span.end(ended)
        return span


@dataclass(frozen=True)
class TracedRequests:
    """An ASGI middleware that creates a span for each API request, a child of the caller's span if there is one.

    Its ``traceparent`` is in the request's state.

    Attributes:
        app: The wrapped app.
        tracer: Creates the spans.
    """

    app: ASGIApp
    tracer: Tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and create its span."""
        if not scope["path"].startswith(_TRACED):
            await self.app(scope, receive, send)
            return
        context, method = _w3c.extract(Headers(scope=scope)), scope["method"]
        span = self.tracer.start_span(method, context, SpanKind.SERVER, attributes={"http.request.method": method})

        async def note_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= _FAILED:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(span))
        scope.setdefault("state", {})["traceparent"] = carrier["traceparent"]
        try:
            with about(trace_id=f"{span.get_span_context().trace_id:032x}"):
                await self.app(scope, receive, note_and_send)
        finally:
            if (route := getattr(scope.get("route"), "path", None)) is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
            span.end()


def _about(job: JobRecord) -> dict[str, str | int | float]:
    of_job = {f"boost.job.{name}": getattr(job, name) for name in ("id", "name", "attempt")}
    return of_job | {"boost.tenant": job.tenant, "boost.queue": job.queue}
