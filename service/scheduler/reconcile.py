"""Brings jobs and gangs together: reads what gangs did into the record, and does what is decided.

The record is written before a gang is started and after its reports are stored, so that wherever the service dies,
its next pass finds what to do: a gang that the record does not know is ended, one that is missing is lost.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from boost_core.config import JobSpec
from service.gang.status import GangPhase, Gangs, GangStatus
from service.jobs.model import JobRecord
from service.jobs.states import IllegalTransition, JobState, Reason
from service.jobs.store import JobNotFound, JobStore
from service.scheduler.decisions import Admit, Launch, Wait, decide, has_gang

logger = logging.getLogger(__name__)

_ENDS = {GangPhase.SUCCEEDED: Reason.TRAINING_FINISHED, GangPhase.FAILED: Reason.TRAINING_FAILED}


class Reconciler:
    """One pass at a time over all active jobs.

    Args:
        store: The record.
        gangs: A connected cluster.
    """

    def __init__(self, store: JobStore, gangs: Gangs) -> None:
        self._store, self._gangs = store, gangs

    def tick(self) -> None:
        """Do one pass. What goes wrong with one job is logged and does not keep the others waiting.

        Raises:
            Exception: The record or the cluster cannot be reached.
        """
        for job in self._store.active():
            with _apart(job.id):
                self._follow(job)
        for job_id, attempt in self._gangs.alive():
            with _apart(job_id):
                self._end_if_forgotten(job_id, attempt)
        for action in decide(self._store.active(), self._gangs.nodes()):
            with _apart(action.job.id):
                self._act(action)

    def _follow(self, job: JobRecord) -> None:
        if job.cancel_requested:
            if has_gang(job):
                self._gangs.end(job.id, job.attempt)
            self._store.change(job.id, Reason.CANCELLED_BY_USER, "cancelled by its user")
        elif has_gang(job):
            status = self._gangs.poll(job.id, job.attempt, self._store.last_sequence(job.id, job.attempt))
            if status is None:
                self._lost(job)
            else:
                self._record(job, status)

    def _record(self, job: JobRecord, status: GangStatus) -> None:
        reports = [(report.sequence, report.time, report.report) for report in status.reports]
        self._store.append_reports(job.id, job.attempt, reports)
        if job.state is JobState.SCHEDULING and status.phase is GangPhase.STARTING:
            self._store.change(job.id, Reason.GANG_STARTING, status.message)
        if job.state is JobState.SCHEDULING and status.phase in (GangPhase.TRAINING, GangPhase.SUCCEEDED):
            self._store.change(job.id, Reason.GANG_STARTED, status.message)
        if status.phase in _ENDS:
            self._store.change(job.id, _ENDS[status.phase], status.message)
            self._gangs.end(job.id, job.attempt)

    def _lost(self, job: JobRecord) -> None:
        restarts_left = job.spec.fault_tolerance.max_restarts + 1 - job.attempt
        if restarts_left > 0:
            message = f"gang {job.attempt} is gone; the job waits for a new one, {restarts_left} restarts are left"
            self._store.change(job.id, Reason.GANG_LOST, message)
        else:
            message = (
                f"gang {job.attempt} is gone, and max_restarts = {job.spec.fault_tolerance.max_restarts} allows no "
                "other; "
                f"submit the job again with checkpoint.resume_from: {job.checkpoint_url}"
            )
            self._store.change(job.id, Reason.RESTARTS_EXHAUSTED, message)

    def _end_if_forgotten(self, job_id: str, attempt: int) -> None:
        """End a gang that outlived its job, as when the service died between a change and its consequence."""
        try:
            job = self._store.get(job_id)
        except JobNotFound:  # of another service on the same cluster
            return
        if not (has_gang(job) and job.attempt == attempt):
            self._gangs.end(job_id, attempt)

    def _act(self, action: Admit | Launch | Wait) -> None:
        job = action.job
        match action:
            case Admit():
                self._store.change(job.id, Reason.HEAD_OF_QUEUE, "is next to be placed")
            case Wait(message=message):
                self._store.change(job.id, Reason.WAITING_FOR_RESOURCES, message)
            case Launch(message=message):
                attempt = job.attempt + 1
                self._store.change(job.id, Reason.GANG_STARTING, message, attempt=attempt)
                self._gangs.launch(job.id, attempt, _with_checkpoint_folder(job))


def _with_checkpoint_folder(job: JobRecord) -> JobSpec:
    checkpoint = job.spec.checkpoint.model_copy(update={"url": job.checkpoint_url})
    return job.spec.model_copy(update={"checkpoint": checkpoint})


@contextmanager
def _apart(job_id: str) -> Iterator[None]:
    try:
        yield
    except IllegalTransition as overtaken:  # its user cancelled the job meanwhile
        logger.info("%s: %s", job_id, overtaken)
    except Exception:
        logger.exception("%s: this pass failed; the next one tries again", job_id)
