"""Reasons for which the API refuses a request before looking at its content."""


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
