"""One of several schedulers on a database and a cluster in a file: ``python -m tests.service.replica URL CLUSTER``.

It does as the service does, but for a lease that runs out sooner, so that tests take seconds.
"""

import logging
import os
import signal
import sys
from pathlib import Path

from service.jobs.leases import Leases
from service.jobs.store import JobStore
from service.scheduler import loop as loop_module
from service.scheduler.loop import ReconcileLoop
from service.scheduler.reconcile import Reconciler
from tests.service.file_cluster import FileCluster

LEASE_SECONDS = 1.5
INTERVAL_SECONDS = 0.02
CPUS = 10


def main(database_url: str, cluster: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
    loop_module.LEASE_SECONDS = LEASE_SECONDS
    store, gangs = JobStore(database_url), FileCluster(Path(cluster), CPUS)
    leases = Leases(store.engine, f"replica-{os.getpid()}")
    loop = ReconcileLoop(gangs, store, leases, lambda record: Reconciler(record, gangs), INTERVAL_SECONDS)
    signal.signal(signal.SIGTERM, lambda *_: None)
    loop.start()
    signal.pause()
    loop.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
