"""What the import contracts cannot see: what is really loaded when a process starts."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("service.serve, service.api.app, service.cli.main", "torch"),
        ("service.client, service.cli.main", "ray"),
        ("boost_core.config, boost_core.plan", "torch"),
        ("boost_core.train, boost_core.__main__", "ray"),
    ],
)
def test_importing_leaves_out(modules: str, absent: str) -> None:
    code = f"import sys, {modules}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
