"""The API against its own OpenAPI document: thousands of requests that schemathesis makes of it, good and bad.

The requests are the same in every run; ``pytest --hypothesis-seed=<number>`` makes others.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.jobs.database import migrate
from service.jobs.model import Owner
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.models.access import Scope
from service.models.sweeps import SweepRequest
from service.settings import Settings
from tests.service.conftest import RunningApi
from tests.service.records import (
    PROFILE,
    a_log_line,
    a_shape,
    a_spec,
    a_step,
    numbered,
    run_to_the_end,
    start,
    write_checkpoints,
)
from tests.service.routes import BODIES

pytestmark = pytest.mark.nightly

CASES = 5000
CONFIG = Path(__file__).with_name("openapi.toml")
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


@pytest.fixture
def lived_in(tmp_path: Path) -> Iterator[RunningApi]:
    """A server without authentication that knows jobs in every state, checkpoints, a queue and keys."""
    url = f"sqlite:///{tmp_path}/boost.db"
    migrate(url)
    store = JobStore(url)
    settings = Settings(
        home=tmp_path, database_url=url, auth=False, allowed_prefixes=(str(tmp_path),), rate_per_second=1_000_000
    )
    running = RunningApi(store, settings)
    running.app.state.context.profiles.put("X1", PROFILE, "ops")
    sweep = BODIES["POST", "/v1/sweeps"]
    for number in range(3):
        request = SweepRequest.model_validate(sweep | {"name": f"rates-{number}"})
        running.app.state.context.sweeps.create(request, Owner())
    known = {
        "jobs": jobs_in_every_state(store, tmp_path),
        "training": [job_with_checkpoints(store, tmp_path) for _ in range(12)],
        "keys": [running.app.state.context.keys.create(f"key {number}", "lab", [Scope.READ]).id for number in range(3)],
    }
    for name, ids in known.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(f'"{each}"' for each in ids))
    yield running
    running.stop()
    store.close()


def jobs_in_every_state(store: JobStore, folder: Path) -> list[str]:
    _, scheduling, running, paused, succeeded, failed, cancelled = (
        store.create(a_spec(name=state.lower(), data={}), f"{folder}/checkpoints") for state in JobState
    )
    store.change(scheduling.id, Reason.HEAD_OF_QUEUE, "is next")
    start(store, running.id)
    gang = a_shape().model_copy(update={"metrics_endpoints": ["10.0.0.5:9400", None]})
    store.append_reports(running.id, 1, numbered(gang, a_step(10), a_log_line("step 10")))
    store.request_pause(paused.id)
    run_to_the_end(store, succeeded.id)
    start(store, failed.id)
    store.change(failed.id, Reason.TRAINING_FAILED, "the loss is not finite")
    store.request_cancel(cancelled.id)
    assert {job.state for job in store.page()[0]} == set(JobState)
    return [job.id for job in store.page()[0]]


def job_with_checkpoints(store: JobStore, folder: Path) -> str:
    job = store.create(a_spec(data={}), f"file://{folder}/checkpoints")
    start(store, job.id)
    write_checkpoints(job, *range(10, 100, 10))
    return job.id


@pytest.mark.timeout(1200)
def test_the_api_is_as_its_document_says(lived_in: RunningApi, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    report, output = gone_over(lived_in, tmp_path, pytestconfig.getoption("--hypothesis-seed"))
    operations = sum(len(path) for path in lived_in.app.openapi()["paths"].values())
    assert report["exit_code"] == 0, output
    assert report["errors"] == []
    # Each operation was gone through to its end, and not only refused.
    accepted = {
        name for name, phases in report["valid_rates"].items() if any(phase["accepted"] for phase in phases.values())
    }
    assert sorted(report["valid_rates"].keys() - accepted) == []
    assert report["operations"] == report["operations"] | {"total": operations, "tested": operations, "errored": 0}
    assert report["test_cases"]["generated"] >= CASES


def gone_over(api: RunningApi, folder: Path, seed: str | None) -> tuple[dict[str, Any], str]:
    """What schemathesis reports."""
    config, command = CONFIG.read_text(), [SCHEMATHESIS, "run", f"{api.url}/openapi.json", "--no-color"]
    if seed is not None:
        config = config.replace("deterministic = true", "deterministic = false")
        command += ["--seed", seed]
    (folder / "schemathesis.toml").write_text(config)
    report = folder / "report.json"
    ran = subprocess.run([*command, "--report-json-path", report], cwd=folder, capture_output=True, text=True)
    assert report.exists(), ran.stdout + ran.stderr
    return json.loads(report.read_text()), ran.stdout
