"""TLS, and which settings are refused because they would leave the service open."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.jobs.store import JobStore
from service.models.access import Scope
from service.security.network import UnsafeExposure, check_exposure
from service.serve import run
from service.settings import Settings
from tests.service.certificates import self_signed
from tests.service.conftest import RunningApi, With, free_port
from tests.service.routes import GOOD_FOR_ALL, READABLE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def server(store: JobStore, database_url: str, tmp_path: Path, files: tuple[Path, Path]) -> Iterator[RunningApi]:
    running = RunningApi(
        store,
        Settings(
            home=tmp_path / "home", database_url=database_url, tls_cert=files[0], tls_key=files[1],
            allowed_prefixes=(str(READABLE),),
        ),
    )  # fmt: skip
    yield running
    running.stop()


@pytest.fixture
def trusting(server: RunningApi, files: tuple[Path, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=str(files[0]))) as opened:
        yield opened


def test_the_service_speaks_tls(server: RunningApi, trusting: httpx.Client) -> None:
    answer = trusting.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["strict-transport-security"] == "max-age=31536000"
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/healthz")
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http"))


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")  # whoever asks for these is told so
def test_old_versions_of_tls_are_refused(server: RunningApi) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", server.port)) as plain, context.wrap_socket(plain) as wrapped:
        assert wrapped.version() == "TLSv1.3"
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with socket.create_connection(("127.0.0.1", server.port)) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)


@pytest.mark.full
def test_over_tls_the_cookie_is_for_tls_alone(server: RunningApi, trusting: httpx.Client) -> None:
    made = With(server)
    key = made(Scope.SUBMIT).headers["Authorization"].removeprefix("Bearer ")
    made.close()
    answer = trusting.post("/session", json={"key": key})
    assert answer.status_code == 204
    assert "Secure" in answer.headers["set-cookie"].split("; ")
    assert trusting.get("/v1/whoami").json()["scopes"] == ["submit"]
    for origin, status in ((server.url, 201), (server.url.replace("https", "http"), 403)):
        assert trusting.post("/v1/jobs", json=GOOD_FOR_ALL, headers={"Origin": origin}).status_code == status


def test_behind_a_proxy_that_does_tls(store: JobStore, database_url: str, tmp_path: Path) -> None:
    settings = Settings(
        home=tmp_path / "home", database_url=database_url, tls=False, trusted_proxies=("127.0.0.1",),
        failed_logins_per_minute=1,
    )  # fmt: skip
    running = RunningApi(store, settings)
    with httpx.Client(base_url=running.url, headers={"X-Forwarded-Proto": "https"}) as http:
        assert "strict-transport-security" in http.get("/healthz").headers
        wrong = {"Authorization": "Bearer x"}
        status = [
            http.get("/v1/jobs", headers=wrong | {"X-Forwarded-For": address}).status_code
            for address in ("192.0.2.1", "192.0.2.1", "192.0.2.2")
        ]
    running.stop()
    assert status == [401, 429, 401], "each address that the proxy tells is one of its own"


def test_nobody_else_is_believed_about_addresses(store: JobStore, database_url: str, tmp_path: Path) -> None:
    running = RunningApi(store, Settings(home=tmp_path / "home", database_url=database_url, failed_logins_per_minute=1))
    with httpx.Client(base_url=running.url, headers={"Authorization": "Bearer x"}) as http:
        status = [
            http.get("/v1/jobs", headers={"X-Forwarded-For": f"192.0.2.{number}"}).status_code for number in range(3)
        ]
    running.stop()
    assert status == [401, 429, 429]


# Settings


def settings(tmp_path: Path, **given: Any) -> Settings:
    return Settings(home=tmp_path, **given)


def test_fit_settings(tmp_path: Path, files: tuple[Path, Path]) -> None:
    certificate = {"tls_cert": files[0], "tls_key": files[1]}
    for given in (
        {}, {"auth": False}, {"host": "localhost", "auth": False}, {"host": "::1", "auth": False}, {"tls": False},
        {"host": "0.0.0.0", "tls": False}, {"host": "0.0.0.0", **certificate}, certificate,
        {"auth": False, **certificate},
    ):  # fmt: skip
        check_exposure(settings(tmp_path, **given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host": "0.0.0.0", "auth": False}, "only on the loopback address, not on 0.0.0.0; leave out --no-auth"),
        ({"host": "0.0.0.0", "auth": False, "tls": False}, "leave out --no-auth"),
        ({"host": "10.1.2.3"}, "on 10.1.2.3 others can read the traffic; give --tls-cert and --tls-key .* or --no-tls"),
        ({"host": "example.org"}, "or --no-tls"),
        ({"host": "localhost.example.org", "auth": False}, "leave out --no-auth"),
        ({"tls_cert": "CERTIFICATE"}, "needs both --tls-cert and --tls-key"),
        ({"tls_key": "KEY"}, "needs both --tls-cert and --tls-key"),
        ({"tls_cert": "CERTIFICATE", "tls_key": "KEY", "tls": False}, "give only one of them"),
        ({"tls_cert": "/nowhere.pem", "tls_key": "KEY"}, "/nowhere.pem .* cannot be used: No such file"),
        ({"tls_cert": "CERTIFICATE", "tls_key": "/nowhere.pem"}, "/nowhere.pem cannot be used: No such file"),
        ({"tls_cert": "KEY", "tls_key": "KEY"}, "cannot be used: .* give readable PEM files"),
        ({"tls_cert": "CERTIFICATE", "tls_key": "OTHER"}, "cannot be used: .* that belong together"),
    ],
    ids=str,
)
def test_settings_that_would_leave_the_service_open(
    tmp_path: Path, files: tuple[Path, Path], given: dict[str, Any], message: str
) -> None:
    named = {"CERTIFICATE": files[0], "KEY": files[1], "OTHER": self_signed(tmp_path)[1]}
    with pytest.raises(UnsafeExposure, match=message):
        check_exposure(settings(tmp_path, **{name: named.get(value, value) for name, value in given.items()}))


def test_the_service_does_not_start_with_such_settings(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(SystemExit, match="leave out --no-auth"):
        run(settings(tmp_path / "home", host="0.0.0.0", port=port, auth=False))
    assert not (tmp_path / "home").exists()


def test_lists_in_the_environment_are_split_by_commas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOOST_CORS_ORIGINS", "https://a.example, https://b.example:8443")
    monkeypatch.setenv("BOOST_TRUSTED_PROXIES", "10.0.0.0/8")
    monkeypatch.setenv("BOOST_AUTH", "false")
    found = settings(tmp_path)
    assert found.cors_origins == ("https://a.example", "https://b.example:8443")
    assert found.trusted_proxies == ("10.0.0.0/8",)
    assert found.auth is False
