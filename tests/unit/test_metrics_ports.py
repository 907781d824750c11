"""The setting that says on which ports ranks serve their metrics."""

import pytest
from pydantic import ValidationError

from service.settings import Settings


@pytest.mark.parametrize(("said", "ports"), [
    ("9400-9499", range(9400, 9500)), ("9400-9400", range(9400, 9401)), ("1-65535", range(1, 65_536)), ("", range(0)),
])  # fmt: skip
def test_a_range_of_ports(said: str, ports: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOST_RANK_METRICS_PORTS", said)
    assert Settings().metrics_ports() == ports


def test_there_is_one_unless_it_is_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOOST_RANK_METRICS_PORTS", raising=False)
    assert Settings().metrics_ports() == range(9400, 9500)


@pytest.mark.parametrize("said", ["9400", "9499-9400", "0-10", "9400-70000", "9400-", "a-b", "9400-9499,9600-9601"])
def test_what_is_no_range_is_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOST_RANK_METRICS_PORTS", said)
    with pytest.raises(ValidationError, match="such as 9400-9499"):
        Settings()
