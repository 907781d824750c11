"""A real browser for tests of the web page: the machine's own Chromium, without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
PHONE = {"width": 390, "height": 844}
PATIENCE_MS = 20_000

expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Chromium; a test that cannot have it fails."""
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.fail(f"no browser: none of {', '.join(NAMES)} is installed; run: sudo apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """One person's look at the service; remembers what should not have happened.

    Attributes:
        page: The browser's page.
        refused: Statuses of answers that the test expects besides those of success.
        requests: Paths that were asked for, in order.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.refused: set[int] = set()
        self.requests: list[str] = []
        self._problems: list[str] = []
        self._statuses: list[tuple[int, str]] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self._problems.append(f"error: {error}"))
        page.on("request", self._request)
        page.on("response", self._response)

    def open(self, path: str = "/") -> Page:
        """Go to a page of the service."""
        self.page.goto(self.url + path)
        return self.page

    def check(self) -> None:
        """Fail if a script failed, something broke the content security policy, or another host was asked."""
        refusals = [f"{status}: {url}" for status, url in self._statuses if status not in self.refused]
        if problems := self._problems + refusals:
            pytest.fail("\n".join(problems))

    def _console(self, message: ConsoleMessage) -> None:
        of_an_answer = "Failed to load resource" in message.text  # those are looked at one by one
        if message.type == "error" and not of_an_answer:
            self._problems.append(message.text)

    def _request(self, request: Request) -> None:
        address = urlsplit(request.url)
        self.requests.append(address.path)
        if address.scheme != "data" and address.netloc != urlsplit(self.url).netloc:
            self._problems.append(f"asked another host: {request.url}")

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self._statuses.append((response.status, response.url))


@contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """Look at a service with a browser that knows nothing yet; ``options`` are those of ``new_context``."""
    context = browser.new_context(**options)
    visiting = Visit(context.new_page(), url)
    yield visiting
    visiting.check()
    context.close()


def drawn(page: Page, selector: str, color: str) -> int:
    """How many pixels of a canvas have about a colour of the theme, given as a CSS property."""
    script = """(canvas, property) => {
        const value = getComputedStyle(document.documentElement).getPropertyValue(property).trim();
        const wanted = [1, 3, 5].map((at) => Number.parseInt(value.slice(at, at + 2), 16));
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        let found = 0;
        for (let at = 0; at < data.length; at += 4) {
            const near = wanted.every((channel, index) => Math.abs(channel - data[at + index]) < 24);
            found += near && data[at + 3] > 200;
        }
        return found;
    }"""
    return int(page.locator(selector).evaluate(script, color))


def color_at(page: Page, selector: str, column: float, row: float) -> tuple[int, int, int]:
    """The colour of a canvas at a place, given in parts of its width and height."""
    script = """(canvas, [column, row]) => Array.from(canvas.getContext('2d').getImageData(
        Math.floor(column * canvas.width), Math.floor(row * canvas.height), 1, 1).data)"""
    red, green, blue, _ = page.locator(selector).evaluate(script, [column, row])
    return red, green, blue
