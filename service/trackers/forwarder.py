"""The thread that keeps trackers up to date with jobs. Of several services on one database, one at a time does this.

A delivery may hang as long as its tracker does, which delays no step. Each tenant has few threads for each
kind of tracker, so a hanging one delays nobody else's deliveries unless so many hang that all threads are taken.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from boost_core.messages.reports import Fault, FaultReport
from service.jobs.leases import Lease, LeaseLost, Leases
from service.jobs.model import JobRecord
from service.jobs.store import JobStore
from service.jobs.trackers import TrackerStore
from service.logs import RecurringFaults
from service.security.redaction import redact
from service.trackers.curves import Tracker
from service.trackers.delivery import deliver

logger = logging.getLogger(__name__)

LEASE = "trackers"
LEASE_SECONDS = 30.0
_FAILED = "trackers could not be updated"
THREADS = 64
THREADS_PER_TENANT = 2  # for each kind of tracker
TOLD_AFTER = 3  # failures in a row, after which the job's user is told
GIVEN_UP_AFTER = timedelta(days=7)  # of failures only, for a job that has ended
PAUSE_SECONDS = {"wandb": 30.0}  # between two deliveries of a job, each of which starts a process
_LONGEST_PAUSE_SECONDS = 60.0  # between two tries
_LONGEST_PROBLEM = 500  # characters

OpenTracker = Callable[[str, JobRecord], Tracker]

Key = tuple[str, str]  # a job's ID and a kind of tracker


class _Lane:
    """Deliveries of one tenant to its trackers of one kind: those waiting, in order, and those in progress."""

    def __init__(self) -> None:
        self._waiting: dict[Key, None] = {}
        self.under_way: set[Key] = set()
        self.threads = 0

    def add(self, key: Key) -> None:
        if key not in self.under_way:
            self._waiting.setdefault(key)

    def next(self) -> Key | None:
        if not self._waiting:
            return None
        key = next(iter(self._waiting))
        del self._waiting[key]
        self.under_way.add(key)
        return key

    def threads_missing(self) -> int:
        return max(0, min(THREADS_PER_TENANT - self.threads, len(self._waiting)))


class Forwarder:
    """Polls the record, and starts a delivery for each tracker that is behind.

    Args:
        store: The record.
        leases: Where to take the lease.
        open_tracker: Creates a tracker of a kind for a job; called in the delivery's thread, so it may block and fail.
        interval_seconds: Pause between polls, and roughly between two deliveries of one job to one tracker.
    """

    def __init__(
        self, store: JobStore, leases: Leases, open_tracker: OpenTracker, interval_seconds: float = 5.0
    ) -> None:
        self._store, self._leases, self._open, self._interval = store, leases, open_tracker, interval_seconds
        self._lease: Lease | None = None
        self._lanes: dict[tuple[str, str], _Lane] = defaultdict(_Lane)  # by tenant and kind
        self._threads = 0
        self._not_before: dict[Key, float] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._faults = RecurringFaults(logger)  # of that thread
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)

    def start(self) -> None:
        """Start working, in threads of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Start nothing more. Deliveries in progress are not waited for; the next service knows how far they got."""
        self._stop.set()
        self._thread.join()
        if self._lease is not None:
            with suppress(Exception):
                self._leases.give_back(self._lease)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._lease = self._leases.take(LEASE, LEASE_SECONDS)
                if self._lease is not None:
                    self._begin(TrackerStore(self._store.engine, self._lease).pending())
                self._faults.over(_FAILED)
            except Exception as error:
                self._faults.occurred(_FAILED, error)
            self._stop.wait(self._interval)

    def _begin(self, pending: Iterable[tuple[str, str, str]]) -> None:
        now = time.monotonic()
        with self._lock:
            for key in [key for key, moment in list(self._not_before.items()) if now >= moment]:
                self._not_before.pop(key, None)
            for tenant, kind, job_id in sorted(pending):
                if (job_id, kind) not in self._not_before:
                    self._lanes[tenant, kind].add((job_id, kind))
            for place, lane in self._lanes.items():
                for _ in range(min(lane.threads_missing(), THREADS - self._threads)):
                    self._threads, lane.threads = self._threads + 1, lane.threads + 1
                    threading.Thread(target=self._work, args=(lane,), name=f"tracker {place[1]}", daemon=True).start()

    def _work(self, lane: "_Lane") -> None:
        """Deliver until nothing waits."""
        while True:
            with self._lock:
                if (key := None if self._stop.is_set() else lane.next()) is None:
                    self._threads, lane.threads = self._threads - 1, lane.threads - 1
                    return
            try:
                self._deliver(*key)
            finally:
                with self._lock:
                    lane.under_way.discard(key)

    def _deliver(self, job_id: str, kind: str) -> None:
        if self._lease is None:  # another service's job
            return
        progress = TrackerStore(self._store.engine, self._lease)
        try:
            tracked, job = progress.one(job_id, kind), self._store.get(job_id)
        except Exception:
            logger.exception(
                "the progress of %s with job %s could not be read; the next poll tries again", kind, job_id
            )
            return
        try:
            deliver(self._store, progress, tracked, self._open(kind, job))
            if pause := PAUSE_SECONDS.get(kind):
                self._not_before[job_id, kind] = time.monotonic() + pause
        except Exception as error:
            self._note_failure(progress, job, kind, error)

    def _note_failure(self, progress: TrackerStore, job: JobRecord, kind: str, error: Exception) -> None:
        """Schedule another try; tell the job's user if failures persist."""
        problem = redact(str(error) or type(error).__name__)[:_LONGEST_PROBLEM]
        logger.info("job %s could not be sent to %s: %s", job.id, kind, problem)
        try:
            tracked = progress.one(job.id, kind)
            since = tracked.failing_since or datetime.now(UTC)
            given_up = job.finished and datetime.now(UTC) - since > GIVEN_UP_AFTER
            failing = progress.failed(tracked, problem, open_=not given_up)
            pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(failing.failures_in_row, 10))
            self._not_before[job.id, kind] = time.monotonic() + pause
            if failing.failures_in_row == TOLD_AFTER and self._lease is not None:
                step = job.progress.step if job.progress else 0
                message = f"{kind} cannot be updated at the moment; delivery is retried: {problem}"
                fault = FaultReport(what=Fault.TRACKER, step=step, message=message)
                self._store.under(self._lease).add_fault(job.id, fault)
        except LeaseLost as overtaken:
            logger.warning("%s", overtaken)
        except Exception:
            logger.exception("the failure could not be recorded; delivery is retried anyway")
