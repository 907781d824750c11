"""YAML as people mean it: the core schema of YAML 1.2, no field twice, nothing that is nested endlessly."""

import math

import pytest
import yaml

from boost_core.config.base import DEEPEST, is_too_deep, read_yaml

# As the tables of YAML 1.2.2 have it, 10.3.2; what is a string there is one here.
CORE_SCHEMA = {
    "1:30": "1:30", "1:30.5": "1:30.5", "yes": "yes", "on": "on", "No": "No", "2026-01-01": "2026-01-01",
    "1_000": "1_000", "0b11": "0b11", "=": "=", "'3'": "3", "010": 10, "0o14": 12, "0x3A": 58, "-19": -19, "+3": 3,
    "3e-4": 3e-4, "12e03": 12e3, "0.": 0.0, "-2E+05": -2e5, ".5": 0.5, "-.INF": -math.inf, "true": True, "FALSE": False,
    "~": None, "null": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("text", CORE_SCHEMA)
def test_plain_values_are_those_of_the_core_schema(text: str) -> None:
    found = read_yaml(f"field: {text}")["field"]
    assert (type(found), found) == (type(CORE_SCHEMA[text]), CORE_SCHEMA[text])


def test_what_is_written_as_yaml_is_read_as_it_was() -> None:
    values = ["1:30", "yes", "010", 10, 3e-4, 1.0, True, None, "", "2026-01-01", {"a": [1, "~"]}]
    assert read_yaml(yaml.safe_dump(values)) == values


def test_merged_fields_may_be_given_again_and_written_ones_not() -> None:
    assert read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}")["b"] == {"x": 3, "y": 2}
    with pytest.raises(yaml.YAMLError, match=r"duplicate field 'steps'; remove one\n.*line 4"):
        read_yaml("training:\n  steps: 1\n  seed: 2\n  steps: 3\n")


@pytest.mark.full
@pytest.mark.parametrize("text", ["[" * 5000, "[" * 200 + "]" * 200, "&a [*a]", "a: &a {b: *a}"])
def test_endless_nesting_is_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="nested too deeply"):
        read_yaml(text)


@pytest.mark.parametrize(
    "text", ["!!int x", "!!bool perhaps", "!!timestamp 2026-99-99", "9" * 5000, "!!python/name:os.x"]
)
def test_values_that_are_none_of_their_kind_are_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


@pytest.mark.full
def test_how_deep_something_is_takes_no_longer_for_what_is_named_often() -> None:
    content: object = 1
    for _ in range(DEEPEST):
        content = [content] * 9
    assert not is_too_deep(content)
    assert is_too_deep([content])
