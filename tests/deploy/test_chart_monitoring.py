"""Rules and dashboards come through the chart as they are."""

import json
from pathlib import Path

import pytest
import yaml

from deploy.grafana.source.variables import SERVICE_URL
from tests.deploy.chart import CHART, Object, of_kind, render, values
from tests.prometheus import promtool

RULES = sorted((CHART / "files" / "rules").glob("*.yml"))
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    labels = {"release": "prometheus"}
    on = {"enabled": True, "labels": labels}
    return render(values(monitoring={"rules": on, "dashboards": on | {"annotations": {"grafana_folder": "BOOST"}}}))


def test_rules_are_as_they_are(objects: list[Object], tmp_path: Path) -> None:
    rendered = of_kind(objects, "PrometheusRule")
    assert len(rendered) == len(RULES) > 0
    assert [found["spec"] for found in rendered] == [yaml.safe_load(path.read_text()) for path in RULES]
    for found in rendered:
        assert found["metadata"]["labels"]["release"] == "prometheus"
        file = tmp_path / f"{found['metadata']['name']}.yml"
        file.write_text(yaml.safe_dump(found["spec"]))
        promtool("check", "rules", "--lint=all", "--lint-fatal", file)


def test_dashboards_are_as_they_are(objects: list[Object]) -> None:
    rendered = of_kind(objects, "ConfigMap")
    assert len(rendered) == len(DASHBOARDS) > 0
    for found, path in zip(rendered, DASHBOARDS, strict=True):
        ((name, text),) = found["data"].items()
        assert (name, json.loads(text)) == (path.name, json.loads(path.read_text()))
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1", "what Grafana's sidecar looks for stays"
        assert found["metadata"]["annotations"] == {"grafana_folder": "BOOST"}


def test_dashboards_link_to_the_service() -> None:
    on = {"dashboards": {"enabled": True}}
    rendered = of_kind(render(values(monitoring=on, config={"publicUrl": "https://boost.example.org"})), "ConfigMap")
    for (text,) in (found["data"].values() for found in rendered):
        (address,) = (each for each in json.loads(text)["templating"]["list"] if each["name"] == "service_url")
        assert address["query"] == "https://boost.example.org"
        assert SERVICE_URL not in text


def test_neither_is_there_unless_wanted() -> None:
    kinds = {found["kind"] for found in render()}
    assert kinds.isdisjoint({"PrometheusRule", "ConfigMap", "ServiceMonitor", "ScrapeConfig"})
