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
    environment,
    helm,
    nested,
    pod_templates,
    read_values,
    render,
    values,
)
from tests.deploy.kubernetes import kubernetes
from tests.deploy.test_chart_templates import GROUP, OPEN

INGRESS: Values = {"ingress": {"enabled": True, "host": "b.example.org", "tlsSecret": "cert"}}
SCRAPED: Values = {"monitoring": {"existingSecret": "key", "serviceMonitor": {"enabled": True}}}
RANKS: Values = {"monitoring": {"existingSecret": "key", "scrapeConfig": {"enabled": True}}}
RULES: Values = {"monitoring": {"rules": {"enabled": True, "runbookBase": "https://wiki.example.org/boost"}}}
OUTSIDE: Values = {"ray": {"enabled": False, "address": "ray:6379", "token": {"existingSecret": "token"}}}
ELSEWHERE: Object = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "elsewhere"}}}
DATA: Object = {"name": "d", "claim": "c", "mountPath": "/data"}
HEAD_ENV: Values = nested(
    "ray.head.podSpec.containers", [{"name": "ray-head", "env": [{"name": "RAY_REDIS_ADDRESS", "value": "r:6379"}]}]
)


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
        *(
            (values(INGRESS, networkPolicy__clients=clients), "ingress.enabled lets people in", OPEN)
            for clients in ([], [{"podSelector": {}}] * 2, [{"podSelector": {"matchLabels": {}}}])
        ),
        (
            INGRESS,
            "admits no others than the pods of this namespace",
            nested("networkPolicy.clients", [{"podSelector": {"matchLabels": {"app": "nginx"}}}]),
        ),
        (INGRESS, "ingress.enabled lets people in", nested("networkPolicy.clients", [{"namespaceSelector": {}}])),
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
        (
            nested("data", [DATA, {"name": "e", "claim": "c", "mountPath": "/data/"}]),
            "data: two are mounted at /data; change",
            nested("data", []),
        ),
        (
            nested("tenantSecrets", [{"tenant": "lab", "name": "s3", "existingSecret": of} for of in "ab"]),
            "tenantSecrets: two of the tenant lab are named s3; rename one",
            nested("tenantSecrets", [{"tenant": of, "name": "s3", "existingSecret": of} for of in "ab"]),
        ),
        *(
            (
                nested("config.rankMetricsPorts", ports),
                f"config.rankMetricsPorts is {ports}",
                nested("config.rankMetricsPorts", "9400-9400"),
            )
            for ports in ("9499-9400", "9400-94000")
        ),
        (
            values(SCRAPED, OPEN, RULES, monitoring__serviceMonitor__interval="2m1s"),
            "monitoring.serviceMonitor.interval is 2m1s",
            nested("monitoring.rules.enabled", False),
        ),
        (
            values(RANKS, OPEN, RULES, monitoring__scrapeConfig__interval="4m"),
            "monitoring.scrapeConfig.interval is 4m",
            nested("monitoring.scrapeConfig.interval", "120s"),
        ),
        (nested("config.autoscaling", True), "set ray.autoscaler.enabled", nested("config.autoscaling", None)),
        (
            nested("data", [DATA | {"mountPath": "/var/lib"}]),
            "data: d is mounted at /var/lib, where the pods have their own files",
            nested("data", [DATA]),
        ),
        (
            nested("env.RAY_AUTH_MODE", "none"),
            "env.RAY_AUTH_MODE: the chart itself sets this variable",
            None,
        ),
        (nested("env.RAY_enable_autoscaler_v2", "1"), "set ray.autoscaler.enabled instead", None),
        (HEAD_ENV, "ray.head.podSpec has RAY_REDIS_ADDRESS", nested("ray.head.podSpec.containers", [])),
        (
            values(ray={"autoscaler": {"enabled": True}, "head": {"podSpec": {"restartPolicy": "Always"}}}),
            "ray.head: podSpec.restartPolicy is Always",
            nested("ray.head.podSpec.restartPolicy", "Never"),
        ),
        (
            values(group(podSpec={"restartPolicy": "OnFailure"}), ray__autoscaler__enabled=True),
            "gpu: podSpec.restartPolicy is OnFailure",
            nested("ray.autoscaler.enabled", False),
        ),
        (
            nested("api.podSpec.securityContext.runAsUser", 0),
            "api: the container api has runAsUser 0",
            nested("api.podSpec.securityContext.runAsUser", 1),
        ),
        (
            group(securityContext={"runAsUser": 0}),
            "gpu: the container ray-worker has runAsUser 0 beside runAsNonRoot true",
            group(securityContext={"runAsUser": 0, "runAsNonRoot": False}),
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
def test_a_trap_is_refused_and_the_way_out_is_not(wrong: Values, said: str, right: Values | None) -> None:
    with pytest.raises(HelmRenderError, match=re.escape(said)):
        render(wrong)
    if right:
        render(values(wrong, right))


@pytest.mark.full
def test_what_the_chart_itself_sets_and_mounts_is_not_given_again() -> None:
    secrets = [{"tenant": "lab", "name": "s3", "existingSecret": "s3"}]
    pods = [pod for _, pod in pod_templates(render(values(api__tls__existingSecret="tls", tenantSecrets=secrets)))]
    places = {mount["mountPath"] for pod in pods for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    for place in {*places, "/etc/boost/", "/home"}:
        with pytest.raises(HelmRenderError, match="where the pods have their own files"):
            render(nested("data", [DATA | {"mountPath": place}]))
    others = {"HOME": "/root", "RAY_USAGE_STATS_ENABLED": "1"}
    for _, pod in pod_templates(render(nested("env", others))):
        names = [each["name"] for each in pod["spec"]["containers"][0]["env"]]
        assert len(names) == len(set(names)) and environment(pod).items() >= others.items()
    for name in {name for pod in pods for name in environment(pod) if not name.startswith("BOOST_")} - others.keys():
        with pytest.raises(HelmRenderError, match=f"{name}: the chart itself sets this"):
            render(nested("env", {name: "x"}))


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
