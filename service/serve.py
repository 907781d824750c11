"""The composition root: builds all parts of the service and runs them."""

import contextlib
import logging
import os
import secrets
import signal
import socket
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from service.accounts.keys import KeyStore
from service.accounts.tenants_and_queues import QuotaStore
from service.api.app import create_app
from service.api.routes.sweeps import trial_submitter
from service.api.server import ApiServer, listen, raise_descriptor_limit
from service.gang.ray.builds import RayBuilds
from service.gang.ray.gangs import RayGangs
from service.jobs.database import in_words, migrate
from service.jobs.datasets import DatasetBuilds
from service.jobs.leases import Lease, Leases
from service.jobs.model import JobRecord
from service.jobs.store import JobStore
from service.logs import write_logs
from service.scheduler.cluster_snapshot import ResizePolicy
from service.scheduler.datasets import DatasetReconciler, job_in_need
from service.scheduler.loop import ReconcileLoop
from service.scheduler.quotas import Limits
from service.scheduler.reconcile import Reconciler
from service.scheduler.sweeps import SweepLoop
from service.security.access import AccessRules
from service.security.network import UnsafeExposure, check_exposure
from service.settings import Settings
from service.telemetry.process import ProcessMetrics
from service.trackers.forwarder import Forwarder
from service.trackers.opening import open_tracker
from service.trainer import REMEDY, has_trainer

_log = logging.getLogger(__name__)


def run(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. The API answers at once; Ray starts behind it.

    Jobs on an embedded Ray end with it and are resumed from their checkpoints at the next start.

    Raises:
        SystemExit: The port is taken, the database cannot be used, the settings would leave the service open, or there
            is nothing to train with; the message says why.
    """
    try:
        check_exposure(settings)
    except UnsafeExposure as error:
        raise SystemExit(str(error)) from error
    if settings.ray_address is None and not has_trainer():
        problem = "jobs cannot train here, because the trainer is not installed"
        raise SystemExit(f"{problem}; set BOOST_RAY_ADDRESS to a Ray cluster on whose nodes it is, or {REMEDY}")
    write_logs(settings.log_format)
    raise_descriptor_limit()
    host, port = settings.host, settings.port
    try:
        listener = listen(host, port)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror}"
        raise SystemExit(f"{problem}; stop what uses it or set BOOST_PORT to another port") from error
    with contextlib.closing(listener):
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            migrate(settings.database_url)
        except (OSError, ValueError, SQLAlchemyError) as error:
            raise SystemExit(f"the database that BOOST_DATABASE_URL names cannot be used: {in_words(error)}") from error
        with contextlib.closing(JobStore(settings.database_url, seconds=settings.database_seconds)) as store:
            if settings.auth and KeyStore(store.engine).empty():
                command = "boost keys create NAME --tenant TENANT --scope admin --direct"
                _log.warning("there is no API key yet; create one on this machine: %s", command)
            _serve(settings, store, listener)


def _serve(settings: Settings, store: JobStore, listener: socket.socket) -> None:
    of_ray = settings.ray_address, settings.cpus, settings.secrets_dir, settings.ray_token_file
    of_ranks = settings.metrics_ports(), settings.log_format, settings.public_url, settings.prefixes()
    gangs = RayGangs(*of_ray, *of_ranks)
    metrics = ProcessMetrics()
    tracing = None
    if settings.otlp_endpoint is not None:
        from service.telemetry.tracing import Tracing  # not imported where tracing is off

        tracing = Tracing(settings.otlp_endpoint)
    quotas = QuotaStore(store)
    leases = Leases(store.engine, f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")

    def limits() -> Limits:
        return Limits(*quotas.limits())

    reconciler = partial(
        Reconciler, gangs=gangs, limits=limits, tracing=tracing, autoscales=settings.autoscaling,
        policy=ResizePolicy(settings.grow_cooldown_seconds, settings.grow_settle_seconds),
        topology=settings.topology_labels, silent_seconds=settings.supervisor_seconds,
    )  # fmt: skip

    def datasets(record: JobStore, lease: Lease) -> DatasetReconciler:
        builds = RayBuilds(AccessRules(str(settings.secrets_dir), settings.prefixes()))

        def in_need(cpus: float) -> JobRecord | None:
            jobs = record.active()
            if all(job.has_gang for job in jobs):
                return None  # without asking Ray for its nodes
            return job_in_need(cpus, jobs, gangs.nodes(), limits())

        return DatasetReconciler(DatasetBuilds(record, lease), builds, settings.dataset_cpus, limits, in_need)

    loop = ReconcileLoop(gangs, store, leases, reconciler, settings.reconcile_seconds, metrics.scheduler, datasets)
    forwarder = Forwarder(store, leases, partial(open_tracker, settings))
    app = create_app(store, settings, loop.outlook, metrics, tracing)
    context = app.state.context
    sweeps = SweepLoop(store, context.studies, lambda: loop.lease, trial_submitter(context), settings.reconcile_seconds)
    server = ApiServer(app, settings)
    # uvicorn stops at either signal and then raises it again: as KeyboardInterrupt, both leave through finally.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for each in (loop, forwarder, sweeps):
        each.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        for each in (forwarder, sweeps, loop):
            each.stop()
        if tracing:
            tracing.close()
