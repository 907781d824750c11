"""Errors as problem+json (RFC 9457): for what the API refuses a request, and how exceptions map to responses."""

import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy import exc
from starlette.exceptions import HTTPException

from boost_core.checkpoint.folder import CheckpointPinned
from service.accounts.keys import KeyNotFound, KeyRevoked
from service.accounts.tenants_and_queues import QueueInUse, QueueNotFound
from service.api.middleware import ENDLESS
from service.api.requests import MOST_BODY_BYTES, MOST_HEADER_BYTES, MOST_KEYLESS_BYTES, MOST_TARGET_BYTES
from service.jobs.database import UNKNOWN_FAULT, fault_of
from service.jobs.datasets import DatasetConflict, DatasetNotFound
from service.jobs.model import IdempotencyKeyReused, TooManyJobs
from service.jobs.profiles import ProfileNotFound
from service.jobs.queries import JobNotFound
from service.jobs.sweeps import SweepConflict, SweepNotFound
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

MOST_FAULTS = 50  # reported per request: a megabyte of them would keep the service busy for a minute


class InvalidJob(ValueError):
    """The request is well-formed but impossible for this job; names the fields at fault.

    Args:
        errors: The fields; only the first of many are reported.
        left_out: Number of further errors.
    """

    def __init__(self, errors: Sequence[FieldError], left_out: int = 0) -> None:
        self.errors = errors[:MOST_FAULTS]
        self.left_out = left_out + len(errors) - len(self.errors)
        super().__init__("; ".join(f"{error.field}: {error.message}" for error in self.errors))


class InvalidDataset(InvalidJob):
    """The same for a dataset."""


@contextmanager
def at_fault(field: str, *raised: type[Exception], value: str | None = None) -> Iterator[None]:
    """Raise some exceptions as ``InvalidJob``, with their message for a field, and its value if that is to be shown."""
    try:
        yield
    except raised as error:
        raise InvalidJob([FieldError(field=field, message=str(error), value=value)]) from error


class NotReady(RuntimeError):
    """The service cannot schedule jobs, yet or any longer; the message says why."""


class CheckpointNotFound(LookupError):
    """A job has no committed checkpoint of some step."""


class CheckpointDamaged(ValueError):
    """A committed checkpoint can no longer be read."""


class CheckpointInUse(ValueError):
    """A checkpoint is the one that its job would resume from, or another job is to start from."""


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
    SweepNotFound: (HTTPStatus.NOT_FOUND, "sweep-not-found"),
    CheckpointNotFound: (HTTPStatus.NOT_FOUND, "checkpoint-not-found"),
    SweepConflict: (HTTPStatus.CONFLICT, "sweep-conflict"),
    AlreadyFinished: (HTTPStatus.CONFLICT, "job-already-finished"),
    KeyRevoked: (HTTPStatus.CONFLICT, "wrong-state"),
    WrongState: (HTTPStatus.CONFLICT, "wrong-state"),
    QueueInUse: (HTTPStatus.CONFLICT, "queue-in-use"),
    DatasetConflict: (HTTPStatus.CONFLICT, "dataset-conflict"),
    CheckpointDamaged: (HTTPStatus.CONFLICT, "checkpoint-damaged"),
    CheckpointInUse: (HTTPStatus.CONFLICT, "checkpoint-in-use"),
    CheckpointPinned: (HTTPStatus.CONFLICT, "checkpoint-pinned"),
    Outdated: (HTTPStatus.PRECONDITION_FAILED, "precondition-failed"),
    TooManyJobs: (HTTPStatus.UNPROCESSABLE_ENTITY, "too-many-jobs"),
    IdempotencyKeyReused: (HTTPStatus.UNPROCESSABLE_ENTITY, "idempotency-key-reused"),
    NotReady: (HTTPStatus.SERVICE_UNAVAILABLE, "not-ready"),
    StoreUnavailable: (HTTPStatus.SERVICE_UNAVAILABLE, "store-unavailable"),
}
# SQLAlchemy's errors for a database that is down or has no connections left, but not for a faulty query.
_DATABASE_AWAY = (exc.OperationalError, exc.InternalError, exc.InterfaceError, exc.DisconnectionError, exc.TimeoutError)
_RETRY_SECONDS = "5"
_log = logging.getLogger(__name__)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """A route's ``responses`` for OpenAPI, for problems with these statuses."""
    return {status: {"model": Problem, "description": HTTPStatus(status).phrase} for status in statuses}


INVALID = problem_responses(422)
NOT_FOUND = problem_responses(404, 422)
CONFLICT = problem_responses(409)
BODY_REFUSED = problem_responses(413, 422)
GUARDED = problem_responses(401, 403, 414, 429, 503, 507)  # that every route requiring a key may answer with


