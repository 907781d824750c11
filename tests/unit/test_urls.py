"""How stores are reached."""

import fsspec
import pytest

from boost_core.config.storage import giving_up_soon, options_at


def test_a_look_up_waits_briefly_for_a_store_and_keeps_what_the_node_says_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"s3": {"addressing_style": "path"}}})
    secret = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"}
    brief, usual = (options_at("s3://bucket", options) for options in (giving_up_soon(secret), secret))
    clients = [fsspec.url_to_fs("s3://bucket", **options)[0].s3 for options in (brief, usual)]
    found = [client.meta.config for client in clients]
    assert [each.s3["addressing_style"] for each in found] == ["path", "path"]
    assert [(each.connect_timeout, each.read_timeout) for each in found] == [(3, 10), (5, 15)]
    assert found[0].retries["total_max_attempts"] == 1
    assert "config_kwargs" not in options_at("/local", giving_up_soon(secret))
