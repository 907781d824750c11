"""The record of profiles: what was measured of each kind of GPU, for the predictions of jobs that ask for it."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import Engine, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from boost_core.config import JobSpec
from boost_core.plan.machine import kind_of_gpu
from boost_core.plan.measured import MeasuredProfile
from service.jobs.tables import ProfileRow
from service.models.profiles import StoredProfile

_COLUMNS = list(ProfileRow.__table__.c)


class ProfileNotFound(LookupError):
    """There is no profile of a kind of GPU."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"there is no profile of {kind!r}; boost profiles ls lists those that there are")


class ProfileStore:
    """Profiles in the record's database.

    Args:
        engine: Of that database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def for_job(self, spec: JobSpec) -> StoredProfile | None:
        """The profile that a job's seconds are predicted by, unless its user gives one.

        Returns:
            ``None`` if the job names no kind of GPU, or there is none of this kind in which its precision is computed.
        """
        kind = kind_of_gpu(spec.resources) if spec.resources.gpus_per_worker else None
        found = None if kind is None else self._find(kind)
        return found if found is not None and found.profile.serves(spec.training.precision) else None

    def get(self, kind: str) -> StoredProfile:
        """The profile of one kind.

        Raises:
            ProfileNotFound: There is none.
        """
        found = self._find(kind)
        if found is None:
            raise ProfileNotFound(kind)
        return found

    def list(self) -> Sequence[StoredProfile]:
        """All profiles by kind."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(*_COLUMNS).order_by(ProfileRow.kind)).all()
        return [StoredProfile.model_validate(dict(row._mapping)) for row in rows]

    def put(self, kind: str, profile: MeasuredProfile, stored_by: str) -> StoredProfile:
        """Store a profile in place of the one that there may be."""
        stored = StoredProfile(kind=kind, stored_at=datetime.now(UTC), stored_by=stored_by, profile=profile)
        try:
            self._write(stored)
        except IntegrityError:  # another request stored the first of this kind meanwhile
            self._write(stored)
        return stored

    def delete(self, kind: str) -> None:
        """Delete the profile of a kind; jobs that were planned with it keep their copy.

        Raises:
            ProfileNotFound: There is none.
        """
        with Session(self._engine) as session, session.begin():
            row = session.get(ProfileRow, kind)
            if row is None:
                raise ProfileNotFound(kind)
            session.delete(row)

    def _find(self, kind: str) -> StoredProfile | None:
        with self._engine.connect() as connection:
            row = connection.execute(select(*_COLUMNS).where(ProfileRow.kind == kind)).one_or_none()
        return None if row is None else StoredProfile.model_validate(dict(row._mapping))

    def _write(self, stored: StoredProfile) -> None:
        values = stored.model_dump() | {"profile": stored.profile.model_dump(mode="json")}
        with self._engine.begin() as connection:
            changed = connection.execute(update(ProfileRow).where(ProfileRow.kind == stored.kind).values(values))
            if changed.rowcount == 0:
                connection.execute(insert(ProfileRow).values(values))
