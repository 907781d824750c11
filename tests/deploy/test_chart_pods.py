"""What holds for all pods that the chart brings about, whatever the values."""

import re

import pytest

from tests.deploy.chart import CI, Object, Values, environment, pod_templates, read_values, render

EXAMPLES = [pytest.param({}, id="defaults"), *(pytest.param(read_values(path), id=path.stem) for path in CI)]
SELECTORS = {
    "Deployment": ("selector", "matchLabels"),
    "NetworkPolicy": ("podSelector", "matchLabels"),
    "PodDisruptionBudget": ("selector", "matchLabels"),
    "Service": ("selector",),
}
COMES_AND_GOES = ("Job/", "Pod/")


@pytest.fixture(params=EXAMPLES)
def templates(request: pytest.FixtureRequest) -> dict[str, Object]:
    values: Values = request.param
    return dict(pod_templates(render(values)))


@pytest.mark.full
def test_images_have_versions(templates: dict[str, Object]) -> None:
    for name, template in templates.items():
        for container in template["spec"]["containers"]:
            assert re.search(r":(?!latest)[\w.-]+$", container["image"]), name


@pytest.mark.full
def test_nobody_is_root_or_can_become_it(templates: dict[str, Object]) -> None:
    for name, template in templates.items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] == 65532, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & spec.keys(), name
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"]["drop"] == ["ALL"], name
            assert security["capabilities"].get("add", []) in ([], ["IPC_LOCK"]), name
            assert "privileged" not in security, name


@pytest.mark.full
def test_requests_and_limits_are_set(templates: dict[str, Object]) -> None:
    for name, template in templates.items():
        for container in template["spec"]["containers"]:
            for kind in ("requests", "limits"):
                assert container["resources"][kind].keys() >= {"cpu", "memory"}, (name, kind)


@pytest.mark.full
def test_those_that_stay_have_probes(templates: dict[str, Object]) -> None:
    for name, template in templates.items():
        for container in template["spec"]["containers"]:
            if not name.startswith(COMES_AND_GOES):
                assert container.keys() >= {"startupProbe", "livenessProbe", "readinessProbe"}, name


# With the head's pod all gangs end, so it has to be the node that is gone, not a dashboard that is slow.
@pytest.mark.full
def test_rays_pods_are_ended_by_what_the_nodes_agent_says(templates: dict[str, Object]) -> None:
    of_ray = {name: template for name, template in templates.items() if name.startswith("RayCluster/")}
    assert len(of_ray) > 1
    for name, template in of_ray.items():
        alive = template["spec"]["containers"][0]["livenessProbe"]["httpGet"]
        assert alive == {"path": "/api/local_raylet_healthz", "port": 52365}, name


@pytest.mark.full
def test_nobody_is_shown_kubernetes(templates: dict[str, Object]) -> None:
    for name, template in templates.items():
        assert template["spec"]["automountServiceAccountToken"] is False, name


@pytest.mark.full
def test_what_is_written_to_is_no_image(templates: dict[str, Object]) -> None:
    for name, template in templates.items():
        volumes = {volume["name"]: volume for volume in template["spec"].get("volumes", [])}
        for container in template["spec"]["containers"]:
            mounts = {mount["mountPath"]: mount for mount in container.get("volumeMounts", [])}
            assert {mount["name"] for mount in mounts.values()} <= volumes.keys(), name
            assert len(mounts) == len(container.get("volumeMounts", [])), name
            if not name.startswith("Pod/"):
                assert mounts.keys() >= {"/tmp", "/home/boost"}, name
            for mount in mounts.values():
                if "secret" in volumes[mount["name"]]:
                    assert mount["readOnly"] is True, name
                    assert volumes[mount["name"]]["secret"]["defaultMode"] == 0o440, name


@pytest.mark.full
def test_secrets_are_named_and_never_said(templates: dict[str, Object]) -> None:
    for name, template in templates.items():
        for variable, value in environment(template).items():
            assert not re.search("PASSWORD|TOKEN$|SECRET_ACCESS|API_KEY", variable), (name, variable)
            if variable == "BOOST_DATABASE_URL":
                assert value == "secret:boost-database/url"


@pytest.mark.full
@pytest.mark.parametrize("given", EXAMPLES)
def test_releases_in_a_namespace_are_strangers(given: Values) -> None:
    one, other = (render(given, release) for release in ("lab", "lab-two"))
    names = [{(found["kind"], found["metadata"]["name"]) for found in objects} for objects in (one, other)]
    assert names[0].isdisjoint(names[1])
    pods = [template["metadata"]["labels"] for _, template in pod_templates(other)]
    for found in one:
        if found["kind"] in SELECTORS:
            selector = found["spec"]
            for key in SELECTORS[found["kind"]]:
                selector = selector[key]
            assert selector and not any(selector.items() <= labels.items() for labels in pods), found["metadata"]
