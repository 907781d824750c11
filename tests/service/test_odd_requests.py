"""Requests at the edges of what HTTP, JSON, the calendar and file systems allow: each is answered in words."""

import copy
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.auth import without_values
from service.jobs.model import Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from tests.service.conftest import RunningApi, With
from tests.service.records import GOOD, a_spec
from tests.service.routes import Route, routes_of
from tests.service.test_api import JSON, problem_of

ENDS_OF_TIME = [
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
]


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=10) as opened:
        yield opened


@pytest.mark.parametrize("moment", ENDS_OF_TIME)
def test_the_ends_of_time_are_refused(http: httpx.Client, store: JobStore, moment: str) -> None:
    key = {"name": "late", "tenant": "blue", "scopes": ["read"], "expires_at": moment}
    problem = problem_of(http.post("/v1/keys", json=key), 422)
    assert [error["field"] for error in problem["errors"]] == ["expires_at"]
    assert "must be in the years 1900 to 9000" in problem["detail"]
    job = store.create(a_spec(), "/checkpoints")
    for stream in ("events", "logs"):
        answer = http.get(f"/v1/jobs/{job.id}/{stream}", params={"since": moment, "follow": "false"})
        assert [error["field"] for error in problem_of(answer, 422)["errors"]] == ["since"]


@pytest.mark.parametrize("moment", ["1900-01-01T00:00:00+23:59", "9000-12-31T23:59:59-23:59"])
def test_times_beside_them_come_back(http: httpx.Client, moment: str) -> None:
    key = {"name": "late", "tenant": "blue", "scopes": ["read"], "expires_at": moment}
    made = http.post("/v1/keys", json=key)
    assert made.status_code == 201, made.text
    assert http.get("/v1/keys").json()["keys"][0]["expires_at"][4:] in ("-12-31T00:01:00Z", "-01-01T23:58:59Z")


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs/dry-run", "clone", "patch"])
def test_deep_bodies_are_refused(http: httpx.Client, store: JobStore, path: str) -> None:
    job = store.create(a_spec(), "/checkpoints")
    own = {"clone": ("POST", f"/v1/jobs/{job.id}/clone"), "patch": ("PATCH", f"/v1/jobs/{job.id}")}
    method, path = own.get(path, ("POST", path))
    for opening, closing in (('{"a":', "}"), ("[", "]")):
        nested = '{"changes": ' + opening * 500 + "1" + closing * 500 + "}"
        answer = http.request(method, path, content=nested, headers={"Content-Type": "application/json"})
        assert "is nested too deeply" in problem_of(answer, 422)["detail"]


