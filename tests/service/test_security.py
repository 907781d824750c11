"""Who is let in, to what, and from where."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy.exc import DisconnectionError, InterfaceError, OperationalError

from service.api.requests import StrictRoute
from service.jobs.model import Owner
from service.jobs.store import JobStore
from service.models.access import ACTIONS, Scope
from service.settings import Settings
from tests.service.conftest import RunningApi, With
from tests.service.records import a_checkpoint, a_spec, numbered, start
from tests.service.routes import GOOD_FOR_ALL, OPEN, READABLE, UNSAFE, Route, routes_of

SCOPES = {
    "read": {
        "GET /metrics", "GET /v1/examples", "GET /v1/jobs", "GET /v1/jobs/{job_id}",
        "GET /v1/jobs/{job_id}/checkpoints",
        "GET /v1/jobs/{job_id}/checkpoints/{step}", "GET /v1/jobs/{job_id}/events", "GET /v1/jobs/{job_id}/logs",
        "GET /v1/jobs/{job_id}/plan", "GET /v1/jobs/{job_id}/diff/{other_id}",
        "GET /v1/jobs/compare", "GET /v1/jobs/compare/curves",
        "GET /v1/jobs/{job_id}/metrics", "GET /v1/jobs/{job_id}/trackers", "GET /v1/metrics/targets", "GET /v1/nodes",
        "GET /v1/jobs/{job_id}/evaluations", "GET /v1/presets",
        "GET /v1/datasets", "GET /v1/datasets/{name}", "GET /v1/sweeps", "GET /v1/sweeps/{name}",
        "GET /v1/sweeps/{name}/trials", "GET /v1/queues", "GET /v1/queues/{name}",
        "GET /v1/profiles", "GET /v1/profiles/{kind}",
        "GET /v1/versions", "GET /v1/whoami", "POST /v1/plans",
    },
    "submit": {
        "DELETE /v1/datasets/{name}", "POST /v1/datasets", "POST /v1/datasets/{name}/cancel",
        "DELETE /v1/jobs/{job_id}", "DELETE /v1/jobs/{job_id}/checkpoints/{step}",
        "DELETE /v1/jobs/{job_id}/checkpoints/{step}/pin", "PATCH /v1/jobs/{job_id}", "POST /v1/jobs",
        "POST /v1/jobs/cancel", "POST /v1/jobs/dry-run", "POST /v1/jobs/{job_id}/cancel",
        "POST /v1/jobs/{job_id}/clone",
        "POST /v1/jobs/{job_id}/drills", "POST /v1/jobs/{job_id}/evaluations", "POST /v1/jobs/{job_id}/pause",
        "POST /v1/jobs/{job_id}/profiles", "POST /v1/jobs/{job_id}/resume", "POST /v1/jobs/{job_id}/retry",
        "PUT /v1/jobs/{job_id}/checkpoints/{step}/pin", "POST /v1/sweeps", "POST /v1/sweeps/{name}/stop",
    },
    "admin": {
        "DELETE /v1/keys/{key_id}", "DELETE /v1/queues/{name}", "GET /v1/audit", "GET /v1/keys", "GET /v1/tenants",
        "POST /v1/keys", "PUT /v1/queues/{name}", "PUT /v1/tenants/{name}",
        "DELETE /v1/profiles/{kind}", "PUT /v1/profiles/{kind}",
    },
}  # fmt: skip


@pytest.fixture
def routes(guarded: RunningApi) -> list[Route]:
    return list(routes_of(guarded.app))


def refusal(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    return answer.status_code, answer.json()["code"]


# Every route


def test_every_route_has_its_scope(routes: list[Route]) -> None:
    found: dict[str, set[str]] = {}
    for route in routes:
        if (route.method, route.path) not in OPEN:
            found.setdefault(str(route.scope), set()).add(f"{route.method} {route.path}")
    assert found == SCOPES


def test_every_route_with_a_body_limits_it(routes: list[Route]) -> None:
    taking = [route for route in routes if route.takes_body]
    assert len(taking) >= 9
    assert all(isinstance(route.handler, StrictRoute) for route in taking)


def test_every_route_that_changes_something_has_a_name_in_the_audit_log(routes: list[Route]) -> None:
    changing = {(route.method, route.path) for route in routes if route.method in UNSAFE}
    assert changing == ACTIONS.keys() | {("POST", "/v1/jobs/dry-run"), ("POST", "/v1/plans")}  # which change nothing


def test_every_route_is_refused_without_a_key(routes: list[Route], client_with: With) -> None:
    http = client_with.nothing()
    for route in routes:
        if (route.method, route.path) in OPEN:
            continue
        answer = http.request(**route.call())
        assert refusal(answer) == (401, "unauthenticated"), route
        assert answer.headers["www-authenticate"] == "Bearer"


def test_every_route_is_refused_with_a_lesser_scope(routes: list[Route], client_with: With) -> None:
    lesser = {Scope.SUBMIT: client_with(Scope.READ), Scope.ADMIN: client_with(Scope.SUBMIT)}
    for route in routes:
        if route.scope in lesser:
            answer = lesser[route.scope].request(**route.call())
            if route.scope is Scope.SUBMIT and "{job_id}" in route.path:
                assert answer.status_code in (403, 404), route
            else:
                assert refusal(answer) == (403, "forbidden"), route
                assert f"scope {route.scope}" in answer.json()["detail"]


def test_who_may_only_read_changes_no_job_of_their_own(routes: list[Route], client_with: With, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints", Owner("lab", "owner"))
    reader = client_with(Scope.READ, tenant="lab")
    for route in routes:
        if "{job_id}" in route.path and route.scope is Scope.SUBMIT:
            assert refusal(reader.request(**route.call(job.id))) == (403, "forbidden"), route
    assert store.get(job.id) == job


def test_the_document_says_what_a_route_asks_for(routes: list[Route], client_with: With) -> None:
    document = client_with.nothing().get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert schemes["bearer"]["scheme"] == "bearer"
    assert (schemes["cookie"]["in"], schemes["cookie"]["name"]) == ("cookie", "boost_key")
    for route in routes:
        if route.path == "/openapi.json":
            continue
        operation = document["paths"][route.path][route.method.lower()]
        assert ("security" in operation) == ((route.method, route.path) not in OPEN), route
        if "security" in operation:
            assert operation["security"] == [{"bearer": []}, {"cookie": []}]
            assert {"401", "403", "429", "503"} <= operation["responses"].keys()


# Tenants


def test_a_tenant_is_told_of_no_job_of_another(routes: list[Route], client_with: With, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints", Owner("theirs", "owner"))
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_checkpoint(10)))
    job = store.get(job.id)
    stranger = client_with(Scope.SUBMIT, tenant="ours")
    paths = [route for route in routes if "{job_id}" in route.path]
    assert len(paths) >= 17
    for route in paths:
        answer = stranger.request(**route.call(job.id))
        assert refusal(answer) == (404, "job-not-found"), route
        assert answer.text.replace(job.id, "job-0") == stranger.request(**route.call("job-0")).text, "as of no job"
    assert store.get(job.id) == job


def test_each_sees_the_own_tenants_jobs_and_an_operator_all(client_with: With) -> None:
    ours, theirs, admin = (
        client_with(Scope.SUBMIT, tenant="ours", name="ann"),
        client_with(Scope.SUBMIT, tenant="theirs"),
        client_with(Scope.ADMIN, tenant="operators"),
    )
    job = ours.post("/v1/jobs", json=GOOD_FOR_ALL).json()
    assert (job["tenant"], job["submitted_by"]) == ("ours", "ann")
    other = theirs.post("/v1/jobs", json=GOOD_FOR_ALL).json()

    def listed(http: httpx.Client, **query: str) -> list[str]:
        return [job["id"] for job in http.get("/v1/jobs", params=query).json()["jobs"]]

    assert (listed(ours), listed(theirs)) == ([job["id"]], [other["id"]])
    assert listed(ours, tenant="theirs") == [job["id"]], "the filter is an operator's"
    assert listed(admin) == [other["id"], job["id"]]
    assert listed(admin, tenant="ours") == [job["id"]]
    assert admin.get(f"/v1/jobs/{job['id']}").json()["tenant"] == "ours"
    assert admin.post(f"/v1/jobs/{job['id']}/cancel").json()["state"] == "CANCELLED"


def test_an_idempotency_key_is_the_tenants_own(client_with: With) -> None:
    headers = {"Idempotency-Key": "monday"}
    made = [
        client_with(Scope.SUBMIT, tenant=tenant).post("/v1/jobs", json=GOOD_FOR_ALL, headers=headers) for tenant in "ab"
    ]
    assert [answer.status_code for answer in made] == [201, 201]
    assert made[0].json()["id"] != made[1].json()["id"]


# Keys in requests


@pytest.mark.parametrize(
    "value", ["", "Bearer", "bearer x", "Bearer x", "Basic dXNlcjpwYXNz", "boost_aaaaaaaa_b", "Bearer boost_aaaaaaaa_b"]
)
def test_a_wrong_key_is_refused(client_with: With, value: str) -> None:
    assert refusal(client_with.headers({"Authorization": value}).get("/v1/jobs")) == (401, "unauthenticated")


def test_a_refused_request_is_not_read(client_with: With) -> None:
    http = client_with.nothing()
    headers = {"Content-Type": "application/json"}
    assert refusal(http.post("/v1/jobs", content=b"{", headers=headers)) == (401, "unauthenticated")
    assert refusal(http.get("/v1/jobs?limit=0")) == (401, "unauthenticated")
    assert refusal(http.get("/v1/nothing")) == (401, "unauthenticated"), "what there is, is not told either"


def test_metrics_are_of_the_tenants_own_jobs(client_with: With, store: JobStore) -> None:
    for tenant in ("lab", "birds"):
        start(store, store.create(a_spec(name=f"job of {tenant}"), "file:///checkpoints", Owner(tenant, "ci")).id)
    seen = {}
    for scope, tenant in ((Scope.READ, "lab"), (Scope.SUBMIT, "birds"), (Scope.ADMIN, "operators")):
        answer = client_with(scope, tenant=tenant).get("/metrics")
        seen[tenant] = [each for each in ("job of lab", "job of birds") if each in answer.text]
        count = 2.0 if scope is Scope.ADMIN else 1.0
        assert f'boost_jobs{{state="RUNNING"}} {count}' in answer.text
    assert seen == {"lab": ["job of lab"], "birds": ["job of birds"], "operators": ["job of lab", "job of birds"]}


def test_probes_and_the_document_are_open(client_with: With) -> None:
    http = client_with.headers({"Authorization": "Bearer nonsense"})
    assert [http.get(path).status_code for path in ("/healthz", "/readyz", "/openapi.json")] == [200, 200, 200]
    assert [http.get(path).status_code for path in ("/docs", "/redoc")] == [404, 404]


# Browsers


def browser(client_with: With, *scopes: Scope) -> httpx.Client:
    """One that has a session."""
    http = client_with.nothing()
    key = client_with(*scopes).headers["Authorization"].removeprefix("Bearer ")
    answer = http.post("/session", json={"key": key})
    assert (answer.status_code, answer.content) == (204, b"")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert "secure" not in cookie.lower(), "it would not come back over plain HTTP"
    return http


def test_a_session_is_opened_and_closed(client_with: With) -> None:
    http = browser(client_with, Scope.READ)
    assert http.get("/v1/whoami").json()["scopes"] == ["read"]
    closed = http.delete("/session", headers={"Sec-Fetch-Site": "same-origin"})
    assert closed.status_code == 204
    assert "Max-Age=0" in closed.headers["set-cookie"]
    assert refusal(http.get("/v1/whoami")) == (401, "unauthenticated")


def test_a_session_needs_a_valid_key(client_with: With) -> None:
    http = client_with.nothing()
    answer = http.post("/session", json={"key": "boost_aaaaaaaa_x"})
    assert refusal(answer) == (401, "unauthenticated")
    assert "set-cookie" not in answer.headers
    assert http.post("/session", json={"key": "x" * 201}).status_code == 422
    assert http.post("/session", content=b"{}" + b" " * 2**20).status_code == 413


OWN, FOREIGN = "own", "https://evil.example"
CAME_FROM = [
    ({"Sec-Fetch-Site": "same-origin"}, True),
    ({"Sec-Fetch-Site": "none"}, True),
    ({"Origin": OWN}, True),
    ({"Sec-Fetch-Site": "same-origin", "Origin": OWN}, True),
    ({}, False),
    ({"Sec-Fetch-Site": "cross-site"}, False),
    ({"Sec-Fetch-Site": "same-site", "Origin": FOREIGN}, False),
    ({"Origin": FOREIGN}, False),
    ({"Origin": "null"}, False),
]


def headers_from(headers: dict[str, str], url: str) -> dict[str, str]:
    return {name: url if value == OWN else value for name, value in headers.items()}


@pytest.mark.parametrize(("headers", "taken"), CAME_FROM, ids=str)
def test_with_a_cookie_only_the_own_page_may_change_things(
    client_with: With, guarded: RunningApi, headers: dict[str, str], taken: bool
) -> None:
    http = browser(client_with, Scope.SUBMIT)
    http.headers.update(headers_from(headers, guarded.url))
    assert http.get("/v1/jobs").status_code == 200, "others cannot read the answer"
    answer = http.post("/v1/jobs", json=GOOD_FOR_ALL)
    if taken:
        assert answer.status_code == 201
    else:
        assert refusal(answer) == (403, "forbidden")
        assert http.get("/v1/jobs").json()["jobs"] == []


def test_a_key_in_the_header_needs_no_origin_and_beats_the_cookie(client_with: With) -> None:
    http = browser(client_with, Scope.READ)
    http.headers.update(client_with(Scope.SUBMIT).headers)
    assert http.post("/v1/jobs", json=GOOD_FOR_ALL, headers={"Origin": FOREIGN}).status_code == 201
    assert refusal(http.get("/v1/jobs", headers={"Authorization": "Bearer x"})) == (401, "unauthenticated")


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_another_origins_page_opens_and_closes_no_session(client_with: With, method: str) -> None:
    answer = client_with.nothing().request(method, "/session", json={"key": "x"}, headers={"Origin": FOREIGN})
    assert refusal(answer) == (403, "forbidden")
    assert "set-cookie" not in answer.headers


def test_no_other_origin_is_told_anything(client_with: With) -> None:
    http = client_with(Scope.READ)
    assert not any(
        name.startswith("access-control") for name in http.get("/v1/jobs", headers={"Origin": FOREIGN}).headers
    )
    asked = {"Origin": FOREIGN, "Access-Control-Request-Method": "POST"}
    assert not any(name.startswith("access-control") for name in http.options("/v1/jobs", headers=asked).headers)


@pytest.fixture
def server_with(store: JobStore, database_url: str, tmp_path: Path) -> Iterator:
    started: list[RunningApi] = []

    def begin(**settings: object) -> RunningApi:
        started.append(RunningApi(store, Settings(home=tmp_path / "home", database_url=database_url, **settings)))
        return started[-1]

    yield begin
    for server in started:
        server.stop()


def test_other_origins_that_the_operator_names_are_let_in(server_with) -> None:
    server = server_with(cors_origins=("https://lab.example.org",), allowed_prefixes=(str(READABLE),))
    key = With(server)(Scope.SUBMIT).headers["Authorization"]
    for origin, allowed in (("https://lab.example.org", True), (FOREIGN, False)):
        asked = {
            "Origin": origin, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }  # fmt: skip
        preflight = httpx.options(f"{server.url}/v1/jobs", headers=asked)
        assert (preflight.headers.get("access-control-allow-origin") == origin) == allowed
        answer = httpx.post(
            f"{server.url}/v1/jobs", json=GOOD_FOR_ALL, headers={"Origin": origin, "Authorization": key}
        )
        assert answer.status_code == 201
        assert ("access-control-allow-origin" in answer.headers) == allowed
        assert "access-control-allow-credentials" not in answer.headers


# Without authentication


def test_without_authentication_everybody_is_one_user_with_all_rights(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints", Owner("lab", "ann"))
    with httpx.Client(base_url=api.url) as http:
        assert http.get("/v1/whoami").json() == {
            "tenant": "default", "name": "anonymous", "scopes": ["read", "submit", "admin"],
        }  # fmt: skip
        assert http.get(f"/v1/jobs/{job.id}").status_code == 200
        made = http.post("/v1/jobs", json=GOOD_FOR_ALL).json()
        assert (made["tenant"], made["submitted_by"]) == ("default", "anonymous")
        assert http.get("/v1/keys").status_code == 200
        assert http.get("/v1/keys", headers={"Authorization": "Bearer x"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("127.0.0.1:8900", True), ("localhost", True), ("LOCALHOST:80", True), ("[::1]:8900", True),
        ("127.9.9.9", True), ("localhost.", True), ("evil.example", False), ("localhost.evil.example", False),
        ("10.0.0.1", False), ("127.0.0.1.evil.example:8900", False), ("[::1", False), ("", False),
        ("a@localhost", False),
    ],
)  # fmt: skip
def test_without_authentication_only_names_of_this_machine_are_answered(
    looked_at: RunningApi, host: str, taken: bool
) -> None:
    for path in ("/v1/jobs", "/healthz", "/"):
        answer = httpx.get(f"{looked_at.url}{path}", headers={"Host": host})
        if taken:
            assert answer.status_code == 200
        else:
            assert refusal(answer) == (403, "forbidden")


@pytest.mark.parametrize(("headers", "taken"), CAME_FROM, ids=str)
def test_without_authentication_no_page_of_another_origin_may_change_things(
    api: RunningApi, store: JobStore, headers: dict[str, str], taken: bool
) -> None:
    answer = httpx.post(f"{api.url}/v1/jobs", json=GOOD_FOR_ALL, headers=headers_from(headers, api.url))
    assert (answer.status_code == 201) == (taken or not headers), "programs say nothing"
    assert len(store.page()[0]) == (answer.status_code == 201)


# Headers


@pytest.mark.parametrize(
    "path", ["/v1/jobs", "/v1/jobs/job-0", "/v1/nothing", "/healthz", "/openapi.json", "/", "/broken"]
)
def test_every_answer_has_the_headers(api: RunningApi, path: str) -> None:
    @api.app.get("/broken")
    def broken() -> None:
        raise RuntimeError

    headers = httpx.get(f"{api.url}{path}").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "same-origin"
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'self'", "style-src": "'self'", "img-src": "'self' data:", "connect-src": "'self'",
        "frame-ancestors": "'none'", "base-uri": "'none'", "form-action": "'self'",
    }  # fmt: skip
    assert (headers.get("cache-control") == "no-store") == path.startswith("/v1")
    assert "strict-transport-security" not in headers
    assert "server" not in headers


def test_streams_are_not_stored_either(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    answer = httpx.get(f"{api.url}/v1/jobs/{job.id}/events?follow=false")
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("given", ["my-request.7", "x" * 64])
def test_a_request_keeps_its_name(looked_at: RunningApi, given: str) -> None:
    assert httpx.get(f"{looked_at.url}/healthz", headers={"X-Request-ID": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 65, "a b", "a\tb", "<script>"])
def test_a_request_without_a_fit_name_is_given_one(looked_at: RunningApi, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    names = [httpx.get(f"{looked_at.url}/healthz", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert names[0] != names[1]
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


def test_oversized_headers_are_refused(looked_at: RunningApi) -> None:
    more = [(f"X-Long-{number}", "x" * 30_000) for number in range(10)]
    with contextlib.suppress(httpx.TransportError):  # the connection may end before all is sent
        assert httpx.get(f"{looked_at.url}/healthz", headers=more).status_code == 400
    assert httpx.get(f"{looked_at.url}/healthz?{'x' * 8_000}").status_code == 200


# The database


@pytest.mark.parametrize(
    "error",
    [
        OperationalError("SELECT", {}, Exception("could not connect to db.internal")),
        InterfaceError("SELECT", {}, Exception("connection already closed")),
        DisconnectionError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["keys", "store"])
def test_without_its_database_the_service_says_so(
    guarded: RunningApi, client_with: With, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    http = client_with(Scope.SUBMIT)

    def fail(*_: object, **__: object) -> None:
        raise error

    context = guarded.app.state.context
    monkeypatch.setattr(context.keys, "verify", fail) if where == "keys" else monkeypatch.setattr(
        JobStore, "page", fail
    )
    answer = http.get("/v1/jobs")
    assert refusal(answer) == (503, "database-unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert "db.internal" not in answer.text
    assert http.get("/healthz").status_code == 200
