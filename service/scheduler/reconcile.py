"""Brings jobs and gangs together: reads what gangs did into the record, and does what is decided.

The record is written before a gang is started and after its reports are stored, so that wherever the service dies,
its next pass finds what to do: a gang that the record does not know is ended, one that is missing is lost.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from boost_core.config import JobSpec
from boost_core.config.reports import Cause, RestartReport
from service.gang.status import GangPhase, Gangs, GangStatus, JobTag
from service.jobs.leases import LeaseLost
from service.jobs.model import JobRecord
from service.jobs.queries import EventFilter, JobNotFound
from service.jobs.states import IllegalTransition, JobState, Reason
from service.jobs.store import JobStore
from service.jobs.writes import TakenBack
from service.logs import about
from service.scheduler.actions import Action, Admit, Explain, Launch, Pause, Resize, ResizePolicy, RoomSeen, Wait
from service.scheduler.autoscaling import Autoscaling, nodes_wanted
from service.scheduler.decisions import decide
from service.scheduler.housekeeping import Housekeeping
from service.scheduler.memory import GangMemory
from service.scheduler.quotas import Limits

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing

logger = logging.getLogger(__name__)

_MOST_CHANGES = 10_000  # that a job's trace is made from
_ENDS = {GangPhase.SUCCEEDED: Reason.TRAINING_FINISHED, GangPhase.FAILED: Reason.TRAINING_FAILED}
_HELD_UP = {
    GangPhase.WAITING: Reason.GANG_RECOVERING,
    GangPhase.RECOVERING: Reason.GANG_RECOVERING,
    GangPhase.SAVING: Reason.WAITING_FOR_STORE,
}
_BEFORE_TRAINING = frozenset({GangPhase.STARTING, GangPhase.WAITING, GangPhase.RECOVERING})


class Reconciler:
    """One pass at a time over all active jobs.

    Args:
        store: The record.
        gangs: A connected cluster.
        policy: When gangs may grow.
        clock: Tells seconds.
        limits: Gives the quotas of tenants and queues.
        tracing: Makes spans of what becomes of jobs; ``None`` for none.
        autoscales: Whether the cluster is to be asked for the nodes that jobs need.
    """

    def __init__(
        self,
        store: JobStore,
        gangs: Gangs,
        policy: ResizePolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        limits: Callable[[], Limits] = Limits,
        tracing: "Tracing | None" = None,
        autoscales: bool = False,
    ) -> None:
        self._store, self._gangs = store, gangs
        self._policy, self._memory = policy or ResizePolicy(), GangMemory(clock)
        self._limits, self._housekeeping = limits, Housekeeping(store, clock)
        self._tracing = tracing
        self._autoscaling = Autoscaling(gangs, clock) if autoscales else None

    def tick(self) -> None:
        """Do one pass. What goes wrong with one job is logged and does not keep the others waiting.

        Raises:
            LeaseLost: Another process schedules now.
            Exception: The record or the cluster cannot be reached.
        """
        for job in self._store.active():
            with _apart(job.id, job.attempt, job.traceparent):
                self._follow(job)
        for job_id, attempt in self._gangs.alive():
            with _apart(job_id, attempt):
                self._end_if_forgotten(job_id, attempt)
        actions = self._decide()
        self._memory.saw_room({action.job.id for action in actions if isinstance(action, RoomSeen)})
        for action in actions:
            with _apart(action.job.id, action.job.attempt, action.job.traceparent):
                self._act(action)
        self._explain(actions)
        if self._autoscaling:
            jobs = [job for job in self._store.active() if self._memory.takes_part(job)]
            self._autoscaling.ask(*nodes_wanted(jobs, self._limits()))

    def _decide(self) -> list[Action]:
        active = self._store.active()
        self._memory.forget_others({job.id for job in active if job.has_gang})
        jobs = [job for job in active if self._memory.takes_part(job)]
        with_gang = [job for job in jobs if job.has_gang]
        gangs, nodes = self._memory.gangs(with_gang), self._gangs.nodes()
        self._housekeeping.show(nodes)
        return decide(jobs, nodes, gangs, self._memory.room_seconds(), self._policy, self._limits())

    def _explain(self, actions: Sequence[Action]) -> None:
        """Say what queued jobs wait for, where that is news."""
        explained = [action for action in actions if isinstance(action, Explain)]
        news = {action.job.id: action.message for action in explained if action.message != action.job.waiting_for}
        if news:
            self._store.explain(news)

    def _follow(self, job: JobRecord) -> None:
        if job.cancel_requested:
            if job.has_gang:
                self._gangs.end(job.id, job.attempt)
            self._change(job, Reason.CANCELLED_BY_USER, "cancelled by its user")
        elif job.has_gang:
            self._follow_gang(job)
        elif job.pause_requested and job.state is not JobState.PAUSED:
            self._change(job, Reason.PAUSED_BY_USER, "paused before it had a gang")

    def _follow_gang(self, job: JobRecord) -> None:
        if job.errands:
            for errand in self._store.take_errands(job.id):
                self._gangs.ask(job.id, job.attempt, errand)
        stored, known = self._store.last_sequence(job.id, job.attempt), self._memory.knows(job)
        status = self._gangs.poll(job.id, job.attempt, stored, self._memory.orders(job))
        if status is None and not (known or stored) and job.state is JobState.SCHEDULING:
            self._make_up_for_launch(job)
        elif status is None:
            self._lost(job)
        else:
            self._memory.saw(job, status)
            self._record(job, status)

    def _make_up_for_launch(self, job: JobRecord) -> None:
        """Start a gang that the record announces, and that the service before this one did not live to start."""
        if job.pause_requested:
            self._change(job, Reason.PAUSED_BY_USER, "paused before it had a gang")
        else:
            orders = self._memory.orders(job)
            self._gangs.launch(_tag(job, job.attempt), _with_checkpoint_folder(job), orders)

    def _record(self, job: JobRecord, status: GangStatus) -> None:
        reports = [(report.sequence, report.time, report.report) for report in status.reports]
        self._store.append_reports(job.id, job.attempt, reports)
        for told in status.reports:
            if self._tracing and isinstance(told.report, RestartReport):
                self._tracing.restarted(job, told.time, told.report)
        if reason := _progress(job, status):
            job = self._change(job, reason, status.message)
        if reason := _end(job, status):
            self._change(job, reason, status.message)
            self._gangs.end(job.id, job.attempt)

    def _lost(self, job: JobRecord) -> None:
        policy = job.spec.fault_tolerance
        since = max(job.queued_at, datetime.now(UTC) - timedelta(seconds=policy.restart_window_seconds))
        restarts_left = policy.max_restarts - self._store.count_changes(job.id, Reason.GANG_LOST, since)
        if restarts_left > 0:
            message = f"gang {job.attempt} is gone; the job waits for a new one, {restarts_left} restarts are left"
            self._change(job, Reason.GANG_LOST, message)
        else:
            message = (
                f"gang {job.attempt} is gone, and fault_tolerance.max_restarts = {policy.max_restarts} allows no "
                f"other; submit the job again with checkpoint.resume_from: {job.checkpoint_url}"
            )
            self._change(job, Reason.RESTARTS_EXHAUSTED, message)

    def _end_if_forgotten(self, job_id: str, attempt: int) -> None:
        """End a gang that outlived its job, as when the service died between a change and its consequence."""
        try:
            job = self._store.get(job_id)
        except JobNotFound:  # of another service on the same cluster
            return
        if not (job.has_gang and job.attempt == attempt):
            self._gangs.end(job_id, attempt)

    def _act(self, action: Action) -> None:
        job = action.job
        match action:
            case Admit():
                self._change(job, Reason.HEAD_OF_QUEUE, "is next to be placed")
            case Wait(message=message):
                self._change(job, Reason.WAITING_FOR_RESOURCES, message)
            case Launch():
                self._launch(action)
            case Resize(shape=shape, cause=cause, message=message, limit=limit):
                logger.info("%s: %s", job.id, message)
                self._memory.order(job.id, shape, cause, limit)
            case Pause(message=message):
                logger.info("%s: %s", job.id, message)
                self._memory.order(job.id, None, Cause.ROOM_NEEDED)

    def _launch(self, launch: Launch) -> None:
        job, attempt = launch.job, launch.job.attempt + 1
        self._change(job, Reason.GANG_STARTING, launch.message, attempt)
        orders = self._memory.start(job, attempt, launch.shape, launch.limit)
        self._gangs.launch(_tag(job, attempt), _with_checkpoint_folder(job), orders)

    def _change(self, job: JobRecord, reason: Reason, message: str, attempt: int | None = None) -> JobRecord:
        after = self._store.change(job.id, reason, message, attempt=attempt)
        if (after.state, after.reason) != (job.state, job.reason):
            with about(attempt=after.attempt):
                logger.info("%s is %s, %s: %s", job.id, after.state, after.reason, after.message)
        if self._tracing and job.state is JobState.SCHEDULING and after.state is not JobState.SCHEDULING:
            changes = EventFilter(kinds=("state",), since=job.waiting_since)
            self._tracing.left_queue(after, self._store.events(job.id, limit=_MOST_CHANGES, wanted=changes))
        return after


def _progress(job: JobRecord, status: GangStatus) -> Reason | None:
    """What there is to say of a gang that goes on, each thing once."""
    trains = status.phase in (GangPhase.TRAINING, GangPhase.SAVING, GangPhase.SUCCEEDED)
    if job.state is JobState.SCHEDULING:
        if trains or (status.phase is GangPhase.PAUSED and not job.pause_requested):
            return Reason.GANG_STARTED
        return Reason.GANG_STARTING if status.phase in _BEFORE_TRAINING else None
    if status.phase in (GangPhase.TRAINING, GangPhase.SUCCEEDED):
        return Reason.GANG_STARTED if job.reason is Reason.GANG_RECOVERING else None
    reason = _HELD_UP.get(status.phase)
    said = job.reason is reason and job.message == status.message
    return None if said else reason


def _end(job: JobRecord, status: GangStatus) -> Reason | None:
    """The change that a gang's last phase brings, if it is the last."""
    if status.phase is GangPhase.PAUSED:
        return Reason.PAUSED_BY_USER if job.pause_requested else Reason.PAUSED_FOR_PRIORITY
    return _ENDS.get(status.phase)


def _tag(job: JobRecord, attempt: int) -> JobTag:
    return JobTag(job.id, attempt, job.name, job.tenant, job.submitted_by)


def _with_checkpoint_folder(job: JobRecord) -> JobSpec:
    checkpoint = job.spec.checkpoint.model_copy(update={"url": job.checkpoint_url})
    return job.spec.model_copy(update={"checkpoint": checkpoint})


@contextmanager
def _apart(job_id: str, attempt: int, traceparent: str | None = None) -> Iterator[None]:
    with about(job=job_id, attempt=attempt, trace_id=traceparent and traceparent.split("-")[1]):
        try:
            yield
        except LeaseLost:
            raise
        except (IllegalTransition, TakenBack) as overtaken:  # its user cancelled or resumed the job meanwhile
            logger.info("%s: %s", job_id, overtaken)
        except Exception:
            logger.exception("%s: this pass failed; the next one tries again", job_id)
