"""Who has changed what, or tried to."""

import logging
from typing import Any

import httpx
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from service.jobs.model import Owner, Request
from service.jobs.store import JobStore
from service.models.access import Scope
from tests.service.conftest import RunningApi, With
from tests.service.records import a_spec
from tests.service.routes import GOOD_FOR_ALL, UNSAFE, routes_of


def entries(http: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    answer = http.get("/v1/audit", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["entries"]


def test_a_change_is_recorded(client_with: With, store: JobStore) -> None:
    admin, http = client_with(Scope.ADMIN), client_with(Scope.SUBMIT, tenant="lab", name="ann")
    made = http.post("/v1/jobs", json=GOOD_FOR_ALL, headers={"X-Request-ID": "request-1"})
    job_id = made.json()["id"]
    assert made.status_code == 201
    http.delete(f"/v1/jobs/{job_id}")
    found = entries(admin)
    key_id = http.headers["Authorization"].split("_")[1]
    who = {"tenant": "lab", "key_id": key_id, "key_name": "ann", "address": "127.0.0.1"}
    assert found[0].items() >= who.items()
    assert found[0] == {
        "id": 1, "time": found[0]["time"], **who, "action": "job.submit", "resource": "/v1/jobs", "status": 201,
        "request_id": "request-1",
    }  # fmt: skip
    assert (found[1]["action"], found[1]["resource"], found[1]["status"]) == ("job.cancel", f"/v1/jobs/{job_id}", 202)
    assert len(found) == 2


def test_a_request_that_is_sent_again_is_recorded_again(client_with: With) -> None:
    http = client_with(Scope.SUBMIT)
    sent = [http.post("/v1/jobs", json=GOOD_FOR_ALL, headers={"Idempotency-Key": "once"}) for _ in range(2)]
    assert sent[0].json()["id"] == sent[1].json()["id"]
    found = [(entry["action"], entry["status"]) for entry in entries(client_with(Scope.ADMIN))]
    assert found == [("job.submit", 201)] * 2


@pytest.mark.full
def test_what_was_refused_is_recorded(client_with: With, store: JobStore) -> None:
    admin, reader = client_with(Scope.ADMIN), client_with(Scope.READ, name="eve")
    job = store.create(a_spec(), "/checkpoints", Owner("default", "ann"))
    reader.delete(f"/v1/jobs/{job.id}")
    reader.post("/v1/keys", json={"name": "k", "tenant": "t", "scopes": ["admin"]})
    admin.delete("/v1/jobs/job-0")
    admin.post("/v1/jobs", json={})
    client_with.headers({"Authorization": "Bearer boost_aaaaaaaa_guess"}).put("/v1/queues/x", json={})
    client_with.nothing().post("/session", json={"key": "boost_aaaaaaaa_guess"})
    found = [(entry["key_name"], entry["action"], entry["status"]) for entry in entries(admin)]
    assert found == [
        ("eve", "job.cancel", 403),
        ("eve", "key.create", 403),
        ("tester", "job.cancel", 404),
        ("tester", "job.submit", 422),
        (None, "queue.put", 401),
        (None, "session.open", 401),
    ]


@pytest.mark.full
def test_every_route_that_changes_something_is_recorded(guarded: RunningApi, client_with: With) -> None:
    admin = client_with(Scope.ADMIN)
    asked = [route for route in routes_of(guarded.app) if route.method in UNSAFE]
    for route in asked:
        admin.request(**route.call())
    unrecorded = {("POST", "/v1/plans"), ("POST", "/v1/jobs/dry-run"), ("DELETE", "/session")}  # there is none
    resources = [route.call()["url"] for route in asked if (route.method, route.path) not in unrecorded]
    found = entries(admin)
    assert [entry["resource"] for entry in found] == resources
    assert all(entry["action"] for entry in found)


def test_what_changes_nothing_is_not_recorded(client_with: With) -> None:
    admin = client_with(Scope.ADMIN)
    for path in ("/v1/jobs", "/v1/whoami", "/v1/keys", "/v1/audit", "/v1/jobs/job-0"):
        admin.get(path)
    admin.post("/v1/plans", json=GOOD_FOR_ALL)
    admin.post("/v1/jobs/dry-run", json=GOOD_FOR_ALL)
    admin.post("/v1/nothing")
    nobody = client_with.nothing()
    nobody.post("/v1/jobs", json=GOOD_FOR_ALL)
    nobody.post("/v1/jobs", headers=[("Origin", "a"), ("Origin", "b")])
    nobody.post("/v1/jobs", headers={"X-Long": "x" * 20_000})
    nobody.post("/v1/jobs?" + "x" * 20_000)
    nobody.delete("/session")
    nobody.post("/session", json={})
    assert entries(admin) == [], "what comes without any key fills no table either"


def test_a_session_is_recorded(client_with: With) -> None:
    admin, http = client_with(Scope.ADMIN), client_with.nothing()
    key = client_with(Scope.READ, name="ann").headers["Authorization"].removeprefix("Bearer ")
    http.post("/session", json={"key": key})
    http.delete("/session", headers={"Sec-Fetch-Site": "same-origin"})
    found = entries(admin)
    assert [(entry["key_name"], entry["action"], entry["status"]) for entry in found] == [
        ("ann", "session.open", 204),
        ("ann", "session.close", 204),
    ]


def test_a_failure_inside_is_recorded(client_with: With, guarded: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(guarded.app.state.context.keys, "revoke", fail)
    admin = client_with(Scope.ADMIN)
    assert admin.delete("/v1/keys/abcdefgh").status_code == 500
    assert [(entry["action"], entry["status"]) for entry in entries(client_with(Scope.ADMIN))] == [("key.revoke", 500)]


@pytest.mark.full
def test_pages_and_tenants(client_with: With) -> None:
    admin = client_with(Scope.ADMIN)
    both = [client_with(Scope.SUBMIT, tenant=tenant) for tenant in ("ours", "theirs")]
    for number in range(3):
        for http in both:
            http.delete(f"/v1/jobs/job-{number}")
    first = admin.get("/v1/audit", params={"limit": 4}).json()
    assert len(first["entries"]) == 4
    rest = admin.get("/v1/audit", params={"limit": 4, "after": first["next_after"]}).json()
    assert rest["next_after"] is None
    ids = [entry["id"] for entry in first["entries"] + rest["entries"]]
    assert ids == sorted(set(ids))
    assert len(ids) == 6
    ours = admin.get("/v1/audit", params={"tenant": "ours", "limit": 3}).json()
    assert [entry["resource"] for entry in ours["entries"]] == [f"/v1/jobs/job-{number}" for number in range(3)]
    assert ours["next_after"] is None
    for query in ({"limit": 0}, {"limit": 501}, {"after": -1}, {"tenant": "No"}, {"afterr": 1}):
        assert admin.get("/v1/audit", params=query).status_code == 422


def test_odd_paths_are_kept(client_with: With) -> None:
    admin = client_with(Scope.ADMIN)
    admin.delete("/v1/keys/%00%ff" + "x" * 400)
    (entry,) = entries(admin)
    assert entry["resource"].startswith("/v1/keys/%00")
    assert len(entry["resource"]) == 255


def test_a_request_succeeds_though_it_cannot_be_recorded(
    client_with: With, guarded: RunningApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OperationalError("INSERT", {}, Exception("disk full"))

    monkeypatch.setattr(guarded.app.state.context.audit, "write", fail)
    with caplog.at_level(logging.ERROR):
        made = client_with(Scope.SUBMIT, name="ann").post("/v1/jobs", json=GOOD_FOR_ALL)
    assert made.status_code == 201
    (message,) = [record.getMessage() for record in caplog.records if record.name == "service.api.audit"]
    assert "job.submit" in message
    assert "'ann'" in message


def test_a_submission_is_recorded_in_its_own_transaction(
    client_with: With, guarded: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OperationalError("INSERT", {}, Exception("disk full"))

    monkeypatch.setattr(guarded.app.state.context.audit, "record", fail)  # in a transaction of its own
    assert client_with(Scope.SUBMIT, name="ann").post("/v1/jobs", json=GOOD_FOR_ALL).status_code == 201
    found = [(entry["key_name"], entry["action"], entry["status"]) for entry in entries(client_with(Scope.ADMIN))]
    assert found == [("ann", "job.submit", 201)]


def test_nothing_is_kept_of_a_submission_whose_transaction_fails(store: JobStore) -> None:
    def fail(_: Connection) -> None:
        raise OperationalError("INSERT", {}, Exception("disk full"))

    request, owner = Request("default", "once", "fingerprint"), Owner("default", "ann")
    with pytest.raises(OperationalError):
        store.create(a_spec(), "/checkpoints", owner, request=request, alongside=fail)
    assert store.known(request) is None
    assert not store.page()[0]


def test_without_authentication_changes_are_recorded_too(api: RunningApi) -> None:
    with httpx.Client(base_url=api.url) as http:
        http.delete("/v1/jobs/job-0")
        (entry,) = entries(http)
    assert (entry["tenant"], entry["key_id"], entry["key_name"]) == ("default", None, "anonymous")
