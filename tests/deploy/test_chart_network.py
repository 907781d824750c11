"""Who may reach which port, worked out from the rendered NetworkPolicies as Kubernetes does."""

import re
from ipaddress import ip_address, ip_network

import pytest
from helm_python import HelmRenderError

from tests.deploy.chart import NAME, NAMESPACE, RELEASE, Object, Values, nested, render, values

MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
RAY_PORTS = (6379, 8265, 10001, 52365, 10002, 19999)
METRICS_PORTS = (8080, 9400, 9450, 9499)  # Ray's own, and the ranks'


class Pod:
    """A pod as a NetworkPolicy sees it."""

    address: str | None = None

    def __init__(self, namespace: str, **labels: str) -> None:
        self.namespace, self.labels = namespace, {name.replace("__", "/"): value for name, value in labels.items()}


def of_chart(component: str) -> Pod:
    labels = {"name": "boost", "instance": RELEASE, "component": component}
    return Pod(NAMESPACE, **{f"app.kubernetes.io__{name}": value for name, value in labels.items()})


def of_ray(kind: str, cluster: str = NAME) -> Pod:
    found = of_chart("head" if kind == "head" else "worker")
    found.labels |= {"ray.io/cluster": cluster, "ray.io/node-type": kind, "app.kubernetes.io/name": "kuberay"}
    return found


API, MIGRATIONS, TEST = of_chart("api"), of_chart("migrations"), of_chart("test")
HEAD, WORKER = of_ray("head"), of_ray("worker")
NEIGHBOUR, STRANGER = Pod(NAMESPACE, app="notebook"), Pod("other", app="notebook")
PROMETHEUS = Pod("monitoring", app="prometheus")
OTHER_RAY = of_ray("head", "somebody-elses")


def matches(selector: Object, labels: dict[str, str]) -> bool:
    said = [labels.get(name) == value for name, value in selector.get("matchLabels", {}).items()]
    for wanted in selector.get("matchExpressions", []):
        assert wanted["operator"] == "In"
        said.append(labels.get(wanted["key"]) in wanted["values"])
    return all(said)


class Machine(Pod):
    """What is outside of the cluster, as a NetworkPolicy sees it."""

    def __init__(self, address: str) -> None:
        super().__init__("")
        self.address = address


def is_peer(peer: Object, pod: Pod) -> bool:
    if pod.address:
        return "ipBlock" in peer and ip_address(pod.address) in ip_network(peer["ipBlock"]["cidr"])
    namespaces = peer.get("namespaceSelector")
    there = (
        pod.namespace == NAMESPACE
        if namespaces is None
        else matches(namespaces, {"kubernetes.io/metadata.name": pod.namespace})
    )
    return there and matches(peer.get("podSelector", {}), pod.labels)


def may_reach(objects: list[Object], source: Pod, target: Pod, port: int) -> bool:
    return _lets(objects, "Ingress", target, source, port) and _lets(objects, "Egress", source, target, port)


def _lets(objects: list[Object], direction: str, of: Pod, other: Pod, port: int) -> bool:
    """Whether the policies of one end let it hear, or speak to, the other."""
    policies = [
        found["spec"]
        for found in objects
        if found["kind"] == "NetworkPolicy"
        and of.namespace == NAMESPACE
        and direction in found["spec"]["policyTypes"]
        and matches(found["spec"]["podSelector"], of.labels)
    ]
    return not policies or any(
        any(is_peer(peer, other) for peer in rule["from" if direction == "Ingress" else "to"])
        and ("ports" not in rule or any(a["port"] <= port <= a.get("endPort", a["port"]) for a in rule["ports"]))
        for policy in policies
        for rule in policy.get(direction.lower(), [])
    )


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render(nested("networkPolicy.prometheus", [MONITORING]))


@pytest.mark.parametrize("target", [HEAD, WORKER])
def test_rays_ports_are_closed_to_all_but_ray_and_the_service(objects: list[Object], target: Pod) -> None:
    for port in RAY_PORTS:
        for source in (API, HEAD, WORKER):
            assert may_reach(objects, source, target, port), port
        for source in (NEIGHBOUR, STRANGER, PROMETHEUS, OTHER_RAY, TEST, MIGRATIONS):
            assert not may_reach(objects, source, target, port), (source.labels, port)


def test_the_api_is_a_node_of_ray_and_closed_to_others(objects: list[Object]) -> None:
    for source in (API, HEAD, WORKER):
        assert may_reach(objects, source, API, 10002)
    for source in (NEIGHBOUR, STRANGER, PROMETHEUS, OTHER_RAY, TEST):
        assert not may_reach(objects, source, API, 10002)


def test_clients_reach_the_api(objects: list[Object]) -> None:
    for source in (NEIGHBOUR, PROMETHEUS, TEST):
        assert may_reach(objects, source, API, 8900)
    assert not may_reach(objects, STRANGER, API, 8900)


def test_clients_are_those_that_are_named() -> None:
    ingress = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
    named = render(nested("networkPolicy.clients", [ingress]))
    assert may_reach(named, Pod("ingress-nginx"), API, 8900)
    assert may_reach(named, TEST, API, 8900), "helm test needs no leave"
    assert not may_reach(named, NEIGHBOUR, API, 8900)
    assert not may_reach(named, Pod("ingress-nginx"), HEAD, 8265)


