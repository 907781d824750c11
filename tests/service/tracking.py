"""Jobs whose trackers are told by a real forwarder, for tests."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from boost_core.messages import Report
from service.jobs.leases import Leases
from service.jobs.model import JobRecord, Owner
from service.jobs.store import JobStore
from service.jobs.trackers import Tracked, TrackerStore
from service.settings import Settings
from service.trackers import forwarder as forwarder_module
from service.trackers.forwarder import Forwarder
from service.trackers.opening import kinds_of, open_tracker
from tests.service.records import a_spec, numbered, start

INTERVAL = 0.05
WAIT_SECONDS = 120


def tracked_job(
    store: JobStore, folder: Path | str, settings: Settings, tenant: str = "default", **changes: Any
) -> JobRecord:
    """A job that trains, with the trackers that its spec asks for."""
    spec = a_spec(**changes)
    job = store.create(spec, str(folder), Owner(tenant, "tester"), trackers=kinds_of(spec, settings))
    return start(store, job.id)


def report(store: JobStore, job: JobRecord, *reports: Report) -> None:
    """Have a job's gang say some more."""
    last = store.last_sequences([job.id])[job.id]
    store.append_reports(job.id, 1, [(last + number, moment, each) for number, moment, each in numbered(*reports)])


@contextmanager
def forwarding(store: JobStore, settings: Settings, holder: str = "this process") -> Iterator[Forwarder]:
    """A forwarder that runs."""
    forwarder = Forwarder(store, Leases(store.engine, holder), partial(open_tracker, settings), INTERVAL)
    with patch.object(forwarder_module, "_LONGEST_PAUSE_SECONDS", INTERVAL):
        forwarder.start()
        try:
            yield forwarder
        finally:
            forwarder.stop()


def wait_for(store: JobStore, job: JobRecord, kind: str, until: Callable[[Tracked, int], bool]) -> Tracked:
    """How far a tracker is, as soon as that is so."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        ((tracked, behind),) = (each for each in TrackerStore(store.engine).of_job(job.id) if each[0].kind == kind)
        if until(tracked, behind):
            return tracked
        assert time.monotonic() < deadline, f"{tracked}, {behind} events behind"
        time.sleep(INTERVAL)


def wait_until_told(store: JobStore, job: JobRecord, kind: str) -> Tracked:
    """How far a tracker is that has been told all."""
    return wait_for(store, job, kind, lambda tracked, behind: behind == 0 and tracked.problem is None)


def kill_deliveries(store: JobStore, database_url: str, settings: Settings, job: JobRecord, kind: str) -> int:
    """Have deliveries killed wherever they have done something, two times over; how many steps the job has done."""
    command = [sys.executable, "-m", "tests.service.killed_deliveries", database_url, str(settings.home), job.id, kind]
    done = subprocess.run([*command, "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    killed, steps = map(int, done.stdout.split())
    assert killed >= 4
    return steps
