"""Upgrades beside the autoscaler in a real API server: ``python -m tests.deploy.live_upgrade URL TOKEN CRD``.

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
            report(
                "the autoscaler alone has sized it",
                conflicts(api, the(render_upgrade(releases, VALUES), "RayCluster")) == "",
            )

            changed = the(render_upgrade(releases, values(VALUES, image__tag="9.9")), "RayCluster")
            report("one that changes a group is a conflict", "workerGroupSpecs" in conflicts(api, changed))
            apply(api, changed, force=True).raise_for_status()
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


def conflicts(api: httpx.Client, cluster: Object) -> str:
    answer = apply(api, cluster, force=False)
    return "" if answer.is_success else answer.text


def apply(api: httpx.Client, cluster: Object, *, force: bool) -> httpx.Response:
    """Apply on the server, as Helm 4 does."""
    how = {"fieldManager": "helm", "force": str(force).lower()}
    return api.patch(CLUSTER, params=how, json=cluster, headers={"Content-Type": "application/apply-patch+yaml"})


def report(what: str, holds: bool) -> None:
    sys.stdout.write(f"{'ok  ' if holds else 'FAIL'} {what}\n")
    if not holds:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
