"""What trackers receive: a job's events as points of curves and as text, each step of a curve only once."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

import httpx
from pydantic import ValidationError

from boost_core.config import JobSpec
from boost_core.messages import RestartReport, restart_in_words
from service.jobs.model import JobEvent, JobRecord
from service.jobs.states import JobState
from service.proxies import proxy_of

_GROUPS = {"progress": "train", "evaluation": "validation", "checkpoint": "checkpoint"}  # of curves, by kind of event
_NO_CURVES = frozenset({"step", "steps", "kind", "eta_seconds"})
_NO_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})  # how events represent numbers that JSON lacks

LARGEST_ANSWER = 8 * 2**20  # bytes
LONGEST_SECONDS = 60.0  # of an answer
_SECONDS = 10.0  # of silence


def client_of(server: str, **settings: Any) -> httpx.Client:
    """Return a client for a tracker's server. Redirects are not followed: what is sent is for this server only.

    Args:
        server: The server's URL.
        settings: Further settings of the client.

    Raises:
        ValueError: The environment names a proxy for it that cannot be used.
    """
    tls, proxy = httpx.create_ssl_context(), proxy_of(server)
    return httpx.Client(base_url=server, timeout=_SECONDS, verify=tls, proxy=proxy, trust_env=False, **settings)


def ask(
    http: httpx.Client, server: str, too_large: Exception, method: str, path: str, **request: Any
) -> tuple[httpx.Response, bytes]:
    """Send a request to a tracker's server, and read its answer, which may be neither endless nor take forever.

    Args:
        http: The client.
        server: The server, for messages.
        too_large: What to raise if the answer has more than ``LARGEST_ANSWER`` bytes.
        method: The request's method.
        path: Its path, below the server's URL.
        request: The rest of it.

    Returns:
        The response, and its body.

    Raises:
        ConnectionError: The server cannot be reached, or its answer takes longer than ``LONGEST_SECONDS``.
    """
    content = b""
    try:
        with http.stream(method, path, **request) as response:
            deadline = time.monotonic() + LONGEST_SECONDS
            for piece in response.iter_bytes():
                content += piece
                if len(content) > LARGEST_ANSWER:
                    raise too_large
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"its answer takes longer than {LONGEST_SECONDS:g} seconds")
    except httpx.HTTPError as error:
        raise ConnectionError(f"{server} does not answer: {str(error) or type(error).__name__}") from error
    return response, content


class NotYet(Exception):
    """A tracker has no place for a job yet; the batch is sent again once more has happened."""


class Entry(NamedTuple):
    """An event in the form that trackers receive.

    Attributes:
        event_id: ID of the event.
        time: When it happened.
        step: Steps done by then.
        values: Points of curves, by the curve's name.
        text: The event in words, if it is not a point of a curve.
        state: The job's new state, if the event is a change of state.
    """

    event_id: int
    time: datetime
    step: int
    values: Mapping[str, float]
    text: str | None = None
    state: JobState | None = None


class Batch(NamedTuple):
    """The next events of a job for a tracker.

    Attributes:
        job: The job's present record.
        entries: At least one entry, in order.
    """

    job: JobRecord
    entries: Sequence[Entry]


class Tracker(Protocol):
    """Sends a job's curves somewhere."""

    def send(self, batch: Batch, previous: Mapping[str, Any]) -> dict[str, Any]:
        """Send a batch. If it may already have been sent, in whole or in part, the next call sends it again.

        Args:
            batch: What to send.
            previous: What the last call known to have succeeded returned; empty at first.

        Returns:
            What to pass to the next call.

        Raises:
            NotYet: There is no place for it yet, and nothing has been sent.
            Exception: It could not be sent, or may not have been; the message says why.
        """


def entry_of(event: JobEvent, marks: dict[str, int]) -> Entry:
    """Convert an event to an entry, without points at steps that their curves have already reached.

    A step repeated after a fault or a rollback was already sent when it was first done.

    Args:
        event: The event.
        marks: The last step of each curve, by name; updated.
    """
    data = event.data
    step = max([int(data.get("step", 0)), *marks.values()])
    if (group := _GROUPS.get(event.kind)) is None:
        if event.kind == "state":
            return Entry(event.id, event.time, step, {}, f"{data['state']}: {data['message']}", JobState(data["state"]))
        try:
            text = f"continues after {restart_in_words(RestartReport.model_validate(data))}"
        except ValidationError:  # from another version
            text = f"{event.kind}: {data.get('message', data)}"
        return Entry(event.id, event.time, step, {}, text)
    at = int(data["step"])
    values = {name: value for name, value in _numbers(group, data) if at > marks.get(name, -1)}
    marks.update(dict.fromkeys(values, at))
    return Entry(event.id, event.time, at, values)


def settings_of(spec: JobSpec) -> dict[str, str | float | bool]:
    """Return a spec's fields by their paths, with their values; unset fields are left out."""
    settings: dict[str, str | float | bool] = {}
    left: list[tuple[str, Any]] = [("", spec.model_dump(mode="json"))]
    while left:
        path, value = left.pop()
        match value:
            case dict():
                left += reversed([(f"{path}.{key}" if path else key, each) for key, each in value.items()])
            case list():
                if value:
                    settings[path] = json.dumps(value)
            case _ if value is not None:
                settings[path] = value
    return settings


def _numbers(path: str, data: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a report by their paths; those of named items under their names."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{path}/{key}", value)
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, Mapping) and "name" in each:
                    yield from _numbers(f"{path}/{each['name']}", each)
        elif key in _NO_CURVES or isinstance(value, bool):
            continue
        elif isinstance(value, int | float) or value in _NO_NUMBERS:
            yield f"{path}/{key}", float(value)
    if data.get("step_seconds"):
        share = float(data["exposed_communication_seconds"]) / float(data["step_seconds"])
        yield f"{path}/exposed_communication_share", share
