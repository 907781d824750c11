"""The thread in which the scheduler lives. Of several services on one database, one at a time schedules."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.gang.status import Gangs
from service.jobs.leases import Lease, LeaseLost, Leases
from service.jobs.store import JobStore
from service.scheduler.reconcile import Reconciler

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
STALE_SECONDS = 30.0
LEASE = "scheduler"
LEASE_SECONDS = 15.0


@dataclass
class _Office:
    """What one has who schedules: the lease, and a reconciler that works under it."""

    lease: Lease
    reconciler: Reconciler


class ReconcileLoop:
    """Waits for the lease, connects to the cluster, and makes pass after pass until it is stopped.

    Args:
        gangs: The cluster; connected and closed here, in one thread, as it asks for.
        store: The record.
        leases: Where the lease is to be had.
        reconciler: Makes what makes the passes; it is given the record, to be written under the lease.
        interval_seconds: From the end of one pass to the beginning of the next.
    """

    def __init__(
        self,
        gangs: Gangs,
        store: JobStore,
        leases: Leases,
        reconciler: Callable[[JobStore], Reconciler],
        interval_seconds: float,
    ) -> None:
        self._gangs, self._store, self._leases = gangs, store, leases
        self._reconciler, self._interval = reconciler, interval_seconds
        self._office: _Office | None = None
        self._connected = False
        self._problem: str | None = "Ray is starting"
        self._last_good = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scheduler")

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End after the pass that is being made, leave the cluster, and return when all that is done."""
        self._stop.set()
        self._thread.join()

    def problem(self) -> str | None:
        """Why jobs are not being scheduled; ``None`` when they are, here or by another service."""
        if self._problem is not None:
            return self._problem
        age = time.monotonic() - self._last_good
        if age > STALE_SECONDS + self._interval:
            return f"the scheduler's last good pass was {age:.0f} s ago; see the log"
        return None

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._stop.wait(self._interval if self._round() else RETRY_SECONDS)
        finally:
            self._leave_office()
            self._gangs.close()

    def _round(self) -> bool:
        """Do what is to be done; say whether it went well."""
        try:
            self._take_office()
            if self._office is not None:
                self._office.reconciler.tick()
        except LeaseLost as overtaken:
            logger.warning("%s", overtaken)
            self._office = None
        except ConnectionError as error:
            logger.exception("Ray cannot be reached; the next try is in %g s", RETRY_SECONDS)
            self._problem = f"Ray cannot be reached: {error}"
            return False
        except Exception:
            logger.exception("a pass of the scheduler failed; the next one tries again")
            return True
        self._problem, self._last_good = None, time.monotonic()
        return True

    def _take_office(self) -> None:
        """Take the lease, or renew it, and connect if that is still to be done."""
        lease = self._leases.take(LEASE, LEASE_SECONDS)
        if lease is None:
            self._office = None
        elif self._office is None or self._office.lease != lease:
            self._connect()
            # A new one, because what the old one remembers may have changed under another's hands.
            self._office = _Office(lease, self._reconciler(self._store.under(lease)))

    def _connect(self) -> None:
        if self._connected:
            return
        try:
            self._gangs.connect()
        except Exception as error:
            raise ConnectionError(str(error)) from error
        self._connected = True

    def _leave_office(self) -> None:
        if self._office is None:
            return
        try:
            self._leases.give_back(self._office.lease)
        except Exception:
            logger.exception("the lease could not be given back; it runs out in %g s", LEASE_SECONDS)
