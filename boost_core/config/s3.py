"""Object stores as s3fs sees them, with what a job needs besides.

- Each call has a total deadline, its retries included, and so has each answer's body; s3fs alone would repeat a call to
  a store that never answers for many minutes.
- An answer that is shorter than the requested range is an error.
- Errors name the operation, the object and, where access is denied, the permission that is missing.
- No HTTP redirect is followed, neither by the store's client nor by those that fetch its credentials. aiohttp follows
  them to any host, with the session token. What S3 itself says about a bucket's region is left to botocore, which stays
  within the endpoint that is configured or within AWS; if that does not help, the error names the region.
"""

import asyncio
import random
import re
from collections import ChainMap
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioContainerProvider, AioInstanceMetadataProvider
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from aiobotocore.utils import _RefCountedSessionMixin
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, ReadTimeoutError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError
from botocore.utils import get_environ_proxies
from fsspec.asyn import sync_wrapper
from s3fs.core import S3FileSystem, _error_wrapper

from boost_core.config.base import UNUSABLE, StoreUnusable

CALL_SECONDS = 30.0
_LEAST_BYTES_PER_SECOND = 2**20  # what is sent or received gets as much more time
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 4.0  # seconds between attempts; each pause is twice the one before
_TRANSIENT = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "XAmzContentSHA256Mismatch"}

_PERMISSIONS = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "complete_multipart_upload": "s3:PutObject",
    "copy_object": "s3:GetObject and s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "get_object": "s3:GetObject",
    "head_bucket": "s3:ListBucket",
    "head_object": "s3:GetObject, and s3:ListBucket if it may be absent",
    "list_objects_v2": "s3:ListBucket",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
}
_LATE = "{}: the store has not answered in full within {:.0f} s"
_DENIED = ("AccessDenied", "403")  # of a HEAD, there is but the status
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_OF_AWS = (".amazonaws.com", ".amazonaws.com.cn")
_REGION = re.compile(r"[a-z0-9-]{1,40}")


class StoreTimeout(StoreUnusable):
    """A call to an object store has taken longer than its deadline."""


class RedirectRefused(StoreUnusable):
    """An object store, or a service that issues its credentials, redirects requests, and that is not followed."""


class ShortAnswer(StoreUnusable, aiohttp.ClientPayloadError):
    """An object store has sent less than was requested. s3fs retries it, like an answer that was cut off."""


