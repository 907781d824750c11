"""The chart in a real API server: ``deploy/api-server.sh python -m tests.deploy.live_chart CRDS``.

CRDS is a folder with the custom resource definitions of KubeRay, the Prometheus operator and the Gateway API, as their
releases have them (YAML). No operator, no scheduler and no kubelet is there: what is looked at is what Kubernetes
takes, keeps and changes. The Jobs that Helm waits for are ended here, well or badly.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from helm_python import Config, HelmReleaseError

from tests.deploy.chart import CHART, CI, NAME, RELEASE, Object, Values, helm, pod, read_values, render, values
from tests.deploy.live_upgrade import create, report
from tests.deploy.live_upgrade import main as upgrade_beside_the_autoscaler

EXAMPLES: dict[str, Values] = {"defaults": {}, **{path.stem.removesuffix("-values"): read_values(path) for path in CI}}
NEWER: Values = {"image": {"tag": "9.9.0", "trainerTag": "9.9.0"}}
VOLATILE = ("managedFields", "resourceVersion", "generation", "creationTimestamp", "uid")
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
TERMINAL = {
    "Complete": {"succeeded": 1},
    "Failed": {"failed": 1},
}


def main(crds: str) -> None:
    url, token = os.environ["API_URL"], os.environ["API_TOKEN"]
    api = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, verify=False, timeout=60)
    define(api, Path(crds))
    for example, given in EXAMPLES.items():
        with namespace(api, example) as jobs, helm(url, token, example) as releases:
            lives(api, releases, jobs, example, given)
    for name, container in ((NAME, "api"), ("/head", "ray-head"), ("/gpu", "ray-worker")):
        report(f"the podSpec of {container} is merged as Kubernetes merges it", *merged_both_ways(api, name, container))
    (cluster,) = Path(crds).glob("ray.io_rayclusters.yaml")
    upgrade_beside_the_autoscaler(url, token, str(cluster))


def define(api: httpx.Client, folder: Path) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    made = [found for file in sorted(folder.glob("*.yaml")) for found in yaml.safe_load_all(file.read_text()) if found]
    for definition in made:
        create(api, path, definition)
    for definition in made:
        name = definition["metadata"]["name"]
        while not is_true(api.get(f"{path}/{name}").json(), "Established"):
            time.sleep(0.2)


def is_true(found: Object, condition: str) -> bool:
    conditions = found.get("status", {}).get("conditions", [])
    return any(each["type"] == condition and each["status"] == "True" for each in conditions)


class Jobs(threading.Thread):
    """Ends the Jobs of a namespace, as their controller would, in the way that is asked for."""

    def __init__(self, api: httpx.Client, namespace: str) -> None:
        super().__init__(daemon=True)
        self.end_as, self._api, self._path = "Complete", api, f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.2):
            for job in self._api.get(self._path).json()["items"]:
                if not job["status"].get("conditions"):
                    self._end(job)

    def _end(self, job: Object) -> None:
        now = job["metadata"]["creationTimestamp"]
        kinds = {"Complete": ["SuccessCriteriaMet", "Complete"], "Failed": ["FailureTarget", "Failed"]}[self.end_as]
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
        status = TERMINAL[self.end_as] | {"conditions": conditions, "startTime": now}
        if self.end_as == "Complete":
            status["completionTime"] = now
        path = f"{self._path}/{job['metadata']['name']}/status"
        patched = self._api.patch(
            path, json={"status": status}, headers={"Content-Type": "application/merge-patch+json"}
        )
        assert patched.is_success or patched.status_code == 404, patched.text


@contextmanager
def namespace(api: httpx.Client, name: str) -> Iterator[Jobs]:
    create(api, "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    jobs = Jobs(api, name)
    jobs.start()
    try:
        yield jobs
    finally:
        jobs.done.set()
        jobs.join()


def lives(api: httpx.Client, releases: Config, jobs: Jobs, example: str, given: Values) -> None:
    """Install, upgrade to the same, to another version, back, and past a migration that fails."""
    manifest = releases.install(CHART, RELEASE, given, namespace=example)["manifest"]
    installed = there(api, example, manifest)
    report(f"{example}: Kubernetes takes all {len(installed)} objects", True)
    releases.upgrade(CHART, RELEASE, given, namespace=example)
    report(f"{example}: an upgrade to the same changes no object", *same(installed, there(api, example, manifest)))
    newer = values(given, NEWER)
    if "database" in given:
        jobs.end_as = "Failed"
        try:
            releases.upgrade(CHART, RELEASE, newer, namespace=example)
        except HelmReleaseError:
            after = there(api, example, manifest)
            report(f"{example}: a migration that fails leaves all as it was", *same(installed, after))
        else:
            report(f"{example}: a migration that fails is told", False)
        jobs.end_as = "Complete"
    releases.upgrade(CHART, RELEASE, newer, namespace=example)
    report(f"{example}: an upgrade to another version", there(api, example, manifest) != installed)
    releases.rollback(RELEASE, version=2)
    before, after = (
        {key: settled(found) for key, found in objects.items()}
        for objects in (installed, there(api, example, manifest))
    )
    report(f"{example}: a rollback", *same(before, after))
    releases.uninstall(RELEASE)


def there(api: httpx.Client, namespace: str, manifest: str) -> dict[str, Object]:
    """The objects of a release as the server has them, by their paths."""
    paths = [path_of(api, found, namespace) for found in yaml.safe_load_all(manifest) if found]
    answers = {path: api.get(path) for path in paths}
    for path, answer in answers.items():
        assert answer.is_success, (path, answer.text)
    return {path: answer.json() for path, answer in answers.items()}


def path_of(api: httpx.Client, found: Object, namespace: str) -> str:
    version = found["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    (plural,) = (
        each["name"] for each in api.get(root).json()["resources"]
        if each["kind"] == found["kind"] and "/" not in each["name"]
    )  # fmt: skip
    return f"{root}/namespaces/{namespace}/{plural}/{found['metadata']['name']}"


def settled(found: Object) -> Object:
    """An object without what Kubernetes counts and notes about it."""
    return found | {"metadata": {key: value for key, value in found["metadata"].items() if key not in VOLATILE}}


def same(before: dict[str, Object], after: dict[str, Object]) -> tuple[bool, str]:
    differing = [path for path in before if before[path] != after.get(path)]
    return not differing and before.keys() == after.keys(), " ".join(differing)


def merged_both_ways(api: httpx.Client, name: str, container: str) -> tuple[bool, str]:
    """A pod that the chart has merged, beside one that Kubernetes has patched (a strategic merge patch)."""
    spec = POD_SPEC | {"containers": [OF_THE_CONTAINER | {"name": container}, {"name": "beside", "image": "i:2"}]}
    group = {"name": "gpu", "minReplicas": 1, "maxReplicas": 1, "cpu": "8", "memory": "64Gi"}
    given = {
        "api": values(api__podSpec=spec),
        "ray-head": values(ray__head__podSpec=spec),
        "ray-worker": values(ray__workerGroups=[group | {"podSpec": spec}]),
    }[container]
    path, dry = "/apis/apps/v1/namespaces/default/deployments", {"dryRun": "All"}
    by_chart = api.post(path, params=dry, json=deployment(f"chart-{container}", pod(render(given), name)))
    assert by_chart.is_success, by_chart.text
    plain = deployment(container, pod(render(values(ray__workerGroups=[group])), name))
    create(api, path, plain)
    by_kubernetes = api.patch(
        f"{path}/{container}",
        params=dry,
        json={"spec": {"template": {"spec": spec}}},
        headers={"Content-Type": "application/strategic-merge-patch+json"},
    )
    assert by_kubernetes.is_success, by_kubernetes.text
    one, other = (in_order(answer.json()["spec"]["template"]["spec"]) for answer in (by_chart, by_kubernetes))
    return one == other, " ".join(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))


def deployment(name: str, template: Object) -> Object:
    selector = {"matchLabels": template["metadata"]["labels"]}
    spec = {"selector": selector, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def in_order(found: Any) -> Any:
    """What is named in lists, ordered by its text: a patch puts what is new in front."""
    if isinstance(found, dict):
        return {key: in_order(value) for key, value in found.items()}
    if isinstance(found, list):
        return sorted(map(in_order, found), key=json.dumps)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
