"""The thread in which the scheduler lives."""

import logging
import threading
import time

from service.gang.status import Gangs
from service.scheduler.reconcile import Reconciler

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
STALE_SECONDS = 30.0


class ReconcileLoop:
    """Connects to the cluster and makes pass after pass until it is stopped.

    Args:
        gangs: The cluster; connected and closed here, in one thread, as it asks for.
        reconciler: Makes the passes.
        interval_seconds: From the end of one pass to the beginning of the next.
    """

    def __init__(self, gangs: Gangs, reconciler: Reconciler, interval_seconds: float) -> None:
        self._gangs, self._reconciler, self._interval = gangs, reconciler, interval_seconds
        self._problem = "Ray is starting"
        self._last_tick: float | None = None
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
        """Why jobs are not being scheduled; ``None`` when they are."""
        if self._last_tick is None:
            return self._problem
        age = time.monotonic() - self._last_tick
        if age > STALE_SECONDS + self._interval:
            return f"the scheduler's last good pass was {age:.0f} s ago; see the log"
        return None

    def _run(self) -> None:
        try:
            while not (self._connected() or self._stop.wait(RETRY_SECONDS)):
                pass
            while not self._stop.is_set():
                self._tick()
                self._stop.wait(self._interval)
        finally:
            self._gangs.close()

    def _connected(self) -> bool:
        try:
            self._gangs.connect()
        except Exception as error:
            logger.exception("Ray cannot be reached; the next try is in %g s", RETRY_SECONDS)
            self._problem = f"Ray cannot be reached: {error}"
            return False
        return True

    def _tick(self) -> None:
        try:
            self._reconciler.tick()
        except Exception:
            logger.exception("a pass of the scheduler failed; the next one tries again")
        else:
            self._last_tick = time.monotonic()
