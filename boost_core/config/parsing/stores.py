"""Readable errors from the clients of object stores, which raise types of their own."""

from collections.abc import Iterator
from contextlib import contextmanager

_CLIENTS = {"botocore", "aiobotocore", "aiohttp"}


class StoreUnusable(OSError):
    """An object store does not answer, or there are no credentials to sign requests with."""


@contextmanager
def stores_in_words() -> Iterator[None]:
    """Convert errors of object store clients to an ``OSError``, as from a disk.

    Raises:
        StoreUnusable: A client has raised an error.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise StoreUnusable(
            f"the object store cannot be used: {error}; check the URL, AWS_ENDPOINT_URL and the credentials"
        ) from error
