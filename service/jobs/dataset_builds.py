"""The record of datasets as the scheduler reads and writes it: which are to be made, and what became of them."""

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
    """A dataset that is to be made, or is being made.

    Attributes:
        dataset_id: Of the dataset.
        attempt: How often it was asked for: what is told of an earlier attempt is not of this one.
        tenant: Whose it is.
        name: Its name.
        url: Where its shards go.
        spec: What was asked for.
        progress: How far it is, as far as is known.
        launches: How often a process was started for this attempt.
        launched_at: When one was started last, for any attempt.
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
        """What the cluster knows it by."""
        return f"{self.dataset_id}-{self.attempt}"


class DatasetBuilds:
    """Datasets that are to be made, in the record's database.

    Args:
        jobs: The record.
        lease: What all writes are made under.
    """

    def __init__(self, jobs: JobStore, lease: Lease | None = None) -> None:
        self._engine, self._lease = jobs.engine, lease

    def waiting(self) -> Sequence[DatasetBuild]:
        """All that are to be made, by their turns: first the tenant's for whom nothing was begun for the longest."""
        others = aliased(DatasetRow)
        last = select(func.max(others.launched_at)).where(others.tenant == DatasetRow.tenant).scalar_subquery()
        turns = (last.asc().nulls_first(), DatasetRow.created_at, DatasetRow.id)
        query = select(DatasetRow.__table__).where(DatasetRow.state == DatasetState.BUILDING).order_by(*turns)
        with self._engine.connect() as connection:
            return [_read(row) for row in connection.execute(query)]

    def known(self, build_ids: AbstractSet[str]) -> set[str]:
        """Those of some builds that are of this record's datasets, which other services on the cluster do not have."""
        datasets = {build_id: build_id.rpartition("-")[0] for build_id in build_ids}
        query = select(DatasetRow.id).where(DatasetRow.id.in_(set(datasets.values())))
        with self._engine.connect() as connection:
            ours = set(connection.scalars(query))
        return {build_id for build_id, dataset_id in datasets.items() if dataset_id in ours}

    def update(self, build: DatasetBuild, **values: Any) -> bool:
        """Write what became of a build; whether it is still wanted.

        Raises:
            LeaseLost: Another process schedules now.
        """
        this = (DatasetRow.id == build.dataset_id) & (DatasetRow.attempt == build.attempt)
        wanted = this & (DatasetRow.state == DatasetState.BUILDING)
        return self._write(update(DatasetRow).where(wanted).values(values)) == 1

    def forget_deleted(self, alive: AbstractSet[str]) -> None:
        """Forget the datasets that their users have deleted, but for those of which a build is alive.

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
