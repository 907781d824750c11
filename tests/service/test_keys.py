"""API keys in the database, and over the API."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from httpx_sse import connect_sse
from sqlalchemy import Engine, event, select

from service.accounts import keys
from service.accounts.audit import AuditLog
from service.accounts.keys import ANONYMOUS, KeyNotFound, KeyRevoked, KeyStore, Principal
from service.accounts.local import LocalKeys
from service.accounts.tables import TenantRow
from service.jobs.database import open_engine
from service.jobs.model import IdempotencyKeyReused, Request
from service.jobs.store import JobStore
from service.models.access import Scope
from service.models.jobs import KeyRequest
from tests.service.conftest import With
from tests.service.records import a_spec

READ = (Scope.READ,)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    opened = open_engine(database_url)
    yield opened
    opened.dispose()


@pytest.fixture
def known(engine: Engine) -> KeyStore:
    return KeyStore(engine)


def test_a_key_is_recognised(known: KeyStore) -> None:
    made = known.create("nightly", "lab", [Scope.SUBMIT])
    assert re.fullmatch(r"boost_[a-z0-9]{8}_[A-Za-z0-9_-]{43}", made.key)
    assert made.key.split("_")[1] == made.id
    assert known.verify(made.key) == Principal("lab", made.id, "nightly", (Scope.SUBMIT,))
    assert known.create("nightly", "lab", [Scope.SUBMIT]).id != made.id


def test_what_is_no_key_is_refused(known: KeyStore) -> None:
    made, other = known.create("a", "lab", READ), known.create("b", "lab", READ)
    secret = made.key.removeprefix(f"boost_{made.id}_")
    last = "A" if made.key[-1] != "A" else "Q"
    for wrong in (
        "", "boost", "boost__", f"boost_{made.id}_", f"boost_{made.id}", secret, made.key[:-1], made.key[:-1] + last,
        made.key + "x", made.key.upper(), f"boost_{other.id}_{secret}", f"boost_aaaaaaaa_{secret}", f" {made.key}",
        f"boost_\x00aaaaaaa_{secret}", "boost_ääääääää_ß", made.key.replace("boost", "tsoob"),
    ):  # fmt: skip
        assert known.verify(wrong) is None, wrong
    assert known.verify(made.key) is not None


def test_each_comparison_takes_as_long(known: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(left: str, right: str) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(keys, "hmac", SimpleNamespace(compare_digest=compare))
    made = known.create("a", "lab", READ)
    for presented in (made.key, made.key[:-1], "boost_aaaaaaaa_x", "nonsense"):
        known.verify(presented)
    assert len(compared) == 4
    assert {len(digest) for pair in compared for digest in pair} == {64}


def test_only_the_hash_is_kept(tmp_path: Path) -> None:
    from service.jobs.database import migrate

    url = f"sqlite:///{tmp_path}/boost.db"
    migrate(url)
    request = Request("lab", "monday", "f" * 64)
    made = [KeyStore(url).create("a", "lab", READ, request=request) for _ in range(2)]
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert made[0].id.encode() in content
    for new in made:
        assert new.key.encode() not in content
        assert new.key.removeprefix(f"boost_{new.id}_").encode() not in content


def test_a_revoked_key_is_refused_by_all_processes_in_time(
    known: KeyStore, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(keys, "time", SimpleNamespace(monotonic=lambda: now))
    other_process = KeyStore(engine)
    made = known.create("a", "lab", READ)
    assert known.verify(made.key)
    assert other_process.verify(made.key)
    known.revoke(made.id)
    assert known.verify(made.key) is None
    now += keys.REMEMBERED_SECONDS - 0.1
    assert other_process.verify(made.key), "remembered"
    now += 0.2
    assert other_process.verify(made.key) is None
    revoked = known.list()[0].revoked_at
    assert revoked is not None
    known.revoke(made.id)
    assert known.list()[0].revoked_at == revoked
    with pytest.raises(KeyNotFound, match="no key 'absent'"):
        known.revoke("absent")


def test_a_key_is_looked_up_once_in_a_while(known: KeyStore, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    made = known.create("a", "lab", READ)
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    for _ in range(50):
        assert known.verify(made.key)
    assert [statement.split()[0] for statement in statements] == ["SELECT", "UPDATE"], "found, and its use noted"


def pass_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have keys see a clock that is ahead."""
    monkeypatch.setattr(
        keys, "datetime", SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(seconds=seconds))
    )


