"""What Kubernetes would take, and what would not work: refused with the way out, or told after the installation."""

import re
from typing import Any

import pytest
from helm_python import HelmReleaseError, HelmRenderError

from tests.deploy.chart import (
    CHART,
    CI,
    NAMESPACE,
    RELEASE,
    Object,
    Values,
    chart,
    helm,
    nested,
    read_values,
    render,
    values,
)
from tests.deploy.kubernetes import kubernetes
from tests.deploy.test_chart_templates import GROUP, OPEN

INGRESS: Values = {"ingress": {"enabled": True, "host": "b.example.org", "tlsSecret": "cert"}}
SCRAPED: Values = {"monitoring": {"existingSecret": "key", "serviceMonitor": {"enabled": True}}}
RANKS: Values = {"monitoring": {"existingSecret": "key", "scrapeConfig": {"enabled": True}}}
OUTSIDE: Values = {"ray": {"enabled": False, "address": "ray:6379", "token": {"existingSecret": "token"}}}
ELSEWHERE: Object = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}


def group(**changes: Any) -> Values:
    return nested("ray.workerGroups", [GROUP | changes])


@pytest.mark.parametrize(
    ("wrong", "said", "right"),
    [
        (INGRESS, "ingress.enabled lets people in", nested("networkPolicy.clients", [ELSEWHERE])),
        (INGRESS, "ingress.enabled lets people in", OPEN),
        (
            nested("service.type", "LoadBalancer"),
            "service.type LoadBalancer",
            nested("networkPolicy.clients", [ELSEWHERE]),
        ),
        (nested("service.type", "NodePort"), "service.type NodePort", OPEN),
        (SCRAPED, "names no Prometheus", nested("networkPolicy.prometheus", [ELSEWHERE])),
        (RANKS, "names no Prometheus", OPEN),
        (OUTSIDE, "networkPolicy.rayNodes admits none", nested("networkPolicy.rayNodes", [ELSEWHERE])),
        (
            group(hostNetwork=True),
            "gpu is in its nodes' network",
            nested("networkPolicy.rayNodes", [{"ipBlock": {"cidr": "10.0.0.0/16"}}]),
        ),
        (
            values(OPEN, networkPolicy__egress__enabled=True),
            "networkPolicy.enabled is false, so nothing is closed",
            nested("networkPolicy.enabled", True),
        ),
        (nested("api.drainSeconds", 60), "api.drainSeconds is 60", nested("api.terminationGracePeriodSeconds", 61)),
        (
            values(
                database__existingSecret="d", api__autoscaling={"enabled": True, "minReplicas": 3, "maxReplicas": 2}
            ),
            "minReplicas (3) must not exceed maxReplicas (2)",
            nested("api.autoscaling.maxReplicas", 3),
        ),
        (group(minReplicas=3), "gpu: minReplicas (3) must not exceed maxReplicas (2)", group(minReplicas=2)),
        (group(replicas=3), "gpu: replicas (3) must be from minReplicas (1) to maxReplicas (2)", group(replicas=2)),
        (group(replicas=0), "gpu: replicas (0) must be", group(replicas=0, minReplicas=0)),
        (nested("ray.workerGroups", [GROUP, GROUP]), "ray.workerGroups: two are named gpu", group()),
        (
            nested("data", [{"name": "d", "claim": "c", "mountPath": f"/{path}"} for path in "ab"]),
            "data: two are named d",
            nested("data", []),
        ),
        (group(memory="7.9Gi"), "gpu: sharedMemory (8Gi) must not exceed the memory (7.9Gi)", group(memory="8Gi")),
        (
            group(sharedMemory="64001M", memory="64G"),
            "sharedMemory (64001M)",
            group(sharedMemory="64000M", memory="64G"),
        ),
        (
            group(sharedMemory="65Gi", memory=64 * 2**30),
            "sharedMemory (65Gi)",
            group(sharedMemory="64Gi", memory=64 * 2**30),
        ),
        (
            nested("monitoring.rules.enabled", True),
            "set monitoring.rules.runbookBase",
            nested("monitoring.rules.runbookBase", "https://wiki.example.org/boost"),
        ),
        (nested("ray.head.sharedMemory", "1Ti"), "ray.head: sharedMemory", nested("ray.head.sharedMemory", "8Gi")),
        (nested("api.sharedMemory", "3073Mi"), "api: sharedMemory", nested("api.sharedMemory", "3072Mi")),
    ],
)
def test_a_trap_is_refused_and_the_way_out_is_not(wrong: Values, said: str, right: Values) -> None:
    with pytest.raises(HelmRenderError, match=re.escape(said)):
        render(wrong)
    render(values(wrong, right))


@pytest.mark.parametrize("release", ["1lab", "lab.boost", "lab-boost.2"])
def test_names_that_are_no_dns_labels_are_refused(release: str) -> None:
    with pytest.raises(HelmRenderError, match="no DNS label; set fullnameOverride"):
        render(release=release)
    render(values(fullnameOverride="lab"), release=release)


@pytest.mark.parametrize(("kinds", "old"), [(("RayCluster",), True), (("RayCluster", "RayCronJob"), False)])
def test_a_kuberay_that_lacks_fields_is_refused(kinds: tuple[str, ...], old: bool) -> None:
    with kubernetes(ray=kinds) as url, helm(url) as config, pytest.raises(HelmReleaseError) as refusal:
        config.install(CHART, RELEASE, values(), namespace=NAMESPACE, dry_run="server")
    # That Kubernetes serves no more than Secrets and these: all else is missing there.
    assert ("older than 1.6" in str(refusal.value)) == old


def notes(given: Values) -> str:
    return " ".join(chart().render(given, name=RELEASE, namespace=NAMESPACE)["boost/templates/NOTES.txt"].split())


def test_notes_say_which_storage_is_needed() -> None:
    assert "lab-boost-checkpoints wants ReadWriteMany" in notes({})
    once = nested("checkpoints.volume.accessModes", ["ReadWriteOnce"])
    assert "does only while all pods are on one node" in notes(once)
    for given in (
        nested("checkpoints.volume.storageClassName", "lustre"),
        nested("checkpoints.volume.existingClaim", "mine"),
        values(checkpoints__volume__enabled=False, config__checkpointRoot="s3://c"),
    ):
        assert "checkpoints wants" not in notes(given)


@pytest.mark.parametrize("path", CI, ids=lambda path: path.stem)
def test_examples_are_in_no_trap(path: Any) -> None:
    render(read_values(path))
