"""An alert, from a service that does not answer to the people who are told."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import yaml

from tests.prometheus import PROMETHEUS, alertmanager, prometheus
from tests.service.conftest import free_port

pytestmark = pytest.mark.nightly


@pytest.fixture
def told() -> Iterator[tuple[str, Queue[dict[str, Any]]]]:
    """A webhook, and what it is told."""
    messages: Queue[dict[str, Any]] = Queue()

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Webhook)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", messages
    server.shutdown()
    thread.join()
    server.server_close()


def at_once(rules: Path, folder: Path) -> Path:
    """The same rules without their patience."""
    content = yaml.safe_load(rules.read_text())
    for group in content["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    path = folder / rules.name
    path.write_text(yaml.safe_dump(content))
    return path


def test_people_are_told_that_the_service_is_down(told: tuple[str, Queue[dict[str, Any]]], tmp_path: Path) -> None:
    webhook, messages = told
    gone = [{"job_name": "boost-api", "static_configs": [{"targets": [f"127.0.0.1:{free_port()}"]}]}]
    rules = [at_once(PROMETHEUS / "rules" / "alerts.yml", tmp_path)]
    shipped = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())
    with alertmanager(tmp_path, shipped, webhook) as address, prometheus(tmp_path, gone, rules, [address]):
        message = messages.get(timeout=60)
    assert (message["status"], message["receiver"]) == ("firing", "people-at-once")
    (alert,) = message["alerts"]
    assert (alert["labels"]["alertname"], alert["labels"]["severity"]) == ("BoostServiceDown", "critical")
    assert alert["annotations"]["runbook_url"] == "docs/runbooks/BoostServiceDown.md"
