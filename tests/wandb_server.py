"""A server for Weights & Biases' own client: as much of one as keeps runs, and can refuse what it is sent."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Keeps the rows of each run's history where the client says that they belong."""

    def __init__(self) -> None:
        self.histories: dict[str, list[str]] = {}
        self.runs: dict[str, dict[str, Any]] = {}  # what the client has said of each run
        self.authorizations: set[str] = set()
        self.ended: dict[str, int] = {}  # with which code
        self.takes_rows = True
        self.url = ""

    def rows(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(row) for row in self.histories[run]]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/graphql":
            return 200, {"data": self._query(body["query"], body.get("variables") or {})}
        if path.endswith("/file_stream"):
            return self._stream(path.split("/")[-2], body)
        return 200, {}

    def _query(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "RunResumeStatus" in query:
            return {"model": {"id": "p", "name": "p", "bucket": self._run(given["name"])}}
        if "upsertBucket" in query:
            name = given["name"]
            known = {key: value for key, value in given.items() if value is not None}
            self.runs[name] = self.runs.get(name, {}) | known
            rows = self.histories.setdefault(name, [])
            project = {"id": "p", "name": given["project"], "entity": {"id": "e", "name": "lab"}}
            bucket = {"id": name, "name": name, "displayName": name, "project": project, "historyLineCount": len(rows)}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        return {}

    def _run(self, name: str) -> dict[str, Any] | None:
        if name not in self.histories:
            return None
        rows = self.histories[name]
        return {
            "id": name, "name": name, "historyLineCount": len(rows), "historyTail": json.dumps(rows[-1:]),
            "eventsLineCount": 0, "eventsTail": "[]", "logLineCount": 0, "summaryMetrics": "{}", "config": "{}",
            "displayName": name, "tags": [], "wandbConfig": "{}",
        }  # fmt: skip

    def _stream(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if not self.takes_rows:
            return 403, {"error": "read only"}
        part = (body.get("files") or {}).get("wandb-history.jsonl")
        if part:
            self.histories[name][part["offset"] :] = part["content"]
        if body.get("complete"):
            self.ended[name] = body["exitcode"]
        return 200, {}


class Server(ThreadingHTTPServer):
    """Whose clients may be killed."""

    def handle_error(self, *_: object) -> None:
        pass


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server that runs."""
    state = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/graphql":
                state.authorizations.add(self.headers["Authorization"])
            in_json = self.path == "/graphql" or self.path.endswith("/file_stream")
            status, answer = state.answer(self.path, json.loads(body) if in_json else {})
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
