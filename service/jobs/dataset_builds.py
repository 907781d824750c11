"""The scheduler's access to the record of datasets: which to build, and the builds' results."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import CursorResult, delete, func, select, true, update
from sqlalchemy.orm import aliased

from service.jobs.leases import Lease, LeaseLost
from service.jobs.store import JobStore
from service.jobs.tables import DatasetRow
from service.models.datasets import DatasetProgress, DatasetRequest, DatasetState


@dataclass(frozen=True)
class DatasetBuild:
    """A dataset to be built, or being built.

    Attributes:
        dataset_id: Of the dataset.
        attempt: How often it was requested; reports on earlier attempts are ignored.
        tenant: Its tenant.
        name: Its name.
        url: Where its shards go.
        spec: The request.
        progress: Its progress, if known.
        launches: Number of processes started for this attempt.
        launched_at: When a process was last started, for any attempt.
    """

    dataset_id: str
    attempt: int
    tenant: str
    name: str
    url: str
    spec: DatasetRequest
    progress: DatasetProgress | None
    launches: int
    launched_at: datetime | None

    @property
    def id(self) -> str:
        """Its id on the cluster."""
        return f"{self.dataset_id}-{self.attempt}"


class DatasetBuilds:
    """Datasets to be built, in the record's database.

    Args:
        jobs: The record.
        lease: The lease for all writes.
    """

    def __init__(self, jobs: JobStore, lease: Lease | None = None) -> None:
        self._engine, self._lease = jobs.engine, lease

    def waiting(self) -> Sequence[DatasetBuild]:
        """All datasets to be built, in turn: first those of the tenant whose last build started longest ago."""
        others = aliased(DatasetRow)
        last = select(func.max(others.launched_at)).where(others.tenant == DatasetRow.tenant).scalar_subquery()
        turns = (last.asc().nulls_first(), DatasetRow.created_at, DatasetRow.id)
        query = select(DatasetRow.__table__).where(DatasetRow.state == DatasetState.BUILDING).order_by(*turns)
        with self._engine.connect() as connection:
            return [_read(row) for row in connection.execute(query)]

    def known(self, build_ids: AbstractSet[str]) -> set[str]:
        """Those builds that belong to this record's datasets, not to other services on the same cluster."""
        datasets = {build_id: build_id.rpartition("-")[0] for build_id in build_ids}
        query = select(DatasetRow.id).where(DatasetRow.id.in_(set(datasets.values())))
        with self._engine.connect() as connection:
            ours = set(connection.scalars(query))
        return {build_id for build_id, dataset_id in datasets.items() if dataset_id in ours}

    def update(self, build: DatasetBuild, **values: Any) -> bool:
        """Store a build's status; return whether it is still wanted.

        Raises:
            LeaseLost: Another process schedules now.
        """
        this = (DatasetRow.id == build.dataset_id) & (DatasetRow.attempt == build.attempt)
        wanted = this & (DatasetRow.state == DatasetState.BUILDING)
        return self._write(update(DatasetRow).where(wanted).values(values)) == 1

    def forget_deleted(self, alive: AbstractSet[str]) -> None:
        """Remove the datasets that users have deleted, except those with a live build.

        Raises:
            LeaseLost: Another process schedules now.
        """
        kept = {build_id.rpartition("-")[0] for build_id in alive}
        self._write(delete(DatasetRow).where(DatasetRow.deleted, DatasetRow.id.not_in(kept)))

    def _write(self, statement: Any) -> int:
        held = self._lease.holds() if self._lease else true()
        with self._engine.begin() as connection:
            if self._lease and not connection.scalar(select(held)):
                raise LeaseLost(self._lease)
            result = connection.execute(statement.where(held))
        assert isinstance(result, CursorResult)
        return result.rowcount


def _read(row: Any) -> DatasetBuild:
    return DatasetBuild(
        row.id,
        row.attempt,
        row.tenant,
        row.name,
        row.url,
        DatasetRequest.model_validate(row.spec),
        DatasetProgress.model_validate(row.progress) if row.progress else None,
        row.launches,
        row.launched_at,
    )
