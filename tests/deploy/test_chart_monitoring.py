"""Rules and dashboards come through the chart as they are, and whole: ``test_installations`` has whose they are."""

import json
import re
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from deploy.grafana.source.panels import SERVICE_URL
from tests.deploy.chart import CHART, NAMESPACE, RELEASE, Object, of_kind, read_values, render, the, values
from tests.prometheus import promtool

RULES = sorted((CHART / "files" / "rules").glob("*.yml"))
DASHBOARDS = sorted((CHART / "files" / "dashboards").glob("*.json"))


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    labels = {"release": "prometheus"}
    on = {"enabled": True, "labels": labels}
    rules = on | {"runbookBase": "https://wiki.example.org/boost"}
    return render(values(monitoring={"rules": rules, "dashboards": on | {"annotations": {"grafana_folder": "BOOST"}}}))


def filled(path: Path) -> str:
    """A file of the chart with what its templates put in for this release."""
    uid = sha256(f"{NAMESPACE}/{RELEASE}".encode()).hexdigest()[:8]
    texts = {
        "@namespace@": NAMESPACE,
        "@release@": RELEASE,
        "@uid@": uid,
        "@runbooks@": "https://wiki.example.org/boost",
        "@price@": "0",
        "@name@": f"{RELEASE}-boost",
        "@groups@": "|".join(group["name"] for group in read_values(CHART / "values.yaml")["ray"]["workerGroups"]),
        "@claim@": f"{RELEASE}-boost-checkpoints",
    }
    text = path.read_text()
    for placeholder, value in texts.items():
        text = text.replace(placeholder, value)
    assert "@" not in text
    return text


def test_rules_are_as_they_are(objects: list[Object], tmp_path: Path) -> None:
    rendered = of_kind(objects, "PrometheusRule")
    assert len(rendered) == len(RULES) > 0
    assert [found["spec"] for found in rendered] == [yaml.safe_load(filled(path)) for path in RULES]
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
        assert (name, json.loads(text)) == (f"{NAMESPACE}_{RELEASE}_{path.name}", json.loads(filled(path)))
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1", "what Grafana's sidecar looks for stays"
        assert found["metadata"]["annotations"] == {"grafana_folder": "BOOST"}


def test_dashboards_link_to_the_service() -> None:
    on = {"dashboards": {"enabled": True}}
    rendered = of_kind(render(values(monitoring=on, config={"publicUrl": "https://boost.example.org"})), "ConfigMap")
    for (text,) in (found["data"].values() for found in rendered):
        (address,) = (each for each in json.loads(text)["templating"]["list"] if each["name"] == "service_url")
        assert address["query"] == "https://boost.example.org"
        assert SERVICE_URL not in text


def test_dashboards_find_pods_of_which_kuberay_cuts_the_names() -> None:
    group = {"name": "h100-of-the-new-pool", "minReplicas": 1, "maxReplicas": 1, "cpu": "8", "memory": "64Gi"}
    given = values(monitoring__dashboards__enabled=True, ray__workerGroups=[group, group | {"name": "cpu"}])
    objects = render(given, release="training-of-the-whole-laboratory")
    cluster = the(objects, "RayCluster")["metadata"]["name"]
    texts = "".join(text for found in of_kind(objects, "ConfigMap") for text in found["data"].values())
    pods = [f"{f'{cluster}-{name}'[:50]}-worker-x5k2p" for name in (group["name"], "cpu")]
    patterns = set(re.findall(r'pod=~\\"([^"\\]+)', texts))
    assert patterns and all(re.fullmatch(pattern, pod) for pattern in patterns for pod in pods)


def test_neither_is_there_unless_wanted() -> None:
    kinds = {found["kind"] for found in render()}
    assert kinds.isdisjoint({"PrometheusRule", "ConfigMap", "ServiceMonitor", "ScrapeConfig"})
