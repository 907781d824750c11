"""What the chart leaves open: any field of a pod, further objects, labels and annotations, digests, who pods are."""

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from helm_python import HelmRenderError, HelmValuesError

from tests.deploy.chart import (
    CHART,
    NAME,
    Object,
    Values,
    chart,
    environment,
    nested,
    of_kind,
    pod,
    pod_templates,
    read_values,
    render,
    the,
    values,
)
from tests.deploy.manifests import KUBERNETES, check
from tests.deploy.test_chart_templates import GROUP, OPEN, POSTGRES

SCHEMA: Values = json.loads((CHART / "values.schema.json").read_text())
OWN = {NAME: "api", "/head": "ray-head", "/gpu": "ray-worker"}
ROUTE: Values = {
    "enabled": True, "host": "b.example.org",
    "parentRefs": [{"name": "public", "namespace": "gw", "sectionName": "https"}],
}  # fmt: skip
OTHERS = ("ServiceMonitor", "ScrapeConfig", "PrometheusRule", "ConfigMap")  # have labels and annotations of their own
ELSEWHERE: Object = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gw"}}}


def with_pod_spec(spec: Object) -> Values:
    """The same for the API, the head and a group, where OWN stands for the chart's container."""

    def of(name: str) -> Any:
        return json.loads(json.dumps(spec).replace("OWN", name))

    groups = [GROUP | {"podSpec": of("ray-worker")}]
    return values(api__podSpec=of("api"), ray={"head": {"podSpec": of("ray-head")}, "workerGroups": groups})


def specs(given: Values) -> dict[str, tuple[Object, Object]]:
    """Of the API, the head and a group: the pod's spec without these values, and with them."""
    plain, open_ = render(nested("ray.workerGroups", [GROUP])), render(given)
    for manifest in open_:
        check(manifest)
    return {name: (pod(plain, name)["spec"], pod(open_, name)["spec"]) for name in OWN}


def test_any_field_of_a_pod_may_be_said_and_no_other() -> None:
    versions = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    kubernetes = json.loads((versions / f"v{KUBERNETES}.0-local-strict" / "podspec-v1.json").read_text())
    elsewhere = {
        "ephemeralContainers", "hostNetwork", "serviceAccount", "serviceAccountName", "terminationGracePeriodSeconds",
    }  # fmt: skip
    assert set(SCHEMA["$defs"]["podSpec"]["propertyNames"]["enum"]) == kubernetes["properties"].keys() - elsewhere
    for wrong in ("afinity", *elsewhere):
        with pytest.raises(HelmValuesError, match=wrong):
            chart().validate_schema(nested("api.podSpec", {wrong: {}}))


def test_fields_of_a_pod_are_merged() -> None:
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
    ]}}}  # fmt: skip
    added = {
        "affinity": affinity, "runtimeClassName": "nvidia", "priorityClassName": "training",
        "securityContext": {"supplementalGroups": [1000680000]}, "tolerations": [{"operator": "Exists"}],
    }  # fmt: skip
    for plain, open_ in specs(with_pod_spec(added)).values():
        assert open_ == plain | added | {"securityContext": plain["securityContext"] | added["securityContext"]}