class ObjectStore(S3FileSystem):  # type: ignore[misc]  # s3fs has no types
    """An object store that speaks S3.

    Args:
        call_seconds: How long a call may take in total, in addition to a second per MiB sent or received.
        attempts: How often a call is tried in that time, if it fails for reasons that may pass.
        config_kwargs: botocore's options.
        profile: Profile in the files of AWS's tools to take credentials from.
        options: s3fs's own.
    """

    def __init__(
        self, *, call_seconds: float = CALL_SECONDS, attempts: int = 6, config_kwargs: Mapping[str, Any] | None = None,
        profile: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        own = {"retries": {"total_max_attempts": 1}}
        session = _Session(profile=profile)
        session.set_default_client_config(AioConfig(http_session_cls=_NoRedirectSession))
        super().__init__(config_kwargs={**(config_kwargs or {}), **own}, session=session, **options)
        self.call_seconds, self.attempts = float(call_seconds), int(attempts)  # as text from the environment

    @property
    def endpoint(self) -> str:
        """Where the store is, if the job's secret says so; empty for the one that all processes of the node have."""
        return str(self.endpoint_url or self.client_kwargs.get("endpoint_url") or "")

    async def _call_s3(self, method: str, *others: Mapping[str, Any], **named: Any) -> Any:
        """Call S3.

        Raises:
            FileNotFoundError: No such object or bucket exists.
            PermissionError: The store refuses it; the message names the permission.
            StoreUnusable: The store does not answer, or its answer cannot be used.
            OSError: The store has answered with another error.
        """
        objects, body = named.get("Delete", {}).get("Objects", ()), named.get("Body", b"")
        key = named.get("Key") or named.get("Prefix") or (objects[0]["Key"] if objects else "")
        more = f" and {len(objects) - 1} more" if len(objects) > 1 else ""
        what = f"{method} of s3://{named.get('Bucket', '')}/{key}{more}"
        size = len(body) if isinstance(body, (bytes, bytearray, memoryview)) else 0
        seconds = self.call_seconds + size / _LEAST_BYTES_PER_SECOND
        failures: list[Exception] = []
        try:
            async with asyncio.timeout(seconds) as deadline:
                # As s3fs does, but with these attempts alone, where its own are each as many of botocore's.
                await self.set_session()
                call = getattr(await self.get_s3(named.get("Bucket")), method)
                arguments = self._get_s3_method_kwargs(call, *others, **named)
                while True:
                    try:
                        answer = await _error_wrapper(call, kwargs=arguments, retries=1)
                        break
                    except Exception as error:
                        if len(failures) + 1 >= self.attempts or not _is_transient(error):
                            raise
                        failures.append(error)
                    await asyncio.sleep(random.uniform(0.5, 1) * min(_FIRST_PAUSE * 2 ** len(failures), _LONGEST_PAUSE))
        except (FileNotFoundError, FileExistsError):
            raise
        except RedirectRefused as error:
            raise RedirectRefused(f"{what}: {error}") from error
        except (OSError, BotoCoreError, aiohttp.ClientError, ResponseParserError) as error:
            timed_out = isinstance(error, TimeoutError)
            if timed_out and deadline.expired():
                # Why the last attempt failed says more than that the time is up.
                before = f"; the attempt before failed with: {_message_of(failures[-1])}" if failures else ""
                raise StoreTimeout(f"{_LATE.format(what, seconds)}{before}") from error
            if timed_out or not isinstance(error, OSError) or _is_transient(error):
                raise StoreUnusable(UNUSABLE.format(f"{what}: {_message_of(error)}")) from error
            # The same error of the same kind, with the operation, the object and the permission that it takes.
            text = f"{what}: {(message := _message_of(error))}"
            if message.startswith(_DENIED) and method in _PERMISSIONS:
                text += f"; this takes {_PERMISSIONS[method]}"
            kind = type(error)
            raise (kind(text) if error.errno is None else kind(error.errno, text)) from error
        if method == "get_object":
            size = expected = int(answer["ContentLength"])
            if part := _RANGE.fullmatch(ChainMap(named, *map(dict, reversed(others))).get("Range", "")):
                begin, last = (int(number) for number in part.groups())
                sent = _CONTENT_RANGE.fullmatch(answer.get("ContentRange") or "")
                total = int(sent.group(3)) if sent else size
                expected = max(0, min(last, total - 1) - begin + 1)
            if size != expected:
                answer["Body"].close()
                raise ShortAnswer(f"{what}: the store has sent {size} bytes of {expected}")
            seconds = self.call_seconds + size / _LEAST_BYTES_PER_SECOND
            return {**answer, "Body": _Body(answer["Body"], what, seconds)}
        if method == "delete_objects" and (refused := answer.get("Errors")):
            first = refused[0]
            text = f"delete_objects of s3://{named['Bucket']}/{first.get('Key', '')}: "
            text += str(first.get("Message") or first.get("Code"))
            if first.get("Code") == "AccessDenied":
                raise PermissionError(f"{text}; this takes {_PERMISSIONS['delete_objects']}")
            raise OSError(text)
        return answer

    call_s3 = sync_wrapper(_call_s3)  # s3fs's own would call s3fs's own


class _Body:
    """The body of an answer, with a deadline for all of it and errors that name it."""

    def __init__(self, body: Any, what: str, seconds: float) -> None:
        self._body, self._what, self._seconds = body, what, seconds
        self._until = asyncio.get_running_loop().time() + seconds

    async def read(self, amt: int | None = None) -> bytes:
        """Read up to ``amt`` bytes; default: all."""
        try:
            async with asyncio.timeout_at(self._until):
                content: bytes = await self._body.read(amt)
        except (TimeoutError, ReadTimeoutError) as error:
            raise StoreTimeout(_LATE.format(self._what, self._seconds)) from error
        except (HTTPClientError, BotoCoreError, aiohttp.ClientError) as error:
            raise ShortAnswer(f"{self._what}: the answer was cut off: {error}") from error
        return content

    def close(self) -> None:
        """Close the connection if it has not been read to the end."""
        self._body.close()


class _Session(AioSession):  # type: ignore[misc]  # aiobotocore has no types
    """aiobotocore's session, of which also the clients that fetch credentials follow no redirects."""

    def _create_credential_resolver(self) -> Any:
        resolver = super()._create_credential_resolver()
        for provider in resolver.providers:  # these two send requests without a client
            if isinstance(provider, AioContainerProvider):
                provider._fetcher._session = _MetadataSession(timeout=provider._fetcher.TIMEOUT_SECONDS)
            elif isinstance(provider, AioInstanceMetadataProvider):
                fetcher = provider._role_fetcher
                proxies = get_environ_proxies(fetcher._base_url)
                fetcher._session = _MetadataSession(timeout=fetcher._timeout, proxies=proxies)
        return resolver


class _NoRedirectSession(AIOHTTPSession):  # type: ignore[misc]  # aiobotocore has no types
    """aiobotocore's HTTP session, which follows no redirects."""

    async def _get_session(self, proxy_url: str | None) -> SimpleNamespace:
        session = await super()._get_session(proxy_url)
        return SimpleNamespace(request=partial(session.request, allow_redirects=False))  # ``send`` needs but this

    async def send(self, request: Any) -> Any:
        """Send a request.

        Raises:
            RedirectRefused: The answer is a redirect.
        """
        answer = await super().send(request)
        target = answer.headers.get("location")
        if target is None or not 300 <= answer.status_code < 400:
            return answer
        if "x-amz-bucket-region" in answer.headers and (urlsplit(request.url).hostname or "").endswith(_OF_AWS):
            return answer  # botocore asks AWS in that region
        answer.raw.close()
        why = "which is not followed, because requests carry credentials"
        remedy = f"if that is the right place, set it as the endpoint{_region_in(answer.headers)}"
        raise RedirectRefused(f"{_place(request.url)} redirects to {_place(target)}, {why}; {remedy}")


class _MetadataSession(_RefCountedSessionMixin, _NoRedirectSession):  # type: ignore[misc]
    """The same for clients of container and instance metadata, which open it for each request."""


def _place(target: str) -> str:
    """Scheme, host and port of a redirect's target, without what else it may hold."""
    try:
        parts = urlsplit(target)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "an invalid URL"
    if not host:
        return "another path"
    return f"{parts.scheme or 'http'}://{host[:253]}{f':{port}' if port else ''}"


def _region_in(headers: Mapping[str, str], region: str | None = None) -> str:
    """Words on the region of a bucket as a store's answer says it, to end an error with; empty if it says none.

    Args:
        headers: Headers of the answer.
        region: The region by its body.
    """
    region = headers.get("x-amz-bucket-region") or region or ""
    return f"; the bucket is in the region {region}, so set that region" if _REGION.fullmatch(region) else ""


def _is_transient(error: Exception) -> bool:
    """Whether a call that has failed is worth another attempt."""
    if isinstance(error, RedirectRefused):
        return False
    if not isinstance(error.__cause__, ClientError):
        return isinstance(error, (HTTPClientError, NoConnection, aiohttp.ClientError, ResponseParserError))
    answer = error.__cause__.response
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status in (429, 500, 502, 503, 504) or answer.get("Error", {}).get("Code") in _TRANSIENT


def _message_of(error: Exception) -> str:
    """A store's error with its code, which s3fs leaves out."""
    if not isinstance(error.__cause__, ClientError):
        return str(error)
    response = error.__cause__.response
    answer, about = response.get("Error", {}), response.get("ResponseMetadata", {})
    text = f"{answer.get('Code', 'error')}: {answer.get('Message', error)}"
    if 300 <= about.get("HTTPStatusCode", 0) < 400:
        text += _region_in(about.get("HTTPHeaders", {}), answer.get("Region"))
    return text
