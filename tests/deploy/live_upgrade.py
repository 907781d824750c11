"""Upgrades beside the autoscaler in a real API server: ``python -m tests.deploy.live_upgrade URL TOKEN CRD``.

``tests.deploy.live_chart`` does them, too.

URL is a kube-apiserver's that holds nothing of value, and TOKEN one of an administrator there; CRD is KubeRay's
``ray.io_rayclusters.yaml``, from the release of its operator. Of the chart, the RayCluster alone is installed, because
the size of its groups is what the chart and the autoscaler both write; no operator and no kubelet is needed.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import httpx
import yaml
from helm_python import HelmReleaseError
from ray.autoscaler._private.kuberay.node_provider import worker_delete_patch, worker_replica_patch

from tests.deploy.chart import CHART, NAME, NAMESPACE, RELEASE, Object, Values, helm, render_upgrade, the, values

GROUP: Values = {"name": "gpu", "minReplicas": 0, "maxReplicas": 8, "cpu": "8", "memory": "64Gi"}
VALUES = values(ray={"autoscaler": {"enabled": True}, "token": {"existingSecret": "t"}, "workerGroups": [GROUP]})
CLUSTER = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{NAME}"


def main(url: str, token: str, crd: str) -> None:
    api = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, verify=False, timeout=30)
    create(api, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(Path(crd).read_text()))
    create(api, "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    with tempfile.TemporaryDirectory() as folder, helm(url, token) as releases:
        chart = cluster_alone(Path(folder))
        releases.install(chart, RELEASE, VALUES, namespace=NAMESPACE)
        try:
            autoscale(api, replicas=5)
            releases.upgrade(chart, RELEASE, VALUES, namespace=NAMESPACE)
            report("an upgrade that changes no group", size(api) == 5)

            changed = values(VALUES, image__tag="9.9")
            try:
                releases.upgrade(chart, RELEASE, changed, namespace=NAMESPACE)
            except HelmReleaseError as refusal:
                report("one that changes a group is a conflict", ".spec.workerGroupSpecs" in str(refusal))
            else:
                report("one that changes a group is a conflict", False)
            insist(api, the(render_upgrade(releases, changed), "RayCluster"))
            report("with --force-conflicts it resizes nothing", size(api) == 5)
            autoscale(api, replicas=6)
            report("and the autoscaler goes on", size(api) == 6)
        finally:
            releases.uninstall(RELEASE)


def create(api: httpx.Client, path: str, made: Object) -> None:
    answer = api.post(path, json=made)
    assert answer.is_success or answer.status_code == 409, answer.text[:500]


def cluster_alone(folder: Path) -> Path:
    chart = folder / "boost"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("api", "monitoring", "tests", "[a-z]*.yaml", "*.json"))
    for name in ("values.yaml", "templates/ray/cluster.yaml"):
        shutil.copy(CHART / name, chart / name)
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    del metadata["kubeVersion"]  # a server of any version has conflicts
    (chart / "Chart.yaml").write_text(yaml.safe_dump(metadata))
    return chart


def autoscale(api: httpx.Client, replicas: int) -> None:
    """What Ray's autoscaler sends when it adds nodes, and when it has removed some."""
    patches = [worker_replica_patch(0, replicas), worker_delete_patch(0, [])]
    answer = api.patch(CLUSTER, json=patches, headers={"Content-Type": "application/json-patch+json"})
    assert answer.is_success, answer.text


def size(api: httpx.Client) -> int:
    (group,) = api.get(CLUSTER).json()["spec"]["workerGroupSpecs"]
    return int(group["replicas"])


def insist(api: httpx.Client, cluster: Object) -> None:
    """Apply on the server in Helm's name, as ``helm upgrade --force-conflicts`` does."""
    fields = api.get(CLUSTER).json()["metadata"]["managedFields"]
    (manager,) = {field["manager"] for field in fields if field["operation"] == "Apply"}
    answer = api.patch(
        CLUSTER,
        params={"fieldManager": manager, "force": "true"},
        json=cluster,
        headers={"Content-Type": "application/apply-patch+yaml"},
    )
    assert answer.is_success, answer.text[:500]


def report(what: str, holds: bool, why: str = "") -> None:
    sys.stdout.write(f"ok   {what}\n" if holds else f"FAIL {what}: {why}\n")
    if not holds:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