@pytest.fixture
def unreadable_link() -> Iterator[str]:
    """A link that nobody can follow, whoever they are: that of a process that has ended and not been waited for."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        link = Path(f"/proc/{ended.pid}/cwd")
        assert link.is_symlink()
        with pytest.raises(OSError, match=str(link)):
            link.readlink()
        yield str(link)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_link_that_cannot_be_read_is_refused(client_with: With, unreadable_link: str) -> None:
    source = {"kind": "text", "paths": [f"{unreadable_link}/corpus"]}
    answer = client_with(Scope.SUBMIT).post("/v1/jobs", json=GOOD | {"data": {"source": source}})
    assert "cannot be looked up" in problem_of(answer, 422)["errors"][0]["message"]


def test_a_refusal_is_short_however_much_is_wrong(client_with: With, store: JobStore) -> None:
    http = client_with(Scope.SUBMIT)
    paths = [f"/elsewhere/{'x' * 60}/{number}" for number in range(10_000)]
    answer = http.post("/v1/jobs", json=GOOD | {"data": {"source": {"kind": "text", "paths": paths}}})
    assert len(answer.content) < 64 * 1024
    problem = problem_of(answer, 422)
    assert len(problem["errors"]) == 50
    assert "and 9950 more" in problem["detail"]
    job = store.create(a_spec(), "/checkpoints", Owner("default", "tester"))
    changes = {f"field_{number}": 1 for number in range(10_000)}
    problem = problem_of(http.post(f"/v1/jobs/{job.id}/clone", json={"changes": changes}), 422)
    assert (len(problem["errors"]), "and 9950 more" in problem["detail"]) == (50, True)


UNKNOWN = {f"field_{number}": 1 for number in range(1_100)}
WRONG = [["!", {}, [], -1][number % 4] for number in range(25_000)]  # about as many values as a body may have


def illegal_parts(document: dict[str, Any], schema: dict[str, Any], *path: str | int) -> Iterator[tuple[Any, ...]]:
    """Every list and object in a schema, with too many entries that are wrong; each model once, by its path."""
    if "$ref" in schema:
        yield from illegal_parts(
            document, document["components"]["schemas"].pop(schema["$ref"].split("/")[-1], {}), *path
        )
    for each in (one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, [])):
        yield from illegal_parts(document, each, *path)
    if schema.get("type") == "array":
        yield *path, WRONG
        if "$ref" in json.dumps(schema.get("items")):
            yield *path, [UNKNOWN] * 10  # about as many fields as a body may have
        yield from illegal_parts(document, schema.get("items", {}), *path, 0)
    if schema.get("type") == "object":
        yield *path, UNKNOWN
    of_any_name = [("x", each) for each in schema.get("patternProperties", {}).values()]
    for name, each in [*schema.get("properties", {}).items(), *of_any_name]:
        yield from illegal_parts(document, each, *path, name)


def changed(body: Any, *path: Any) -> Any:
    """A body with its part at a path replaced by the last argument; an object there keeps its fields."""
    name, *rest = path
    if not rest:
        return body | name if isinstance(body, dict) and isinstance(name, dict) else name
    if isinstance(name, int):
        return [changed({}, *rest)]
    own = body if isinstance(body, dict) else {}
    return own | {name: changed(own.get(name), *rest)}


@pytest.mark.full
def test_no_illegal_body_costs_much_more_than_the_largest_legal_one(
    api: RunningApi, http: httpx.Client, store: JobStore
) -> None:
    job = store.create(a_spec(), "/checkpoints")
    paths = [f"/data/{number}" for number in range(10_000)]
    largest = {
        "source": {"kind": "text", "paths": paths},
        "validation": [{"name": "x", "kind": "text", "paths": paths}],
    }

    def cost(route: Route, body: Any) -> float:
        content = json.dumps(body, separators=(",", ":"))
        begin = time.process_time()
        answer = http.request(route.method, route.call(job.id)["url"], content=content, headers=JSON)
        assert 400 <= answer.status_code < 500, (route, answer.text[:300])
        return time.process_time() - begin

    document, costs = copy.deepcopy(api.app.openapi()), list[tuple[str, Any, float]]()
    routes = [route for route in routes_of(api.app) if route.takes_body]
    submit = next(route for route in routes if route.path == "/v1/jobs")
    whole = min(cost(submit, GOOD | {"data": largest}) for _ in range(3))
    for route in routes:
        operation = document["paths"][route.path][route.method.lower()]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        for part in [*illegal_parts(document, schema)]:
            body = changed(route.call(job.id)["json"], *part)
            tries = (cost(route, body) / whole for _ in range(3))  # as others use this machine, too
            costs.append((route.path, part[:-1], next((each for each in tries if each <= 5), math.inf)))
    assert len(costs) > 80
    assert [each for each in costs if each[-1] > 5] == []


def raw_answer(api: RunningApi, request: str) -> bytes:
    """What a server really sends, to the end of the connection."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(f"{request}\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(65_536), b""))


