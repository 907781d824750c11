"""The record of sweeps: what users ask of them, and what the scheduler does with their trials' jobs."""

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from service.jobs.database import read_rows
from service.jobs.leases import Lease, write_under
from service.jobs.model import JobRecord, Owner, new_id
from service.jobs.store import JobStore
from service.jobs.tables import EventRow, SweepRow
from service.models.sweeps import Sweep, SweepRequest, SweepState

MOST_RUNNING = 20  # of a tenant

_unreadable = set[str]()  # IDs of sweeps of which that has been logged
logger = logging.getLogger(__name__)
_SWEEP = list(SweepRow.__table__.c)
_UNFINISHED = SweepRow.state.in_((SweepState.RUNNING, SweepState.STOPPING))


class SweepNotFound(LookupError):
    """The tenant has no sweep of this name."""


class SweepConflict(ValueError):
    """A name is taken, a tenant has too many sweeps, or a sweep has ended."""


@dataclass(frozen=True)
class SweepStore:
    """Sweeps in the record's database.

    Attributes:
        jobs: The record.
        lease: The lease for what only the scheduler writes.
    """

    jobs: JobStore
    lease: Lease | None = None

    def create(self, request: SweepRequest, owner: Owner) -> Sweep:
        """Store a new sweep; creating the same again returns the one there is.

        Raises:
            SweepConflict: The name is taken, or the tenant has too many sweeps that have not ended.
        """
        spec = request.model_dump(mode="json")
        sweep = Sweep(
            name=request.name, id=new_id("sweep"), tenant=owner.tenant, submitted_by=owner.name, spec=request,
            state=SweepState.RUNNING, message="no trial has started yet", trials={}, best=None,
            created_at=datetime.now(UTC), finished_at=None,
        )  # fmt: skip
        running = select(SweepRow.id).where(SweepRow.tenant == owner.tenant, _UNFINISHED)
        try:
            with self.jobs.engine.begin() as connection:
                here = (SweepRow.tenant == owner.tenant) & (SweepRow.name == request.name)
                if (earlier := connection.execute(select(*_SWEEP).where(here)).one_or_none()) is not None:
                    if earlier.spec == spec and earlier.submitted_by == owner.name:
                        return Sweep.model_validate(dict(earlier._mapping))
                    raise SweepConflict(f"there is a sweep {request.name!r} already; give this one another name")
                if len(connection.execute(running).all()) >= MOST_RUNNING:
                    problem = f"has {MOST_RUNNING} sweeps that have not ended, which is the maximum; wait, or stop some"
                    raise SweepConflict(f"the tenant {owner.tenant!r} {problem}")
                connection.execute(insert(SweepRow).values(dict(sweep) | {"spec": spec}))
        except IntegrityError as error:  # another request was the first
            raise SweepConflict(f"the sweep {request.name!r} was created at the same time; check it") from error
        return sweep

    def get(self, name: str, tenant: str) -> Sweep:
        """One sweep.

        Raises:
            SweepNotFound: The tenant has none of this name.
            SweepConflict: Another release has written it, and this one cannot read it.
        """
        here = (SweepRow.tenant == tenant) & (SweepRow.name == name)
        rows = read_rows(self.jobs.engine, select(*_SWEEP).where(here))
        if not rows:
            raise SweepNotFound(f"there is no sweep {name!r}; boost sweep list shows all sweeps")
        try:
            return Sweep.model_validate(rows[0]._asdict())
        except ValidationError as error:
            remedy = f"boost sweep stop {name} ends it, and boost cancel --group {name} its jobs"
            raise SweepConflict(f"the sweep {name!r} is of another release, and cannot be read; {remedy}") from error

    def list(self, tenant: str, limit: int) -> Sequence[Sweep]:
        """The newest sweeps of a tenant, the newest first."""
        query = select(*_SWEEP).where(SweepRow.tenant == tenant).order_by(SweepRow.id.desc()).limit(limit)
        return _readable(read_rows(self.jobs.engine, query))

    def unfinished(self) -> Sequence[Sweep]:
        """All sweeps that have not ended, of all tenants, the oldest first."""
        return _readable(read_rows(self.jobs.engine, select(*_SWEEP).where(_UNFINISHED).order_by(SweepRow.id)))

    def that_needs(self, values: Set[str], *fields: str, tenant: str | None = None) -> Sweep | None:
        """A sweep that has not ended, of one tenant or of any, of which further trials may have a value in a field.

        Args:
            values: The values; those of the sweeps are compared without ``file://`` and a slash at their end.
            *fields: The fields' paths.
            tenant: The tenant; ``None`` for all.
        """
        for sweep in self.unfinished():
            named = (str(value) for field in fields for value in sweep.spec.values(field))
            if tenant in (None, sweep.tenant) and values & {each.removeprefix("file://").rstrip("/") for each in named}:
                return sweep
        return None

    def request_stop(self, name: str, tenant: str) -> Sweep:
        """Request that a sweep stop its trials and end. Stopping it again changes nothing.

        Raises:
            SweepNotFound: The tenant has none of this name.
            SweepConflict: It has ended, or cannot be read, and so has ended now.
        """
        here = (SweepRow.tenant == tenant) & (SweepRow.name == name)
        stopping = {"state": SweepState.STOPPING, "message": "its trials are being stopped"}
        with self.jobs.engine.begin() as connection:
            connection.execute(update(SweepRow).where(here, SweepRow.state == SweepState.RUNNING).values(stopping))
        try:
            sweep = self.get(name, tenant)
        except SweepConflict as error:
            ended = {"state": SweepState.STOPPED, "finished_at": datetime.now(UTC)}
            with self.jobs.engine.begin() as connection:
                connection.execute(update(SweepRow).where(here, _UNFINISHED).values(ended))
            end = f"and has ended now; boost cancel --group {name} ends its jobs"
            raise SweepConflict(f"the sweep {name!r} is of another release, {end}") from error
        if sweep.state not in (SweepState.STOPPING, SweepState.STOPPED):
            raise SweepConflict(f"the sweep {name!r} has {sweep.state}; there is nothing to stop")
        return sweep

    def update(self, sweep: Sweep, **values: Any) -> None:
        """Store a sweep's progress or end, unless its user has changed its state in the meantime.

        Raises:
            LeaseLost: Another process schedules now.
        """
        unchanged = (SweepRow.id == sweep.id) & (SweepRow.state == sweep.state)
        write_under(self.jobs.engine, self.lease, update(SweepRow).where(unchanged).values(values))

    def value(self, job: JobRecord, metric: str, step: int) -> float | str | None:
        """A job's metric at a step, as first reported; ``None``: not yet reported.

        What JSON has no number for comes as a string, such as ``NaN``.
        """
        newest = job.evaluation if metric.startswith("validation") else job.progress
        if newest is None or newest.step < step:  # its events need not be read
            return None
        of_step = EventRow.job_id == job.id, EventRow.kind == newest.kind, EventRow.data["step"].as_integer() == step
        events = read_rows(self.jobs.engine, select(EventRow.data).where(*of_step).order_by(EventRow.id).limit(1))
        figures = [data for (data,) in events]
        if metric.startswith("validation."):
            figures = [each for data in figures for each in data["sets"] if each["name"] == metric.partition(".")[2]]
        return figures[0]["loss" if metric.startswith("validation") else metric] if figures else None


def _readable(rows: Sequence[Any]) -> Sequence[Sweep]:
    """The sweeps of some rows, without those that another release has written and this one refuses."""
    sweeps = []
    for row in rows:
        try:
            sweeps.append(Sweep.model_validate(dict(row._mapping)))
        except ValidationError as error:
            if row.id not in _unreadable:
                logger.error("%s cannot be read, and is left out: %s", row.id, error)
                _unreadable.add(row.id)
    return sweeps
