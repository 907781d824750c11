"""How much may be asked of the service, by whom."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from httpx_sse import connect_sse

from boost_core.plan.report import Plan, plan
from service.api.errors import RateLimited
from service.api.limits import PLANS_WAITING, WINDOW_SECONDS, RateLimits, network_of
from service.jobs.model import Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from service.settings import Settings
from tests.service.conftest import RunningApi, With
from tests.service.hostile import until
from tests.service.records import GOOD, a_spec

Begin = Callable[..., tuple[RunningApi, With]]


@pytest.fixture
def server_with(store: JobStore, database_url: str, tmp_path: Path) -> Iterator[Begin]:
    with ExitStack() as ends:

        def begin(**settings: int) -> tuple[RunningApi, With]:
            server = RunningApi(store, Settings(home=tmp_path / "home", database_url=database_url, **settings))
            ends.callback(server.stop)
            made = With(server)
            ends.callback(made.close)
            return server, made

        yield begin


def is_limited(answer: httpx.Response) -> bool:
    if answer.status_code != 429:
        return False
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "rate-limited"
    wait = int(answer.headers["retry-after"])
    assert 1 <= wait <= 60
    assert f"try again in {wait} s" in answer.json()["detail"]
    return True


def count_until_limited(ask: Callable[[], httpx.Response], most: int) -> int:
    for number in range(most):
        if is_limited(ask()):
            return number
    raise AssertionError(f"{most} requests, and no limit")


@pytest.mark.full
def test_a_key_has_its_rate_with_bursts(server_with: Begin) -> None:
    _, client_with = server_with(rate_per_second=2)
    first, second = client_with(Scope.READ), client_with(Scope.READ)
    assert count_until_limited(lambda: first.get("/v1/whoami"), 40) >= 2 * WINDOW_SECONDS
    assert is_limited(first.get("/v1/nothing")), "whatever is asked for"
    assert second.get("/v1/whoami").status_code == 200, "each key for itself"
    probes = [first.get(path).status_code for path in ("/healthz", "/readyz") for _ in range(50)]
    assert set(probes) == {200}


@pytest.mark.full
def test_the_limit_ends_when_it_says(server_with: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.limits.WINDOW_SECONDS", 1)
    _, client_with = server_with(rate_per_second=5)
    http = client_with(Scope.READ)
    count_until_limited(lambda: http.get("/v1/whoami"), 30)
    time.sleep(int(http.get("/v1/whoami").headers["retry-after"]))
    assert http.get("/v1/whoami").status_code == 200


def test_plans_have_threads_of_their_own_one_for_each_tenant(
    server_with: Begin, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client_with = server_with(rate_per_second=1000)
    job, go_on, running = store.create(a_spec(), "/ckpt", Owner("lab", "ann")), threading.Event(), list[int]()

    def wait_and_plan(*_: object) -> Plan:
        running.append(1)
        go_on.wait(60)
        return plan(job.spec)

    monkeypatch.setattr("service.api.admission.plan", wait_and_plan)
    http = client_with(Scope.SUBMIT, tenant="lab")
    asked = [("POST", "/v1/plans", GOOD), ("GET", f"/v1/jobs/{job.id}/plan", None)]
    with ThreadPoolExecutor(60) as threads:
        try:
            answers = [
                threads.submit(http.request, method, path, json=body, timeout=60) for method, path, body in 30 * asked
            ]
            until(lambda: sum(answer.done() for answer in answers) == 60 - 1 - PLANS_WAITING)
            assert running == [1]
            others = client_with(Scope.READ, tenant="other")
            assert others.get("/v1/jobs").status_code == others.get("/v1/nodes").status_code == 200
        finally:
            go_on.set()
    assert sum(map(is_limited, (answer.result() for answer in answers))) == 60 - 1 - PLANS_WAITING
    assert sum(answer.result().status_code == 200 for answer in answers) == 1 + PLANS_WAITING


@pytest.mark.full
def test_an_address_without_a_key_has_its_rate(server_with: Begin) -> None:
    _, client_with = server_with(rate_per_second=2)
    http = client_with.nothing()
    assert count_until_limited(lambda: http.get("/v1/jobs"), 40) >= 2 * WINDOW_SECONDS
    assert is_limited(http.get("/openapi.json"))
    assert client_with(Scope.READ).get("/v1/whoami").status_code == 200, "others from there have their own"


@pytest.mark.full
@pytest.mark.parametrize("how", ["header", "session"])
def test_wrong_keys_are_limited_more_strictly(server_with: Begin, how: str) -> None:
    _, client_with = server_with(failed_logins_per_minute=5)
    http = client_with.nothing()

    def guess() -> httpx.Response:
        if how == "header":
            return http.get("/v1/whoami", headers={"Authorization": "Bearer boost_aaaaaaaa_guess"})
        return http.post("/session", json={"key": "boost_aaaaaaaa_guess"})

    assert count_until_limited(guess, 10) == 5
    assert client_with(Scope.READ).get("/v1/whoami").status_code == 200, "a guesser shuts nobody out"
    assert http.get("/v1/whoami").status_code == 401


def test_without_authentication_nothing_is_limited(server_with: Begin) -> None:
    _, client_with = server_with(rate_per_second=1, auth=False)
    http = client_with.nothing()
    assert {http.get("/v1/whoami").status_code for _ in range(30)} == {200}


@pytest.mark.full
def test_a_key_has_only_so_many_streams(server_with: Begin, store: JobStore) -> None:
    server, client_with = server_with(streams_per_key=2)
    first, second = client_with(Scope.READ), client_with(Scope.READ)
    job = store.create(a_spec(), "/checkpoints", Owner("default", "ann"))
    path = f"/v1/jobs/{job.id}/events"
    with ExitStack() as streams:
        for what in ("events", "logs"):
            opened = streams.enter_context(connect_sse(first, "GET", f"/v1/jobs/{job.id}/{what}"))
            assert opened.response.status_code == 200
        refused = first.get(path)
        assert is_limited(refused)
        assert "2 event streams" in refused.json()["detail"]
        assert first.get("/v1/whoami").status_code == 200
        assert second.get(f"{path}?follow=false").status_code == 200
    deadline = time.monotonic() + 10
    while is_limited(first.get(f"{path}?follow=false")):
        assert time.monotonic() < deadline, "a closed stream was never let go"
        time.sleep(0.05)
    for _ in range(5):
        assert first.get(f"{path}?follow=false").status_code == 200
        assert first.get(f"{path}?after=x").status_code == 422
        assert first.get("/v1/jobs/job-0/events").status_code == 404
    assert not server.app.state.context.limits._streams, "refused streams are not counted"


def test_one_sender_has_a_whole_network_of_ipv6() -> None:
    limits = RateLimits(Settings(failed_logins_per_minute=2))
    limits.failures.count(network_of("2001:db8::1"))
    limits.failures.count(network_of("2001:db8::ffff:2"))
    with pytest.raises(RateLimited):
        limits.failures.count(network_of("2001:db8::3"))
    limits.failures.count(network_of("2001:db8:0:1::3"))
    limits.failures.count(network_of("192.0.2.1"))
    limits.failures.count(network_of(None))


def test_many_addresses_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.limits._MOST_COUNTED", 100)
    limits = RateLimits(Settings())
    for number in range(1000):
        limits.addresses.count(network_of(f"10.0.{number // 250}.{number % 250}"))
    assert len(limits.addresses._counted) <= 100


def test_the_window_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("service.api.limits.time.monotonic", lambda: now)
    limits = RateLimits(Settings(failed_logins_per_minute=2))
    taken = []
    for now in (100.0, 130.0, 159.0, 160.0, 189.0, 190.0, 300.0):  # noqa: B007  # the clock reads it
        try:
            limits.failures.count(network_of("192.0.2.1"))
        except RateLimited as refused:
            taken.append(refused.retry_after)
        else:
            taken.append(0)
    assert taken == [0, 0, 1, 0, 1, 0, 0]
