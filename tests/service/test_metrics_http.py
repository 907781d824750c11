"""What the API measures of requests to itself."""

import time
from collections.abc import Iterator

import httpx
import pytest
from httpx_sse import connect_sse

from service.api.middleware import OTHER, UNMATCHED
from service.jobs.store import JobStore
from service.models.access import Scope
from service.settings import Settings
from tests.service.conftest import RunningApi, With
from tests.service.records import a_spec
from tests.service.routes import routes_of
from tests.service.scraping import Scrape

REQUESTS = "boost_http_requests_total"
SECONDS = "boost_http_request_duration_seconds"


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=10) as opened:
        yield opened


def test_requests_are_counted_by_route_and_never_by_path(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    for path in (f"/v1/jobs/{job.id}", f"/v1/jobs/{job.id}", "/v1/jobs/other", "/nothing/1", "/nothing/2", "/v1/none"):
        http.get(path)
    http.request("BREW", "/v1/jobs")
    http.request("STEEP", "/v1/jobs")
    found = Scrape(http)
    assert found.value(REQUESTS, route="/v1/jobs/{job_id}", method="GET", status="200") == 2
    assert found.value(REQUESTS, route="/v1/jobs/{job_id}", method="GET", status="404") == 1
    assert found.value(REQUESTS, route=UNMATCHED, method="GET", status="404") == 3
    assert found.value(REQUESTS, route="/v1/jobs", method=OTHER, status="405") == 2
    assert found.value(f"{SECONDS}_count", route="/v1/jobs/{job_id}", method="GET") == 3
    assert 0 < found.value(f"{SECONDS}_sum", route="/v1/jobs/{job_id}", method="GET") < 60
    assert job.id not in "".join(str(sample.labels) for sample in found.samples() if "route" in sample.labels)


def test_every_route_has_a_name(api: RunningApi, http: httpx.Client) -> None:
    known = list(routes_of(api.app))
    assert len(known) > 30
    for route in known:
        if route.path != "/metrics":
            http.request(**(route.call() | {"method": "HEAD"}))
    assert {route.path for route in known} - {"/metrics"} == {
        sample.labels["route"] for sample in Scrape(http).find(REQUESTS)
    }


def test_what_the_gate_turns_away_counts_for_its_route(client_with: With) -> None:
    client_with.headers({"Authorization": "Bearer wrong"}).get("/v1/jobs")
    found = Scrape(client_with(Scope.ADMIN))
    assert found.value(REQUESTS, route="/v1/jobs", status="401") == 1


def test_streams_are_counted_while_they_are_open(http: httpx.Client, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    route = "/v1/jobs/{job_id}/events"
    with connect_sse(http, "GET", f"/v1/jobs/{job.id}/events") as source:
        sent = source.iter_sse()
        next(sent)
        found = Scrape(http)
        assert found.value("boost_http_streams") == 1
        assert found.value(REQUESTS, route=route, status="200") == 1, "counted when it begins"
    deadline = time.monotonic() + 10
    while Scrape(http).value("boost_http_streams"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert Scrape(http).find(f"{SECONDS}_count", route=route) == []


def test_a_request_that_the_service_fails_on(
    http: httpx.Client, api: RunningApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobStore, "page", lambda *_: 1 / 0)
    assert http.get("/v1/jobs", headers={"Connection": "close"}).status_code == 500
    assert Scrape(http).value(REQUESTS, route="/v1/jobs", status="500") == 1


def test_apps_in_one_process_measure_apart(http: httpx.Client, store: JobStore, api: RunningApi) -> None:
    other = RunningApi(store, Settings(home=api.settings.home, database_url=api.settings.database_url, auth=False))
    try:
        http.get("/healthz")
        with httpx.Client(base_url=other.url) as elsewhere:
            assert Scrape(elsewhere).find(REQUESTS, route="/healthz") == []
        assert Scrape(http).value(REQUESTS, route="/healthz") == 1
    finally:
        other.stop()