def test_a_key_ends_when_it_expires(known: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    past = known.create("a", "lab", READ, datetime.now(UTC) - timedelta(seconds=1))
    assert known.verify(past.key) is None
    ends = datetime.now(UTC) + timedelta(seconds=30)
    soon = known.create("a", "lab", READ, ends)
    assert soon.expires_at == ends
    assert known.verify(soon.key)
    pass_seconds(monkeypatch, 31)
    assert known.verify(soon.key) is None, "though it is remembered"


def test_the_same_request_again_gives_the_key_another_secret(known: KeyStore, engine: Engine) -> None:
    request = Request("default", "monday", "f" * 64)
    first = known.create("a", "lab", READ, request=request)
    assert known.verify(first.key)
    again = known.create("a", "lab", READ, request=request)
    assert again.id == first.id
    assert again.model_copy(update={"key": first.key}) == first
    assert known.verify(first.key) is None
    assert known.verify(again.key)
    assert len(known.list()) == 1
    with pytest.raises(IdempotencyKeyReused):
        known.create("b", "lab", READ, request=Request("default", "monday", "e" * 64))
    known.revoke(first.id)
    with pytest.raises(KeyRevoked, match="send another Idempotency-Key"):
        known.create("a", "lab", READ, request=request)


def test_keys_are_listed_without_their_secrets(known: KeyStore, engine: Engine) -> None:
    assert known.empty()
    assert known.list() == []
    made = [known.create(name, "lab", [Scope.ADMIN, Scope.READ]) for name in ("first", "second")]
    found = known.list()
    assert not known.empty()
    assert [key.name for key in found] == ["second", "first"]
    assert found[1].model_dump() == made[0].model_dump(exclude={"key"}) | {"revoked_at": None, "last_used_at": None}
    assert found[0].scopes == [Scope.READ, Scope.ADMIN]
    with engine.connect() as connection:
        assert connection.execute(select(TenantRow.name)).scalars().all() == ["lab"], "made with its first key"


def test_what_is_recalled_is_what_would_be_verified(
    known: KeyStore, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, soon = known.create("k", "a", READ), known.create("s", "a", READ, datetime.now(UTC) + timedelta(seconds=30))
    assert known.verify(made.key, cached_only=True) is None, "it has never been seen"
    assert known.verify(made.key, cached_only=True) is None, "and asking changes nothing"
    principal = known.verify(made.key)
    assert principal is not None
    assert known.verify(made.key, cached_only=True) == principal
    assert {known.verify(wrong, cached_only=True) for wrong in (f"{made.key}x", made.key[:-1], "boost_", "")} == {None}
    assert known.verify(soon.key)
    pass_seconds(monkeypatch, 31)
    assert known.verify(soon.key, cached_only=True) is None, "it has expired"
    known.revoke(made.id)
    assert known.verify(made.key, cached_only=True) is None
    monkeypatch.setattr(keys, "REMEMBERED_SECONDS", -1)
    other = known.create("o", "a", READ)
    assert known.verify(other.key)
    assert known.verify(other.key, cached_only=True) is None, "the database is to be asked again"


def test_use_is_noted_about_once_a_minute(known: KeyStore, engine: Engine) -> None:
    made = known.create("a", "lab", READ)
    assert known.list()[0].last_used_at is None
    known.verify(made.key)
    used = known.list()[0].last_used_at
    assert used is not None
    assert KeyStore(engine).verify(made.key)
    assert known.list()[0].last_used_at == used


@pytest.mark.parametrize(
    ("scopes", "may"),
    [
        ([Scope.READ], [True, False, False]),
        ([Scope.SUBMIT], [True, True, False]),
        ([Scope.ADMIN], [True, True, True]),
        ([Scope.READ, Scope.SUBMIT], [True, True, False]),
        ([], [False, False, False]),
    ],
)
def test_scopes_include_the_lesser_ones(scopes: list[Scope], may: list[bool]) -> None:
    principal = Principal("lab", "k", "k", tuple(scopes))
    assert [principal.may(scope) for scope in (Scope.READ, Scope.SUBMIT, Scope.ADMIN)] == may
    assert ANONYMOUS.may(Scope.ADMIN)


def test_what_is_done_on_the_database_itself_is_in_the_audit_log(engine: Engine) -> None:
    local = LocalKeys(engine)
    made = local.create_key(KeyRequest(name="first", tenant="lab", scopes=[Scope.ADMIN]))
    assert KeyStore(engine).verify(made.key)
    local.revoke_key(made.id)
    entries = AuditLog(engine).page().entries
    assert [(entry.action, entry.resource, entry.address, entry.tenant) for entry in entries] == [
        ("key.create", f"/v1/keys/{made.id}", "local", None),
        ("key.revoke", f"/v1/keys/{made.id}", "local", None),
    ]


# Over the API


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
class TestRoutes:
    def test_a_key_is_made_used_and_revoked(self, client_with: With) -> None:
        admin = client_with(Scope.ADMIN)
        wanted = {"name": "ci", "tenant": "lab", "scopes": ["submit"], "expires_at": "2999-01-01T00:00:00Z"}
        answer = admin.post("/v1/keys", json=wanted)
        assert answer.status_code == 201, answer.text
        made = answer.json()
        assert {name: made[name] for name in wanted} == wanted
        using = client_with.headers({"Authorization": f"Bearer {made['key']}"})
        assert using.get("/v1/whoami").json() == {"tenant": "lab", "name": "ci", "scopes": ["submit"]}
        listed = admin.get("/v1/keys")
        assert [key["name"] for key in listed.json()["keys"]] == ["ci", "tester"]
        assert made["key"] not in listed.text
        assert admin.delete(f"/v1/keys/{made['id']}").status_code == 204
        assert using.get("/v1/whoami").status_code == 401
        absent = admin.delete("/v1/keys/absent")
        assert (absent.status_code, absent.json()["code"]) == (404, "key-not-found")

    def test_a_stream_ends_when_its_key_does(self, client_with: With, store: JobStore) -> None:
        admin, reader = client_with(Scope.ADMIN), client_with(Scope.READ)
        job = store.create(a_spec(), "/checkpoints")
        with connect_sse(reader, "GET", f"/v1/jobs/{job.id}/events") as source:
            sent = source.iter_sse()
            assert next(sent).json()["data"]["state"] == "QUEUED"
            key_id = reader.headers["Authorization"].split("_")[1]
            assert admin.delete(f"/v1/keys/{key_id}").status_code == 204
            assert list(sent) == []
        assert not store.get(job.id).finished

    def test_a_repeated_request_gives_the_key_another_secret(self, client_with: With) -> None:
        admin = client_with(Scope.ADMIN)
        wanted = {"name": "ci", "tenant": "lab", "scopes": ["read"]}
        made = [admin.post("/v1/keys", json=wanted, headers={"Idempotency-Key": "k"}).json() for _ in range(2)]
        assert made[0]["id"] == made[1]["id"]
        using = [client_with.headers({"Authorization": f"Bearer {each['key']}"}) for each in made]
        assert [each.get("/v1/whoami").status_code for each in using] == [401, 200]
        other = admin.post("/v1/keys", json=wanted | {"name": "x"}, headers={"Idempotency-Key": "k"})
        assert (other.status_code, other.json()["code"]) == (422, "idempotency-key-reused")

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"tenant": "Lab"}, "tenant"),
            ({"scopes": []}, "scopes"),
            ({"scopes": ["root"]}, "scopes[0]"),
            ({"name": ""}, "name"),
            ({"expires_at": "2030-01-01T00:00:00"}, "expires_at"),
            ({"scope": "read"}, "scope"),
        ],
    )
    def test_a_bad_request_names_its_field(self, client_with: With, change: dict[str, object], field: str) -> None:
        wanted = {"name": "ci", "tenant": "lab", "scopes": ["read"]} | change
        answer = client_with(Scope.ADMIN).post("/v1/keys", json=wanted)
        assert answer.status_code == 422
        assert [error["field"] for error in answer.json()["errors"]] == [field]
