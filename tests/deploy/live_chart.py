"""The chart in a real API server: ``deploy/api-server.sh python -m tests.deploy.live_chart CRDS``.

CRDS is a folder with the custom resource definitions of KubeRay, the Prometheus operator and the Gateway API, as their
releases have them (YAML). No operator, no scheduler and no kubelet is there: what is looked at is what Kubernetes
takes, keeps and changes. The Jobs that Helm waits for are ended here, well or badly.
"""

import os
import sys
from pathlib import Path

import httpx
from helm_python import Config, HelmReleaseError

from tests.deploy.chart import CHART, CI, NAME, RELEASE, Object, Values, helm, read_values, values
from tests.deploy.live_pods import OWN, merged_both_ways, objections, refused_as_unsafe
from tests.deploy.live_server import (
    OWNER,
    Jobs,
    connect,
    create,
    define,
    let_owners_have,
    namespace,
    paths,
    report,
    same,
    settled,
    there,
)
from tests.deploy.live_upgrade import beside_the_autoscaler

GROUP: Values = {"name": "gpu", "minReplicas": 0, "maxReplicas": 8, "cpu": "8", "memory": "64Gi"}
DIGEST = "sha256:" + 32 * "0f"
EVERYTHING = values(
    commonAnnotations={"owner": "ml"},
    image={"digest": DIGEST, "trainerDigest": DIGEST},
    extraObjects=["{apiVersion: v1, kind: ConfigMap, metadata: {name: '{{ .Release.Name }}-mine'}, data: {a: b}}"],
    api__tls__existingSecret="boost-tls",
    database__existingSecret="boost-database",
    httpRoute={"enabled": True, "host": "b.example.org", "parentRefs": [{"name": "public", "sectionName": "https"}]},
    networkPolicy={
        "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}],
        "egress": {"enabled": True, "allow": [{"to": [{"ipBlock": {"cidr": "10.2.0.0/16"}}]}]},
        "rayNodes": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
    },
    ray={
        "gcsFaultTolerance": {"redisAddress": "redis:6379", "existingSecret": "boost-redis", "usernameKey": "user"},
        "gangScheduling": {"by": "kueue", "queue": "training"},
        "workerGroups": [GROUP | {"hostNetwork": True}],
    },
)
EXAMPLES: dict[str, Values] = {
    "defaults": {},
    **{path.stem.removesuffix("-values"): read_values(path) for path in CI},
    "openshift": values(podSecurityContext=dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"))),
    "everything": EVERYTHING,
}
UNSAFE = {  # what a namespace whose pods have to be "restricted" does not take
    "h100-pool": {f"RayCluster/{NAME}/h100": ('"IPC_LOCK"', '"hostPath"')},
    "everything": {f"RayCluster/{NAME}/gpu": ("hostNetwork=true",)},
}
POLICY = "helm.sh/resource-policy"
CUSTOM = {
    "ray.io": ["rayclusters"],
    "monitoring.coreos.com": ["servicemonitors", "scrapeconfigs", "prometheusrules"],
    "gateway.networking.k8s.io": ["httproutes"],
}
NVIDIA = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}
NEWER: Values = {"image": {"tag": "9.9.0", "trainerTag": "9.9.0"}}


def main(crds: str) -> None:
    url, token = os.environ["API_URL"], os.environ["API_TOKEN"]
    api = connect(url, token)
    define(api, Path(crds))
    let_owners_have(api, CUSTOM)
    create(api, "/apis/node.k8s.io/v1/runtimeclasses", NVIDIA)
    for example, given in EXAMPLES.items():
        with namespace(api, example) as jobs, helm(url, token, example, OWNER) as releases:
            is_taken(api, releases, example, given)
            lives(api, releases, jobs, example, given)
    beside_each_other(api, url, token)
    grows_up(api, url, token)
    begins_to_follow_its_load(api, url, token)
    for name, container in OWN.items():
        report(f"the podSpec of {container} is merged as Kubernetes merges it", *merged_both_ways(api, name, container))
    beside_the_autoscaler(api, url, token)


def is_taken(api: httpx.Client, releases: Config, example: str, given: Values) -> None:
    """Each object by itself, strictly: no field is unknown, doubled or deprecated."""
    found = objections(api, releases, example, given)
    report(f"{example}: Kubernetes objects to nothing and warns of nothing", not found, str(found))


