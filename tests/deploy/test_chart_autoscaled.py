"""An upgrade leaves the size of the cluster to those who have set it since: Ray's autoscaler, KubeRay and Kueue.

It also leaves none of its nodes at another version than the API.

The autoscaler's patches are made by Ray's own code. That an API server then has no conflict either is shown by
``python -m tests.deploy.live_chart``, which needs one.
"""

import copy
from typing import Any

import pytest
from helm_python import HelmRenderError
from ray.autoscaler._private.kuberay.node_provider import worker_delete_patch, worker_replica_patch

from tests.deploy.chart import Object, Values, helm, render, render_upgrade, the, values
from tests.deploy.kubernetes import kubernetes

DEFAULTED = {"numOfHosts": 1, "priority": 0}  # by the CRD of KubeRay 1.7
GROUP: Values = {"name": "gpu", "minReplicas": 0, "maxReplicas": 8, "replicas": 2, "cpu": "8", "memory": "64Gi"}
AUTOSCALED = values(ray={"autoscaler": {"enabled": True}, "workerGroups": [GROUP, GROUP | {"name": "spot"}]})
ADMITTED = values(ray={"gangScheduling": {"by": "kueue", "queue": "q"}, "workerGroups": [GROUP]})


def installed(given: Values) -> Object:
    """The cluster as an installation leaves it, and Kubernetes has filled it in."""
    cluster = copy.deepcopy(the(render(given), "RayCluster"))
    for group in cluster["spec"]["workerGroupSpecs"]:
        group |= DEFAULTED
    return cluster


def patch(cluster: Object, operation: dict[str, Any]) -> None:
    """One of the autoscaler's patches, as Kubernetes applies it: what is replaced has to be there."""
    place: Any = cluster
    *path, last = (int(key) if key.isdigit() else key for key in operation["path"].strip("/").split("/"))
    for key in path:
        place = place[key]
    assert operation["op"] == "replace" and last in place
    place[last] = operation["value"]


def upgraded(live: Object, given: Values) -> Object:
    with kubernetes(live) as url, helm(url) as config:
        spec: Object = the(render_upgrade(config, given), "RayCluster")["spec"]
    return spec


@pytest.mark.full
def test_an_upgrade_that_changes_nothing_states_what_is_there() -> None:
    live = installed(AUTOSCALED)
    for replicas in (7, 0):
        patch(live, worker_replica_patch(1, replicas))
        patch(live, worker_delete_patch(1, ["lab-boost-spot-worker-x"]))
        assert upgraded(live, AUTOSCALED)["workerGroupSpecs"] == live["spec"]["workerGroupSpecs"]


@pytest.mark.full
def test_an_upgrade_that_changes_a_group_resizes_none() -> None:
    live = installed(AUTOSCALED)
    patch(live, worker_replica_patch(0, 5))
    changed = values(AUTOSCALED, image__tag="9.9")
    expected = installed(changed)
    patch(expected, worker_replica_patch(0, 5))
    assert upgraded(live, changed)["workerGroupSpecs"] == expected["spec"]["workerGroupSpecs"]


@pytest.mark.full
def test_other_bounds_are_kept_to() -> None:
    live = installed(AUTOSCALED)
    patch(live, worker_replica_patch(0, 5))
    for bounds, replicas in (({"maxReplicas": 3}, 3), ({"minReplicas": 6, "replicas": 6}, 6)):
        groups = upgraded(live, values(AUTOSCALED, ray__workerGroups=[GROUP | bounds]))["workerGroupSpecs"]
        assert [group["replicas"] for group in groups] == [replicas]


def test_a_group_that_is_new_begins_as_the_values_say() -> None:
    added = values(AUTOSCALED, ray__workerGroups=[GROUP | {"name": "new"}, GROUP])
    live = installed(AUTOSCALED)
    patch(live, worker_replica_patch(0, 5))
    groups = upgraded(live, added)["workerGroupSpecs"]
    assert {group["groupName"]: group["replicas"] for group in groups} == {"new": 2, "gpu": 5}


def test_without_the_autoscaler_the_values_say_how_many_there_are() -> None:
    fixed = values(ray__workerGroups=[GROUP])
    live = installed(fixed)
    live["spec"]["workerGroupSpecs"][0]["replicas"] = 7
    (group,) = upgraded(live, fixed)["workerGroupSpecs"]
    assert group["replicas"] == 2


@pytest.mark.full
def test_what_kueue_has_added_when_it_admitted_the_cluster_stays() -> None:
    live = installed(ADMITTED)
    taint = {"key": "spot", "operator": "Exists"}
    for group in (live["spec"]["headGroupSpec"], *live["spec"]["workerGroupSpecs"]):
        group["template"]["spec"] |= {"nodeSelector": {"flavor": "h100"}, "tolerations": [taint]}
        group["template"]["metadata"]["labels"]["kueue.x-k8s.io/podset"] = "p"
    spec = upgraded(live, ADMITTED)
    assert spec["workerGroupSpecs"] == live["spec"]["workerGroupSpecs"]
    assert spec["headGroupSpec"] == live["spec"]["headGroupSpec"]
    (group,) = upgraded(live, values(ADMITTED, ray__gangScheduling__by="none"))["workerGroupSpecs"]
    assert group["template"] == the(render(values(ADMITTED)), "RayCluster")["spec"]["workerGroupSpecs"][0]["template"]


@pytest.mark.full
def test_ray_becomes_of_the_version_of_the_api() -> None:
    spec = installed(values())["spec"]
    assert spec["upgradeStrategy"] == {"type": "Recreate"}, "a rollback applies what was rendered then, too"
    with pytest.raises(
        HelmRenderError, match=r"image .* changes from .*:0\.0\.9 to .*set ray\.upgradeStrategy to Recreate"
    ):
        upgraded(installed(values(image__tag="0.0.9")), values(ray__upgradeStrategy="None"))
    assert upgraded(installed(values()), values(ray__upgradeStrategy="None"))["upgradeStrategy"] == {"type": "None"}
