"""What the clients of object stores raise, in words: their errors are of types of their own."""

from collections.abc import Iterator
from contextlib import contextmanager

_CLIENTS = {"botocore", "aiobotocore", "aiohttp"}


class StoreUnusable(OSError):
    """An object store does not answer, or there is nothing to sign requests with."""


@contextmanager
def stores_in_words() -> Iterator[None]:
    """Have what an object store's client raises be an error of the system's, as of a disk.

    Raises:
        StoreUnusable: One of them has raised something.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise StoreUnusable(
            f"the object store cannot be used: {error}; check the URL, AWS_ENDPOINT_URL and the credentials"
        ) from error
