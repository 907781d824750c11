"""``boost watch`` and what its table is made of."""

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest

from service.cli.commands import jobs
from service.cli.commands.jobs import sparkline
from service.jobs.states import JobState, Reason
from tests.service.canned import a_job, a_running_job, metrics
from tests.service.command_line import boost_at, process
from tests.service.records import a_step
from tests.service.scripted import Answer, problem, serving

DONE = a_job(
    JobState.SUCCEEDED, reason=Reason.TRAINING_FINISHED, message="all steps done", progress=a_step(10)
)  # fmt: skip
FAILED = a_job(JobState.FAILED, id="job-2", reason=Reason.TRAINING_FAILED, message="out of memory")
NONE = Answer(200, {"jobs": [], "next_cursor": None})


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_LOOK_SECONDS", 0.01)


def states(*jobs: dict[str, Any]) -> list[Answer]:
    return [Answer(200, job) for job in jobs]


def test_lines_where_there_is_no_terminal() -> None:
    waiting = a_job(waiting_for="2 GPUs of the queue night")
    script = {
        "GET /v1/jobs": NONE,
        "GET /v1/jobs/job-1": states(waiting, waiting, a_running_job(4), a_running_job(5), DONE),
        "GET /v1/jobs/job-1/metrics": Answer(200, metrics(5.0, 4.0)),
    }
    with serving(script) as server:
        result = boost_at(server.url)("watch", "job-1")
    assert result.exit_code == 0, result.output
    lines = [line.split("  ", 1)[1] for line in result.stdout.splitlines()]
    assert lines[0] == "job-1 tiny  QUEUED: 2 GPUs of the queue night"
    assert lines[1].startswith(
        "job-1 tiny  RUNNING  step 4/10  loss 4.6000  2,048 tokens/s  communication 25%  goodput"
    )
    assert lines[2:] == ["job-1 tiny  SUCCEEDED: all steps done"], "the same state is not said again at once"


def test_a_job_that_did_not_succeed_is_told_by_the_exit_status() -> None:
    script = {"GET /v1/jobs": NONE, "GET /v1/jobs/job-1": states(DONE), "GET /v1/jobs/job-2": states(FAILED)}
    with serving(script) as server:
        result = boost_at(server.url)("watch", "job-1", "job-2")
    assert (result.exit_code, "job-2 tiny  FAILED: out of memory" in result.stdout) == (1, True)


def test_a_job_that_runs_need_not_end() -> None:
    script = {
        "GET /v1/jobs": NONE,
        "GET /v1/jobs/job-1": states(a_job(), a_running_job(4)),
        "GET /v1/jobs/job-1/metrics": Answer(200, metrics(5.0, 4.0)),
        "GET /v1/jobs/job-2": states(DONE),
        "GET /v1/jobs/job-3": states(FAILED),
    }
    with serving(script) as server:
        boost = boost_at(server.url)
        assert boost("watch", "job-1", "job-2", "--until", "running").exit_code == 0
        assert boost("watch", "job-3", "--until", "running").exit_code == 1
        result = boost("watch", "--until", "running")
    assert (result.exit_code, "needs the ids of the jobs" in result.output) == (2, True)


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    waiting = a_job(id="job-2", waiting_for="2 GPUs of [b]the queue[/b] night")
    script = {
        "GET /v1/jobs": NONE,
        "GET /v1/jobs/job-1": states(a_running_job(4), DONE),
        "GET /v1/jobs/job-1/metrics": Answer(200, metrics(8.0, 7.0, 6.0)),
        "GET /v1/jobs/job-2": states(waiting, FAILED),
    }
    with serving(script) as server:
        shown = boost_at(server.url)("watch", "job-1", "job-2").stdout
    for fact in (
        "RUNNING",
        "4/10",
        "0:03",
        "4.6000",
        "2,048",
        "25%",
        "tp 2 × pp 1 × dp 1",
        "2 GPUs of [b]the queue[/b]",
    ):
        assert fact in shown, fact
    assert sparkline([8.0, 7.0, 6.0, 4.6]) in shown, "what was before watching is in the curve"
    assert sparkline([8.0, 7.0, 6.0, 4.6, 4.0]) in shown
    assert "out of memory" in shown


def test_a_service_without_curves_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    script = {
        "GET /v1/jobs": NONE,
        "GET /v1/jobs/job-1": states(DONE),
        "GET /v1/jobs/job-1/metrics": problem(500, "internal-error"),
    }
    with serving(script) as server:
        assert boost_at(server.url)("watch", "job-1").exit_code == 0


@pytest.mark.nightly
def test_all_that_goes_on_is_watched_until_ctrl_c() -> None:
    def page(*jobs: dict[str, Any]) -> Answer:
        return Answer(200, {"jobs": list(jobs), "next_cursor": None})

    script = {
        "GET /v1/jobs": [page(), page(a_job()), page(a_job(), a_job(id="job-2")), page(a_job())],
        "GET /v1/jobs/job-2": states(FAILED),
    }
    with serving(script) as server:
        watching = process("watch", BOOST_URL=server.url)
        assert watching.stdout is not None
        lines = [watching.stdout.readline().split("  ", 1)[1] for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        output, _ = watching.communicate(timeout=60)
    assert watching.returncode == 130, output
    assert "Traceback" not in output
    assert lines == [
        "job-1 tiny  QUEUED: waits for its turn\n",
        "job-2 tiny  QUEUED: waits for its turn\n",
        "job-2 tiny  FAILED: out of memory\n",
    ]
    asked = [asked.query for asked in server.asked if asked.path == "/v1/jobs"][1]
    assert asked["state"] == ["QUEUED", "SCHEDULING", "RUNNING", "PAUSED"]


def test_a_job_that_is_not_there() -> None:
    script: dict[str, Callable[[], Answer] | Any] = {
        "GET /v1/jobs": NONE,
        "GET /v1/jobs/job-0": problem(404, "job-not-found"),
    }
    with serving(script) as server:
        assert boost_at(server.url)("watch", "job-0").exit_code == 1


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇█"),
        ([8, 1], "█▁"),
        ([3, 3], "▅▅"),
        ([1, None, math.nan, math.inf, 2], "▁   █"),
        ([None, None], "  "),
    ],
)
def test_sparklines(values: list[float | None], curve: str) -> None:
    assert sparkline(values) == curve
