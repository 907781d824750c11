"""What both clients are created with."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from boost_core import __version__
from service.proxies import proxy_of

RETRY_SECONDS = 30.0
TIMEOUT_SECONDS = 60.0  # an open stream sends something at least every 15 s; looking up data may take long


@dataclass(frozen=True)
class Options:
    """The service's URL, and how to talk to it.

    Raises:
        ValueError: An option is invalid; the message says why.
    """

    base_url: str
    api_key: str | None
    verify: bool | str | Path
    retry_seconds: float
    timeout: float

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"{self.base_url!r} is not the URL of a service; give one such as http://127.0.0.1:8900")
        try:
            httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{self.base_url!r} is not the URL of a service: {error}") from error
        if self.api_key is not None and not _is_visible_ascii(self.api_key):
            raise ValueError("the API key contains characters that no key has; give it as it was shown")

    @property
    def of_httpx(self) -> dict[str, Any]:
        """The arguments for httpx's clients."""
        headers = {"User-Agent": f"boost-client/{__version__}"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {
            "base_url": self.base_url,
            "timeout": self.timeout,
            "headers": headers,
            "verify": self._trusted(),
            "proxy": proxy_of(self.base_url),
            "trust_env": False,  # of the environment, httpx would read proxies in its own way
        }

    def _trusted(self) -> bool | ssl.SSLContext:
        if not self.base_url.startswith("https://"):
            return False  # otherwise httpx would load all system certificates, which takes longer than most requests
        if isinstance(self.verify, bool):
            return httpx.create_ssl_context(self.verify)
        try:
            return ssl.create_default_context(cafile=self.verify)
        except OSError as error:  # includes ssl.SSLError
            raise ValueError(f"{self.verify} cannot be used as a CA bundle: {error}") from error


def _is_visible_ascii(text: str) -> bool:
    return bool(text) and all("!" <= character <= "~" for character in text)
