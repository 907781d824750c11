"""A real Prometheus for tests: Debian's, in a folder and on a port of its own."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.s3 import free_ports

PROMETHEUS = Path(__file__).parents[1] / "deploy" / "prometheus"
SCRAPE_SECONDS = 1
_PATIENCE_SECONDS = 60


def program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is missing; run: make prometheus"
    return found


def promtool(*arguments: str | Path, given: str | None = None) -> None:
    """Run it; fail with what it says if it finds something wrong."""
    done = subprocess.run([program("promtool"), *map(str, arguments)], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Series:
    """One series of an answer.

    Attributes:
        labels: Its labels, ``__name__`` among them if it has one.
        points: Its values by time, in seconds; of an instant query, one.
    """

    labels: dict[str, str]
    points: dict[float, float]

    @property
    def value(self) -> float:
        """The newest value."""
        return self.points[max(self.points)]


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=30)

    def query(self, expression: str, at: float | None = None) -> list[Series]:
        """What an expression is at a time, in seconds since 1970; now, if none is given."""
        moment = {} if at is None else {"time": at}
        answer = self._get("query", query=expression, **moment)
        if answer["resultType"] == "scalar":
            return [_series({"metric": {}, "value": answer["result"]})]
        return [_series(found) for found in answer["result"]]

    def query_range(self, expression: str, begin: float, end: float, step: float = SCRAPE_SECONDS) -> list[Series]:
        """What an expression is from one time to another, every ``step`` seconds."""
        answer = self._get("query_range", query=expression, start=begin, end=end, step=step)
        return [_series(found) for found in answer["result"]]

    def targets(self) -> list[dict[str, Any]]:
        """What is scraped, and how that goes."""
        found: list[dict[str, Any]] = self._get("targets", state="active")["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Rules that are evaluated, and how that goes."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or fire."""
        found: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return found

    def until(self, condition: Callable[[], object], what: str, seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait for something that is seen here."""
        deadline = time.monotonic() + seconds
        while not condition():
            targets = [(target["scrapeUrl"], target["health"], target["lastError"]) for target in self.targets()]
            assert time.monotonic() < deadline, f"never: {what}; {targets}"
            time.sleep(0.2)

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = self._http.get(path, params=parameters)
        assert answer.is_success, f"{parameters}: {answer.text}"
        return answer.json()["data"]


@contextmanager
def prometheus(
    folder: Path,
    scrape_configs: Sequence[dict[str, Any]],
    rule_files: Sequence[Path] = (),
    alertmanagers: Sequence[str] = (),
) -> Iterator[Prometheus]:
    """Run a server that looks every second.

    Args:
        folder: Where it keeps all; must exist.
        scrape_configs: What it scrapes, as in its configuration file.
        rule_files: Rules that it evaluates every second.
        alertmanagers: Host and port of each that is told of alerts.
    """
    seconds = f"{SCRAPE_SECONDS}s"
    config = {
        "global": {"scrape_interval": seconds, "scrape_timeout": seconds, "evaluation_interval": seconds},
        "scrape_configs": list(scrape_configs),
        "rule_files": list(map(str, rule_files)),
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]},
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    promtool("check", "config", path)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    # Its first alerts may come before it has found whom to tell; the next time is a minute later unless told otherwise.
    command = [
        program("prometheus"), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", f"--rules.alert.resend-delay={seconds}", "--log.level=warn",
    ]  # fmt: skip
    with running(command, f"http://{address}/-/ready", folder / "prometheus.log"):
        server = Prometheus(f"http://{address}")
        try:
            yield server
        finally:
            server.close()


@contextmanager
def alertmanager(folder: Path, config: dict[str, Any], webhook: str) -> Iterator[str]:
    """Run one with a configuration, but that all its receivers are a webhook and that it does not wait.

    Yields:
        Its host and port.
    """
    receivers = [{"name": each["name"], "webhook_configs": [{"url": webhook}]} for each in config["receivers"]]
    config = config | {"receivers": receivers, "route": config["route"] | {"group_wait": "0s"}}
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    command = [
        program("prometheus-alertmanager"), f"--config.file={path}", f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address={address}", "--cluster.listen-address=", "--log.level=warn",
    ]  # fmt: skip
    with running(command, f"http://{address}/-/ready", folder / "alertmanager.log"):
        yield address


@contextmanager
def running(command: list[str], ready: str, log: Path) -> Iterator[None]:
    """Run a program until the block ends; it begins when a URL answers."""
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _answers(ready):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def _series(found: dict[str, Any]) -> Series:
    points = found.get("values") or [found["value"]]
    return Series(found["metric"], {float(time): float(value) for time, value in points})
