"""Upgrades beside Ray's autoscaler, for ``tests.deploy.live_chart``: the size of groups is what both write.

The autoscaler's patches are made by Ray's own code; they are all of it that is there.
"""

import httpx
from helm_python import HelmReleaseError
from ray.autoscaler._private.kuberay.node_provider import worker_delete_patch, worker_replica_patch

from tests.deploy.chart import CHART, NAME, NAMESPACE, RELEASE, Object, Values, helm, render_upgrade, the, values
from tests.deploy.live_server import OWNER, namespace, report

GROUP: Values = {"name": "gpu", "minReplicas": 0, "maxReplicas": 8, "cpu": "8", "memory": "64Gi"}
VALUES = values(ray={"autoscaler": {"enabled": True}, "token": {"existingSecret": "t"}, "workerGroups": [GROUP]})
CLUSTER = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters/{NAME}"


def beside_the_autoscaler(api: httpx.Client, url: str, token: str) -> None:
    with namespace(api, NAMESPACE), helm(url, token, user=OWNER) as releases:
        releases.install(CHART, RELEASE, VALUES, namespace=NAMESPACE)
        autoscale(api, replicas=5)
        releases.upgrade(CHART, RELEASE, VALUES, namespace=NAMESPACE)
        report("autoscaled: an upgrade that changes no group", size(api) == 5)

        changed = values(VALUES, image__tag="9.9", image__trainerTag="9.9")
        try:
            releases.upgrade(CHART, RELEASE, changed, namespace=NAMESPACE)
        except HelmReleaseError as refusal:
            report("autoscaled: one that changes a group is a conflict", ".spec.workerGroupSpecs" in str(refusal))
        else:
            report("autoscaled: one that changes a group is a conflict", False)
        insist(api, the(render_upgrade(releases, changed), "RayCluster"))
        report("autoscaled: with --force-conflicts it resizes nothing", size(api) == 5)
        autoscale(api, replicas=6)
        report("autoscaled: and the autoscaler goes on", size(api) == 6)
        releases.uninstall(RELEASE)


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
