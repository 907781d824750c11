"""Runs ``boost``, apart from whatever the person running the tests is signed in to."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml
from typer.testing import CliRunner, Result

from service.cli.main import app

ROOT = Path(__file__).parents[2]
_NOBODY = {"BOOST_CONFIG": "/nowhere/login.json", "BOOST_RETRY_SECONDS": "0"}

Boost = Callable[..., Result]


def run_boost(*arguments: object, stdin: str | None = None, **environment: str) -> Result:
    """Within this process."""
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin, env=_NOBODY | environment, prog_name="boost")


def boost_at(url: str) -> Boost:
    """``run_boost`` with a service."""
    return partial(run_boost, BOOST_URL=url)


def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """As a process group of its own, which can be sent signals as a terminal sends them."""
    return subprocess.Popen(
        [sys.executable, "-m", "service.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | _NOBODY | environment,
        preexec_fn=_hear_interrupts,
        process_group=0,
    )


def _hear_interrupts() -> None:
    """As a shell's job in the foreground does; what runs in the background of a script ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def job_file(folder: Path, job: object) -> str:
    path = folder / "job.yaml"
    path.write_text(job if isinstance(job, str) else yaml.safe_dump(job))
    return str(path)
