"""The chart renders, and what it renders is what Kubernetes and the operators take."""

import copy
import re
import tarfile
from pathlib import Path

import helm_python
import pytest
from jsonschema.exceptions import ValidationError

import boost_core
from service.settings import Settings
from tests.deploy.chart import (
    CHART,
    CI,
    ROOT,
    Values,
    chart,
    environment,
    of_kind,
    pod_templates,
    read_values,
    render,
    the,
)
from tests.deploy.manifests import check

EXAMPLES = [pytest.param({}, id="defaults"), *(pytest.param(read_values(path), id=path.stem) for path in CI)]


def test_the_chart_is_of_this_version() -> None:
    assert chart().metadata["appVersion"] == boost_core.__version__ == chart().version
    assert "dependencies" not in chart().metadata


def test_the_cluster_has_the_ray_of_the_images() -> None:
    pinned = re.search(r"ray\[.*\]==([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert pinned and chart().values["ray"]["version"] == pinned[1]


def test_the_package_has_all_that_is_rendered(tmp_path: Path) -> None:
    archive = helm_python.package(CHART, destination=tmp_path)
    with tarfile.open(archive) as packed:
        names = {name.removeprefix("boost/") for name in packed.getnames()}
    files = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file() and path.parent.name != "ci"}
    assert files - names <= {".helmignore"}
    assert not {name for name in names if name.startswith("ci/")}


def test_there_are_values_for_each_place() -> None:
    places = ["cloud", "h100-pool", "laptop", "one-gpu"]
    assert [path.name.removesuffix("-values.yaml") for path in CI] == places


@pytest.mark.parametrize("values", EXAMPLES)
def test_helm_finds_nothing_to_say(values: Values) -> None:
    report = helm_python.lint(CHART, values, strict=True, kube_version="v1.34.0")
    said = [message for message in report["messages"] if message["error"] != "icon is recommended"]
    assert (said, report["errors"]) == ([], [])


@pytest.mark.parametrize("values", EXAMPLES)
def test_objects_are_as_their_schemas_want_them(values: Values) -> None:
    objects = render(values)
    for manifest in objects:
        check(manifest)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)


def test_an_object_that_is_not_is_refused() -> None:
    cluster = the(render(), "RayCluster")
    for path, value in (
        (("spec", "headGroupSpec", "rayStartParams", "labels"), "a=b"),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "imagePullPolice"), "Always"),
        (("spec", "workerGroupSpecs", 0, "maxReplica"), 1),
    ):
        wrong = copy.deepcopy(cluster)
        place = wrong
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(ValidationError):
            check(wrong)


@pytest.mark.parametrize("values", EXAMPLES)
def test_settings_are_the_services(values: Values) -> None:
    known = {f"BOOST_{name.upper()}" for name in Settings.model_fields}
    for name, template in pod_templates(render(values)):
        given = {variable for variable in environment(template) if variable.startswith("BOOST_")}
        assert given <= known, name


def test_the_service_takes_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "checkpointRoot": "s3://c", "allowedPrefixes": ["s3://a/{tenant}", "/data"],
        "trustedProxies": ["10.0.0.0/8", "::1"], "corsOrigins": ["https://a.example.org"],
        "ratePerSecond": 1_000_000, "failedLoginsPerMinute": 3, "streamsPerKey": 4, "reconcileSeconds": 0.25,
        "connections": 1_000, "storeSeconds": 12.5, "datasetCpus": 7.5, "tensorboard": False,
        "trackingUris": ["https://mlflow.example.org", "http://m:5000"], "topologyLabels": ["zone", "example.org/rack"],
        "growCooldownSeconds": 0, "growSettleSeconds": 2.5, "databaseSeconds": 20, "supervisorSeconds": 90.5,
        "gpuHourPrice": 2.5, "autoscaling": True, "logFormat": "text", "otlpEndpoint": "http://o:4318",
        "rankMetricsPorts": "9500-9510", "rayDashboardUrl": "http://r:8265", "publicUrl": "https://b.example.org",
    }  # fmt: skip
    assert config.keys() == chart().values["config"].keys()
    elsewhere = {"enabled": False, "address": "ray:6379", "token": {"existingSecret": "token"}}
    given = {"config": config, "ray": elsewhere, "networkPolicy": {"enabled": False}}
    for name, value in environment(_api(render(given))).items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.allowed_prefixes, settings.trusted_proxies) == (
        ("s3://a/{tenant}", "/data"),
        ("10.0.0.0/8", "::1"),
    )
    assert (settings.rate_per_second, settings.reconcile_seconds) == (1_000_000, 0.25)
    assert (settings.connections, settings.store_seconds) == (1_000, 12.5)
    assert (settings.dataset_cpus, settings.tensorboard) == (7.5, False)
    assert (settings.database_seconds, settings.supervisor_seconds, settings.gpu_hour_price) == (20, 90.5, 2.5)
    assert settings.autoscaling
    assert settings.topology_labels == ("zone", "example.org/rack")
    assert settings.tracking_uris == ("https://mlflow.example.org", "http://m:5000")
    assert (settings.grow_cooldown_seconds, settings.grow_settle_seconds) == (0, 2.5)
    assert (settings.host, settings.port, settings.tls, settings.auth) == ("0.0.0.0", 8900, False, True)
    assert settings.secrets_dir == Path("/etc/boost/secrets")


# Settings that neither the chart nor `config` sets, and why.
ELSEWHERE = {
    "auth": "a service in a network needs keys",
    "cpus": "of an embedded Ray, which the API's image lacks",
    **dict.fromkeys(("url", "api_key", "config", "retry_seconds"), "the command line's"),
}


def test_operators_reach_all_settings() -> None:
    over_tls = {"api": {"tls": {"existingSecret": "tls"}}, "database": {"existingSecret": "database"}}
    rendered = {name for values in ({}, over_tls) for name in environment(_api(render(values)))}
    reached = {re.sub("([A-Z])", r"_\1", name).lower() for name in chart().values["config"]}
    reached |= {name.removeprefix("BOOST_").lower() for name in rendered if name.startswith("BOOST_")}
    assert reached.isdisjoint(ELSEWHERE)
    assert reached | ELSEWHERE.keys() == Settings.model_fields.keys()


def test_what_is_not_said_is_the_services_default() -> None:
    assert not {
        name
        for name in environment(_api(render()))
        if re.search("RATE|CORS|GROW|OTLP|URL|CPUS|PRICE|AUTOSCALING|DATABASE|TENSORBOARD|TRACKING|TOPOLOGY", name)
    }


def _api(objects: list[Values]) -> Values:
    return of_kind(objects, "Deployment")[0]["spec"]["template"]
