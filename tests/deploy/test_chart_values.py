"""The values: each is documented, each is in the schema, and what is misspelled or of the wrong kind is refused."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from helm_python import HelmValuesError

from tests.deploy import values_table
from tests.deploy.chart import CHART, CI, Values, chart, nested, read_values

SCHEMA: Values = json.loads((CHART / "values.schema.json").read_text())
GROUP: Values = {"name": "gpu", "minReplicas": 1, "maxReplicas": 1, "cpu": "1", "memory": "1Gi"}
ALL = [chart().values, *map(read_values, CI)]
Path = tuple[Any, ...]


def resolved(schema: Values) -> Values:
    for part in schema.get("allOf", []):
        schema = schema | resolved(part)
    if "$ref" in schema:
        schema = schema | resolved(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
    return schema


def keys(value: Any, schema: Values, path: Path = ()) -> Iterator[tuple[Path, bool]]:
    """Where all keys of some values are, and whether the schema knows them by name."""
    schema = resolved(schema)
    if isinstance(value, dict):
        named = "properties" in schema
        for key, below in value.items():
            yield (*path, key), named
            yield from keys(below, schema["properties"][key] if named else {}, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from keys(below, schema.get("items", {}), (*path, index))


def objects(schema: Any) -> Iterator[Values]:
    """All schemas of objects in a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield schema
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from objects(part)


def changed(values: Values, path: Path, key: Any, value: Any) -> Values:
    """The values with another key or value at a place."""
    wrong = copy.deepcopy(values)
    place = wrong
    for step in path[:-1]:
        place = place[step]
    place.pop(path[-1])
    place[key] = value
    return wrong


def refused(values: Values) -> str:
    with pytest.raises(HelmValuesError) as error:
        chart().validate_schema(values)
    return str(error.value)


def places() -> Iterator[tuple[Values, Path, Any, bool]]:
    """Each key once: values that have it, where, what it is there, and whether the schema knows it by name."""
    seen = set()
    for values in ALL:
        for path, named in keys(values, SCHEMA):
            everywhere = tuple(step for step in path if not isinstance(step, int))
            if everywhere not in seen:
                seen.add(everywhere)
                value: Any = values
                for step in path:
                    value = value[step]
                yield values, path, value, named


@pytest.mark.full
def test_all_documented_values_are_accepted() -> None:
    for values in ALL:
        chart().validate_schema(values)
    for _, path, value, named in places():
        if named and not any(isinstance(step, int) for step in path):
            chart().validate_schema(nested(".".join(path), value))


def test_misspelled_ones_are_refused() -> None:
    tried = 0
    for values, path, value, named in places():
        if named:
            said = refused(changed(values, path, f"{path[-1]}x", value))
            assert f"{path[-1]}x" in said, (path, said)
            tried += 1
    assert tried > 150


@pytest.mark.full
def test_values_of_the_wrong_kind_are_refused() -> None:
    for values, path, value, named in places():
        if named:
            fits_some_bool = value is None or isinstance(value, bool)
            refused(changed(values, path, path[-1], {"un": {"fit": 1}} if fits_some_bool else True))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("image.tag", "latest"),
        ("api.replicas", 0),
        ("api.resources.limits.memory", None),
        ("env", {"BOOST_AUTH": "false"}),
        ("config.checkpointRoot", "gs://bucket"),
        ("config.rankMetricsPorts", "9400"),
        ("config.rayDashboardUrl", "http://127.0.0.1:8265/#/overview"),
        ("config.trackingUris", ["https://mlflow.lab/?a=b"]),
        ("ray.address", "ray-head"),
        ("ray.gangScheduling.by", "yunikorn"),
        ("ray.workerGroups", [GROUP | {"name": "GPU"}]),
        ("ray.workerGroups", [{"name": "gpu", "minReplicas": 1, "maxReplicas": 1, "cpu": "1"}]),
        ("ray.workerGroups", [GROUP | {"labels": {"network": "400 Gb/s"}}]),
        ("ray.workerGroups", [GROUP | {"labels": {"net work": "ib"}}]),
        ("commonLabels", {"cost": "a" * 64}),
        ("tenantSecrets", [{"tenant": "../lab", "name": "s3", "existingSecret": "s3"}]),
        ("networkPolicy.clients", [{}]),
        ("fullnameOverride", "a" * 41),
    ],
)
def test_what_could_not_work_is_refused(path: str, value: Any) -> None:
    refused(nested(path, value))


def test_data_of_the_hub_can_be_allowed() -> None:
    chart().validate_schema(nested("config.allowedPrefixes", ["hf://datasets/org/name"]))


@pytest.mark.parametrize("values", ALL)
def test_jobs_may_name_the_data_that_is_mounted(values: Values) -> None:
    mounts = [claim["mountPath"] for claim in values.get("data", [])]
    assert set(mounts) <= set(values.get("config", {}).get("allowedPrefixes", []))


def test_the_schema_names_all_keys() -> None:
    free = [found for found in objects(SCHEMA) if found.get("additionalProperties") is not False]
    assert all("additionalProperties" in found or found is SCHEMA["properties"]["global"] for found in free)
    assert {path for path, _ in keys(chart().values, SCHEMA)} >= {(name,) for name in SCHEMA["properties"]} - {
        ("global",)
    }


def test_the_readme_has_the_table_of_all_values() -> None:
    assert (CHART / "README.md").read_text() == values_table.current(), "run: python -m tests.deploy.values_table"


def test_a_value_without_a_comment_is_not_overlooked() -> None:
    text = "a:\n  # -- Said.\n  b: 1\n\n  # no\n  c: 2\n"
    with pytest.raises(ValueError, match=r"a\.c in values\.yaml has no comment"):
        list(values_table.rows(text, {"properties": {"a": {"properties": {"b": {}, "c": {}}}}}))
