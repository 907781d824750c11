"""The embedded Ray does nothing for those who do not have its token."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

_EMBEDDED = """
import sys
from pathlib import Path
import ray
from service.gang.ray.gangs import RayGangs

gangs = RayGangs(None, 1, Path(sys.argv[1]), Path(sys.argv[1]) / "home" / "ray-token")
gangs.connect()
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
gangs.close()
"""
_CLIENT = """
import sys
import ray

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
print([node["Alive"] for node in ray.nodes()])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedded")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _EMBEDDED, folder], env=without_token(), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout
    yield process.stdout.readline().decode().strip()
    process.stdin.close()
    assert process.wait(60) == 0


def without_token(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | more


def come(address: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CLIENT, address]
    here = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the embedded Ray is on the loopback interface alone
    return subprocess.Popen(
        command, env=without_token(**here, **environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_only_the_owner_can_read_the_token(address: str, folder: Path) -> None:
    file = folder / "home" / "ray-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_text()) == 64
    assert [path.name for path in file.parent.iterdir()] == ["ray-token"]


def test_who_has_the_token_is_let_in(address: str, folder: Path) -> None:
    client = come(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(folder / "home" / "ray-token"))
    said, errors = client.communicate(timeout=120)
    assert said.strip() == "[True]", errors


def test_who_has_not_is_refused(address: str) -> None:
    clients = [
        come(address, **environment)  # at once: each tries for twenty seconds
        for environment in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32})
    ]
    for client in clients:
        said, errors = client.communicate(timeout=120)
        assert client.returncode != 0
        assert said == ""
        assert "AuthenticationError" in errors or "Unauthenticated" in errors, errors
