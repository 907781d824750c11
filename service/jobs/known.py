"""Records that have been read before. To make a record of a row takes longer than all else about a list of jobs."""

import threading
from collections.abc import Sequence

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from service.jobs.model import JobRecord
from service.jobs.queries import record_of
from service.jobs.tables import JobRow

_CHUNK = 500


class KnownJobs:
    """Reads jobs, and makes records of those alone that have changed. Threads may share it.

    Args:
        most: So many records are remembered, the ones read last.
    """

    def __init__(self, most: int = 5000) -> None:
        self._most = most
        self._known: dict[str, JobRecord] = {}
        self._lock = threading.Lock()

    def read(self, session: Session, wanted: Select[JobRow]) -> list[JobRecord]:
        """The jobs that a query names, in its order."""
        heads = session.execute(wanted.with_only_columns(JobRow.id, JobRow.version, JobRow.waiting_for)).all()
        with self._lock:
            known = {job_id: self._known[job_id] for job_id, _, _ in heads if job_id in self._known}
        unknown = [job_id for job_id, version, _ in heads if job_id not in known or known[job_id].version != version]
        known |= _fresh(session, unknown)
        jobs = [_waiting_for(known[job_id], waiting_for) for job_id, _, waiting_for in heads]
        self.remember(jobs)
        return jobs

    def remember(self, jobs: Sequence[JobRecord]) -> None:
        """Take records as they are in the database now."""
        with self._lock:
            for job in jobs:
                self._known.pop(job.id, None)  # so that it comes last
                self._known[job.id] = job
            for job_id in list(self._known)[: max(0, len(self._known) - self._most)]:
                del self._known[job_id]


def _fresh(session: Session, job_ids: Sequence[str]) -> dict[str, JobRecord]:
    records: dict[str, JobRecord] = {}
    for begin in range(0, len(job_ids), _CHUNK):
        query = select(JobRow).where(JobRow.id.in_(job_ids[begin : begin + _CHUNK]))
        records |= {job.id: record_of(job) for job in session.scalars(query)}
    return records


def _waiting_for(job: JobRecord, reason: str | None) -> JobRecord:
    """The record with what it waits for now, which changes without the version."""
    return job if job.waiting_for == reason else job.model_copy(update={"waiting_for": reason})
