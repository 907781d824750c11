"""What a client raises."""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from pydantic import ValidationError

from service.models.problems import FieldError, Problem

_CODES = "urn:boost:problem:"
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class ApiError(RuntimeError):
    """The service refused a request.

    Attributes:
        status: The HTTP status.
        code: The kind of problem, for example ``job-not-found``; does not change from version to version.
        detail: What went wrong and what to do.
        errors: The fields at fault, when there are any.
        retry_after: In how many seconds the service wants to be asked again; ``None`` if it does not say.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        errors: list[FieldError],
        code: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code or f"http-{status}"
        self.detail = detail
        self.errors = errors
        self.retry_after = retry_after

    @classmethod
    def of(cls, response: httpx.Response) -> "ApiError":
        """What an answer says that is an error and has been read."""
        retry_after = _seconds(response.headers.get("Retry-After"))
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            detail = f"{response.url} answered {response.status_code} {response.reason_phrase}".rstrip()
            return cls(response.status_code, detail, [], retry_after=retry_after)
        code = problem.type.removeprefix(_CODES)
        return cls(problem.status, problem.detail, problem.errors, code, retry_after)


class ServiceUnreachable(ConnectionError):
    """The service does not answer.

    Attributes:
        was_sent: Whether the request may have reached the service.
        is_final: Whether to ask again is of no use, because the service's certificate is not trusted.
    """

    def __init__(self, base_url: str, cause: Exception) -> None:
        self.was_sent = not isinstance(cause, _NEVER_SENT)
        self.is_final = any(isinstance(error, ssl.SSLCertVerificationError) for error in _chain(cause))
        remedy = (
            "name the file of the authority that has signed its certificate: verify= or `boost login --ca-file`"
            if self.is_final
            else "is `boost serve` running there? Give another address with --url or BOOST_URL"
        )
        super().__init__(f"no service answers at {base_url} ({cause or type(cause).__name__}); {remedy}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _seconds(retry_after: str | None) -> float | None:
    """The header Retry-After, which is a number of seconds or a date."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        at = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    return max(0.0, (at.astimezone(UTC) - datetime.now(UTC)).total_seconds())
