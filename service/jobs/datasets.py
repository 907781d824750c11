"""The record of datasets and their states."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import aliased

from service.jobs.database import read_models, read_rows
from service.jobs.leases import Lease, write_under
from service.jobs.model import Owner, new_id
from service.jobs.store import JobStore
from service.jobs.sweeps import SweepStore
from service.jobs.tables import DatasetRow
from service.models.datasets import Dataset, DatasetDetail, DatasetRequest, DatasetState

MOST_BUILDING = 10  # of a tenant
MOST_DATASETS = 500  # of a tenant

_DETAIL = list(DatasetRow.__table__.c)
_SUMMARY = [column for column in _DETAIL if column.name != "lineage"]  # which may have a line for each of many files


class DatasetNotFound(LookupError):
    """The tenant has no dataset of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no dataset {name!r}; boost datasets ls lists all datasets")


class DatasetConflict(ValueError):
    """A dataset is in use, or not in a state in which this can be done."""


@dataclass(frozen=True)
class DatasetStore:
    """Datasets in the record's database.

    Attributes:
        jobs: The record, whose jobs name datasets.
    """

    jobs: JobStore

    def create(self, request: DatasetRequest, root: str, owner: Owner) -> Dataset:
        """Build a dataset; one that failed or was cancelled continues with the remaining files.

        Args:
            request: The request.
            root: Root folder for requests that name none.
            owner: Its owner.

        Raises:
            DatasetConflict: The name is taken, or the tenant has too many.
        """
        theirs = (DatasetRow.tenant == owner.tenant) & ~DatasetRow.deleted
        by_state = select(DatasetRow.state, func.count().label("number")).where(theirs).group_by(DatasetRow.state)
        here = _named(request.name, owner.tenant)
        try:
            with self.jobs.engine.begin() as connection:
                counts = {row.state: row.number for row in connection.execute(by_state)}
                total, building = sum(counts.values()), counts.get(DatasetState.BUILDING, 0)
                if building >= MOST_BUILDING or total >= MOST_DATASETS:
                    has = f"the tenant {owner.tenant!r} has {total} datasets, of which {building} are being built"
                    most = f"at most {MOST_DATASETS} and {MOST_BUILDING} are allowed"
                    raise DatasetConflict(f"{has}; {most}: wait, or delete some")
                earlier = connection.execute(select(*_SUMMARY).where(here)).one_or_none()
                dataset_id = earlier.id if earlier else new_id("dataset")
                folder = request.url or f"{root.rstrip('/')}/{owner.tenant}/datasets"
                values = {
                    "tenant": owner.tenant, "name": request.name, "id": dataset_id, "submitted_by": owner.name,
                    "spec": request.model_dump(mode="json"), "url": f"{folder.rstrip('/')}/{dataset_id}",
                    "state": DatasetState.BUILDING, "message": "waits for its turn", "progress": None,
                    "finished_at": None, "attempt": earlier.attempt + 1 if earlier else 1, "launches": 0,
                }  # fmt: skip
                ended = DatasetRow.state.not_in([DatasetState.BUILDING, DatasetState.READY])
                if earlier is None:
                    connection.execute(insert(DatasetRow).values(values | {"created_at": datetime.now(UTC)}))
                elif connection.execute(update(DatasetRow).where(here, ended).values(values)).rowcount != 1:
                    state = connection.scalar(select(DatasetRow.state).where(here))
                    remedy = "cancel it first" if state == DatasetState.BUILDING else "delete it"
                    raise DatasetConflict(f"the dataset {request.name!r} is {state}; {remedy}, or take another name")
        except IntegrityError as error:  # another request was the first
            raise DatasetConflict(f"the dataset {request.name!r} was requested at the same time; check it") from error
        return self.get(request.name, owner.tenant)

    def get(self, name: str, tenant: str) -> DatasetDetail:
        """One dataset.

        Raises:
            DatasetNotFound: The tenant has none of this name.
        """
        datasets = read_models(self.jobs.engine, DatasetDetail, select(*_DETAIL).where(_named(name, tenant)))
        if not datasets:
            raise DatasetNotFound(name)
        return datasets[0]

    def some(self, names: AbstractSet[str], tenant: str) -> dict[str, Dataset]:
        """Those datasets of a tenant that have these names, by name."""
        if not names:
            return {}
        query = select(*_SUMMARY).where(DatasetRow.tenant == tenant, DatasetRow.name.in_(names), ~DatasetRow.deleted)
        return {dataset.name: dataset for dataset in read_models(self.jobs.engine, Dataset, query)}

    def list(self, tenant: str | None) -> Sequence[Dataset]:
        """The datasets of a tenant, or of all, by name."""
        query = select(*_SUMMARY).where(~DatasetRow.deleted).order_by(DatasetRow.name, DatasetRow.tenant)
        query = query if tenant is None else query.where(DatasetRow.tenant == tenant)
        return read_models(self.jobs.engine, Dataset, query)

    def building(self) -> Dataset | None:
        """The dataset, of whatever tenant, whose build holds CPUs now; only one is built at a time."""
        query = select(*_SUMMARY).where(DatasetRow.state == DatasetState.BUILDING, DatasetRow.launches > 0)
        datasets = read_models(self.jobs.engine, Dataset, query)
        return next((dataset for dataset in datasets if dataset.progress and dataset.progress.cpus), None)

    def cancel(self, name: str, tenant: str) -> Dataset:
        """Stop building a dataset; what has been built stays where it is.

        Raises:
            DatasetNotFound: The tenant has none of this name.
            DatasetConflict: It is not being made.
        """
        ended = {"state": DatasetState.CANCELLED, "message": "cancelled on request", "finished_at": datetime.now(UTC)}
        building = DatasetRow.state == DatasetState.BUILDING
        with self.jobs.engine.begin() as connection:
            connection.execute(update(DatasetRow).where(_named(name, tenant), building).values(ended))
        dataset = self.get(name, tenant)
        if dataset.state is not DatasetState.CANCELLED:
            raise DatasetConflict(f"the dataset {name!r} is {dataset.state}; there is nothing to cancel")
        return dataset

    def delete(self, name: str, tenant: str) -> None:
        """Delete a dataset. Its files stay, and its row until the scheduler has seen that its build has ended.

        Raises:
            DatasetNotFound: The tenant has none of this name.
            DatasetConflict: It is being made, or a job or a sweep that has not ended trains on it.
        """
        self.get(name, tenant)
        # Further trials of a sweep will look for it, in its job or in what that is given.
        sweeps = [each for each in SweepStore(self.jobs).unfinished() if each.tenant == tenant]
        uses = [("job", job.id, job.spec) for job in self.jobs.active() if job.tenant == tenant]
        for noun, user, spec in [*uses, *(("sweep", sweep.id, sweep.spec.job) for sweep in sweeps)]:
            if any(name == used for _, used, _ in spec.data.datasets):
                raise DatasetConflict(f"the dataset {name!r} is in use by the {noun} {user}")
        for sweep in sweeps:
            if f'"{name}"' in sweep.spec.model_dump_json(include={"space"}):
                raise DatasetConflict(f"the dataset {name!r} is in use by the sweep {sweep.id}")
        ended = DatasetRow.state != DatasetState.BUILDING
        with self.jobs.engine.begin() as connection:
            result = connection.execute(update(DatasetRow).where(_named(name, tenant), ended).values(deleted=True))
        if result.rowcount != 1:
            raise DatasetConflict(f"the dataset {name!r} is being built; cancel it first")


