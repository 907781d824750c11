"""Which proxy is asked for a URL."""

import httpx
import pytest

from service.client import Client, ServiceUnreachable
from service.proxies import proxy_of

PROXY = "http://proxy:3128"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("url", "excluded"),
    [
        ("http://127.0.0.1:8900", ""),
        ("http://127.3.2.1", ""),
        ("http://[::1]:8900", ""),
        ("http://localhost:8900", ""),
        ("http://boost.corp", "other.org, .corp"),
        ("http://boost.corp", "boost.corp"),
        ("http://boost.corp", "*"),
        ("http://10.1.2.3:8900", "10.0.0.0/8"),
        ("http://10.1.2.3:8900", "10.1.2.3"),
        ("http://[fd00::7]:8900", "127.0.0.1,fd00::/8"),
        ("http://[fd00::7]:8900", "[fd00::7]"),
    ],
)
def test_some_hosts_are_asked_directly(url: str, excluded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", excluded)
    assert proxy_of(url) is None


@pytest.mark.parametrize("excluded", ["", "[::1]", "fd00::/8", "10.0.0.0/8,nocorp", "nonsense/99,[", ",,"])
@pytest.mark.parametrize("url", ["http://boost.corp:8900", "https://11.1.2.3", "https://[fe80::1]:8900"])
def test_others_by_the_proxy(url: str, excluded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", excluded)
    assert proxy_of(url).url == httpx.URL(PROXY)
    monkeypatch.setenv("https_proxy", "http://other:1")  # of its scheme, before that for all
    assert proxy_of(url).url.host == ("other" if url.startswith("https") else "proxy")


@pytest.mark.parametrize("named", ["socks5://proxy:9", "ftp://proxy", "http://:::"])
def test_a_proxy_that_cannot_be_used_is_refused_by_its_variable(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", named)
    with pytest.raises(ValueError, match=r"all_proxy \(or ALL_PROXY\) names no proxy .* add boost.corp to NO_PROXY"):
        Client("http://boost.corp")
    Client("http://127.0.0.1:8900").close()


def test_an_error_says_which_proxy_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@127.0.0.1:9")
    with Client("http://boost.corp", retry_seconds=0) as client, pytest.raises(ServiceUnreachable) as refused:
        client.list()
    assert "no service answers at http://boost.corp through the proxy 127.0.0.1:9" in str(refused.value)
    assert "secret" not in str(refused.value)