def test_ranks_metrics_are_prometheus_alone(objects: list[Object]) -> None:
    for port in METRICS_PORTS:
        assert may_reach(objects, PROMETHEUS, WORKER, port)
        assert not may_reach(objects, NEIGHBOUR, WORKER, port)
    assert not may_reach(objects, PROMETHEUS, WORKER, 9500)
    other = render(values(nested("networkPolicy.prometheus", [MONITORING]), config__rankMetricsPorts="9500-9507"))
    assert may_reach(other, PROMETHEUS, WORKER, 9507)
    assert not may_reach(other, PROMETHEUS, WORKER, 9400)


def test_without_a_prometheus_nobody_scrapes() -> None:
    assert not may_reach(render(), PROMETHEUS, WORKER, 9400)
    assert not may_reach(render(), PROMETHEUS, API, 8900)


def test_nobody_reaches_hooks(objects: list[Object]) -> None:
    for target in (MIGRATIONS, TEST):
        assert not may_reach(objects, NEIGHBOUR, target, 8900)


def test_a_cluster_that_is_there_already_reaches_the_api() -> None:
    elsewhere: Values = {
        "ray": {"enabled": False, "address": "ray.example.org:6379", "token": {"existingSecret": "token"}},
        "networkPolicy": {"rayNodes": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ray"}}}]},
    }
    objects = render(elsewhere)
    assert may_reach(objects, Pod("ray"), API, 10002)
    assert not may_reach(objects, NEIGHBOUR, API, 10002)


def test_workers_in_their_nodes_network_reach_head_and_api() -> None:
    group = {"name": "gpu", "minReplicas": 1, "maxReplicas": 1, "cpu": "8", "memory": "64Gi", "hostNetwork": True}
    nodes = {"ipBlock": {"cidr": "10.0.0.0/16"}}
    objects = render(values(ray__workerGroups=[group], networkPolicy__rayNodes=[nodes]))
    policies = {found["metadata"]["name"]: found["spec"] for found in objects if found["kind"] == "NetworkPolicy"}
    for name in (NAME, f"{NAME}-ray"):
        assert [rule for rule in policies[name]["ingress"] if nodes in rule["from"] and "ports" not in rule], name


def test_they_can_be_left_out() -> None:
    assert may_reach(render(nested("networkPolicy.enabled", False)), STRANGER, HEAD, 8265)


DNS = Pod("kube-system", k8s_app="kube-dns")
DATABASE, INTERNET = Machine("10.9.0.5"), Machine("93.184.216.34")
ALLOWED: Object = {"to": [{"ipBlock": {"cidr": "10.9.0.0/24"}}], "ports": [{"port": 5432}]}


@pytest.fixture(scope="module")
def closed() -> list[Object]:
    egress = {"enabled": True, "allow": [ALLOWED]}
    return render(values(networkPolicy={"egress": egress, "prometheus": [MONITORING]}))


def test_pods_speak_to_whom_they_like_unless_that_is_closed(objects: list[Object]) -> None:
    for source in (API, HEAD, WORKER, MIGRATIONS, TEST):
        assert may_reach(objects, source, INTERNET, 443)


def test_pods_speak_to_those_that_are_named(closed: list[Object]) -> None:
    for source in (API, HEAD, WORKER, MIGRATIONS, TEST):
        assert may_reach(closed, source, DATABASE, 5432)
        assert may_reach(closed, source, DNS, 53)
        assert not may_reach(closed, source, DATABASE, 22)
        assert not may_reach(closed, source, DNS, 443)
        assert not may_reach(closed, source, INTERNET, 443)
        assert not may_reach(closed, source, NEIGHBOUR, 80)


def test_the_release_speaks_to_itself(closed: list[Object]) -> None:
    for source in (API, HEAD, WORKER):
        for target in (API, HEAD, WORKER):
            assert may_reach(closed, source, target, 10002)
    assert may_reach(closed, TEST, API, 8900)
    assert not may_reach(closed, MIGRATIONS, HEAD, 6379)
    assert may_reach(closed, PROMETHEUS, WORKER, 9400) and may_reach(closed, NEIGHBOUR, API, 8900)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (nested("database.existingSecret", "d"), "but database.existingSecret needs more"),
        (nested("config.checkpointRoot", "s3://c"), "but config.checkpointRoot needs more"),
        (nested("ray.autoscaler.enabled", True), "but ray.autoscaler.enabled needs more"),
        (nested("config.otlpEndpoint", "http://collector:4318"), "but config.otlpEndpoint needs more"),
        (nested("config.trackingUris", ["https://mlflow.lab"]), "but config.trackingUris needs more"),
    ],
)
def test_what_would_be_out_of_reach_is_refused(wrong: Values, said: str) -> None:
    closed = values(wrong, networkPolicy__egress__enabled=True)
    with pytest.raises(HelmRenderError, match=re.escape(said)):
        render(closed)
    render(values(closed, networkPolicy__egress__allow=[ALLOWED]))


def test_what_the_pods_reach_by_themselves_needs_no_egress() -> None:
    render(values(nested("config.otlpEndpoint", "http://localhost:4318"), networkPolicy__egress__enabled=True))
