"""Queues and tenants, and how much the gangs of each may hold together."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from boost_core.config.base import counted
from service.accounts.tables import QueueRow, TenantRow
from service.jobs.database import read_rows
from service.jobs.queries import WITH_GANGS
from service.jobs.store import JobStore
from service.jobs.sweeps import SweepStore
from service.jobs.tables import JobRow
from service.models.access import Tenant
from service.models.cluster import DEFAULT_QUEUE, Queue
from service.models.jobs import QueueSettings, TenantSettings

_QUEUES = select(QueueRow.__table__).order_by(QueueRow.name)
_QUEUE = select(QueueRow.name).where(QueueRow.name == bindparam("name")).with_for_update(read=True, key_share=True)

Limit = dict[str, float]  # by Ray's names of resources; a missing one is not limited


class QueueNotFound(LookupError):
    """No queue has this name."""


class QueueInUse(ValueError):
    """A queue cannot be deleted."""


@dataclass(frozen=True)
class QuotaStore:
    """Queues and tenants with their limits.

    Attributes:
        store: The record, whose jobs draw on the quotas and whose database holds them.
    """

    store: JobStore

    def limits(self) -> tuple[dict[str, Limit], dict[str, Limit]]:
        """Return the limits of tenants and of queues, by name."""
        limits = dict[str, Limit](), dict[str, Limit]()
        for by_name, table in zip(limits, (TenantRow, QueueRow), strict=True):
            for row in read_rows(self.store.engine, select(table.__table__)):
                amounts = {"GPU": row.gpus, "CPU": row.cpus}
                by_name[row.name] = {name: limit for name, limit in amounts.items() if limit is not None}
        return limits

    def keep_queue(self, connection: Connection, name: str) -> None:
        """Keep a queue from being deleted before the end of the transaction that has put a job in it.

        SQLite has a single writer, which that transaction is already; PostgreSQL locks the queue's row.

        Raises:
            QueueNotFound: It does not exist.
        """
        if name != DEFAULT_QUEUE and connection.scalar(_QUEUE, {"name": name}) is None:  # that cannot be deleted
            raise _queue_not_found(connection, name)

    def queues(self) -> list[Queue]:
        """Return all queues by name, with what their jobs hold."""
        rows, usage = read_rows(self.store.engine, _QUEUES), self._usage(JobRow.queue)
        return [Queue(**row._asdict(), **usage[row.name]) for row in rows]

    def queue(self, name: str) -> Queue:
        """Return one queue.

        Raises:
            QueueNotFound: There is no queue of this name.
        """
        for queue in self.queues():
            if queue.name == name:
                return queue
        with self.store.engine.connect() as connection:
            raise _queue_not_found(connection, name)

    def put_queue(self, name: str, settings: QueueSettings) -> Queue:
        """Create or change a queue."""
        with Session(self.store.engine) as session, session.begin():
            session.merge(QueueRow(name=name, **settings.model_dump()))
        return self.queue(name)

    def delete_queue(self, name: str) -> None:
        """Delete a queue.

        Raises:
            QueueNotFound: There is no queue of this name.
            QueueInUse: It is the default queue, has active jobs, or a sweep that has not ended names it.
        """
        with Session(self.store.engine) as session, session.begin():
            row = session.get(QueueRow, name)
            if row is None:
                raise _queue_not_found(session, name)
            if name == DEFAULT_QUEUE:
                raise QueueInUse(f"the queue {name!r} is the default for jobs that name no other; it cannot be deleted")
            session.delete(row)
            session.flush()  # from here on no other transaction can put a job in it
            jobs = [job.id for job in self.store.active() if job.queue == name]
            if jobs:
                raise QueueInUse(f"the queue {name!r} has {counted(len(jobs), 'active job')}, such as {jobs[0]}")
            if sweep := SweepStore(self.store).that_needs({name}, "queue"):
                raise QueueInUse(f"the queue {name!r} is in use by the sweep {sweep.id}; stop it first")

    def tenants(self) -> list[Tenant]:
        """Return all tenants that have jobs or limits, by name, with what their jobs hold."""
        rows = {row.name: row._asdict() for row in read_rows(self.store.engine, select(TenantRow.__table__))}
        usage, unlimited = self._usage(JobRow.tenant), {"gpus": None, "cpus": None}
        names = sorted(rows.keys() | usage.keys())
        return [Tenant(**rows.get(name, {"name": name, **unlimited}), **usage[name]) for name in names]

    def put_tenant(self, name: str, settings: TenantSettings) -> Tenant:
        """Set the limits of a tenant."""
        with Session(self.store.engine) as session, session.begin():
            session.merge(TenantRow(name=name, **settings.model_dump()))
        return next(tenant for tenant in self.tenants() if tenant.name == name)

    def _usage(self, column: InstrumentedAttribute[str]) -> Mapping[str, dict[str, Any]]:
        """Return what jobs hold, and their number by state, by the value of a column; zero for all other values."""
        usage: dict[str, dict[str, Any]] = defaultdict(lambda: {"used_gpus": 0.0, "used_cpus": 0.0, "jobs": {}})
        for job in self.store.read(WITH_GANGS):
            of_value, allocated = usage[getattr(job, column.key)], job.allocated
            of_value["used_gpus"] += allocated.get("GPU", 0.0)
            of_value["used_cpus"] += allocated.get("CPU", 0.0)
        for value, jobs in self.store.count_by(column).items():
            usage[value]["jobs"] = jobs
        return usage


def _queue_not_found(session: Session | Connection, name: str) -> QueueNotFound:
    names = session.scalars(select(QueueRow.name).order_by(QueueRow.name)).all()
    return QueueNotFound(f"there is no queue {name!r}; there are: {', '.join(names)}")
