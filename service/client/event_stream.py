"""How far a stream has been read, and what is done when it breaks off."""

from typing import Any

import httpx
from httpx_sse import ServerSentEvent

from service.client.calls import Call, Stream, get, path_of
from service.client.errors import ApiError, ServiceUnreachable
from service.client.retries import RetryPolicy
from service.jobs.model import JobEvent, JobRecord


class StreamEndedEarly(ConnectionError):
    """The service has ended a stream before its job had come to its end, as it does when it stops."""

    def __init__(self) -> None:
        super().__init__("the stream ended early")


class EventStreamReader:
    """One stream over all of its connections: each event is taken once.

    Args:
        stream: What is read.
        base_url: Where the service is.
        seconds: How long to go on trying when nothing comes.
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
        """Asks for the job, which tells whether there is more to come."""
        return get(path_of("jobs", self._stream.job_id), JobRecord)

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of httpx-sse's ``connect_sse`` for the next connection."""
        params = {name: value for name, value in self._stream.params.items() if value is not None}
        return {
            "method": "GET",
            "url": path_of("jobs", self._stream.job_id, self._stream.part),
            "params": params | {"follow": self._stream.follow},
            "headers": {"Last-Event-ID": str(self._after)},
        }

    def take(self, sent: ServerSentEvent) -> JobEvent | None:
        """The event in what was sent; ``None`` if that only keeps the connection alive."""
        self._patience = None
        if not sent.data:
            return None
        event = JobEvent.model_validate_json(sent.data)
        self._after = event.id
        return event

    def looked(self, job: JobRecord) -> None:
        """Take note of the job, as it is before a connection is made."""
        self._job_finished = job.finished

    @property
    def is_complete(self) -> bool:
        """Whether a connection that has ended in good order has given everything there was."""
        # One made before the job had come to its end may have been ended by a service that stopped just then.
        return self._job_finished or not self._stream.follow

    def pause_after(self, failure: Exception) -> float:
        """How many seconds to wait before the next connection.

        Raises:
            ApiError: The service refuses the stream, or has done so for too long.
            ServiceUnreachable: It has been away for too long.
        """
        self._patience = self._patience or RetryPolicy(self._seconds)
        if not isinstance(failure, ApiError | ServiceUnreachable):
            failure = ServiceUnreachable(self._base_url, failure)
        return self._patience.pause_after(failure)


BROKEN_OFF = (httpx.TransportError, ServiceUnreachable, StreamEndedEarly, ApiError)
