"""The plain manifests: by Kubernetes' own schemas and KubeRay's field names, and that they fit each other."""

from typing import Any

import yaml

from boost_core import __version__
from service.settings import Settings
from tests.deploy.dockerfile import ROOT
from tests.deploy.manifests import check

MANIFESTS: list[dict[str, Any]] = [
    manifest
    for path in sorted((ROOT / "deploy" / "kuberay").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
]
BY_NAME = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in MANIFESTS}


def pods() -> list[dict[str, Any]]:
    cluster = BY_NAME["RayCluster", "boost"]["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"], BY_NAME["Deployment", "boost-api"]["spec"]]
    return [group["template"]["spec"] for group in groups]


def test_all_keep_to_their_schemas() -> None:
    assert len(MANIFESTS) == 5
    for manifest in MANIFESTS:
        check(manifest)


def test_pods_are_confined() -> None:
    for pod in pods():
        assert pod["securityContext"]["runAsUser"] == 65532 and pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["resources"]["limits"]
            assert container["image"].endswith(f":{__version__}")
            assert {"/tmp", "/home/boost", "/var/lib/boost"} <= {
                mount["mountPath"] for mount in container["volumeMounts"]
            }


def test_a_new_image_replaces_all_of_rays_pods() -> None:
    assert BY_NAME["RayCluster", "boost"]["spec"]["upgradeStrategy"] == {"type": "Recreate"}
    versions = {container["image"].partition(":")[2] for pod in pods() for container in pod["containers"]}
    assert len(versions) == 1


def test_secrets_that_are_named_are_there() -> None:
    for pod in pods():
        for container in pod["containers"]:
            for source in container["envFrom"]:
                assert ("Secret", source["secretRef"]["name"]) in BY_NAME
            for variable in container["env"]:
                if "valueFrom" in variable:
                    reference = variable["valueFrom"]["secretKeyRef"]
                    assert reference["key"] in BY_NAME["Secret", reference["name"]]["stringData"]
                if variable["name"].startswith("BOOST_"):
                    assert variable["name"].removeprefix("BOOST_").lower() in Settings.model_fields


def test_the_api_finds_the_head() -> None:
    # KubeRay names the head's Service after the cluster.
    (address,) = (
        variable["value"] for variable in pods()[-1]["containers"][0]["env"] if variable["name"] == "BOOST_RAY_ADDRESS"
    )
    assert address == f"{BY_NAME['RayCluster', 'boost']['metadata']['name']}-head-svc:6379"
