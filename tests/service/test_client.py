"""The client against a server that answers what it is told to; against the real one: test_api.py."""

import asyncio
import inspect
import pydoc
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from boost_core.messages import Profile
from service.client import ApiError, AsyncClient, Client, ServiceUnreachable, calls
from service.client.calls import Method, RetryPolicy
from service.jobs.model import JobEvent, JobRecord
from service.jobs.states import JobState
from service.models.jobs import Checkpoint
from tests.service.canned import A_KEY, a_job
from tests.service.certificates import self_signed
from tests.service.conftest import free_port
from tests.service.records import GOOD, a_spec
from tests.service.scripted import DROP, Answer, ScriptedServer, events, problem, scripted

Ask = Callable[..., Any]


def ask_blocking(url: str, what: Callable[[Client], Any], **options: Any) -> Any:
    with Client(url, **options) as client:
        answer = what(client)
        return list(answer) if isinstance(answer, Iterator) else answer


def ask_awaiting(url: str, what: Callable[[AsyncClient], Any], **options: Any) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, **options) as client:
            answer = what(client)
            if isinstance(answer, AsyncIterator):
                return [each async for each in answer]
            assert isinstance(answer, Awaitable)
            return await answer

    return asyncio.run(ask())


@pytest.fixture(params=[ask_blocking, ask_awaiting], ids=["blocking", "awaiting"])
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Does something with a client of a server, and soon again; every test is one of both clients."""
    monkeypatch.setattr(calls, "_FIRST_PAUSE_SECONDS", 0.02)
    return request.param


def an_event(number: int, message: str = "hello") -> dict[str, Any]:
    data = {"kind": "log", "rank": 0, "level": "INFO", "message": message}
    return {"id": number, "job_id": "job-1", "kind": "log", "time": "2026-01-01T00:00:00Z", "data": data}


CREATED = Answer(201, a_job())
CREATES = {
    "submit": (lambda client, **key: client.submit(GOOD, **key), CREATED),
    "clone": (lambda client, **key: client.clone("job-0", {"name": "other"}, **key), CREATED),
    "drill": (lambda client, **key: client.drill("job-0", {"kind": "kill_rank"}, **key), Answer(202, a_job())),
    "profile": (lambda client, **key: client.profile("job-0", {"steps": 3}, **key), Answer(202, a_job())),
    "create_key": (
        lambda client, **key: client.create_key({"name": "ci", "tenant": "acme", "scopes": ["submit"]}, **key),
        Answer(201, A_KEY),
    ),
}  # fmt: skip


# Trying again


@pytest.mark.full
@pytest.mark.parametrize("create", CREATES)
def test_all_tries_of_a_create_carry_one_key(ask: Ask, create: str) -> None:
    what, made = CREATES[create]
    with scripted(DROP, problem(503, "database-unavailable", Retry_After="0"), DROP, made) as server:
        answer = ask(server.url, what)
    assert answer.id == made.body["id"]
    assert len(server.asked) == 4
    assert len({asked.headers["Idempotency-Key"] for asked in server.asked}) == 1
    assert all(asked.body == server.asked[0].body for asked in server.asked)


@pytest.mark.parametrize("create", CREATES)
def test_a_create_takes_its_callers_key(ask: Ask, create: str) -> None:
    what, made = CREATES[create]
    with scripted(DROP, made) as server:
        ask(server.url, lambda client: what(client, idempotency_key="night-42"))
    assert [asked.headers["Idempotency-Key"] for asked in server.asked] == ["night-42", "night-42"]
    for impossible in ("", "two words", "ä", "x" * 256):
        with pytest.raises(ValueError, match="cannot be an Idempotency-Key"):
            ask("http://127.0.0.1:1", lambda client, key=impossible: what(client, idempotency_key=key))


def test_two_submissions_are_two_jobs(ask: Ask) -> None:
    with scripted(CREATED) as server:
        ask(server.url, lambda client: client.submit(a_spec()))
        ask(server.url, lambda client: client.submit(a_spec()))
    first, second = (asked.headers["Idempotency-Key"] for asked in server.asked)
    assert first != second


@pytest.mark.parametrize(
    "what",
    [
        lambda client: client.resume("job-1"),
        lambda client: client.retry("job-1"),
        lambda client: client.patch("job-1", {"priority": 2}),
    ],
    ids=["resume", "retry", "patch"],
)
def test_what_may_not_come_twice_is_sent_once(ask: Ask, what: Callable[[Any], Any]) -> None:
    with scripted(DROP, CREATED) as server, pytest.raises(ServiceUnreachable):
        ask(server.url, what)
    assert len(server.asked) == 1
    for status, code in ((503, "not-ready"), (429, "rate-limited")):
        with scripted(problem(status, code), CREATED) as server, pytest.raises(ApiError) as caught:
            ask(server.url, what)
        assert (len(server.asked), caught.value.status, caught.value.code) == (1, status, code)


@pytest.mark.full
@pytest.mark.parametrize("what", [lambda client: client.pause("job-1"), lambda client: client.get("job-1")])
def test_what_was_never_sent_is_tried_again(ask: Ask, what: Callable[[Any], Any]) -> None:
    port, asked = free_port(), threading.Event()

    def serve_late() -> None:
        with scripted(CREATED, port=port):
            asked.wait(20)

    late = threading.Timer(0.3, serve_late)
    late.start()
    assert ask(f"http://127.0.0.1:{port}", what).id == "job-1"
    asked.set()
    late.join()


@pytest.mark.parametrize(
    ("what", "made"),
    [
        (lambda client: client.get("job-1"), Answer(200, a_job())),
        (lambda client: client.plan(GOOD), Answer(422, None)),
        (lambda client: client.cancel("job-1"), Answer(202, a_job())),
        (lambda client: client.delete_queue("night"), Answer(204)),
    ],
    ids=["get", "plan", "cancel", "delete"],
)
def test_what_may_come_twice_is_tried_again(ask: Ask, what: Callable[[Any], Any], made: Answer) -> None:
    with scripted(problem(429, "rate-limited", Retry_After="0"), DROP, Answer(502, "of a proxy"), made) as server:
        if made.status == 422:
            with pytest.raises(ApiError):
                ask(server.url, what)
        else:
            ask(server.url, what)
    assert len(server.asked) == 4


def test_a_redirect_is_no_success(ask: Ask) -> None:
    with scripted(Answer(307, headers={"Location": "/v1/keys"})) as server, pytest.raises(ApiError, match="307"):
        ask(server.url, lambda client: client.revoke_key(""))


def test_patience_has_an_end(ask: Ask) -> None:
    with scripted(problem(503, "not-ready")) as server, pytest.raises(ApiError, match="it is not-ready"):
        ask(server.url, lambda client: client.versions(), retry_seconds=0.5)
    assert len(server.asked) > 1
    with scripted(problem(503, "not-ready")) as server, pytest.raises(ApiError):
        ask(server.url, lambda client: client.versions(), retry_seconds=0)
    assert len(server.asked) == 1
    with scripted(problem(429, "rate-limited", Retry_After="3600")) as server, pytest.raises(ApiError) as caught:
        ask(server.url, lambda client: client.versions())
    assert (len(server.asked), caught.value.retry_after) == (1, 3600), "to wait for an hour is the caller's to decide"


def test_pauses_grow_and_heed_the_service() -> None:
    url = "http://127.0.0.1:8900"
    patience, refusal = RetryPolicy(url, 1000), ApiError(503, "", [])
    pauses = [patience.pause_after(refusal) for _ in range(10)]
    for pause, longest in zip(pauses, [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8, 8, 8, 8], strict=True):
        assert longest / 2 <= pause <= longest
    assert 60 < patience.pause_after(ApiError(429, "", [], retry_after=60)) <= 68
    busy = ApiError(503, "", [], retry_after=5)
    assert RetryPolicy(url, 3).pause_after(busy) > 5, "what a busy service asks for comes on top"
    with pytest.raises(ApiError):
        RetryPolicy(url, 0).pause_after(busy)
    assert len({RetryPolicy(url, 10).pause_after(refusal) for _ in range(20)}) > 1, "there is chance in it"


def test_a_date_to_come_back_at(ask: Ask) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    date = at.strftime("%a, %d %b %Y %H:%M:%S GMT")
    for header, expected in ((date, 3600), ("Thu, 01 Jan 1970 00:00:00 GMT", 0), ("soon", None)):
        with scripted(problem(503, "not-ready", Retry_After=header)) as server, pytest.raises(ApiError) as caught:
            ask(server.url, lambda client: client.versions(), retry_seconds=0)
        assert caught.value.retry_after == (expected and pytest.approx(expected, abs=60))


# What is asked and answered


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda c: c.list(["RUNNING"], 5, "job-9"), ("GET", "/v1/jobs?cursor=job-9&limit=5&state=RUNNING", None)),
        (
            lambda c: c.list(queue="night", name="co", tenant="acme", submitted_by="ci"),
            ("GET", "/v1/jobs?limit=100&name=co&queue=night&submitted_by=ci&tenant=acme", None),
        ),
        (lambda c: c.get("../a b"), ("GET", "/v1/jobs/..%2Fa%20b", None)),
        (lambda c: c.dry_run(GOOD), ("POST", "/v1/jobs/dry-run", GOOD)),
        (lambda c: c.patch("j", {"name": "x"}), ("PATCH", "/v1/jobs/j", {"name": "x"})),
        (lambda c: c.cancel("j"), ("DELETE", "/v1/jobs/j", None)),
        (lambda c: c.cancel_many({"ids": ["j"]}), ("POST", "/v1/jobs/cancel", {"ids": ["j"]})),
        (lambda c: c.pause("j"), ("POST", "/v1/jobs/j/pause", None)),
        (lambda c: c.resume("j"), ("POST", "/v1/jobs/j/resume", None)),
        (lambda c: c.retry("j"), ("POST", "/v1/jobs/j/retry", None)),
        (
            lambda c: c.clone("j"),
            ("POST", "/v1/jobs/j/clone", {"changes": {}, "from_checkpoint": False, "from_weights": False}),
        ),
        (
            lambda c: c.clone("j", {"training": {"steps": 5}}, from_checkpoint=True),
            (
                "POST",
                "/v1/jobs/j/clone",
                {"changes": {"training": {"steps": 5}}, "from_checkpoint": True, "from_weights": False},
            ),
        ),
        (lambda c: c.drill("j", {"kind": "kill_rank"}), ("POST", "/v1/jobs/j/drills", {"kind": "kill_rank"})),
        (lambda c: c.profile("j", Profile()), ("POST", "/v1/jobs/j/profiles", Profile().model_dump(mode="json"))),
        (lambda c: c.metrics("j"), ("GET", "/v1/jobs/j/metrics?points=500", None)),
        (
            lambda c: c.metrics("j", 9, from_step=1, to_step=2, ranks=False),
            ("GET", "/v1/jobs/j/metrics?from_step=1&points=9&ranks=false&to_step=2", None),
        ),
        (lambda c: c.checkpoints("j"), ("GET", "/v1/jobs/j/checkpoints", None)),
        (lambda c: c.checkpoint("j", 5), ("GET", "/v1/jobs/j/checkpoints/5", None)),
        (lambda c: c.pin("j", 5), ("PUT", "/v1/jobs/j/checkpoints/5/pin", None)),
        (lambda c: c.unpin("j", 5), ("DELETE", "/v1/jobs/j/checkpoints/5/pin", None)),
        (lambda c: c.delete_checkpoint("j", 5), ("DELETE", "/v1/jobs/j/checkpoints/5", None)),
        (lambda c: c.queues(), ("GET", "/v1/queues", None)),
        (lambda c: c.queue("night"), ("GET", "/v1/queues/night", None)),
        (lambda c: c.put_queue("night", {"gpus": 4}), ("PUT", "/v1/queues/night", {"gpus": 4})),
        (lambda c: c.delete_queue("night"), ("DELETE", "/v1/queues/night", None)),
        (lambda c: c.tenants(), ("GET", "/v1/tenants", None)),
        (lambda c: c.put_tenant("acme", {"gpus": 4}), ("PUT", "/v1/tenants/acme", {"gpus": 4})),
        (lambda c: c.nodes(), ("GET", "/v1/nodes", None)),
        (lambda c: c.plan(GOOD), ("POST", "/v1/plans", GOOD)),
        (lambda c: c.presets(), ("GET", "/v1/presets", None)),
        (lambda c: c.examples(), ("GET", "/v1/examples", None)),
        (lambda c: c.versions(), ("GET", "/v1/versions", None)),
        (lambda c: c.whoami(), ("GET", "/v1/whoami", None)),
        (lambda c: c.create_key({"name": "ci"}), ("POST", "/v1/keys", {"name": "ci"})),
        (lambda c: c.keys(), ("GET", "/v1/keys", None)),
        (lambda c: c.revoke_key("abc"), ("DELETE", "/v1/keys/abc", None)),
        (lambda c: c.audit(), ("GET", "/v1/audit", None)),
        (lambda c: c.audit("acme", after=5, limit=2), ("GET", "/v1/audit?after=5&limit=2&tenant=acme", None)),
    ],
    ids=lambda value: None if callable(value) else " ".join(value[:2]),
)
def test_what_is_asked(ask: Ask, what: Callable[[Any], Any], expected: tuple[str, str, Any]) -> None:
    with scripted(problem(404, "not-found")) as server, pytest.raises(ApiError):
        ask(server.url, what)
    (asked,) = server.asked
    query = "&".join(f"{name}={value}" for name, values in sorted(asked.query.items()) for value in values)
    assert (asked.method, asked.path + ("?" + query if query else ""), asked.body) == expected


def test_a_patch_can_be_bound_to_what_it_is_made_to(ask: Ask) -> None:
    with scripted(problem(412, "precondition-failed")) as server, pytest.raises(ApiError) as caught:
        ask(server.url, lambda client: client.patch("job-1", {"priority": 1}, if_match='"7"'))
    assert (server.asked[0].headers["If-Match"], caught.value.code) == ('"7"', "precondition-failed")


def test_the_key_is_sent_and_only_when_there_is_one(ask: Ask) -> None:
    who = Answer(200, {"tenant": "acme", "name": "ci", "scopes": ["submit"]})
    with scripted(who) as server:
        ask(server.url, lambda client: client.whoami())
        assert ask(server.url, lambda client: client.whoami(), api_key="boost_a_b").tenant == "acme"
    without, with_key = server.asked
    assert "Authorization" not in without.headers
    assert with_key.headers["Authorization"] == "Bearer boost_a_b"
    for broken in ("", "two words", "a\nb", "schlüssel"):
        with pytest.raises(ValueError, match="characters that no key has") as caught:
            ask(server.url, lambda client: client.whoami(), api_key=broken)
        assert broken == "" or broken not in str(caught.value), "a key is not printed"


def test_what_is_no_problem_document_is_an_error_all_the_same(ask: Ask) -> None:
    with scripted(Answer(502, "<html>", {"Content-Type": "text/html"})) as server, pytest.raises(ApiError) as caught:
        ask(server.url, lambda client: client.versions(), retry_seconds=0)
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (502, "http-502", None)
    assert "answered 502 Bad Gateway" in caught.value.detail
    with scripted(Answer(200, {"hello": "world"})) as server, pytest.raises(ApiError, match="is not a BOOST service"):
        ask(server.url, lambda client: client.versions())


def test_an_answer_may_hold_more_than_this_client_knows(ask: Ask) -> None:
    with scripted(Answer(200, {"tenant": "acme", "name": "ci", "scopes": ["admin"], "since": "v2"})) as server:
        assert ask(server.url, lambda client: client.whoami()).name == "ci"


def test_both_clients_have_the_same_methods() -> None:
    described = {name for name, member in inspect.getmembers_static(Client) if isinstance(member, Method)}
    assert described == {name for name, member in inspect.getmembers_static(AsyncClient) if isinstance(member, Method)}
    assert len(described) == 58
    assert all(getattr(Client, name).__doc__ for name in described)


def test_methods_have_the_names_and_signatures_that_people_call() -> None:
    client, waiting = Client("http://127.0.0.1:1"), AsyncClient("http://127.0.0.1:1")
    signature = inspect.signature(client.pin)
    assert signature == inspect.signature(waiting.pin)
    assert list(signature.parameters) == ["job_id", "step"]
    assert signature.return_annotation is Checkpoint
    assert inspect.signature(client.submit).return_annotation is JobRecord
    assert inspect.signature(client.events).return_annotation == Iterator[JobEvent]
    assert inspect.signature(waiting.events).return_annotation == AsyncGenerator[JobEvent, None]
    assert (client.pin.__name__, client.pin.__qualname__) == ("pin", "Client.pin")
    with pytest.raises(TypeError, match=r"^AsyncClient\.pin\(\) got an unexpected keyword argument 'steps'$"):
        waiting.pin("job-1", steps=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Client\.whoami\(\) too many positional arguments$"):
        client.whoami("me")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Client\.submit\(\) missing a required argument: 'spec'$"):
        client.submit()  # type: ignore[call-arg]
    documented = pydoc.plain(pydoc.render_doc(Client))
    assert "pin(self, job_id: str, step: int) -> service.models.jobs.Checkpoint" in documented


# Streams


def test_events_go_on_where_the_connection_was_lost(ask: Ask) -> None:
    sent = [an_event(number) for number in range(1, 6)]
    with (
        scripted(
            Answer(200, a_job(JobState.RUNNING)),
            events(*sent[:2], cut=True),
            DROP,
            problem(503, "not-ready", Retry_After="0"),
            events(*sent[2:4]),  # ends in good order, as by a service that stops
            Answer(200, a_job(JobState.SUCCEEDED)),
            events(*sent[4:]),
        ) as server
    ):
        received = ask(server.url, lambda client: client.events("job-1"))
    assert received == [JobEvent.model_validate(event) for event in sent]
    connections = [asked for asked in server.asked if asked.path == "/v1/jobs/job-1/events"]
    assert [asked.headers["Last-Event-ID"] for asked in connections] == ["0", "2", "2", "2", "4"]
    assert connections[0].query == {"follow": ["true"]}
    assert server.asked[-1] == connections[-1], "what came between the stream's end and the job's is asked for"


def test_events_that_there_are(ask: Ask) -> None:
    with scripted(Answer(200, a_job(JobState.RUNNING)), events(an_event(8))) as server:
        received = ask(server.url, lambda client: client.events("job-1", after=7, follow=False))
    assert [event.id for event in received] == [8]
    assert (server.asked[1].query, server.asked[1].headers["Last-Event-ID"]) == ({"follow": ["false"]}, "7")
    assert len(server.asked) == 2


def test_logs_are_asked_for_by_rank_level_and_time(ask: Ask) -> None:
    since = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    with scripted(Answer(200, a_job(JobState.RUNNING)), events(an_event(1, "a"), an_event(2, "b"))) as server:
        received = ask(
            server.url, lambda client: client.logs("job-1", rank=0, level=["INFO", "ERROR"], since=since, follow=False)
        )
    assert [event.data["message"] for event in received] == ["a", "b"]
    query = dict(server.asked[1].query)
    assert datetime.fromisoformat(query.pop("since")[0]) == since
    assert (server.asked[1].path, query) == (
        "/v1/jobs/job-1/logs",
        {"rank": ["0"], "level": ["INFO", "ERROR"], "follow": ["false"]},
    )


def test_a_stream_of_nothing_but_broken_connections_ends(ask: Ask) -> None:
    with scripted(Answer(200, a_job(JobState.RUNNING)), DROP) as server, pytest.raises(ServiceUnreachable):
        ask(server.url, lambda client: client.events("job-1"), retry_seconds=0.5)
    assert len(server.asked) > 2


def test_a_stream_that_is_refused(ask: Ask) -> None:
    with scripted(problem(404, "job-not-found")) as server, pytest.raises(ApiError) as caught:
        ask(server.url, lambda client: client.events("job-1"))
    assert (caught.value.code, len(server.asked)) == ("job-not-found", 1)
    with (
        scripted(Answer(200, a_job()), problem(422, "invalid-request")) as server,
        pytest.raises(ApiError, match="it is invalid-request"),
    ):
        ask(server.url, lambda client: client.logs("job-1", level=["LOUD"] * 9))


def test_an_asynchronous_stream_left_early_gives_back_its_connection() -> None:
    async def first() -> int:
        async with AsyncClient(server.url) as client:
            stream = client.events("job-1")
            event = await anext(stream)
            await stream.aclose()
            return event.id

    with scripted(Answer(200, a_job(JobState.RUNNING)), events(an_event(1), an_event(2))) as server:
        assert asyncio.run(first()) == 1


# Encryption


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[ScriptedServer, Path]]:
    """A server with a certificate of its own, and the file of that certificate."""
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with scripted(Answer(200, {"tenant": "acme", "name": "ci", "scopes": ["read"]}), encrypt=context) as server:
        yield server, certificate


def test_a_certificate_that_is_not_trusted(ask: Ask, encrypted: tuple[ScriptedServer, Path]) -> None:
    server, certificate = encrypted
    with pytest.raises(ServiceUnreachable, match="boost login --ca-file"):
        ask(server.url, lambda client: client.whoami(), retry_seconds=3600)
    assert server.asked == []
    assert ask(server.url, lambda client: client.whoami(), verify=certificate).tenant == "acme"
    assert ask(server.url, lambda client: client.whoami(), verify=str(certificate)).tenant == "acme"


def test_a_file_that_holds_no_certificates(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for name in ("empty.pem", "absent.pem"):
        with pytest.raises(ValueError, match=f"{name} cannot be used as a CA bundle"):
            ask("https://127.0.0.1:1", lambda client: client.whoami(), verify=tmp_path / name)
