"""The chart, rendered by Helm itself, and what its objects say."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "boost"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "lab", "ml"
NAME = f"{RELEASE}-boost"

Values = dict[str, Any]
Object = dict[str, Any]


@cache
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def read_values(path: Path) -> Values:
    return helm_python.values_from_yaml(path.read_text())


def nested(path: str, value: Any) -> Values:
    """A value at a path such as ``ray.head.sharedMemory``."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def values(*changes: Values, **paths: Any) -> Values:
    """Values over each other, the later ones first; in the names of keywords ``__`` is a dot."""
    merged: Values = {}
    for change in (*changes, *(nested(path.replace("__", "."), value) for path, value in paths.items())):
        merged = _merge(merged, change)
    return merged


def _merge(low: Any, high: Any) -> Any:
    if not (isinstance(low, dict) and isinstance(high, dict)):
        return high
    return low | {key: _merge(low.get(key), value) for key, value in high.items()}


def render(given: Values | None = None, release: str = RELEASE) -> list[Object]:
    """Check values against the schema, as Helm does before it installs, and render all objects."""
    chart().validate_schema(given or {})
    return _objects(chart().render(given or {}, name=release, namespace=NAMESPACE))


def helm(url: str, token: str | None = None, namespace: str = NAMESPACE, user: str | None = None) -> helm_python.Config:
    """Helm with a Kubernetes of the tests' own, whose certificate nobody has signed, and there as that user.

    Where it has a token, it keeps what it knows of releases in Secrets, as ``helm`` does.
    """
    return helm_python.Config(
        kube_apiserver=url,
        kube_token=token,
        kube_as_user=user,
        kube_insecure_skip_tls_verify=url.startswith("https"),
        storage_driver="secret" if token else "memory",
        namespace=namespace,
    )


def render_upgrade(config: helm_python.Config, given: Values | None = None) -> list[Object]:
    """Render an upgrade as Helm does that looks up what is there already."""
    return _objects(config.render(chart(), given or {}, name=RELEASE, namespace=NAMESPACE, is_upgrade=True))


def _objects(texts: dict[str, str]) -> list[Object]:
    manifests = (text for path, text in sorted(texts.items()) if not path.endswith("NOTES.txt"))
    return [found for text in manifests for found in yaml.safe_load_all(text) if found]


def of_kind(objects: list[Object], kind: str, name: str | None = None) -> list[Object]:
    return [found for found in objects if found["kind"] == kind and name in (None, found["metadata"]["name"])]


def the(objects: list[Object], kind: str, name: str | None = None) -> Object:
    (found,) = of_kind(objects, kind, name)
    return found


def pod_templates(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """All pods that these objects bring about: what each is called, and its template."""
    for found in objects:
        name = f"{found['kind']}/{found['metadata']['name']}"
        if found["kind"] == "Pod":
            yield name, {"metadata": found["metadata"], "spec": found["spec"]}
        elif found["kind"] in ("Deployment", "Job"):
            yield name, found["spec"]["template"]
        elif found["kind"] == "RayCluster":
            yield f"{name}/head", found["spec"]["headGroupSpec"]["template"]
            for group in found["spec"]["workerGroupSpecs"]:
                yield f"{name}/{group['groupName']}", group["template"]


def pod(objects: list[Object], name: str) -> Object:
    """The one pod template whose name ends so."""
    (found,) = (template for called, template in pod_templates(objects) if called.endswith(name))
    return found


def environment(template: Object) -> dict[str, str]:
    """Variables of a pod's first container; of those that come from a Secret, ``secret:name/key``."""
    found = {}
    for variable in template["spec"]["containers"][0].get("env", []):
        reference = variable.get("valueFrom", {}).get("secretKeyRef")
        found[variable["name"]] = f"secret:{reference['name']}/{reference['key']}" if reference else variable["value"]
    return found
