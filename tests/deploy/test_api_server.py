"""``deploy/api-server.sh`` says what is missing; with all that it needs it is what ``live_chart`` runs in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT

SCRIPT = ROOT / "deploy" / "api-server.sh"
NEEDED = ("bash", "basename", "curl", "dirname", "mktemp", "openssl", "rm", "sed", "sleep", "sort", "tail")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the programs that any machine has, and with nothing of Kubernetes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    (folder / "python3").symlink_to(sys.executable)
    return folder


def add(programs: Path, name: str, text: str) -> None:
    (programs / name).write_text(f"#!/bin/bash\n{text}\n")
    (programs / name).chmod(0o755)


def run(programs: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PATH": str(programs), "TMPDIR": str(programs.parent)}
    return subprocess.run([SCRIPT, *command], env=environment, capture_output=True, text=True, timeout=60)


def test_a_command_is_needed(programs: Path) -> None:
    done = run(programs)
    assert (done.returncode, done.stdout) == (2, "")
    assert "say which command to run" in done.stderr


def test_what_is_not_installed_is_named(programs: Path) -> None:
    assert "api-server.sh: etcd is not on the PATH" in run(programs, "true").stderr
    add(programs, "etcd", "exit 0")
    done = run(programs, "true")
    assert done.returncode == 2
    assert "api-server.sh: kube-apiserver is not on the PATH" in done.stderr


def test_a_server_that_the_chart_is_not_for_is_not_started(programs: Path) -> None:
    add(programs, "etcd", "exit 0")
    add(programs, "kube-apiserver", "echo Kubernetes v1.9.11")
    done = run(programs, "true")
    assert done.returncode == 2
    assert "kube-apiserver is of Kubernetes 1.9.11; the chart needs 1.30.0 or later" in done.stderr


@pytest.mark.full
def test_a_server_that_ends_is_not_waited_for(programs: Path) -> None:
    add(programs, "etcd", "exec sleep 60")
    add(
        programs,
        "kube-apiserver",
        "[[ $1 = --version ]] && echo Kubernetes v1.36.2 || { echo 'no such flag'; exit 1; }",
    )
    done = run(programs, "echo", "ran")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "no such flag" in done.stderr
    assert list(programs.parent.glob("tmp.*")) == [], "nothing is left behind"
