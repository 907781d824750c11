"""A worker's pod that is to end gives Ray notice and waits for its ranks: the rendered command, on a real Ray.

Kubernetes is played by process and network namespaces, so that the command sees the pod's own processes alone.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT, environment, pod, render
from tests.hosts import need_namespaces

pytestmark = pytest.mark.nightly

POD = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_a_pod_that_ends_waits_for_its_ranks(tmp_path: Path) -> None:
    template = pod(render(), "/gpu")
    shell, option, command = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("/bin/bash", "-c")
    token = tmp_path / "token"
    token.write_text("t" * 64)
    said = environment(template) | {"HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(token)}
    programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    need_namespaces(*as_root)
    done = subprocess.run(
        [*POD, *as_root, sys.executable, "-m", "tests.deploy.leaving", command],
        cwd=ROOT,
        env=os.environ | said | programs,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
