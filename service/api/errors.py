"""Errors as problem+json (RFC 9457): for what the API refuses a request, and how exceptions map to responses."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Self

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import (
    DatabaseError,
    DisconnectionError,
    InterfaceError,
    InternalError,
    OperationalError,
    TimeoutError,  # noqa: A004
)
from starlette.exceptions import HTTPException

from service.accounts.keys import KeyNotFound, KeyRevoked
from service.accounts.quotas import QueueInUse, QueueNotFound
from service.api.middleware import is_stream
from service.api.requests import MOST_BODY_BYTES, MOST_HEADER_BYTES, MOST_TARGET_BYTES
from service.jobs.database import UNKNOWN_FAULT, fault_of
from service.jobs.datasets import DatasetConflict, DatasetNotFound
from service.jobs.model import IdempotencyKeyReused
from service.jobs.profiles import ProfileNotFound
from service.jobs.queries import JobNotFound
from service.jobs.writes import AlreadyFinished, Outdated, WrongState
from service.models.problems import FieldError, Problem, field_error, job_errors


class Unauthenticated(PermissionError):
    """The request carries no credentials, or no valid ones."""


class Forbidden(PermissionError):
    """The sender is known but may not do this, or not in this way."""


class AmbiguousHeader(ValueError):
    """A header that has one value came with several."""


class RateLimited(RuntimeError):
    """A limit was exceeded.

    Attributes:
        retry_after: Seconds after which the request may be sent again.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(f"{message}; try again in {retry_after} s")
        self.retry_after = retry_after


MEDIA_TYPE = "application/problem+json"

_MOST_FAULTS = 50  # reported per request: a megabyte of them would keep the service busy for a minute


class InvalidJob(ValueError):
    """The request is well-formed but impossible for this job; names the fields at fault.

    Args:
        errors: The fields; only the first of many are reported.
        left_out: Number of further errors.
    """

    def __init__(self, errors: Sequence[FieldError], left_out: int = 0) -> None:
        self.errors = errors[:_MOST_FAULTS]
        self.left_out = left_out + len(errors) - len(self.errors)
        super().__init__("; ".join(f"{error.field}: {error.message}" for error in self.errors))

    @classmethod
    def of(cls, error: ValidationError, model: type[BaseModel]) -> Self:
        """Convert pydantic's errors in a job or another model."""
        faults = error.errors()
        return cls(job_errors(faults[:_MOST_FAULTS], model), max(0, len(faults) - _MOST_FAULTS))


class InvalidDataset(InvalidJob):
    """The same for a dataset."""


class NotReady(RuntimeError):
    """The service cannot schedule jobs, yet or any longer; the message says why."""


class CheckpointNotFound(LookupError):
    """A job has no committed checkpoint of some step."""

    def __init__(self, job_id: str, step: int) -> None:
        super().__init__(f"job {job_id} has no checkpoint of step {step}; list its checkpoints to see which it has")


class CheckpointDamaged(ValueError):
    """A committed checkpoint can no longer be read."""


class CheckpointInUse(ValueError):
    """A checkpoint is the one that its job would resume from."""


class CheckpointPinned(ValueError):
    """A checkpoint is pinned, so it is kept until it is unpinned."""


class StoreUnavailable(RuntimeError):
    """The store does not respond, or denies access."""


# Status and code of the problem for each exception; codes never change. The detail is the exception's message.
_PROBLEMS: dict[type[Exception], tuple[HTTPStatus, str]] = {
    AmbiguousHeader: (HTTPStatus.BAD_REQUEST, "ambiguous-header"),
    Unauthenticated: (HTTPStatus.UNAUTHORIZED, "unauthenticated"),
    Forbidden: (HTTPStatus.FORBIDDEN, "forbidden"),
    RateLimited: (HTTPStatus.TOO_MANY_REQUESTS, "rate-limited"),
    JobNotFound: (HTTPStatus.NOT_FOUND, "job-not-found"),
    QueueNotFound: (HTTPStatus.NOT_FOUND, "queue-not-found"),
    KeyNotFound: (HTTPStatus.NOT_FOUND, "key-not-found"),
    ProfileNotFound: (HTTPStatus.NOT_FOUND, "profile-not-found"),
    DatasetNotFound: (HTTPStatus.NOT_FOUND, "dataset-not-found"),
    CheckpointNotFound: (HTTPStatus.NOT_FOUND, "checkpoint-not-found"),
    AlreadyFinished: (HTTPStatus.CONFLICT, "job-already-finished"),
    KeyRevoked: (HTTPStatus.CONFLICT, "wrong-state"),
    WrongState: (HTTPStatus.CONFLICT, "wrong-state"),
    QueueInUse: (HTTPStatus.CONFLICT, "queue-in-use"),
    DatasetConflict: (HTTPStatus.CONFLICT, "dataset-conflict"),
    CheckpointDamaged: (HTTPStatus.CONFLICT, "checkpoint-damaged"),
    CheckpointInUse: (HTTPStatus.CONFLICT, "checkpoint-in-use"),
    CheckpointPinned: (HTTPStatus.CONFLICT, "checkpoint-pinned"),
    Outdated: (HTTPStatus.PRECONDITION_FAILED, "precondition-failed"),
    IdempotencyKeyReused: (HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency-key-reused"),
    NotReady: (HTTPStatus.SERVICE_UNAVAILABLE, "not-ready"),
    StoreUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "store-unavailable"),
}
# SQLAlchemy's errors for a database that is down or has no connections left, but not for a faulty query.
_DATABASE_AWAY = (OperationalError, InternalError, InterfaceError, DisconnectionError, TimeoutError)
_RETRY_SECONDS = "5"
_log = logging.getLogger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error with a problem."""
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(InvalidJob, _invalid_job)
    for kind in _PROBLEMS:
        app.add_exception_handler(kind, _known_problem)
    for away in (*_DATABASE_AWAY, DatabaseError):
        app.add_exception_handler(away, _database_unavailable)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


def problem_responses(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """A route's ``responses`` for OpenAPI, for problems with these statuses."""
    return {int(status): {"model": Problem, "description": status.phrase} for status in statuses}


