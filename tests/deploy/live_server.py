"""What the live tests ask of an API server, and how they say what they have seen."""

import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from tests.deploy.chart import Object

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
VOLATILE = ("managedFields", "generation", "creationTimestamp", "uid")
_RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
OWNER = "owner"
_RBAC = "rbac.authorization.k8s.io"
_OF_OWNERS = ("custom-resources", *(f"system:aggregate-to-{role}" for role in ("admin", "edit", "view")))
_ENDS = {
    "Complete": (["SuccessCriteriaMet", "Complete"], {"succeeded": 1}),
    "Failed": (["FailureTarget", "Failed"], {"failed": 1}),
}
_PATIENCE_SECONDS = 60


def connect(url: str, token: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, verify=False, timeout=60)


def report(what: str, holds: bool, why: str = "") -> None:
    sys.stdout.write(f"ok   {what}\n" if holds else f"FAIL {what}: {why}\n")
    sys.stdout.flush()
    if not holds:
        sys.exit(1)


def create(api: httpx.Client, path: str, made: Object) -> None:
    answer = api.post(path, json=made)
    assert answer.is_success or answer.status_code == 409, answer.text[:500]


def define(api: httpx.Client, folder: Path) -> None:
    """Create all custom resource definitions of a folder of YAML files, and wait until they are served."""
    texts = [part for file in sorted(folder.glob("*.yaml")) for part in documents(file.read_text())]
    waiting = {_define(api, text) for text in texts if re.search("(?m)^kind: CustomResourceDefinition$", text)}
    assert waiting, f"{folder} has no definitions of custom resources"
    end = time.monotonic() + _PATIENCE_SECONDS
    while waiting:
        assert time.monotonic() < end, f"not served: {sorted(waiting)}"
        waiting -= {name for name in waiting if _is_true(api.get(f"{CRDS}/{name}").json(), "Established")}
        time.sleep(0.2)


def _define(api: httpx.Client, text: str) -> str:
    """Its name, by what the server reads: PyYAML knows no bare ``=``, which enumerations of Prometheus have."""
    answer = api.post(CRDS, content=text, headers={"Content-Type": "application/yaml"})
    assert answer.is_success, answer.text[:500]
    return str(answer.json()["metadata"]["name"])


def documents(text: str) -> list[str]:
    """The YAML documents of a text as they are written, so that a field which is there twice still is."""
    return [part for part in re.split("(?m)^---.*$", text) if re.search("(?m)^kind:", part)]


def _is_true(found: Object, condition: str) -> bool:
    conditions = found.get("status", {}).get("conditions") or []
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
        kinds, status = _ENDS[self.end_as]
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds]
        status = status | {"conditions": conditions, "startTime": now}
        if self.end_as == "Complete":
            status["completionTime"] = now
        answer = self._api.patch(
            f"{self._path}/{job['metadata']['name']}/status",
            json={"status": status},
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert answer.is_success or answer.status_code == 404, answer.text


def let_owners_have(api: httpx.Client, resources: dict[str, list[str]]) -> None:
    """Give owners of namespaces all verbs on these resources, by group, besides what ``admin`` has there."""
    rules = [{"apiGroups": [group], "resources": kinds, "verbs": ["*"]} for group, kinds in resources.items()]
    role = {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": _OF_OWNERS[0]}, "rules": rules}
    create(api, f"/apis/{_RBAC}/v1/clusterroles", role)


@contextmanager
def namespace(api: httpx.Client, name: str) -> Iterator[Jobs]:
    """A namespace with an owner, whose pods have to be "restricted", and whose Jobs are ended.

    What Kubernetes' controllers would do is done here: the account that pods have, and the parts of the role ``admin``.
    """
    metadata = {"name": name, "labels": _RESTRICTED}
    create(api, "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    create(api, f"/api/v1/namespaces/{name}/serviceaccounts", account)
    for role in _OF_OWNERS:
        binding = {"metadata": {"name": role}, "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role}}
        binding |= {"subjects": [{"apiGroup": _RBAC, "kind": "User", "name": OWNER}]}
        create(api, f"/apis/{_RBAC}/v1/namespaces/{name}/rolebindings", binding)
    jobs = Jobs(api, name)
    jobs.start()
    try:
        yield jobs
    finally:
        jobs.done.set()
        jobs.join()


def paths(api: httpx.Client, namespace: str, manifest: str) -> list[str]:
    """Where the objects of a release are."""
    return [path_of(api, found, namespace) for found in yaml.safe_load_all(manifest) if found]


def there(api: httpx.Client, paths: Iterable[str]) -> dict[str, Object]:
    """The objects that the server has at these paths, without how often it has written them."""
    found = {}
    for path in paths:
        answer = api.get(path)
        assert answer.is_success or answer.status_code == 404, (path, answer.text)
        if answer.is_success:
            found[path] = answer.json()
            del found[path]["metadata"]["resourceVersion"]  # claims get another when nothing of them changes
    return found


def path_of(api: httpx.Client, found: Object, namespace: str) -> str:
    version = found["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    (plural,) = (
        each["name"] for each in api.get(root).json()["resources"]
        if each["kind"] == found["kind"] and "/" not in each["name"]
    )  # fmt: skip
    return f"{root}/namespaces/{namespace}/{plural}/{found['metadata']['name']}"


def settled(objects: dict[str, Object]) -> dict[str, Object]:
    """Objects without what Kubernetes counts and notes about them."""
    return {
        path: found | {"metadata": {key: value for key, value in found["metadata"].items() if key not in VOLATILE}}
        for path, found in objects.items()
    }


def same(before: dict[str, Object], after: dict[str, Object]) -> tuple[bool, str]:
    differing = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    return not differing, " ".join(sorted(differing))
