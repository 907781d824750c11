"""Spans of a job's way to its first step, and a collector that does not answer."""

import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from boost_core.messages import Cause, RestartReport
from service.jobs.model import JobEvent
from service.jobs.states import JobState, Reason
from service.telemetry.tracing import CLOSE_SECONDS, Tracing, phases
from tests.scheduling import job

Q, S, R, P = JobState.QUEUED, JobState.SCHEDULING, JobState.RUNNING, JobState.PAUSED
ADMITTED, WAITS, STARTS = Reason.HEAD_OF_QUEUE, Reason.WAITING_FOR_RESOURCES, Reason.GANG_STARTING
SOME_DAY = datetime(2026, 1, 1, tzinfo=UTC)
TO_LAUNCH = [(0, Q, Reason.SUBMITTED), (2, S, ADMITTED), (3, S, WAITS), (4, S, WAITS), (7, S, STARTS), (8, S, STARTS)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], []),
        ([(0, Q, Reason.SUBMITTED)], []),
        ([*TO_LAUNCH, (9, R, Reason.GANG_STARTED)], [("queued", 0, 2), ("place", 2, 7), ("start gang", 7, 9)]),
        ([*TO_LAUNCH, (9, P, Reason.PAUSED_BY_USER)], [("queued", 0, 2), ("place", 2, 7), ("start gang", 7, 9)]),
        ([*TO_LAUNCH[:2], (9, P, Reason.PAUSED_BY_USER)], [("queued", 0, 2), ("place", 2, 9)]),
        # Of a job that came back to the queue, the way that it has gone since.
        (
            [*TO_LAUNCH, (9, Q, Reason.GANG_LOST), (10, S, ADMITTED), (11, S, STARTS), (15, R, Reason.GANG_STARTED)],
            [("queued", 9, 10), ("place", 10, 11), ("start gang", 11, 15)],
        ),
    ],
)
def test_a_way_has_phases(changes: list[tuple[int, JobState, Reason]], expected: list[tuple[str, int, int]]) -> None:
    events = [
        JobEvent(
            id=number, job_id="j", kind="state", time=SOME_DAY + timedelta(seconds=second),
            data={"state": state, "reason": reason, "message": ""},
        )
        for number, (second, state, reason) in enumerate(changes)
    ]  # fmt: skip
    found = [(phase.name, (phase.start - SOME_DAY).seconds, (phase.end - SOME_DAY).seconds) for phase in phases(events)]
    assert found == expected


@pytest.mark.nightly
def test_a_collector_that_never_answers_holds_nobody_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracing = Tracing(f"http://127.0.0.1:{silent.getsockname()[1]}")
        traced = job("j", 1).model_copy(update={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
        restart = RestartReport(
            cause=Cause.HANG, message="hangs", step=5, resumed_step=4, recovered_from="memory", seconds=3.0,
            waiting_seconds=0.0, parts={"detect": 1.0, "stop": 2.0},
        )  # fmt: skip
        before = time.monotonic()
        for _ in range(1000):
            tracing.restarted(traced, SOME_DAY, restart)
        tracing.close()
        assert time.monotonic() - before < 3 * CLOSE_SECONDS
    for thread in threading.enumerate():
        if thread.name.startswith(("Otel", "last spans")):
            thread.join(5)
            assert not thread.is_alive(), f"{thread.name} retries"


@pytest.mark.full
def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    program = (
        "import sys, service.serve, service.api.app\n"
        "print([name for name in sys.modules if name == 'service.telemetry.tracing' or '.otlp.' in name])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
