"""A cache of records. Making a record from a row takes longer than everything else in listing jobs."""

import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from service.jobs.database import SHORT_READS
from service.jobs.model import JobRecord
from service.jobs.queries import Heads, record_of
from service.jobs.tables import JobRow

_CHUNK = 500
_MOST_IN_SHORT_READ = 2  # records to make or change; each takes up to a third of a millisecond
_NONE: Mapping[str, Any] = MappingProxyType({})


class TooManyUnknown(RuntimeError):
    """A short read would have to make too many records."""


class JobCache:
    """Reads jobs, making records only of those that have changed. Threads may share it.

    Each time, the current versions are read from the database, because other processes write to it, too.

    Args:
        most: Maximum number of records kept, the newest ones.
    """

    def __init__(self, most: int = 5000) -> None:
        self._most = most
        self._known: dict[str, JobRecord] = {}
        self._lock = threading.Lock()

    def read(self, connection: Connection, wanted: Heads, parameters: Mapping[str, Any] = _NONE) -> list[JobRecord]:
        """Return the jobs that a query selects, in its order.

        Args:
            connection: Connection to the database.
            wanted: The query.
            parameters: Values of its parameters.

        Raises:
            TooManyUnknown: It is a connection for short reads, and too many of the jobs are not cached as they are now.
        """
        heads = connection.execute(wanted, parameters).all()
        with self._lock:
            jobs = {job_id: self._known[job_id] for job_id, _, _ in heads if job_id in self._known}
        waiting: dict[str, str | None] = {}
        unknown: list[str] = []
        for job_id, version, waiting_for in heads:
            job = jobs.get(job_id)
            if job is None or job.version != version:
                unknown.append(job_id)
            elif job.waiting_for != waiting_for:
                waiting[job_id] = waiting_for  # which changes without the version
        if len(unknown) + len(waiting) > _MOST_IN_SHORT_READ and SHORT_READS in connection.get_execution_options():
            raise TooManyUnknown
        changed = {job_id: jobs[job_id].with_values({"waiting_for": what}) for job_id, what in waiting.items()}
        changed |= _fresh(connection, unknown)
        self.remember(changed)
        jobs |= changed
        return [jobs[job_id] for job_id, _, _ in heads]

    def remember(self, jobs: Mapping[str, JobRecord]) -> None:
        """Remember records, by id, as they are in the database now."""
        with self._lock:
            for job_id in jobs:
                self._known.pop(job_id, None)  # so that it comes last
            self._known |= jobs
            for job_id in list(islice(self._known, max(0, len(self._known) - self._most))):
                del self._known[job_id]


def _fresh(connection: Connection, job_ids: Sequence[str]) -> dict[str, JobRecord]:
    records: dict[str, JobRecord] = {}
    for begin in range(0, len(job_ids), _CHUNK):
        query = select(JobRow).where(JobRow.id.in_(job_ids[begin : begin + _CHUNK]))
        with Session(connection) as session:
            records |= {job.id: record_of(job) for job in session.scalars(query)}
    return records
