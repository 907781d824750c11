"""Errors as problem+json (RFC 9457): which answers there are, and how exceptions become them."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from service.api.requests import MOST_BODY_BYTES
from service.jobs.queries import JobNotFound
from service.jobs.writes import AlreadyFinished, WrongState
from service.problems import FieldError, Problem, field_error, job_errors

MEDIA_TYPE = "application/problem+json"


class InvalidJob(ValueError):
    """What was asked for is well-formed but cannot be had of this job; names the fields at fault."""

    def __init__(self, errors: list[FieldError]) -> None:
        super().__init__("; ".join(f"{error.field}: {error.message}" for error in errors))
        self.errors = errors


class NotReady(RuntimeError):
    """The service cannot schedule jobs yet or any more; the message says why."""


def install_error_handlers(app: FastAPI) -> None:
    """Have every error answered with a problem."""
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(InvalidJob, _invalid_job)
    app.add_exception_handler(JobNotFound, _job_not_found)
    app.add_exception_handler(AlreadyFinished, _already_finished)
    app.add_exception_handler(WrongState, _wrong_state)
    app.add_exception_handler(NotReady, _not_ready)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)


def problem_responses(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` of a route that answers with these problems, for OpenAPI."""
    return {int(status): {"model": Problem, "description": status.phrase} for status in statuses}


def document_media_type(openapi: dict[str, Any]) -> None:
    """Say in an OpenAPI document that problems come as problem+json. FastAPI knows only one media type a route."""
    for path in openapi["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                if int(status) >= HTTPStatus.BAD_REQUEST:
                    (response["content"],) = ({MEDIA_TYPE: content} for content in response["content"].values())


def _answer(
    request: Request,
    status: int,
    kind: str,
    detail: str,
    *,
    errors: Sequence[FieldError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = Problem(
        type=f"urn:boost:problem:{kind}",
        title=kind.replace("-", " ").capitalize(),
        status=status,
        detail=detail,
        instance=request.url.path,
        errors=list(errors),
    )
    return Response(problem.model_dump_json(exclude_none=True), status, dict(headers or {}), MEDIA_TYPE)


async def _invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    fields = [found for entry in error.errors() for found in _request_errors(request, entry)]
    return _refused(request, "invalid-request", fields)


async def _invalid_job(request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidJob)
    return _refused(request, "invalid-job", error.errors)


def _refused(request: Request, kind: str, fields: Sequence[FieldError]) -> Response:
    detail = "; ".join(f"{field.field}: {field.message}" for field in fields)
    return _answer(request, HTTPStatus.UNPROCESSABLE_ENTITY, kind, detail, errors=fields)


def _request_errors(request: Request, entry: Mapping[str, Any]) -> list[FieldError]:
    place, *path = entry["loc"]
    if entry["type"] == "json_invalid":
        return [FieldError(field="body", message=entry["ctx"]["error"])]
    if place == "body":
        expected = request.scope["route"].body_field.field_info.annotation
        return job_errors([{**entry, "loc": tuple(path)}], expected)
    return [field_error(tuple(path), entry)]


async def _job_not_found(request: Request, error: Exception) -> Response:
    return _answer(request, HTTPStatus.NOT_FOUND, "job-not-found", str(error))


async def _already_finished(request: Request, error: Exception) -> Response:
    return _answer(request, HTTPStatus.CONFLICT, "job-already-finished", str(error))


async def _wrong_state(request: Request, error: Exception) -> Response:
    return _answer(request, HTTPStatus.CONFLICT, "wrong-state", str(error))


async def _not_ready(request: Request, error: Exception) -> Response:
    return _answer(request, HTTPStatus.SERVICE_UNAVAILABLE, "not-ready", str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind, detail = _HTTP_PROBLEMS.get(error.status_code, (f"http-{error.status_code}", error.detail))
    return _answer(request, error.status_code, kind, detail, headers=error.headers)


# Written out, because the phrases of HTTPStatus change from one Python to the next.
_HTTP_PROBLEMS: dict[int, tuple[str, str]] = {
    404: ("not-found", "nothing is at this path; /docs lists what there is"),
    405: ("method-not-allowed", "this path does not take this method; the Allow header lists those that it takes"),
    413: ("body-too-large", f"the body is larger than {MOST_BODY_BYTES} bytes; send less"),
}


async def _internal_error(request: Request, _error: Exception) -> Response:
    # Starlette raises the exception again behind this answer, and the server logs it with its traceback.
    detail = "the service failed on this request; its log says why"
    return _answer(request, HTTPStatus.INTERNAL_SERVER_ERROR, "internal-error", detail)