def lives(api: httpx.Client, releases: Config, jobs: Jobs, example: str, given: Values) -> None:
    """Install, upgrade to the same, to another version, back, and past a migration that fails; go, and come again."""
    places = paths(api, example, releases.install(CHART, RELEASE, given, namespace=example)["manifest"])
    installed = there(api, places)
    report(f"{example}: Kubernetes has all {len(places)} objects", len(installed) == len(places))
    report(f"{example}: its pods are restricted, but for {len(UNSAFE.get(example, {}))}", *is_safe(api, example, given))
    releases.upgrade(CHART, RELEASE, given, namespace=example)
    report(f"{example}: an upgrade to the same changes no object", *same(installed, there(api, places)))
    if "database" in given:
        jobs.end_as = "Failed"
        report(f"{example}: a migration that fails is told", fails(releases, example, values(given, NEWER)))
        report(f"{example}: and leaves all as it was", *same(installed, there(api, places)))
        jobs.end_as = "Complete"
    releases.upgrade(CHART, RELEASE, values(given, NEWER), namespace=example)
    report(f"{example}: an upgrade to another version", there(api, places) != installed)
    releases.rollback(RELEASE, version=2)
    report(f"{example}: a rollback", *same(settled(installed), settled(there(api, places))))
    if given.get("api", {}).get("autoscaling"):
        report(
            f"{example}: an upgrade keeps the replicas that its load wants", is_scaled(api, releases, example, given)
        )
    releases.uninstall(RELEASE)
    kept = {path: found for path, found in settled(installed).items() if POLICY in annotations(found)}
    report(f"{example}: uninstalled, but for the {len(kept)} that are kept", *same(kept, settled(there(api, places))))
    releases.install(CHART, RELEASE, given, namespace=example)
    report(f"{example}: and installed again", there(api, places).keys() == installed.keys())
    releases.uninstall(RELEASE)


def is_safe(api: httpx.Client, example: str, given: Values) -> tuple[bool, str]:
    refused, expected = refused_as_unsafe(api, example, given), UNSAFE.get(example, {})
    as_expected = refused.keys() == expected.keys() and all(
        reason in refused[name] for name, reasons in expected.items() for reason in reasons
    )
    return as_expected, str(refused)


def fails(releases: Config, example: str, given: Values) -> bool:
    try:
        releases.upgrade(CHART, RELEASE, given, namespace=example)
    except HelmReleaseError:
        return True
    return False


def is_scaled(api: httpx.Client, releases: Config, example: str, given: Values) -> bool:
    scale(api, example, 5)
    releases.upgrade(CHART, RELEASE, values(given, NEWER), namespace=example)
    return replicas(api, example) == 5


def scale(api: httpx.Client, namespace: str, replicas: int) -> None:
    """Set the number of the API's replicas, as ``kubectl scale`` and the HorizontalPodAutoscaler do."""
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{NAME}/scale"
    answer = api.put(path, json=api.get(path).json() | {"spec": {"replicas": replicas}})
    assert answer.is_success, answer.text


def replicas(api: httpx.Client, namespace: str) -> int:
    return int(api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{NAME}").json()["spec"]["replicas"])


def annotations(found: Object) -> Object:
    return found["metadata"].get("annotations") or {}


def beside_each_other(api: httpx.Client, url: str, token: str) -> None:
    """Two releases in a namespace, and one of the same name in another: none touches what is another's."""
    given = EXAMPLES["cloud"]
    with (
        namespace(api, "one"), namespace(api, "two"),
        helm(url, token, "one", OWNER) as here, helm(url, token, "two", OWNER) as elsewhere,
    ):  # fmt: skip
        mine, *others = (
            paths(api, where, releases.install(CHART, release, given, namespace=where)["manifest"])
            for releases, release, where in ((here, "lab", "one"), (here, "lab-two", "one"), (elsewhere, "lab", "two"))
        )
        before = there(api, (path for places in others for path in places))
        report("two releases and two namespaces share no object", len(before | there(api, mine)) == 3 * len(mine))
        here.upgrade(CHART, "lab", values(given, NEWER), namespace="one")
        report("an upgrade of one changes none of the others", *same(before, there(api, before)))
        here.uninstall("lab")
        report("nor does its end", *same(before, there(api, before)))


def begins_to_follow_its_load(api: httpx.Client, url: str, token: str) -> None:
    """From a number of replicas to as many as their load wants, in the way that the chart's README tells."""
    fixed = values(EXAMPLES["cloud"], api__autoscaling__enabled=False, api__replicas=3)
    with namespace(api, "load"), helm(url, token, "load", OWNER) as releases:
        releases.install(CHART, RELEASE, fixed, namespace="load")
        scale(api, "load", 4)
        releases.upgrade(CHART, RELEASE, EXAMPLES["cloud"], namespace="load")
        report("replicas begin to follow their load", replicas(api, "load") == 4)


def grows_up(api: httpx.Client, url: str, token: str) -> None:
    """From SQLite and a volume to PostgreSQL and an object store, and back, in one release."""
    with namespace(api, "grows"), helm(url, token, "grows", OWNER) as releases:
        small = paths(api, "grows", releases.install(CHART, RELEASE, {}, namespace="grows")["manifest"])
        before = there(api, small)
        large = paths(api, "grows", releases.upgrade(CHART, RELEASE, EXAMPLES["cloud"], namespace="grows")["manifest"])
        report("an installation grows up", len(there(api, large)) == len(large))
        releases.rollback(RELEASE, version=1)
        report("and goes back", *same(settled(before), settled(there(api, small))))


if __name__ == "__main__":
    main(*sys.argv[1:])
