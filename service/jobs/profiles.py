"""The record of profiles: measurements of each kind of GPU at each precision, for jobs that use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, Engine, delete, insert, select, update

from boost_core.config import JobSpec
from boost_core.plan.machine import MeasuredProfile, computed_in, kind_of_gpu
from service.jobs.database import read_models, retried_once
from service.jobs.tables import ProfileRow
from service.models.cluster import StoredProfile

_COLUMNS = list(ProfileRow.__table__.c)


class ProfileNotFound(LookupError):
    """There is no profile of a kind of GPU, or none at a precision."""

    def __init__(self, kind: str, precision: str | None = None) -> None:
        at = "" if precision is None else f" in {precision}"
        super().__init__(f"there is no profile of {kind!r}{at}; boost profiles ls lists all profiles")


@dataclass(frozen=True)
class ProfileStore:
    """Profiles in the record's database.

    Attributes:
        engine: Of that database.
    """

    engine: Engine

    def for_job(self, spec: JobSpec) -> StoredProfile | None:
        """The profile for predicting a job's seconds, unless its user gives one.

        Returns:
            ``None`` if the job names no kind of GPU, or there is none of this kind in which its precision is computed.
        """
        kind = kind_of_gpu(spec.resources) if spec.resources.gpus_per_worker else None
        profiles = [] if kind is None else self.list(kind, computed_in(spec.training.precision))
        return next(iter(profiles), None)

    def get(self, kind: str, precision: str | None = None) -> StoredProfile:
        """The profile of one kind.

        Args:
            kind: Ray's name of it.
            precision: At which it was measured; by default ``bf16`` if there is such a one, or else another.

        Raises:
            ProfileNotFound: There is none.
        """
        profiles = self.list(kind, precision)
        if not profiles:
            raise ProfileNotFound(kind, precision)
        return profiles[0]

    def list(self, kind: str | None = None, precision: str | None = None) -> Sequence[StoredProfile]:
        """The profiles of a kind at a precision, or of all, by kind and precision."""
        query = select(*_COLUMNS).where(*_matching(kind, precision)).order_by(ProfileRow.kind, ProfileRow.precision)
        return read_models(self.engine, StoredProfile, query)

    def put(self, kind: str, profile: MeasuredProfile, stored_by: str) -> StoredProfile:
        """Store a profile, replacing any of the same kind and precision."""
        stored = StoredProfile(kind=kind, stored_at=datetime.now(UTC), stored_by=stored_by, profile=profile)
        values = dict(stored) | {"precision": profile.precision}

        def write() -> None:
            with self.engine.begin() as connection:
                alike = update(ProfileRow).where(*_matching(kind, profile.precision))
                if connection.execute(alike.values(values)).rowcount == 0:
                    connection.execute(insert(ProfileRow).values(values))

        retried_once(write)
        return stored

    def delete(self, kind: str, precision: str | None = None) -> None:
        """Delete the profiles of a kind; jobs that were planned with one keep their copy.

        Args:
            kind: Ray's name of it.
            precision: Only the one that was measured at this.

        Raises:
            ProfileNotFound: There is none.
        """
        with self.engine.begin() as connection:
            if connection.execute(delete(ProfileRow).where(*_matching(kind, precision))).rowcount == 0:
                raise ProfileNotFound(kind, precision)


def _matching(kind: str | None, precision: str | None) -> list[ColumnElement[bool]]:
    pairs = (ProfileRow.kind, kind), (ProfileRow.precision, precision)
    return [column == value for column, value in pairs if value is not None]
