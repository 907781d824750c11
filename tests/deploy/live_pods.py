"""What a live API server says of the chart's objects before they are there: strictness, pods' security, ``podSpec``."""

import json
from typing import Any

import httpx
import yaml
from helm_python import Config

from tests.deploy.chart import NAME, RELEASE, Object, Values, chart, pod, pod_templates, render, values
from tests.deploy.live_server import create, documents, path_of

POD_SPEC: Values = {
    "priorityClassName": "training",
    "securityContext": {"supplementalGroups": [7]},
    "tolerations": [{"operator": "Exists"}],
    "topologySpreadConstraints": [
        {"topologyKey": "kubernetes.io/hostname", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"},
    ],
    "volumes": [{"name": "tmp", "emptyDir": None, "hostPath": {"path": "/nvme"}}, {"name": "new", "emptyDir": {}}],
    "initContainers": [{"name": "first", "image": "i:1"}],
}  # fmt: skip
OF_THE_CONTAINER: Values = {
    "env": [{"name": "HOME", "value": "/scratch"}, {"name": "NEW", "value": "1"}],
    "volumeMounts": [{"name": "new", "mountPath": "/tmp"}, {"name": "new", "mountPath": "/new"}],
    "resources": {"limits": {"cpu": "64"}, "requests": None},
}
_DRY = {"dryRun": "All"}


def objections(api: httpx.Client, releases: Config, namespace: str, given: Values) -> dict[str, str]:
    """What the server objects to or warns of, by object: fields unknown, doubled, deprecated."""
    texts = releases.render(chart(), given, name=RELEASE, namespace=namespace, is_install=True)
    found = {}
    for text in (part for path, all_ in texts.items() if path.endswith(".yaml") for part in documents(all_)):
        manifest = yaml.safe_load(text)
        answer = api.patch(
            path_of(api, manifest, namespace),
            params=_DRY | {"fieldManager": "strict", "fieldValidation": "Strict"},
            content=text,
            headers={"Content-Type": "application/apply-patch+yaml"},
        )
        warnings = answer.headers.get_list("Warning")
        if warnings or not answer.is_success:
            found[f"{manifest['kind']}/{manifest['metadata']['name']}"] = "; ".join(warnings) or answer.text
    return found


def refused_as_unsafe(api: httpx.Client, namespace: str, given: Values) -> dict[str, str]:
    """The pods that the namespace does not take for the sake of its security, and why."""
    found = {}
    for number, (name, template) in enumerate(pod_templates(render(given))):
        one = {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": f"pod-{number}"}}
        answer = api.post(f"/api/v1/namespaces/{namespace}/pods", params=_DRY, json=one)
        if not answer.is_success:
            found[name] = str(answer.json()["message"])
    return found


def merged_both_ways(api: httpx.Client, name: str, container: str) -> tuple[bool, str]:
    """A pod that the chart has merged, beside one that Kubernetes has patched (a strategic merge patch)."""
    spec = POD_SPEC | {"containers": [OF_THE_CONTAINER | {"name": container}, {"name": "beside", "image": "i:2"}]}
    group = {"name": "gpu", "minReplicas": 1, "maxReplicas": 1, "cpu": "8", "memory": "64Gi"}
    given = {
        "api": values(api__podSpec=spec),
        "ray-head": values(ray__head__podSpec=spec),
        "ray-worker": values(ray__workerGroups=[group | {"podSpec": spec}]),
    }[container]
    path = "/apis/apps/v1/namespaces/default/deployments"
    by_chart = api.post(path, params=_DRY, json=_deployment(f"chart-{container}", pod(render(given), name)))
    assert by_chart.is_success, by_chart.text
    create(api, path, _deployment(container, pod(render(values(ray__workerGroups=[group])), name)))
    by_kubernetes = api.patch(
        f"{path}/{container}",
        params=_DRY,
        json={"spec": {"template": {"spec": spec}}},
        headers={"Content-Type": "application/strategic-merge-patch+json"},
    )
    assert by_kubernetes.is_success, by_kubernetes.text
    one, other = (_in_order(answer.json()["spec"]["template"]["spec"]) for answer in (by_chart, by_kubernetes))
    return one == other, " ".join(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def _deployment(name: str, template: Object) -> Object:
    selector = {"matchLabels": template["metadata"]["labels"]}
    spec = {"selector": selector, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def _in_order(found: Any) -> Any:
    """What is named in lists, ordered by its text: a patch puts what is new in front."""
    if isinstance(found, dict):
        return {key: _in_order(value) for key, value in found.items()}
    if isinstance(found, list):
        return sorted(map(_in_order, found), key=json.dumps)
    return found


OWN = {NAME: "api", "/head": "ray-head", "/gpu": "ray-worker"}
