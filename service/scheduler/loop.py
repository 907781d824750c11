"""The scheduler's thread. Of several services on one database, only one schedules at a time."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from service.gang.status import Gangs
from service.jobs.database import fault_of
from service.jobs.leases import Lease, LeaseLost, Leases
from service.jobs.outlook import STALE_SECONDS, Outlook
from service.jobs.store import JobStore
from service.logs import RecurringFaults
from service.scheduler.datasets import DatasetReconciler
from service.scheduler.reconcile import Reconciler
from service.security.redaction import redact
from service.telemetry.process import ProcessMetrics, SchedulerMetrics

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
UPDATE_SECONDS = 0.1  # between two polls of gangs, so that a fast gang's reports are stored together
LEASE = "scheduler"
LEASE_SECONDS = 15.0
LAST_PASS = "last_pass"  # name of the record of the newest good pass, whichever service made it
NOTE_SECONDS = 5.0  # between two of these records
HUNG_SECONDS = 120.0  # a scheduler that is busy for longer is not waited for if another service can schedule

_AWAY = "Ray cannot be reached"
_FAILED = "a pass of the scheduler failed"


@contextmanager
def _faults_logged(faults: RecurringFaults, what: str) -> Iterator[None]:
    """Log an error and continue; log once when it no longer occurs. ``LeaseLost`` is raised."""
    try:
        yield
        faults.over(what)
    except LeaseLost:
        raise
    except Exception as error:
        faults.occurred(what, error)


class ReconcileLoop:
    """Waits for the lease, connects to the cluster, and makes passes until it is stopped.

    Between passes it stores gangs' reports as they come.

    A second thread renews the lease, because a pass over many jobs may take longer than a dead service should go
    unnoticed.

    Args:
        gangs: The cluster; connected and closed here, in one thread, as it requires.
        store: The record.
        leases: Leases of this process.
        reconciler: Creates the reconciler, given the record, which it writes under the lease.
        interval_seconds: From the end of one pass to the start of the next.
        metrics: Receives measurements of the passes; ``None`` to discard them.
        datasets: Creates the reconciler of datasets, which runs after each pass; ``None``: datasets are not built.
    """

    def __init__(
        self, gangs: Gangs, store: JobStore, leases: Leases, reconciler: Callable[[JobStore], Reconciler],
        interval_seconds: float, metrics: SchedulerMetrics | None = None,
        datasets: Callable[[JobStore, Lease], DatasetReconciler] | None = None,
    ) -> None:  # fmt: skip
        self._gangs, self._store, self._leases = gangs, store, leases
        self._make_reconciler, self._interval = reconciler, interval_seconds
        self._metrics = metrics or ProcessMetrics().scheduler
        self._lease: Lease | None = None
        self._reconciler: Reconciler | None = None
        self._make_datasets = datasets
        self._datasets: DatasetReconciler | None = None
        self._metrics.leading.set_function(lambda: self._reconciler is not None)
        self._lease_lock = threading.Lock()  # so that it is not renewed when it has just been given back
        self._connected = False
        self._problem: str | None = "Ray is starting"
        self._failure: str | None = None  # of the newest pass, if it failed
        self._last_good = self._problem_since = time.monotonic()
        self._busy_since: float | None = None  # with one pass, or with reports between passes; ``None`` while it waits
        self._noted = -NOTE_SECONDS  # when this service last recorded a good pass
        self._newest: tuple[datetime, Any] | None = None  # the record of the newest good pass
        self._faults, self._lease_faults = RecurringFaults(logger), RecurringFaults(logger)  # each of one thread
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler")
        self._renewal = threading.Thread(target=self._keep_lease, name="lease")

    def start(self) -> None:
        """Start, in threads of its own."""
        self._thread.start()
        self._renewal.start()

    def stop(self) -> None:
        """End after the current pass, leave the cluster, and return when that is done."""
        self._stop.set()
        self._thread.join()
        self._renewal.join()

    @property
    def lease(self) -> Lease | None:
        """The lease while this service schedules; ``None`` while it does not."""
        return self._lease if self._reconciler is not None else None

    def problem(self) -> str | None:
        """Why jobs are not being scheduled; ``None`` if they are, by this or another service."""
        if self._problem is not None:
            return self._problem
        if time.monotonic() - self._last_good > STALE_SECONDS + self._interval:
            at = f"was at {self._newest[0]:%Y-%m-%d %H:%M:%S} UTC" if self._newest else "is not known"
            return f"the scheduler's last good pass {at}; {self._failure or 'see the log'}"
        return None

    def outlook(self) -> Outlook:
        """Whether jobs are being scheduled, by this or another service, and what is not known of them."""
        if self._newest is None:
            return Outlook(self.problem())
        last_pass, data = self._newest
        unseen = data.get("unseen", {}).items()  # a release before records none
        return Outlook(self.problem(), last_pass, {job_id: at and datetime.fromisoformat(at) for job_id, at in unseen})

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._round():
                    self._stop.wait(RETRY_SECONDS)
                    continue
                # Until the next pass, gangs' reports are stored as soon as they announce some.
                until = time.monotonic() + self._interval
                try:
                    with _faults_logged(self._faults, "gangs' reports could not be stored between passes"):
                        while self._reconciler is not None and time.monotonic() < until and not self._stop.is_set():
                            self._busy_since = time.monotonic()
                            if updated := self._gangs.wait_for_updates(min(UPDATE_SECONDS, until - time.monotonic())):
                                self._reconciler.store_updates(updated)
                                self._stop.wait(UPDATE_SECONDS)
                except LeaseLost as overtaken:
                    logger.warning("%s", overtaken)
                self._busy_since = None
                self._stop.wait(max(0.0, until - time.monotonic()))
        finally:
            self._leave()

    def _round(self) -> bool:
        """Make a pass if this service has the lease; return whether the cluster could be reached."""
        self._busy_since = time.monotonic()
        try:
            if self._newest is None:
                self._newest = self._store.snapshot(LAST_PASS)  # of before this service started
            lease = self._leases.take(LEASE, LEASE_SECONDS)
            if lease != self._lease:
                logger.info("this service schedules now" if lease else "another service schedules now")
                # Another service may have changed what a reconciler remembers.
                self._lease, self._reconciler = lease, None
            if lease is not None and self._reconciler is None:
                if not self._connected:
                    try:
                        self._gangs.connect()
                    except Exception as error:
                        raise ConnectionError(str(error)) from error
                    self._connected = True
                self._reconciler = self._make_reconciler(self._store.under(lease))
                self._datasets = self._make_datasets(self._store, lease) if self._make_datasets else None
            if self._reconciler is not None:
                self._gangs.check()
                with self._metrics.seconds.time(), self._metrics.failed.count_exceptions():
                    self._reconciler.tick()
                self._metrics.good.inc()
                with _faults_logged(self._faults, "a pass over the datasets failed"):  # which does not hold up jobs
                    if self._datasets is not None:
                        self._datasets.tick()

            # The newest good pass: this one, or that of the service that has the lease, by the record.
            now = time.monotonic()
            if self._reconciler is not None and self._lease is not None:
                silent = self._reconciler.unseen(STALE_SECONDS)
                unseen = {"unseen": {job_id: at and at.isoformat() for job_id, at in silent.items()}}
                self._last_good, self._newest = now, (datetime.now(UTC), unseen)
                if now - self._noted >= NOTE_SECONDS:
                    self._store.under(self._lease).keep_snapshot(LAST_PASS, unseen)
                    self._noted = now
            elif (newest := self._store.snapshot(LAST_PASS)) is not None:
                if self._newest is None or newest[0] != self._newest[0]:
                    # Only when it changes: after the clock was set back, an old one would look new for ever.
                    self._last_good = now - max(0.0, (datetime.now(UTC) - newest[0]).total_seconds())
                self._newest = newest
            if self._last_good > self._problem_since:
                self._problem = None
            self._failure = None
            for what in (_AWAY, _FAILED):
                self._faults.over(what)
        except LeaseLost as overtaken:
            logger.warning("%s", overtaken)
            self._lease = self._reconciler = None
        except ConnectionError as error:
            self._faults.occurred(_AWAY, error)
            self._problem, self._problem_since = redact(f"{_AWAY}: {error}"), time.monotonic()
            self._leave()  # another service may reach it
            return False
        except Exception as error:
            self._faults.occurred(_FAILED, error)
            fault = fault_of(error)
            self._failure = fault.message if fault else f"its passes fail ({type(error).__name__}); see the log"
        return True

    def _keep_lease(self) -> None:
        shown: float | None = None  # since when it had been busy when the log last said where it hangs
        while not self._stop.wait(LEASE_SECONDS / 3):
            since = self._busy_since
            hung = since is not None and time.monotonic() - since >= HUNG_SECONDS
            if hung and since != shown:
                shown = since
                frame = sys._current_frames().get(self._thread.ident or 0)  # none once the thread has ended
                stack = "".join(traceback.format_stack(frame)) if frame else "its thread has ended"
                logger.error("the scheduler has been busy for over %.0f s; it is at:\n%s", HUNG_SECONDS, stack)
            with self._lease_lock:
                if self._lease is not None and not hung:
                    with _faults_logged(self._lease_faults, "the scheduler's lease could not be renewed"):
                        self._leases.renew(self._lease, LEASE_SECONDS)

    def _leave(self) -> None:
        """Give the lease back, so that another service may schedule, and leave the cluster."""
        with self._lease_lock:
            lease, self._lease, self._reconciler = self._lease, None, None
            if lease is not None:
                with _faults_logged(self._faults, "the scheduler's lease could not be given back"):  # else it runs out
                    self._leases.renew(lease, 0.0)
        self._connected = False
        self._gangs.close()