def test_head_answers_as_get_does_without_its_body(api: RunningApi, http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    paths = ["/", "/healthz", "/readyz", "/openapi.json", "/metrics", "/v1/jobs", f"/v1/jobs/{job.id}", "/v1/nothing"]
    for path in (*paths, "/static/app.js", f"/v1/jobs/{job.id}/metrics", "/v1/queues", "/v1/whoami"):
        got, head = http.get(path), http.head(path)
        same = ("content-type", "etag", "cache-control", "x-frame-options")
        assert head.status_code == got.status_code
        assert [head.headers.get(name) for name in same] == [got.headers.get(name) for name in same], path
        if path != "/metrics":  # which counts the request before
            assert head.headers["content-length"] == got.headers["content-length"], path
        assert raw_answer(api, f"HEAD {path} HTTP/1.1").endswith(b"\r\n\r\n")


def test_streams_have_no_head(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    for stream in ("events", "logs"):
        answer = http.head(f"/v1/jobs/{job.id}/{stream}")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert http.put("/v1/jobs").headers["allow"] == "GET, HEAD, POST"


def test_head_asks_for_a_key_like_get(client_with: With) -> None:
    assert client_with.nothing().head("/v1/jobs").status_code == 401
    assert client_with(Scope.READ).head("/v1/jobs").status_code == 200


def test_the_path_and_the_headers_have_a_limit_each(http: httpx.Client) -> None:
    assert http.get("/healthz?" + "x" * 15_000, headers={"X-Long": "x" * 15_000}).status_code == 200
    problem = problem_of(http.get("/healthz?" + "x" * 17_000), 414)
    assert (problem["code"], "16384 bytes" in problem["detail"]) == ("target-too-long", True)
    problem = problem_of(http.get("/healthz", headers={"X-Long": "x" * 17_000}), 431)
    assert problem["code"] == "headers-too-large"


@pytest.mark.parametrize("name", ["Authorization", "Idempotency-Key", "If-Match", "Last-Event-ID", "Content-Type"])
def test_a_header_with_two_values_is_refused_and_one_sent_twice_is_not(client_with: With, name: str) -> None:
    http = client_with(Scope.READ)
    key = http.headers["Authorization"]
    values = (key, "Bearer boost_another") if name == "Authorization" else ("a", "b")
    for pair in (values, values[::-1]):
        problem = problem_of(http.get("/v1/jobs", headers=[(name, value) for value in pair]), 400)
        assert problem["code"] == "ambiguous-header"
        assert f"several {name} headers" in problem["detail"]
    assert http.get("/v1/jobs", headers=[(name, values[0])] * 2).status_code == 200


def test_a_key_in_the_query_is_refused_and_not_logged(client_with: With, caplog: pytest.LogCaptureFixture) -> None:
    http = client_with(Scope.READ)
    key = http.headers["Authorization"].removeprefix("Bearer ")
    with caplog.at_level(logging.INFO):
        for query in (f"key={key}", key, f"limit=5&access_token={key.replace('_', '%5F')}"):
            problem = problem_of(http.get(f"/v1/jobs?{query}"), 401)
            assert "API key in the query" in problem["detail"]
            assert key not in json.dumps(problem)
        assert http.get("/v1/jobs?limit=5").status_code == 200
        http.get(f"/v1/jobs/{key}")
    said = [(record.name, record.getMessage()) for record in caplog.records if record.name != "httpx"]
    logged = [message for name, message in said if name == "uvicorn.access"]
    assert len(logged) == 5
    assert '"GET /v1/jobs?limit=[redacted] HTTP/1.1" 200' in logged[3]
    assert not [message for _, message in said if key in message or key.replace("_", "%5F") in message]


def test_what_the_access_log_shows_of_an_address() -> None:
    for target, shown in (
        ("/v1/jobs", "/v1/jobs"),
        ("/v1/jobs?limit=5&state=RUNNING", "/v1/jobs?limit=[redacted]&state=[redacted]"),
        ("/v1/jobs?S3cr3t", "/v1/jobs?[redacted]=[redacted]"),
    ):
        record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, "", ("client", "GET", target, "1.1"), None)
        assert without_values(record)
        assert record.args == ("client", "GET", shown, "1.1")


def test_a_cursor_that_no_page_gave_is_refused(client_with: With, store: JobStore) -> None:
    http = client_with(Scope.READ, tenant="blue")
    jobs = [store.create(a_spec(), "/checkpoints", Owner("blue", "tester")) for _ in range(3)]
    foreign = store.create(a_spec(), "/checkpoints", Owner("red", "tester"))
    cursor = http.get("/v1/jobs?limit=1").json()["next_cursor"]
    assert http.get(f"/v1/jobs?cursor={cursor}").json()["jobs"][0]["id"] == jobs[1].id
    last = cursor[:-1] + ("0" if cursor[-1] != "0" else "1")
    for tampered in (last, "zzzz", "job-", foreign.id, "' OR 1=1", ""):
        problem = problem_of(http.get("/v1/jobs", params={"cursor": tampered}), 422)
        assert [error["field"] for error in problem["errors"]] == ["cursor"]
        assert "use next_cursor as returned" in problem["detail"]


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_database_file_that_is_gone_is_noticed(
    http: httpx.Client, api: RunningApi, store: JobStore, how: str
) -> None:
    file = Path(api.settings.database_url.removeprefix("sqlite:///"))
    job = store.create(a_spec(), "/checkpoints")
    aside = file.rename(file.with_suffix(".aside"))
    if how == "replaced":
        file.write_bytes(aside.read_bytes())
    for answer in (http.post("/v1/jobs", json=GOOD), http.get("/v1/jobs"), http.get(f"/v1/jobs/{job.id}")):
        problem = problem_of(answer, 503)
        assert (problem["code"], "database file is missing or was replaced" in problem["detail"]) == (
            "database-unavailable",
            True,
        )
        assert str(file) not in answer.text
    assert file.exists() == (how == "replaced")  # none is made in its place
    aside.rename(file)
    assert [each["id"] for each in http.get("/v1/jobs").json()["jobs"]] == [job.id]
    assert http.post("/v1/jobs", json=GOOD).status_code == 201
