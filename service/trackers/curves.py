"""What trackers receive: a job's events as points of curves and as text, each step of a curve only once."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import httpx
from pydantic import ValidationError

from boost_core.config import JobSpec
from boost_core.messages import RestartReport, restart_in_words
from service.jobs.model import JobEvent, JobRecord
from service.jobs.states import JobState

_GROUPS = {"progress": "train", "evaluation": "validation", "checkpoint": "checkpoint"}  # of curves, by kind of event
_NO_CURVES = frozenset({"step", "steps", "kind", "eta_seconds"})
_NO_NUMBERS = frozenset({"NaN", "Infinity", "-Infinity"})  # how events represent numbers that JSON lacks


LARGEST_ANSWER = 8 * 2**20  # bytes
LONGEST_SECONDS = 60.0  # of an answer


def read_answer(response: httpx.Response, too_large: Exception) -> bytes:
    """Read the body of a tracker's answer, which may be neither endless nor take forever.

    Args:
        response: The answer, as a stream.
        too_large: What to raise if it has more than ``LARGEST_ANSWER`` bytes.

    Raises:
        httpx.ReadTimeout: It takes longer than ``LONGEST_SECONDS``.
    """
    content, deadline = b"", time.monotonic() + LONGEST_SECONDS
    for piece in response.iter_bytes():
        content += piece
        if len(content) > LARGEST_ANSWER:
            raise too_large
        if time.monotonic() > deadline:
            raise httpx.ReadTimeout(f"its answer takes longer than {LONGEST_SECONDS:g} seconds")
    return content


class NotYet(Exception):
    """A tracker has no place for a job yet; the batch is sent again once more has happened."""


@dataclass(frozen=True)
class Entry:
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


@dataclass(frozen=True)
class Batch:
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
