"""A typed client of the REST API."""

import time
from collections.abc import Collection, Iterator
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import connect_sse
from pydantic import BaseModel, ValidationError

from boost_core.config import Drill, JobSpec
from service.jobs.model import JobEvent, JobPage, JobRecord
from service.jobs.patch import JobPatch
from service.jobs.states import JobState
from service.problems import FieldError, Problem

_Answer = TypeVar("_Answer", bound=BaseModel)

_TIMEOUT_SECONDS = 60.0  # an open stream says something at least every 15 s; looking up data may take long
_RECONNECT_SECONDS = (0.25, 0.5, 1.0, 2.0, 4.0)


class ApiError(RuntimeError):
    """The service refused a request.

    Attributes:
        status: The HTTP status.
        detail: What went wrong and what to do.
        errors: The fields at fault, when there are any.
    """

    def __init__(self, status: int, detail: str, errors: list[FieldError]) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = errors


class ServiceUnreachable(ConnectionError):
    """The service does not answer."""

    def __init__(self, base_url: str, cause: Exception) -> None:
        super().__init__(
            f"no service answers at {base_url} ({cause or type(cause).__name__}); "
            "is `boost serve` running there? Give another address with --url or BOOST_URL"
        )


class Client:
    """Talks to a BOOST service.

    Every method raises ``ApiError`` when the service refuses and ``ServiceUnreachable`` when it does not answer.

    Args:
        base_url: Where the service is, for example ``http://127.0.0.1:8900``.

    Raises:
        ValueError: ``base_url`` is no HTTP address.
    """

    def __init__(self, base_url: str) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r} is no address of a service; give one such as http://127.0.0.1:8900")
        self._base_url = base_url
        try:
            self._http = httpx.Client(base_url=base_url, timeout=_TIMEOUT_SECONDS)
        except httpx.InvalidURL as error:
            raise ValueError(f"{base_url!r} is no address of a service: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def submit(self, spec: JobSpec | dict[str, Any]) -> JobRecord:
        """Submit a job; a mapping is checked by the service."""
        return self._call("POST", "/v1/jobs", JobRecord, json=_plain(spec))

    def list(self, states: Collection[JobState] = (), limit: int = 100, cursor: str | None = None) -> JobPage:
        """One page of jobs, the newest first; ``cursor`` is the ``next_cursor`` of the page before."""
        query = {"state": [*states], "limit": limit} | ({"cursor": cursor} if cursor else {})
        return self._call("GET", "/v1/jobs", JobPage, params=query)

    def get(self, job_id: str) -> JobRecord:
        """One job."""
        return self._call("GET", _path(job_id), JobRecord)

    def cancel(self, job_id: str) -> JobRecord:
        """Ask for a job to be cancelled."""
        return self._call("DELETE", _path(job_id), JobRecord)

    def pause(self, job_id: str) -> JobRecord:
        """Ask for a job to be paused."""
        return self._call("POST", f"{_path(job_id)}/pause", JobRecord)

    def resume(self, job_id: str) -> JobRecord:
        """Put a paused job in the queue again."""
        return self._call("POST", f"{_path(job_id)}/resume", JobRecord)

    def patch(self, job_id: str, changes: JobPatch | dict[str, Any]) -> JobRecord:
        """Change a job's name, priority or limits of replicas; a mapping is checked by the service."""
        return self._call("PATCH", _path(job_id), JobRecord, json=_plain(changes))

    def drill(self, job_id: str, drill: Drill | dict[str, Any]) -> JobRecord:
        """Have a fault brought about in a job; a mapping is checked by the service."""
        return self._call("POST", f"{_path(job_id)}/drills", JobRecord, json=_plain(drill))

    def events(self, job_id: str, after: int = 0, follow: bool = True) -> Iterator[JobEvent]:
        """A job's events with ids above ``after``, in order and each once; a lost connection is made again.

        Args:
            job_id: The job.
            after: The last event already seen.
            follow: Go on until the job has come to its end; else stop after the events that there are.
        """
        self.get(job_id)  # what was never reached is not a lost connection: fail at once
        failures = 0
        while True:
            cause: Exception = ConnectionError("the stream ended early")
            try:
                for event in self._stream(job_id, after, follow):
                    after, failures = event.id, 0
                    yield event
                if not follow or self.get(job_id).finished:
                    return
            except (httpx.TransportError, ServiceUnreachable) as error:
                cause = error
            if failures == len(_RECONNECT_SECONDS):
                raise ServiceUnreachable(self._base_url, cause) from cause
            time.sleep(_RECONNECT_SECONDS[failures])
            failures += 1

    def _stream(self, job_id: str, after: int, follow: bool) -> Iterator[JobEvent]:
        request = {"params": {"follow": follow}, "headers": {"Last-Event-ID": str(after)}}
        with connect_sse(self._http, "GET", f"{_path(job_id)}/events", **request) as source:
            if source.response.is_error:
                source.response.read()
                raise _api_error(source.response)
            for sent in source.iter_sse():
                if sent.data:  # a keep-alive comes as an event without data
                    yield JobEvent.model_validate_json(sent.data)

    def _call(self, method: str, path: str, answer: type[_Answer], **request: Any) -> _Answer:
        try:
            response = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise ServiceUnreachable(self._base_url, error) from error
        if response.is_error:
            raise _api_error(response)
        try:
            return answer.model_validate_json(response.content)
        except ValidationError as error:
            raise ApiError(HTTPStatus.BAD_GATEWAY, f"{response.url} is not a BOOST service: {error}", []) from error


def _plain(body: BaseModel | dict[str, Any]) -> dict[str, Any]:
    return body.model_dump(mode="json") if isinstance(body, BaseModel) else body


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _api_error(response: httpx.Response) -> ApiError:
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return ApiError(response.status_code, f"{response.url} answered {response.status_code}", [])
    return ApiError(problem.status, problem.detail, problem.errors)