async def _answer(request: Request, error: Exception, is_internal: bool = False) -> Response:
    if is_internal:
        error = HTTPException(HTTPStatus.INTERNAL_SERVER_ERROR)
    errors: Sequence[FieldError] = ()
    headers: Mapping[str, str] | None = None
    status: int = HTTPStatus.UNPROCESSABLE_ENTITY
    detail, left_out = "", 0
    match error:
        case RequestValidationError():
            faults, fields = error.errors(), list[FieldError]()
            for entry in faults[:MOST_FAULTS]:
                place, *path = entry["loc"]
                if entry["type"] == "json_invalid":
                    fields.append(FieldError(field="body", message=entry["ctx"]["error"]))
                elif place == "body":
                    expected = request.scope["route"].body_field.field_info.annotation
                    fields += job_errors([{**entry, "loc": tuple(path)}], expected)
                else:
                    fields.append(field_error(tuple(path), entry))
            code, errors, left_out = "invalid-request", fields, len(faults) - len(fields)
        case InvalidJob():
            code = "invalid-dataset" if isinstance(error, InvalidDataset) else "invalid-job"
            errors, left_out = error.errors, error.left_out
        case exc.SQLAlchemyError():
            fault = fault_of(error)
            if fault is None and not isinstance(error, _DATABASE_AWAY):
                raise error  # a faulty query of the service's own
            fault = fault or UNKNOWN_FAULT
            _log.error("%s: %s", fault.code, error)
            is_full = fault.code == "database-full"
            status = HTTPStatus.INSUFFICIENT_STORAGE if is_full else HTTPStatus.SERVICE_UNAVAILABLE
            code, detail = fault.code, fault.message
            headers = {"Retry-After": _RETRY_SECONDS} if fault.transient else None
        case HTTPException():
            status, headers = error.status_code, error.headers
            code, detail = _HTTP_PROBLEMS.get(status, (f"http-{status}", error.detail))
            if status == HTTPStatus.METHOD_NOT_ALLOWED:
                # All methods of the requested path; Starlette names only those of the first route with this path.
                path = getattr(request.scope.get("route"), "path", "")
                methods = {method.upper() for method in request.app.openapi()["paths"].get(path, ())}
                if "GET" in methods and not ENDLESS.fullmatch(path):
                    methods.add("HEAD")
                if methods:
                    headers = {"Allow": ", ".join(sorted(methods))}
        case _:
            status, code = _PROBLEMS[type(error)]
            detail = str(error)
            if isinstance(error, RateLimited):
                headers = {"Retry-After": str(error.retry_after)}
            elif isinstance(error, Unauthenticated):
                headers = {"WWW-Authenticate": "Bearer"}
            elif status == HTTPStatus.SERVICE_UNAVAILABLE:
                headers = {"Retry-After": _RETRY_SECONDS}
    if errors:
        detail = "; ".join(f"{field.field}: {field.message}" for field in errors)
        if left_out:
            detail += f"; and {left_out} more (fix these first)"
    urn, title, at = f"urn:boost:problem:{code}", code.replace("-", " ").capitalize(), request.url.path
    problem = Problem(type=urn, code=code, title=title, status=status, detail=detail, instance=at, errors=list(errors))
    return Response(problem.model_dump_json(exclude_none=True), status, dict(headers or {}), MEDIA_TYPE)


_TOO_LARGE = f"the body is larger than {MOST_BODY_BYTES} bytes, or than {MOST_KEYLESS_BYTES} without a key; send less"
# Written out, because the phrases of HTTPStatus differ between Python versions.
_HTTP_PROBLEMS: dict[int, tuple[str, str]] = {
    404: ("not-found", "there is nothing at this path; /openapi.json lists all paths"),
    405: ("method-not-allowed", "this path does not support this method; the Allow header lists those it supports"),
    414: ("target-too-long", f"the path and the query are longer than {MOST_TARGET_BYTES} bytes; shorten them"),
    431: ("headers-too-large", f"the headers are larger than {MOST_HEADER_BYTES} bytes; send fewer or shorter ones"),
    500: ("internal-error", "the service failed on this request; its log says why"),
    413: ("body-too-large", _TOO_LARGE),
}


# Every error is answered with a problem.
HANDLERS: dict[int | type[Exception], Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    **dict.fromkeys((RequestValidationError, HTTPException, InvalidJob, *_PROBLEMS), _answer),
    **dict.fromkeys((*_DATABASE_AWAY, exc.DatabaseError), _answer),
    # Starlette raises the exception again after this response, and the server logs it with its traceback.
    Exception: partial(_answer, is_internal=True),
}
