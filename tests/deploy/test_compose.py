"""The compose file, as far as it can be looked at without containers."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import Settings
from tests.deploy.dashboards import dashboards
from tests.deploy.dockerfile import ROOT, read

FOLDER = ROOT / "deploy" / "compose"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
RUNNING = [name for name in SERVICES if name != "s3-folder"]
# Those of the Compose specification that we use: a misspelled one is none of them.
KEYS = {
    "cap_add", "cap_drop", "command", "depends_on", "entrypoint", "environment", "healthcheck", "image", "init",
    "network_mode", "ports", "read_only", "restart", "secrets", "security_opt", "shm_size", "stop_grace_period",
    "tmpfs", "user", "volumes",
}  # fmt: skip
MADE = {f"./secrets/{name}" for name in COMPOSE["secrets"]} | {"./secrets/api-key", "./data"}


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SERVICES[request.param]


def test_all_is_there() -> None:
    assert set(SERVICES) == {
        "postgres", "s3-folder", "s3", "ray-head", "ray-worker", "api", "prometheus", "alertmanager", "grafana",
    }  # fmt: skip


# The newest schema that a release of Grafana knows (DASHBOARD_SCHEMA_VERSION in its source). It migrates older boards
# when it reads them, and knows nothing of newer ones.
SCHEMAS = {"12.3": 42}


def test_grafana_knows_the_schema_of_the_dashboards() -> None:
    release = ".".join(SERVICES["grafana"]["image"].partition(":")[2].split(".")[:2])
    assert {board["schemaVersion"] for board in dashboards().values()} == {SCHEMAS[release]}


def test_each_is_confined(service: dict[str, Any]) -> None:
    assert set(service) <= KEYS
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] != "root" or service["network_mode"] == "none"
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_each_image_has_a_version(service: dict[str, Any]) -> None:
    name, _, tag = service["image"].partition(":")
    if name.startswith("boost-"):
        variable = re.fullmatch(r"\$\{(\w+):\?.+\}", tag)
        assert variable and f"{variable[1]}=0." in (FOLDER / ".env.example").read_text()
    else:
        assert re.fullmatch(r"v?\d+\.\d+[\w.-]*", tag), service["image"]


@pytest.mark.parametrize("name", RUNNING)
def test_each_is_watched_and_started_again(name: str) -> None:
    assert SERVICES[name]["restart"] == "unless-stopped"
    image = SERVICES[name]["image"].partition(":")[0].removeprefix("boost-")
    ours = FOLDER.parents[1] / "docker" / f"{image}.Dockerfile"
    assert "healthcheck" in SERVICES[name] or read(ours).image["HEALTHCHECK"]


def test_what_is_waited_for_can_come(service: dict[str, Any]) -> None:
    for name, condition in service.get("depends_on", {}).items():
        assert condition["condition"] == "service_healthy" or SERVICES[name]["restart"] == "no"


def test_what_is_mounted_is_there_or_is_made(service: dict[str, Any]) -> None:
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert source in MADE or (FOLDER / source).exists(), volume
        else:
            assert source in COMPOSE["volumes"]
    assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])


def test_the_service_knows_its_variables() -> None:
    said = {name for name in SERVICES["api"]["environment"] if name.startswith("BOOST_")}
    assert said <= {f"BOOST_{name.upper()}" for name in Settings.model_fields}
    asked = set(re.findall(r"\$\{(\w+)", (FOLDER / "compose.yaml").read_text()))
    assert asked == set(re.findall(r"^(\w+)=", (FOLDER / ".env.example").read_text(), re.MULTILINE))


def test_the_file_for_gpus_changes_what_there_is() -> None:
    changes = yaml.safe_load((FOLDER / "compose.gpu.yaml").read_text())["services"]
    assert set(changes) <= set(SERVICES)


def test_secrets_are_made_once_and_kept_from_others(tmp_path: Path) -> None:
    script = tmp_path / "make-secrets.sh"
    # Another user's files can be made by root alone.
    script.write_text(
        (FOLDER / "make-secrets.sh").read_text().replace("chown 65532:65532", "true").replace("= 0", "!= -")
    )
    subprocess.run(["sh", script], check=True, capture_output=True)
    first = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert {f"./secrets/{name}" for name in first} - {"./secrets/s3-secret"} == MADE - {"./data"}
    assert first["postgres-password"] in first["pgpass"] and first["s3-secret"] in first["aws-credentials"]
    assert len(first["ray-token"]) == 64 and len(set(first.values())) == len(first)
    assert yaml.safe_load(first["s3-config"])["identities"][0]["credentials"][0]["secretKey"] == first["s3-secret"]
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    subprocess.run(["sh", script], check=True, capture_output=True)
    assert first == {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}


def test_git_keeps_none_of_them() -> None:
    for name in ("secrets/ray-token", ".env", "data/corpus.txt"):
        assert subprocess.run(["git", "check-ignore", "--quiet", FOLDER / name], cwd=ROOT).returncode == 0
