"""The thread that keeps trackers up to date with jobs. Of several services on one database, one at a time does this.

A delivery may hang as long as its tracker does, which delays no step. Each tenant has few threads for each
kind of tracker, so a hanging one delays nobody else's deliveries unless so many hang that all threads are taken.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from boost_core.messages import Fault, FaultReport
from service.jobs.leases import Lease, LeaseLost, Leases
from service.jobs.model import JobRecord
from service.jobs.queries import EventFilter
from service.jobs.store import JobStore
from service.jobs.trackers import SENT_KINDS, Tracked, TrackerStore
from service.logs import RecurringFaults
from service.security.redaction import redact
from service.trackers.curves import Batch, NotYet, Tracker, entry_of

logger = logging.getLogger(__name__)

BATCH = 500  # events
_MOST_BATCHES = 20  # then other deliveries have their turn
_SENT = EventFilter(kinds=SENT_KINDS)
_DELIVERED: dict[str, Any] = {"failures_in_row": 0, "failing_since": None, "problem": None}

LEASE = "trackers"
LEASE_SECONDS = 30.0
STOP_SECONDS = 5.0  # to wait for deliveries in progress; much less than the lease is still valid
_FAILED = "trackers could not be updated"
THREADS = 64
THREADS_PER_TENANT = 2  # for each kind of tracker
FAILURES_BEFORE_NOTICE = 3  # in a row, after which the job's user is told
GIVEN_UP_AFTER = timedelta(days=7)  # of failures only, for a job that has ended
PAUSE_SECONDS = {"wandb": 30.0}  # between two deliveries of a job, each of which starts a process
_LONGEST_PAUSE_SECONDS = 60.0  # between two tries
_LONGEST_PROBLEM = 500  # characters

OpenTracker = Callable[[str, JobRecord], Tracker]


def deliver(store: JobStore, progress: TrackerStore, tracked: Tracked, tracker: Tracker) -> None:
    """Send all pending events, batch by batch, and record the progress after each.

    A process that dies in between has sent a batch that is not recorded; the next one sends it again, and the
    tracker must recognise it.

    Args:
        store: The record.
        progress: Where progress is recorded.
        tracked: The tracker's progress with the job.
        tracker: The tracker.

    Raises:
        Exception: The tracker failed.
    """
    for _ in range(_MOST_BATCHES):
        job = store.get(tracked.job_id)  # read before its events: later events are left for next time
        events = store.events(tracked.job_id, tracked.event_id, BATCH, _SENT)
        whole = len(events) < BATCH
        after = replace(tracked, version=job.version if whole else tracked.version, **_DELIVERED)
        if events:
            marks = dict(tracked.marks)
            entries = [entry_of(event, marks) for event in events]
            try:
                kept = tracker.send(Batch(job, entries), tracked.kept)
            except NotYet:
                progress.write(tracked, replace(after, version=job.version), open_=True)
                return
            after = replace(after, event_id=events[-1].id, marks=marks, kept=kept)
        if not progress.write(tracked, after, open_=not (whole and job.finished)) or whole:
            return
        tracked = after


@dataclass
class _Lane:
    """Deliveries of one tenant to its trackers of one kind: those waiting, in order, and those in progress.

    Each is a job's ID and a kind of tracker.
    """

    waiting: dict[tuple[str, str], None] = field(default_factory=dict)
    under_way: set[tuple[str, str]] = field(default_factory=set)
    threads: int = 0


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
        self._not_before: dict[tuple[str, str], float] = {}  # by job and kind
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._faults = RecurringFaults(logger)  # of that thread
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)

    def start(self) -> None:
        """Start working, in threads of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Start nothing more, and wait briefly for deliveries in progress; the next service knows how far they got.

        If one takes longer, the lease is left to expire: the next service is not to write to the same files meanwhile.
        """
        self._stop.set()
        self._thread.join()
        with self._lock:
            done = self._lock.wait_for(lambda: not self._threads, STOP_SECONDS)
        if done and self._lease is not None:
            with suppress(Exception):
                self._leases.renew(self._lease, 0.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._lease = self._leases.take(LEASE, LEASE_SECONDS)
                if self._lease is not None:
                    pending = TrackerStore(self._store.engine, self._lease).pending()
                    now = time.monotonic()
                    with self._lock:
                        for key in [key for key, moment in list(self._not_before.items()) if now >= moment]:
                            self._not_before.pop(key, None)
                        for tenant, kind, job_id in sorted(pending):
                            key, lane = (job_id, kind), self._lanes[tenant, kind]
                            if key not in self._not_before and key not in lane.under_way:
                                lane.waiting.setdefault(key)
                        for (_, kind), lane in self._lanes.items():
                            missing = max(0, min(THREADS_PER_TENANT - lane.threads, len(lane.waiting)))
                            for _ in range(min(missing, THREADS - self._threads)):
                                self._threads, lane.threads = self._threads + 1, lane.threads + 1
                                name = f"tracker {kind}"
                                threading.Thread(target=self._work, args=(lane,), name=name, daemon=True).start()
                self._faults.over(_FAILED)
            except Exception as error:
                self._faults.occurred(_FAILED, error)
            self._stop.wait(self._interval)

    def _work(self, lane: _Lane) -> None:
        """Deliver until nothing waits."""
        while True:
            with self._lock:
                if self._stop.is_set() or not lane.waiting:
                    self._threads, lane.threads = self._threads - 1, lane.threads - 1
                    self._lock.notify_all()
                    return
                key = next(iter(lane.waiting))
                del lane.waiting[key]
                lane.under_way.add(key)
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
            logger.exception("the progress of %s with job %s cannot be read; the next poll tries again", kind, job_id)
            return
        try:
            deliver(self._store, progress, tracked, self._open(kind, job))
            if pause := PAUSE_SECONDS.get(kind):
                self._not_before[job_id, kind] = time.monotonic() + pause
            return
        except Exception as error:
            problem = redact(str(error) or type(error).__name__)[:_LONGEST_PROBLEM]
            logger.info("job %s could not be sent to %s: %s", job.id, kind, problem)
        try:  # again later; if failures persist, the job's user is told
            tracked = progress.one(job.id, kind)
            since = tracked.failing_since or datetime.now(UTC)
            given_up = job.finished and datetime.now(UTC) - since > GIVEN_UP_AFTER
            failures, in_row = tracked.failures + 1, tracked.failures_in_row + 1
            failing = replace(tracked, failures=failures, failures_in_row=in_row, failing_since=since, problem=problem)
            progress.write(tracked, failing, open_=not given_up)
            pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(in_row, 10))
            self._not_before[job.id, kind] = time.monotonic() + pause
            if in_row == FAILURES_BEFORE_NOTICE and self._lease is not None:
                message = f"{kind} cannot be updated at the moment; delivery is retried: {problem}"
                fault = FaultReport(what=Fault.TRACKER, step=job.progress.step if job.progress else 0, message=message)
                self._store.under(self._lease).add_fault(job.id, fault)
        except LeaseLost as overtaken:
            logger.warning("%s", overtaken)
        except Exception:
            logger.exception("the failure could not be recorded; delivery is retried anyway")
