"""How far a stream has been read, and what happens when it breaks off."""

from typing import Any

import httpx
from httpx_sse import ServerSentEvent

from service.client.calls import Call, Stream, get, path_of
from service.client.errors import ApiError, ServiceUnreachable
from service.client.retries import RetryPolicy
from service.jobs.model import JobEvent, JobRecord


class StreamEndedEarly(ConnectionError):
    """The service ended a stream before the job had ended, as it does when it stops."""

    def __init__(self) -> None:
        super().__init__("the stream ended early")


class EventStreamReader:
    """One stream across all its connections: each event is taken once.

    Args:
        stream: The stream to read.
        base_url: URL of the service.
        seconds: How long to keep trying while nothing arrives.
    """

    def __init__(self, stream: Stream, base_url: str, seconds: float) -> None:
        self._stream = stream
        self._base_url = base_url
        self._seconds = seconds
        self._after = stream.after
        self._patience: RetryPolicy | None = None
        self._job_finished = False

    @property
    def look(self) -> Call[JobRecord]:
        """The request for the job, which tells whether more events may follow."""
        return get(path_of("jobs", self._stream.job_id), JobRecord)

    @property
    def request(self) -> dict[str, Any]:
        """The arguments for httpx-sse's ``connect_sse`` for the next connection."""
        params = {name: value for name, value in self._stream.params.items() if value is not None}
        return {
            "method": "GET",
            "url": path_of("jobs", self._stream.job_id, self._stream.part),
            "params": params | {"follow": self._stream.follow},
            "headers": {"Last-Event-ID": str(self._after)},
        }

    def take(self, sent: ServerSentEvent) -> JobEvent | None:
        """Return the event that was received; ``None`` if the message only keeps the connection alive."""
        self._patience = None
        if not sent.data:
            return None
        event = JobEvent.model_validate_json(sent.data)
        self._after = event.id
        return event

    def looked(self, job: JobRecord) -> None:
        """Remember the job's state before a connection is opened."""
        self._job_finished = job.finished

    @property
    def is_complete(self) -> bool:
        """Whether a connection that ended cleanly has delivered everything."""
        # A connection opened before the job ended may have been closed by a service that was stopping.
        return self._job_finished or not self._stream.follow

    def pause_after(self, failure: Exception) -> float:
        """Return how many seconds to wait before the next connection.

        Raises:
            ApiError: The service refuses the stream, or has done so for too long.
            ServiceUnreachable: The service has been unreachable for too long.
        """
        self._patience = self._patience or RetryPolicy(self._seconds)
        if not isinstance(failure, ApiError | ServiceUnreachable):
            failure = ServiceUnreachable(self._base_url, failure)
        return self._patience.pause_after(failure)


BROKEN_OFF = (httpx.TransportError, ServiceUnreachable, StreamEndedEarly, ApiError)
