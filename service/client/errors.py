"""The errors that a client raises."""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx
from pydantic import ValidationError

from service.models.problems import FieldError, Problem
from service.proxies import proxy_of

_CODES = "urn:boost:problem:"
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class ApiError(RuntimeError):
    """The service refused a request.

    Attributes:
        status: The HTTP status.
        code: The kind of problem, for example ``job-not-found``; stable across versions.
        detail: What went wrong and what to do.
        errors: The fields at fault, if any.
        retry_after: Seconds after which to ask again, if the service says so.
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
        """Build the error from an error response that has been read."""
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
        is_final: Whether a retry is useless, because the service's certificate is not trusted.
    """

    def __init__(self, base_url: str, cause: Exception) -> None:
        self.was_sent = not isinstance(cause, _NEVER_SENT)
        self.is_final = any(isinstance(error, ssl.SSLCertVerificationError) for error in _chain(cause))
        remedy = (
            "give the CA file that its certificate is signed with: verify= or `boost login --ca-file`"
            if self.is_final
            else "is `boost serve` running there? Give another address with --url or BOOST_URL"
        )
        proxy = proxy_of(base_url)
        way = f" through the proxy {proxy.url.host}:{proxy.url.port}" if proxy else ""
        super().__init__(f"no service answers at {base_url}{way} ({cause or type(cause).__name__}); {remedy}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _seconds(retry_after: str | None) -> float | None:
    """Parse the header Retry-After, a number of seconds or a date."""
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
