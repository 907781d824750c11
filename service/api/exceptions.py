"""Why the API turns a request away before it looks at what was asked for."""


class Unauthenticated(PermissionError):
    """The request does not say who sends it, or not so that it can be believed."""


class Forbidden(PermissionError):
    """It is known who sends the request, and they may not do this, or not in this way."""


class RateLimited(RuntimeError):
    """Too much was asked for.

    Attributes:
        retry_after: Seconds after which it may be asked for again.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(f"{message}; try again in {retry_after} s")
        self.retry_after = retry_after