def _named(name: str, tenant: str) -> ColumnElement[bool]:
    return (DatasetRow.tenant == tenant) & (DatasetRow.name == name) & ~DatasetRow.deleted


# The scheduler's access to the record of datasets: which to build, and the builds' results.


class DatasetBuild(Dataset):
    """A dataset to be built, or being built.

    Attributes:
        attempt: How often it was requested; reports on earlier attempts are ignored.
        launches: Number of processes started for this attempt.
        launched_at: When a process was last started, for any attempt.
    """

    attempt: int
    launches: int
    launched_at: datetime | None

    @property
    def build_id(self) -> str:
        """Its id on the cluster."""
        return f"{self.id}-{self.attempt}"


@dataclass(frozen=True)
class DatasetBuilds:
    """Datasets to be built, in the record's database.

    Attributes:
        jobs: The record.
        lease: The lease for all writes.
    """

    jobs: JobStore
    lease: Lease | None = None

    def waiting(self) -> Sequence[DatasetBuild]:
        """All datasets to be built, in turn: first those of the tenant whose last build started longest ago."""
        others = aliased(DatasetRow)
        last = select(func.max(others.launched_at)).where(others.tenant == DatasetRow.tenant).scalar_subquery()
        turns = (last.asc().nulls_first(), DatasetRow.created_at, DatasetRow.id)
        query = select(*_SUMMARY).where(DatasetRow.state == DatasetState.BUILDING).order_by(*turns)
        return read_models(self.jobs.engine, DatasetBuild, query)

    def known(self, build_ids: AbstractSet[str]) -> set[str]:
        """Those builds that belong to this record's datasets, not to other services on the same cluster."""
        datasets = {build_id: build_id.rpartition("-")[0] for build_id in build_ids}
        query = select(DatasetRow.id).where(DatasetRow.id.in_(set(datasets.values())))
        ours = {dataset_id for (dataset_id,) in read_rows(self.jobs.engine, query)}
        return {build_id for build_id, dataset_id in datasets.items() if dataset_id in ours}

    def update(self, build: DatasetBuild, **values: Any) -> bool:
        """Store a build's status; return whether it is still wanted.

        Raises:
            LeaseLost: Another process schedules now.
        """
        this = (DatasetRow.id == build.id) & (DatasetRow.attempt == build.attempt)
        building = DatasetRow.state == DatasetState.BUILDING
        statement = update(DatasetRow).where(this & building).values(values)
        return write_under(self.jobs.engine, self.lease, statement) == 1

    def forget_deleted(self, alive: AbstractSet[str]) -> None:
        """Remove the datasets that users have deleted, except those with a live build.

        Raises:
            LeaseLost: Another process schedules now.
        """
        in_use = {build_id.rpartition("-")[0] for build_id in alive}
        gone = delete(DatasetRow).where(DatasetRow.deleted, DatasetRow.id.not_in(in_use))
        write_under(self.jobs.engine, self.lease, gone)
