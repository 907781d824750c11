"""Queues and tenants, and how much the gangs of each may hold together."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select
from sqlalchemy.orm import Session

from boost_core.config.base import counted
from service.accounts.tables import QueueRow, TenantRow
from service.jobs.model import JobRecord
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
        with Session(self.store.engine) as session:
            for by_name, table in zip(limits, (TenantRow, QueueRow), strict=True):
                for row in session.execute(select(table.__table__)):
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
            with Session(connection) as session:
                raise _queue_not_found(session, name)

    def queues(self) -> list[Queue]:
        """Return all queues by name, with what their jobs hold."""
        with self.store.engine.connect() as connection:
            rows = connection.execute(_QUEUES).all()
            allocated = self._allocated(connection, lambda job: job.queue)
        counts = self.store.count_by(JobRow.queue)
        return [
            Queue(
                **row._asdict(),
                used_gpus=allocated[row.name, "GPU"],
                used_cpus=allocated[row.name, "CPU"],
                jobs=counts.get(row.name, {}),
            )
            for row in rows
        ]

    def queue(self, name: str) -> Queue:
        """Return one queue.

        Raises:
            QueueNotFound: There is no queue of this name.
        """
        for queue in self.queues():
            if queue.name == name:
                return queue
        with Session(self.store.engine) as session:
            raise _queue_not_found(session, name)

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
        with self.store.engine.connect() as connection:
            rows = {row.name: row._asdict() for row in connection.execute(select(TenantRow.__table__))}
            allocated = self._allocated(connection, lambda job: job.tenant)
        counts = self.store.count_by(JobRow.tenant)
        return [
            Tenant(
                **rows.get(name, {"name": name, "gpus": None, "cpus": None}),
                used_gpus=allocated[name, "GPU"],
                used_cpus=allocated[name, "CPU"],
                jobs=counts.get(name, {}),
            )
            for name in sorted(rows.keys() | counts.keys())
        ]

    def put_tenant(self, name: str, settings: TenantSettings) -> Tenant:
        """Set the limits of a tenant."""
        with Session(self.store.engine) as session, session.begin():
            session.merge(TenantRow(name=name, **settings.model_dump()))
        return next(tenant for tenant in self.tenants() if tenant.name == name)

    def _allocated(self, connection: Connection, of: Callable[[JobRecord], str]) -> Mapping[tuple[str, str], float]:
        """Return what gangs have of each resource, by the key that their jobs count towards; zero for all others."""
        allocated: dict[tuple[str, str], float] = defaultdict(float)
        for job in self.store.with_gangs(connection):
            for resource, amount in job.allocated.items():
                allocated[of(job), resource] += amount
        return allocated


def _queue_not_found(session: Session, name: str) -> QueueNotFound:
    names = session.scalars(select(QueueRow.name).order_by(QueueRow.name)).all()
    return QueueNotFound(f"there is no queue {name!r}; there are: {', '.join(names)}")
