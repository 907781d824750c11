"""Signing in, and which service and key a command uses."""

import json
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.connection import read_login
from tests.service.canned import a_job
from tests.service.certificates import self_signed
from tests.service.command_line import run_boost
from tests.service.conftest import free_port
from tests.service.scripted import Answer, ScriptedServer, problem, serving

KEY = "boost_abcdefgh_secret"
ME = Answer(200, {"tenant": "acme", "name": "ci", "scopes": ["read", "submit"]})
JOBS = Answer(200, {"jobs": [a_job()], "next_cursor": None})


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with serving({"GET /v1/whoami": ME, "GET /v1/jobs": JOBS}) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config" / "login.json"


def sign_in(server: ScriptedServer, config: Path) -> None:
    result = run_boost("login", "--url", server.url, "--key-stdin", stdin=f"{KEY}\n", BOOST_CONFIG=str(config))
    assert result.exit_code == 0, result.output


def sent_keys(server: ScriptedServer) -> list[str | None]:
    return [asked.headers.get("Authorization") for asked in server.asked]


@pytest.mark.parametrize("how", [[], ["--key-stdin"]])
def test_login_tries_the_key_and_keeps_it(server: ScriptedServer, config: Path, how: list[str]) -> None:
    result = run_boost("login", "--url", server.url, *how, stdin=f"{KEY}\n", BOOST_CONFIG=str(config))
    assert result.exit_code == 0, result.output
    assert (
        f"signed in to {server.url} as ci of tenant acme, with scope read, submit; saved in {config}" in result.stdout
    )
    assert KEY not in result.output
    assert sent_keys(server) == [f"Bearer {KEY}"]
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    assert stat.S_IMODE(config.parent.stat().st_mode) == 0o700
    assert json.loads(config.read_text()) == {"url": server.url, "api_key": KEY, "ca_file": None}
    assert list(config.parent.iterdir()) == [config], "nothing is left of its making"
    assert run_boost("ls", BOOST_CONFIG=str(config)).exit_code == 0
    assert sent_keys(server)[-1] == f"Bearer {KEY}"


def test_a_key_that_is_refused_is_not_kept(config: Path) -> None:
    with serving({"GET /v1/whoami": problem(401, "unauthenticated")}) as server:
        result = run_boost("login", "--url", server.url, "--key-stdin", stdin=KEY, BOOST_CONFIG=str(config))
    assert (result.exit_code, config.exists()) == (4, False)
    assert KEY not in result.output


def test_no_key(server: ScriptedServer, config: Path) -> None:
    result = run_boost("login", "--url", server.url, "--key-stdin", stdin="\n", BOOST_CONFIG=str(config))
    assert (result.exit_code, "an operator creates one with: boost keys create" in result.stderr) == (2, True)
    broken = run_boost("login", "--url", server.url, "--key-stdin", stdin="schlüssel\n", BOOST_CONFIG=str(config))
    assert (broken.exit_code, "characters that no key has" in broken.stderr) == (2, True)
    assert "schlüssel" not in broken.output
    assert server.asked == []


def test_a_new_login_takes_the_place_of_an_unusable_one(server: ScriptedServer, config: Path) -> None:
    config.parent.mkdir()
    config.write_text("{")
    config.chmod(0o600)
    refused = run_boost("ls", BOOST_CONFIG=str(config))
    assert (refused.exit_code, "is not what `boost login` writes" in refused.stderr) == (2, True)
    sign_in(server, config)
    assert run_boost("ls", BOOST_CONFIG=str(config)).exit_code == 0


def test_a_login_that_cannot_be_written_leaves_no_key_behind(server: ScriptedServer, config: Path) -> None:
    config.mkdir(parents=True)
    result = run_boost("login", "--url", server.url, "--key-stdin", stdin=KEY, BOOST_CONFIG=str(config))
    assert (result.exit_code, "cannot be written" in result.stderr) == (2, True)
    assert list(config.parent.iterdir()) == [config]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_file_that_others_can_read_is_not_used(server: ScriptedServer, config: Path, mode: int) -> None:
    sign_in(server, config)
    config.chmod(mode)
    result = run_boost("ls", BOOST_CONFIG=str(config))
    assert (result.exit_code, f"chmod 600 {config}" in result.stderr) == (2, True)
    assert KEY not in result.output
    assert len(server.asked) == 1


def test_the_environment_goes_before_the_file(server: ScriptedServer, config: Path) -> None:
    sign_in(server, config)
    run_boost("ls", BOOST_CONFIG=str(config), BOOST_API_KEY="boost_other_key")
    assert sent_keys(server)[-1] == "Bearer boost_other_key"
    with serving({"GET /v1/jobs": JOBS}) as other:
        run_boost("ls", BOOST_CONFIG=str(config), BOOST_URL=other.url)
        run_boost("ls", "--url", other.url, BOOST_CONFIG=str(config))
        run_boost("ls", BOOST_CONFIG=str(config), BOOST_PORT=other.url.rsplit(":", 1)[1])
        assert sent_keys(other) == [None, None, None], "a key is shown to no other service than its own"
    run_boost("ls", "--url", f"{server.url}/", BOOST_CONFIG=str(config))
    assert sent_keys(server)[-1] == f"Bearer {KEY}"


def test_logout(server: ScriptedServer, config: Path) -> None:
    sign_in(server, config)
    assert run_boost("logout", BOOST_CONFIG=str(config)).stdout == f"removed {config}\n"
    assert run_boost("logout", BOOST_CONFIG=str(config)).stdout == "not signed in\n"
    assert read_login(config) is None


def test_whoami(server: ScriptedServer) -> None:
    assert run_boost("whoami", BOOST_URL=server.url).stdout == "ci of tenant acme, with scope read, submit\n"
    assert json.loads(run_boost("whoami", "--json", BOOST_URL=server.url).stdout) == ME.body


@pytest.mark.parametrize(("status", "code"), [(401, "unauthenticated"), (403, "forbidden")])
def test_who_may_not_is_told_so_by_the_exit_status(status: int, code: str) -> None:
    with serving({"GET /v1/jobs": problem(status, code)}) as server:
        result = run_boost("ls", BOOST_URL=server.url)
    assert (result.exit_code, f"it is {code}" in result.stderr) == (4, True)
    assert ("boost login" in result.stderr) == (status == 401)


def test_a_key_on_an_open_road_is_worth_a_warning(config: Path) -> None:
    port = free_port()
    warned = run_boost("login", "--url", f"http://boost.invalid:{port}", "--key-stdin", stdin=KEY)
    assert (warned.exit_code, "is not encrypted; use https" in warned.stderr) == (3, True)
    here = run_boost("login", "--url", f"http://127.0.0.1:{port}", "--key-stdin", stdin=KEY)
    assert (here.exit_code, "use https" in here.stderr) == (3, False)


def test_an_authority_of_ones_own_is_kept_with_the_key(tmp_path: Path, config: Path) -> None:
    certificate, key = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving({"GET /v1/whoami": ME, "GET /v1/jobs": JOBS}, encrypt=context) as server:
        arguments = ("login", "--url", server.url, "--key-stdin")
        refused = run_boost(*arguments, stdin=KEY, BOOST_CONFIG=str(config))
        assert (refused.exit_code, "--ca-file" in refused.stderr) == (3, True)
        assert run_boost(*arguments, "--ca-file", certificate, stdin=KEY, BOOST_CONFIG=str(config)).exit_code == 0
        assert run_boost("ls", BOOST_CONFIG=str(config)).exit_code == 0
