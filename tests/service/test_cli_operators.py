"""Commands about queues, nodes, tenants, keys and the audit log against a service that answers what it is told to."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from service import serve
from service.cli.console import ExitStatus
from service.jobs.store import JobStore
from service.settings import Settings
from tests.service.canned import A_KEY, A_QUEUE, A_TENANT, AUDIT, NODES
from tests.service.command_line import boost_at, run_boost
from tests.service.conftest import free_port
from tests.service.scripted import Answer, problem, serving

LISTED_KEY = {name: value for name, value in A_KEY.items() if name != "key"} | {
    "revoked_at": None,
    "last_used_at": "2026-01-02T00:00:00Z",
}
EMPTY_QUEUE = A_QUEUE | {"gpus": None, "used_gpus": 0.0, "used_cpus": 0.0, "jobs": {}}


def test_queues() -> None:
    script = {
        "GET /v1/queues": Answer(200, {"queues": [A_QUEUE]}),
        "GET /v1/queues/night": Answer(200, A_QUEUE),
        "DELETE /v1/queues/night": Answer(204),
    }
    with serving(script) as server:
        boost = boost_at(server.url)
        header, line = boost("queues", "ls").stdout.splitlines()
        assert json.loads(boost("queues", "ls", "--json").stdout) == {"queues": [A_QUEUE]}
        shown = boost("queues", "show", "night").stdout
        assert json.loads(boost("queues", "show", "night", "--json").stdout) == A_QUEUE
        assert boost("queues", "rm", "night").stdout == "deleted the queue night\n"
        unknown = boost("queues", "show", "day")
    assert header.split() == ["NAME", "GPUS", "CPUS", "JOBS", "DESCRIPTION"]
    assert line.split("  ")[0] == "night"
    for fact in ("2/8", "16.5", "1 RUNNING, 3 QUEUED", "when nobody looks"):
        assert fact in line
        assert fact in shown
    assert "PAUSED" not in line
    assert unknown.exit_code == 1


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--gpus", "16"], {"description": "when nobody looks", "gpus": 16.0, "cpus": None}),
        (["--gpus", "none", "--cpus", "0.5"], {"description": "when nobody looks", "gpus": None, "cpus": 0.5}),
        (["--description", ""], {"description": "", "gpus": 8.0, "cpus": None}),
    ],
)
def test_what_is_not_given_of_a_queue_stays(options: list[str], settings: dict[str, object]) -> None:
    script = {"GET /v1/queues/night": Answer(200, A_QUEUE), "PUT /v1/queues/night": Answer(200, A_QUEUE)}
    with serving(script) as server:
        result = boost_at(server.url)("queues", "set", "night", *options)
    assert result.stdout == "queue night: GPUs 2/8, CPUs 16.5\n", result.output
    assert server.asked[-1].body == settings


def test_a_new_queue() -> None:
    script = {
        "GET /v1/queues/night": problem(404, "queue-not-found"),
        "PUT /v1/queues/night": Answer(200, EMPTY_QUEUE),
        "GET /v1/queues/day": problem(404, "not-found"),
    }
    with serving(script) as server:
        made = boost_at(server.url)("queues", "set", "night", "--cpus", "4")
        assert server.asked[-1].body == {"description": "", "gpus": None, "cpus": 4.0}
        assert made.stdout == "queue night: GPUs 0, CPUs 0\n"
        assert boost_at(server.url)("queues", "set", "day").exit_code == 1, "what is not understood is not overwritten"
        for limit in ("many", "inf"):
            refused = boost_at(server.url)("queues", "set", "night", "--gpus", limit)
            why = f"{limit!r} is not a limit; give a number, or none"
            assert (refused.exit_code, why in refused.stderr) == (2, True)


def test_tenants() -> None:
    script = {
        "GET /v1/tenants": Answer(200, {"tenants": [A_TENANT]}),
        "PUT /v1/tenants/acme": Answer(200, A_TENANT),
        "PUT /v1/tenants/newcomer": Answer(200, A_TENANT | {"name": "newcomer"}),
    }
    with serving(script) as server:
        boost = boost_at(server.url)
        header, line = boost("tenants", "ls").stdout.splitlines()
        assert json.loads(boost("tenants", "ls", "--json").stdout) == {"tenants": [A_TENANT]}
        assert boost("tenants", "set", "acme", "--cpus", "32").stdout == "tenant acme: GPUs 4/16, CPUs 8\n"
        assert server.asked[-1].body == {"gpus": 16.0, "cpus": 32.0}
        assert boost("tenants", "set", "newcomer", "--gpus", "1").exit_code == 0
        assert server.asked[-1].body == {"gpus": 1.0, "cpus": None}
    assert header.split() == ["NAME", "GPUS", "CPUS", "JOBS"]
    assert line.split() == ["acme", "4/16", "8", "2", "RUNNING"]


def test_nodes() -> None:
    with serving({"GET /v1/nodes": Answer(200, NODES)}) as server:
        header, first, second, third, why, seen = boost_at(server.url)("nodes").stdout.splitlines()
        assert json.loads(boost_at(server.url)("nodes", "--json").stdout) == NODES
    assert header.split("  ")[0] == "NODE"
    for fact in ("node-a", "ready", "6/8", "63.5/64", "tiny (job-1): 2 rank(s), others: 1 rank(s)", "pool=training"):
        assert fact in first
    assert second.split() == ["node-b", "draining", "-", "0/4", "dataset", "corpus-v1:", "2", "CPU(s)", "-"]
    assert third.split() == ["node-c", "unusable", "-", "4/4", "-", "-"]
    assert why == "node-c is not used: it has no torch, which Ray's head has"
    assert seen.startswith("(as seen at ")
    with serving({"GET /v1/nodes": Answer(200, {"seen_at": None, "nodes": []})}) as server:
        assert boost_at(server.url)("nodes").stdout == "no scheduler has seen the cluster yet\n"


def test_audit() -> None:
    with serving({"GET /v1/audit": Answer(200, AUDIT)}) as server:
        boost = boost_at(server.url)
        header, first, second, more = boost("audit", "--tenant", "acme", "--after", "6", "-n", "2").stdout.splitlines()
        assert json.loads(boost("audit", "--json").stdout) == AUDIT
    assert server.asked[0].query == {"tenant": ["acme"], "after": ["6"], "limit": ["2"]}
    assert header.split() == ["ID", "TIME", "TENANT", "KEY", "FROM", "STATUS", "ACTION", "RESOURCE"]
    assert first.split()[3:] == ["acme", "ci", "10.0.0.9", "202", "jobs.cancel", "job-1"]
    assert second.split()[3:] == ["-", "-", "-", "401", "jobs.submit", "/v1/jobs"]
    assert more == "(more entries follow: add --after 8)"


# Keys


def test_a_new_key_is_shown_once() -> None:
    with serving({"POST /v1/keys": Answer(201, A_KEY)}) as server:
        boost = boost_at(server.url)
        made = boost(
            "keys", "create", "ci", "--tenant", "acme", "--scope", "read", "--scope", "submit", "--expires", "90d"
        )
        assert (made.exit_code, made.stdout) == (0, f"{A_KEY['key']}\n"), (
            "it can be piped into `boost login --key-stdin`"
        )
        assert json.loads(boost("keys", "create", "ci", "--tenant", "acme", "--json").stdout) == A_KEY
    first, second = server.asked
    expires = datetime.fromisoformat(first.body.pop("expires_at"))
    assert expires - datetime.now(UTC) == pytest.approx(timedelta(days=90), abs=timedelta(minutes=1))
    assert first.body == {"name": "ci", "tenant": "acme", "scopes": ["read", "submit"]}
    assert second.body == {"name": "ci", "tenant": "acme", "scopes": ["submit"], "expires_at": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tenant", "No Tenant"], "error: tenant: should match pattern"),
        (["--tenant", "acme", "--expires", "2020-01-01"], "is not in the future"),
        (["--tenant", "acme", "--scope", "everything"], "everything"),
    ],
)
def test_keys_that_cannot_be(options: list[str], message: str) -> None:
    refused = run_boost("keys", "create", "ci", *options, BOOST_URL="http://127.0.0.1:1")
    assert (refused.exit_code, message in refused.stderr) == (2, True), refused.output


def test_keys_are_listed_and_revoked() -> None:
    script = {"GET /v1/keys": Answer(200, {"keys": [LISTED_KEY]}), "DELETE /v1/keys/abcdefgh": Answer(204)}
    with serving(script) as server:
        boost = boost_at(server.url)
        header, line = boost("keys", "ls").stdout.splitlines()
        assert json.loads(boost("keys", "ls", "--json").stdout) == {"keys": [LISTED_KEY]}
        assert boost("keys", "revoke", "abcdefgh").stdout == "key abcdefgh is revoked\n"
        assert boost("keys", "revoke", "unknown").exit_code == 1
    assert header.split("  ")[0] == "ID"
    assert line.split()[:4] == ["abcdefgh", "ci", "acme", "submit"]


def test_keys_in_the_database_itself(tmp_path: Path) -> None:
    home = {"BOOST_HOME": str(tmp_path / "home"), "BOOST_URL": "http://127.0.0.1:1"}
    made = json.loads(
        run_boost("keys", "create", "root", "--tenant", "ops", "--scope", "admin", "--direct", "--json", **home).stdout
    )
    assert made["key"].startswith(f"boost_{made['id']}_")
    assert (made["tenant"], made["scopes"], made["expires_at"]) == ("ops", ["admin"], None)
    (listed,) = json.loads(run_boost("keys", "ls", "--direct", "--json", **home).stdout)["keys"]
    assert (listed["id"], listed["revoked_at"], "key" in listed) == (made["id"], None, False)
    assert run_boost("keys", "revoke", made["id"], "--direct", **home).exit_code == 0
    (listed,) = json.loads(run_boost("keys", "ls", "--direct", "--json", **home).stdout)["keys"]
    assert listed["revoked_at"]
    unknown = run_boost("keys", "revoke", "nosuchid", "--direct", **home)
    assert (unknown.exit_code, "nosuchid" in unknown.stderr) == (1, True)
    assert made["key"].encode() not in (tmp_path / "home" / "boost.db").read_bytes()
    lost = run_boost("keys", "ls", "--direct", BOOST_DATABASE_URL="nonsense://", **home)
    assert (lost.exit_code, "BOOST_DATABASE_URL names cannot be used" in lost.stderr) == (1, True)


@pytest.mark.parametrize(
    "database", ["mysql://db", "postgresql://a@127.0.0.1:x/b", "sqlite:///{}/damaged.db", "postgresql://{}"]
)
def test_serve_says_in_a_line_what_is_wrong_with_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: str
) -> None:
    monkeypatch.setattr(serve, "write_logs", lambda _: None)
    (tmp_path / "damaged.db").write_bytes(b"x" * 5000)
    place = f"boost:hidden@127.0.0.1:{free_port()}/boost" if database.startswith("postgresql://{") else tmp_path
    settings = Settings(home=tmp_path, database_url=database.format(place), auth=False, port=free_port())
    with pytest.raises(SystemExit, match=r"^the database that BOOST_DATABASE_URL names cannot be used: ") as ended:
        serve.run(settings)
    assert "hidden" not in str(ended.value)


def test_migrate(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/boost.db"
    for _ in range(2):
        assert run_boost("migrate", BOOST_DATABASE_URL=url).output == f"the database {url} is up to date\n"
    JobStore(url).close()


def test_migrate_says_what_is_wrong_and_no_password() -> None:
    away = run_boost("migrate", BOOST_DATABASE_URL=f"postgresql://boost:hidden@127.0.0.1:{free_port()}/boost")
    assert away.exit_code == ExitStatus.FAILED
    assert "could not be migrated" in away.stderr
    assert "hidden" not in away.output
    unknown = run_boost("migrate", BOOST_DATABASE_URL="mysql://db")
    assert unknown.exit_code == ExitStatus.BAD_INPUT
    assert "use sqlite or postgresql" in unknown.stderr
    assert run_boost("migrate", BOOST_DATABASE_URL="postgresql://db:port/boost").exit_code == ExitStatus.BAD_INPUT