# Problems that every route requiring a key may answer with.
GUARDED = problem_responses(
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.INSUFFICIENT_STORAGE,
)


def document_media_type(openapi: dict[str, Any]) -> None:
    """Document the media type of problems in OpenAPI. FastAPI knows only one media type per route."""
    for path in openapi["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                if int(status) >= HTTPStatus.BAD_REQUEST:
                    (response["content"],) = ({MEDIA_TYPE: content} for content in response["content"].values())


def _answer(
    request: Request,
    status: int,
    code: str,
    detail: str,
    *,
    errors: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = Problem(
        type=f"urn:boost:problem:{code}",
        code=code,
        title=code.replace("-", " ").capitalize(),
        status=status,
        detail=detail,
        instance=request.url.path,
        errors=list(errors),
    )
    return Response(problem.model_dump_json(exclude_none=True), status, dict(headers or {}), MEDIA_TYPE)


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    fields: list[FieldError] = []
    for entry in faults[:_MOST_FAULTS]:
        place, *path = entry["loc"]
        if entry["type"] == "json_invalid":
            fields.append(FieldError(field="body", message=entry["ctx"]["error"]))
        elif place == "body":
            expected = request.scope["route"].body_field.field_info.annotation
            fields += job_errors([{**entry, "loc": tuple(path)}], expected)
        else:
            fields.append(field_error(tuple(path), entry))
    return _refused(request, "invalid-request", fields, left_out=len(faults) - len(fields))


async def _invalid_job(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidJob)
    code = "invalid-dataset" if isinstance(error, InvalidDataset) else "invalid-job"
    return _refused(request, code, error.errors, error.left_out)


def _refused(request: Request, code: str, fields: Sequence[FieldError], left_out: int = 0) -> Response:
    detail = "; ".join(f"{field.field}: {field.message}" for field in fields)
    if left_out:
        detail += f"; and {left_out} more (fix these first)"
    return _answer(request, HTTPStatus.UNPROCESSABLE_ENTITY, code, detail, errors=fields)


async def _known_problem(request: Request, error: Exception) -> Response:
    status, code = _PROBLEMS[type(error)]
    headers = {"Retry-After": _RETRY_SECONDS} if status is HTTPStatus.SERVICE_UNAVAILABLE else {}
    if isinstance(error, RateLimited):
        headers = {"Retry-After": str(error.retry_after)}
    if isinstance(error, Unauthenticated):
        headers = {"WWW-Authenticate": "Bearer"}
    return _answer(request, status, code, str(error), headers=headers)


async def _database_unavailable(request: Request, error: Exception) -> Response:
    fault = fault_of(error)
    if fault is None and not isinstance(error, _DATABASE_AWAY):
        raise error  # a faulty query of the service's own
    fault = fault or UNKNOWN_FAULT
    _log.error("%s: %s", fault.code, error)
    status = HTTPStatus.INSUFFICIENT_STORAGE if fault.code == "database-full" else HTTPStatus.SERVICE_UNAVAILABLE
    headers = {"Retry-After": _RETRY_SECONDS} if fault.transient else None
    return _answer(request, status, fault.code, fault.message, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, detail = _HTTP_PROBLEMS.get(error.status_code, (f"http-{error.status_code}", error.detail))
    headers, methods = error.headers, set[str]()
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        # All methods of the requested path; Starlette names only those of the first route with this path.
        path = getattr(request.scope.get("route"), "path", "")
        methods = {method.upper() for method in request.app.openapi()["paths"].get(path, ())}
        if "GET" in methods and not is_stream(path):
            methods.add("HEAD")
    if methods:
        headers = {"Allow": ", ".join(sorted(methods))}
    return _answer(request, error.status_code, code, detail, headers=headers)


# Written out, because the phrases of HTTPStatus differ between Python versions.
_HTTP_PROBLEMS: dict[int, tuple[str, str]] = {
    404: ("not-found", "there is nothing at this path; /openapi.json lists all paths"),
    405: ("method-not-allowed", "this path does not support this method; the Allow header lists those it supports"),
    414: ("target-too-long", f"the path and the query are longer than {MOST_TARGET_BYTES} bytes; shorten them"),
    431: ("headers-too-large", f"the headers are larger than {MOST_HEADER_BYTES} bytes; send fewer or shorter ones"),
    413: ("body-too-large", f"the body is larger than {MOST_BODY_BYTES} bytes; send less"),
}


async def _internal_error(request: Request, _error: Exception) -> Response:
    # Starlette raises the exception again after this response, and the server logs it with its traceback.
    detail = "the service failed on this request; its log says why"
    return _answer(request, HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", detail)
