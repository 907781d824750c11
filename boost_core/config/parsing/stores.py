"""Readable errors from stores: from object stores' clients, which raise types of their own, and from full disks."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

_CLIENTS = {"botocore", "aiobotocore", "aiohttp"}


class StoreUnusable(OSError):
    """An object store does not answer, or there are no credentials to sign requests with."""


def unusable(problem: object) -> StoreUnusable:
    """Return the error for a store that cannot be used, given what went wrong."""
    return StoreUnusable(
        f"the object store cannot be used: {problem}; check the URL, AWS_ENDPOINT_URL and the credentials"
    )


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
        raise unusable(error) from error


def no_room(error: BaseException, folder: str, again: str) -> str | None:
    """The message for an error from writing to a folder because a disk is full; ``None`` for another error.

    Args:
        error: The error.
        folder: The folder.
        again: What to do once there is room.
    """
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return f"{error.filename or folder}: {error.strerror}; make room and {again}, which keeps what is done"