def test_the_charts_own_containers_volumes_and_variables_stay() -> None:
    sidecar = {"name": "logs", "image": "logs:1", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    added = {
        "initContainers": [sidecar],
        "containers": [
            sidecar,
            {"name": "OWN", "env": [{"name": "HOME", "value": "/scratch"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
             "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}, {"name": "scratch", "mountPath": "/tmp"}],
             "resources": {"limits": {"cpu": "3"}}},
        ],
        "volumes": [
            {"name": "scratch", "hostPath": {"path": "/nvme"}}, {"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}},
        ],
    }  # fmt: skip
    for name, (plain, open_) in specs(with_pod_spec(added)).items():
        (before,), (own, beside) = plain["containers"], open_["containers"]
        assert (own["name"], beside) == (OWN[name], sidecar), "KubeRay starts Ray in the first"
        changed = {"env", "volumeMounts", "resources"}
        assert {key: own[key] for key in own.keys() - changed} == {key: before[key] for key in before.keys() - changed}
        said = environment({"spec": plain}) | {"HOME": "/scratch", "NCCL_DEBUG": "INFO"}
        assert (environment({"spec": open_}), len(own["env"])) == (said, len(said))
        mounts = {mount["mountPath"]: mount["name"] for mount in before["volumeMounts"]}
        assert len(own["volumeMounts"]) == len(mounts) + 1
        assert {mount["mountPath"]: mount["name"] for mount in own["volumeMounts"]} == mounts | {
            "/scratch": "scratch", "/tmp": "scratch",
        }  # fmt: skip
        assert own["resources"]["limits"] == before["resources"]["limits"] | {"cpu": "3"}
        volumes = {volume["name"]: volume for volume in plain["volumes"]}
        assert len(open_["volumes"]) == len(volumes) + 1
        assert {volume["name"]: volume for volume in open_["volumes"]} == volumes | {
            volume["name"]: volume for volume in added["volumes"]
        }


def test_what_is_null_is_left_out() -> None:
    scratch = {"name": "tmp", "emptyDir": None, "hostPath": {"path": "/nvme"}}
    for plain, open_ in specs(with_pod_spec({"volumes": [scratch]})).values():
        kept = [volume for volume in plain["volumes"] if volume["name"] != "tmp"]
        assert [volume for volume in open_["volumes"] if volume["name"] != "tmp"] == kept
        assert {"name": "tmp", "hostPath": {"path": "/nvme"}} in open_["volumes"]


def test_one_groups_fields_are_not_anothers() -> None:
    groups = [GROUP | {"podSpec": {"priorityClassName": "training"}}, GROUP | {"name": "spot"}]
    first, second = the(render(nested("ray.workerGroups", groups)), "RayCluster")["spec"]["workerGroupSpecs"]
    assert first["template"]["spec"].pop("priorityClassName") == "training"
    assert first["template"] == second["template"]


@pytest.mark.parametrize("name", OWN)
def test_an_image_beside_the_releases_is_refused(name: str) -> None:
    wrong = [{"name": OWN[name], "image": "mine:1"}]
    given = {
        NAME: nested("api.podSpec.containers", wrong),
        "/head": nested("ray.head.podSpec.containers", wrong),
        "/gpu": nested("ray.workerGroups", [GROUP | {"podSpec": {"containers": wrong}}]),
    }[name]
    with pytest.raises(
        HelmRenderError, match=f"podSpec sets the image of the container {OWN[name]}.*set image.registry"
    ):
        render(given)


def test_pods_have_labels_and_annotations() -> None:
    said = {"podLabels": {"cost": "lab"}, "podAnnotations": {"scan": "no"}}
    objects = render(values(api=said, ray={"head": said, "workerGroups": [GROUP | said]}, commonLabels={"cost": "all"}))
    for name in OWN:
        metadata = pod(objects, name)["metadata"]
        assert (metadata["labels"]["cost"], metadata["annotations"]) == ("lab", {"scan": "no"})
        assert pod(render(), name)["metadata"]["labels"].items() <= metadata["labels"].items()


@pytest.mark.parametrize("label", ["app.kubernetes.io/instance", "ray.io/cluster", "helm.sh/chart"])
@pytest.mark.parametrize("path", ["commonLabels", "api.podLabels", "ray.head.podLabels"])
def test_labels_that_others_select_by_are_not_for_the_taking(path: str, label: str) -> None:
    with pytest.raises(HelmValuesError):
        chart().validate_schema(nested(path, {label: "mine"}))


def test_all_objects_have_what_is_common() -> None:
    given = values(
        POSTGRES, OPEN, read_values(CHART / "ci" / "one-gpu-values.yaml"), commonLabels={"team": "ml"},
        commonAnnotations={"owner": "ops"}, httpRoute=ROUTE,
        ingress={"enabled": True, "host": "b.example.org", "tlsSecret": "cert", "annotations": {"of": "its own"}},
    )  # fmt: skip
    objects = render(given)
    for found in objects:
        assert found["metadata"]["labels"]["team"] == "ml", found["metadata"]["name"]
        if found["kind"] not in OTHERS:
            assert found["metadata"]["annotations"]["owner"] == "ops", found["metadata"]["name"]
    for name, template in pod_templates(objects):
        assert template["metadata"]["labels"]["team"] == "ml", name
    assert the(objects, "Ingress")["metadata"]["annotations"] == {"owner": "ops", "of": "its own"}
    for selector in (
        the(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        the(objects, "Service")["spec"]["selector"],
    ):
        assert "team" not in selector, "what is selected by can never be changed"


def test_images_are_pulled_by_digest() -> None:
    api, trainer = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
    objects = render(values(POSTGRES, image={"registry": "r.example.org", "digest": api, "trainerDigest": trainer}))
    tag = chart().metadata["appVersion"]
    expected = {
        "api": f"r.example.org/boost-api:{tag}@{api}",
        "trainer": f"r.example.org/boost-trainer:{tag}@{trainer}",
    }
    for name, template in pod_templates(objects):
        image = template["spec"]["containers"][0]["image"]
        assert image == expected["trainer" if name.startswith("RayCluster") else "api"], name
    with pytest.raises(HelmValuesError):
        chart().validate_schema(nested("image.digest", "sha256:abc"))


def test_further_objects_are_templates() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ .Release.Name }}-text\ndata: {a: {{ 1 | quote }}}\n"
    labels = {"team": "{{ .Values.config.logFormat }}"}
    policy: Object = {
        "apiVersion": "gateway.networking.k8s.io/v1", "kind": "BackendTLSPolicy",
        "metadata": {"name": '{{ include "boost.fullname" . }}', "labels": labels}, "spec": {"weight": 3},
    }  # fmt: skip
    objects = render(nested("extraObjects", [text, policy]))
    assert the(objects, "ConfigMap") == {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "lab-text"}, "data": {"a": "1"},
    }  # fmt: skip
    assert the(objects, "BackendTLSPolicy") == policy | {"metadata": {"name": NAME, "labels": {"team": "json"}}}
    with pytest.raises(HelmValuesError):
        chart().validate_schema(nested("extraObjects", [{"kind": "ConfigMap"}]))


def test_a_route_of_the_gateway_api() -> None:
    assert of_kind(render(), "HTTPRoute") == []
    given = values(httpRoute=ROUTE, service__port=80, networkPolicy__clients=[ELSEWHERE])
    objects = render(given)
    route = the(objects, "HTTPRoute")
    check(route)
    assert route["spec"] == {
        "parentRefs": ROUTE["parentRefs"],
        "hostnames": ["b.example.org"],
        "rules": [{"backendRefs": [{"name": NAME, "port": 80}], "timeouts": {"request": "0s"}}],
    }
    assert environment(pod(objects, NAME))["BOOST_PUBLIC_URL"] == "https://b.example.org"
    (rule,) = the(render(values(given, httpRoute__requestTimeout="")), "HTTPRoute")["spec"]["rules"]
    assert "timeouts" not in rule
    notes = chart().render(given, name="lab", namespace="ml")["boost/templates/NOTES.txt"]
    assert "boost login --url https://b.example.org" in notes and "port-forward" not in notes


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (nested("httpRoute.enabled", True), "needs httpRoute.host and httpRoute.parentRefs"),
        (nested("httpRoute", ROUTE), "httpRoute.enabled lets people in from outside"),
    ],
)
def test_a_route_that_leads_nowhere_is_refused(wrong: Values, said: str) -> None:
    with pytest.raises(HelmRenderError, match=re.escape(said)):
        render(wrong)


def test_a_route_takes_no_keys_in_clear_text() -> None:
    with pytest.raises(HelmValuesError, match="sectionName"):
        chart().validate_schema(nested("httpRoute.parentRefs", [{"name": "public"}]))


def test_the_platform_may_say_who_the_pods_are() -> None:
    anybody = values(POSTGRES, podSecurityContext=dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup")))
    somebody = values(POSTGRES, podSecurityContext={"runAsUser": 1000680000, "runAsGroup": 0, "fsGroup": 1000680001})
    for (name, plain), (_, open_), (_, other) in zip(
        *(pod_templates(render(given)) for given in (POSTGRES, anybody, somebody)), strict=True
    ):
        kept = plain["spec"]["securityContext"]
        ids = {field: kept.pop(field) for field in ("runAsUser", "runAsGroup", "fsGroup")}
        assert set(ids.values()) == {65532}, name
        assert open_["spec"]["securityContext"] == kept, name
        assert other["spec"]["securityContext"] == kept | somebody["podSecurityContext"], name
    with pytest.raises(HelmValuesError):
        chart().validate_schema(nested("podSecurityContext.runAsUser", 0))
