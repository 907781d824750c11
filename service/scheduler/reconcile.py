"""Reconciles jobs and gangs: stores gangs' reports in the record, and carries out decisions.

The record is written before a gang is started and after its reports are stored, so that wherever the service dies, its
next pass finds what to do: a gang unknown to the record is ended, and a missing one counts as lost.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from boost_core.config import ElasticityConfig, Layout
from boost_core.config.job import MOST_LOSSES
from boost_core.messages import Cause, RestartReport
from service.gang.status import GangKey, GangPhase, Gangs, GangStatus, JobTag, Labels, Orders, PollRequest
from service.jobs.leases import LeaseLost
from service.jobs.model import NODES, JobRecord
from service.jobs.queries import EventFilter, JobNotFound
from service.jobs.states import IllegalTransition, JobState, Reason
from service.jobs.store import JobStore
from service.jobs.writes import NumberedReport, TakenBack
from service.logs import RecurringFaults, about
from service.scheduler.autoscaling import Autoscaling, requested_nodes
from service.scheduler.cluster_snapshot import (
    Admit,
    CapacityObserved,
    Explain,
    Gang,
    Launch,
    Pause,
    Resize,
    ResizePolicy,
    SchedulerMemory,
    Wait,
)
from service.scheduler.decisions import decide
from service.scheduler.demand import demand_of
from service.scheduler.messages import GAVE_WAY
from service.scheduler.quotas import Limits

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing


logger = logging.getLogger(__name__)

SHOW_SECONDS = 10.0  # after which unchanged nodes are published again
CLEAR_SECONDS = 3600.0  # between two deletions of old requests
_MOST_CHANGES = 10_000  # from which a job's trace is made
# Seconds before a job that keeps losing its gangs gets another: twice as long each time.
_LOSS_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
_START_SECONDS = 300.0  # for a new gang's supervisor to answer first
_MOST_TOLD_TO_WAIT = 50  # jobs that a pass moves out of the queue, or tells what is new, though nothing starts them
_MOST_EXPLAINED = 500  # jobs in the queue of which a pass stores what they wait for, besides those that need it now
_JOBS_A_TRANSACTION = 100  # whose reports are stored together, while other writers wait for the database
_ENDS = {GangPhase.SUCCEEDED: Reason.TRAINING_FINISHED, GangPhase.FAILED: Reason.TRAINING_FAILED}
_INTERRUPTED = {
    GangPhase.WAITING: Reason.WAITING_FOR_RESOURCES,
    GangPhase.RECOVERING: Reason.GANG_RECOVERING,
    GangPhase.SAVING: Reason.WAITING_FOR_STORE,
}
_BEFORE_TRAINING = frozenset({GangPhase.STARTING, GangPhase.WAITING, GangPhase.RECOVERING})
_WITHDRAWN = "for its user, who has resumed it since"
_NEAR_SECONDS = 10.0  # to get workers where there was room; then anywhere, since others may have been faster


@dataclass
class GangEntry:
    """What is known of one gang.

    Attributes:
        attempt: Its number.
        gang: The gang as it was seen last.
        limits: What its job's elasticity was when its gang was looked at last.
        changed_at: When its layout or target last changed, or it recovered.
        trained_at: When it trained last.
        begun_at: When it was started or adopted.
        stored: Sequence number of its newest report in the record, which need not be read: only this process writes
            reports while it has the lease.
        seen_at: When it last answered; ``None`` if it has not since the service began.
        why: Why it was ordered to pause, as in ``Pause``, also if its user has withdrawn that.
        looked_at: When it began to look for workers under its latest orders; ``None`` before that.
    """

    attempt: int
    gang: Gang
    limits: ElasticityConfig | None
    changed_at: float
    trained_at: float
    begun_at: float
    stored: int
    seen_at: float | None = None
    why: str | None = None
    looked_at: float | None = None


@dataclass
class GangMemory:
    """The gangs of all jobs that have one, from one pass to the next; it does not survive the service.

    Attributes:
        clock: Returns seconds.
        entries: By job, its gang.
        unusable: Nodes on which no rank can run.
        held: When jobs that lost their gangs may have another.
    """

    clock: Callable[[], float] = time.monotonic
    entries: dict[str, GangEntry] = field(default_factory=dict, init=False)
    unusable: tuple[str, ...] = field(default=(), init=False)
    held: dict[str, float] = field(default_factory=dict, init=False)

    def start(
        self, job: JobRecord, attempt: int, target: Layout, limit: float | None = None, near: Labels = (),
        stored: int = 0,
    ) -> Orders:  # fmt: skip
        """Note that a gang is about to start, or was started before the service, and return its orders.

        Args:
            job: Its job.
            attempt: Its number.
            target: The layout that it is to have.
            limit: Bytes that its ranks may need.
            near: Labels of the nodes on which it is to get its workers.
            stored: Sequence number of its newest report in the record; 0 if there is none.
        """
        gang, now = Gang(None, target, limit=limit, near=near), self.clock()
        self.entries[job.id] = GangEntry(attempt, gang, job.spec.elasticity, now, now, now, stored)
        return self.orders(job)

    def takes_part(self, job: JobRecord) -> bool:
        """Whether a job has or wants resources. A gang that only keeps a state does not, unless it has lost it."""
        if self.held.get(job.id, 0.0) > self.clock():
            return False
        entry = self.entries.get(job.id)
        return not (job.has_gang and job.keeps) or (entry is not None and entry.gang.waiting)

    def orders(self, job: JobRecord) -> Orders:
        """Orders for a job's gang."""
        entry = self.entries[job.id]
        if job.pause_requested:
            self.order(job.id, None, Cause.PAUSED)
        elif entry.gang.target is None and entry.gang.cause is Cause.PAUSED:  # the user has withdrawn it
            layout = entry.gang.layout or _layout_in_record(job, entry.stored)
            self.order(job.id, layout, Cause.WORKER_BACK, why=_WITHDRAWN)  # perhaps too late: it may pause all the same
        if entry.gang.near and entry.looked_at is not None and self.clock() >= entry.looked_at + _NEAR_SECONDS:
            entry.gang = replace(entry.gang, near=())
        return replace(entry.gang.orders(job.spec, job.basis), unusable=self.unusable, steers=tuple(job.steers))

    def saw(self, job: JobRecord, status: GangStatus) -> None:
        """Note a gang's status."""
        entry, now = self.entries[job.id], self.clock()
        starting, waiting = status.phase is GangPhase.STARTING, status.phase is GangPhase.WAITING
        if not starting or job.state is JobState.SCHEDULING:  # one that trains appears to start when slow to answer
            entry.seen_at = now
            layout = None if waiting else entry.gang.layout if starting else status.layout
            self._change(entry, replace(entry.gang, layout=layout, waiting=waiting))
        if status.phase is GangPhase.RECOVERING:
            entry.changed_at = now
        # It looks for any workers it needs, unless it must stop first because its replicas' layout is to change.
        target = entry.gang.target
        stays = status.layout and target and status.layout.per_replica == target.per_replica
        if entry.looked_at is None and (stays or status.phase in _BEFORE_TRAINING):
            entry.looked_at = now
        if status.phase in (GangPhase.TRAINING, GangPhase.SAVING):
            entry.trained_at = now

    def order(
        self, job_id: str, target: Layout | None, cause: Cause, limit: float | None = None, near: Labels = (),
        why: str | None = None,
    ) -> None:  # fmt: skip
        """Change a gang's orders; without a limit, its present one stays. ``why``: of a pause."""
        entry = self.entries[job_id]
        entry.why = why
        limit = entry.gang.limit if limit is None else limit
        entry.looked_at = None
        self._change(entry, replace(entry.gang, target=target, cause=cause, limit=limit, near=near))

    def gangs(self, jobs: Collection[JobRecord]) -> dict[str, Gang]:
        """The gangs of some jobs as they are now. A change of a job's limits is reported once."""
        now, gangs = self.clock(), {}
        for job in jobs:
            if entry := self.entries.get(job.id):
                gangs[job.id] = replace(
                    entry.gang,
                    unchanged_seconds=now - entry.changed_at,
                    stalled_seconds=now - entry.trained_at,
                    limits_changed=entry.limits != job.spec.elasticity,
                )
                entry.limits = job.spec.elasticity
        return gangs

    def _change(self, entry: GangEntry, gang: Gang) -> None:
        if (gang.layout, gang.target) != (entry.gang.layout, entry.gang.target):
            entry.changed_at = self.clock()
        entry.gang = gang


def _layout_in_record(job: JobRecord, stored: int) -> Layout:
    """The layout of a job's gang as far as its record tells.

    Args:
        job: The job.
        stored: Sequence number of the gang's newest report in the record; 0 if there is none.
    """
    demand, layout = demand_of(job.spec, job.basis), job.present_layout
    # One that starts may have been given less than the job's own layout, or an earlier gang's, by quotas and nodes. It
    # had room for the smallest, and grows once it trains.
    if job.state is JobState.SCHEDULING and not stored and demand.layouts:
        return demand.layouts[0]
    if layout in demand.layouts or job.state is JobState.RUNNING:
        return layout
    return demand.fastest(demand.layouts) or layout


class Reconciler:
    """Makes passes over all active jobs.

    Args:
        store: The record.
        gangs: A connected cluster.
        policy: When gangs may grow.
        clock: Returns seconds.
        limits: Returns the quotas of tenants and queues.
        tracing: Creates spans of jobs' progress; ``None``: no tracing.
        autoscales: Whether to request the nodes that jobs need from the cluster.
        topology: Node labels that indicate proximity, as in ``decide``.
        silent_seconds: How long a gang's supervisor may not answer before the gang is ended.
    """

    def __init__(
        self, store: JobStore, gangs: Gangs, policy: ResizePolicy | None = None,
        clock: Callable[[], float] = time.monotonic, limits: Callable[[], Limits] = Limits,
        tracing: "Tracing | None" = None, autoscales: bool = False, topology: Sequence[str] = (),
        silent_seconds: float = 60.0,
    ) -> None:  # fmt: skip
        self._topology, self._silent_seconds = topology, silent_seconds
        self._store, self._gangs = store, gangs
        self._policy, self._memory = policy or ResizePolicy(), GangMemory(clock)
        self._decided = SchedulerMemory()
        self._limits, self._tracing = limits, tracing
        self._clock = clock
        self._shown: list[dict[str, Any]] | None = None  # the nodes as they were published last
        self._shown_at = self._cleared_at = clock()
        self._passes = 0
        self._room_since: dict[str, float] = {}  # by job, since when there has been room for it
        self._faults = RecurringFaults(logger)
        self._autoscaling = Autoscaling(gangs, clock) if autoscales else None

    def tick(self) -> None:
        """Make one pass. Errors with one job are logged and do not hold up the others.

        Raises:
            LeaseLost: Another process schedules now.
            Exception: The record or the cluster cannot be reached.
        """
        self._follow(self._store.active())
        jobs = self._store.active()
        if unnumbered := [job for job in jobs if job.arrival is None]:
            for job in unnumbered:
                self._store.number(job.id)
            jobs = self._store.active()
        # Gangs that outlived their jobs, as when the service died between a change and carrying it out.
        for job_id, attempt in self._gangs.alive() - {(job.id, job.attempt) for job in jobs if job.has_gang}:
            with self._apart(job_id, attempt), suppress(JobNotFound):  # of another service on the same cluster
                job = self._store.get(job_id)
                if not (job.has_gang and job.attempt == attempt):
                    self._gangs.end(job_id, attempt)

        with_gangs, entries = {job.id for job in jobs if job.has_gang}, self._memory.entries
        self._memory.entries = {job_id: entry for job_id, entry in entries.items() if job_id in with_gangs}
        jobs = [job for job in jobs if self._memory.takes_part(job)]
        gangs, nodes = self._memory.gangs(jobs), self._gangs.nodes()
        self._memory.unusable = tuple(sorted(node.node_id for node in nodes if node.unusable is not None))
        # The nodes for other processes to show, and old requests, each when it is due.
        now, shown = self._clock(), [asdict(node) for node in sorted(nodes, key=lambda node: node.node_id)]
        if shown != self._shown or now >= self._shown_at + SHOW_SECONDS:
            self._store.keep_snapshot(NODES, shown)
            self._shown, self._shown_at = shown, now
        if now >= self._cleared_at + CLEAR_SECONDS:
            self._store.forget_old_requests()
            self._cleared_at = now

        now = self._clock()
        room_seconds = {job_id: now - since for job_id, since in self._room_since.items()}
        decided = decide(jobs, nodes, gangs, room_seconds, self._policy, self._limits(), self._topology, self._decided)
        unchanged = Reason.WAITING_FOR_RESOURCES
        actions = [  # but of those that are to wait for what their records say already
            each
            for each in decided
            if not (isinstance(each, Wait) and (each.job.reason, each.job.message) == (unchanged, each.message))
        ]
        now, roomy = self._clock(), [action.job.id for action in actions if isinstance(action, CapacityObserved)]
        self._room_since = {job_id: self._room_since.get(job_id, now) for job_id in roomy}
        explained = [action for action in actions if isinstance(action, Explain)]
        launched = {action.job.id for action in actions if isinstance(action, Launch)}
        waits = (each.job.id for each in actions if isinstance(each, Admit | Wait))
        waiting = dict.fromkeys(job_id for job_id in waits if job_id not in launched)
        put_off = set([*waiting][_MOST_TOLD_TO_WAIT:])
        for action in actions:
            if isinstance(action, Explain) or action.job.id in put_off:
                continue
            job = action.job
            with self._apart(job.id, job.attempt, job.traceparent):
                match action:
                    case Admit():
                        self._change(job, Reason.HEAD_OF_QUEUE, "is next to be placed")
                    case Wait(message=message):
                        self._change(job, Reason.WAITING_FOR_RESOURCES, message)
                    case Launch(layout=layout, message=message, limit=limit, near=near):
                        attempt = job.attempt + 1
                        # With what its user has changed since the pass began: from here on a gang makes such changes.
                        present = self._change(job, Reason.GANG_STARTING, message, attempt)
                        self._start_gang(present, self._memory.start(job, attempt, layout, limit, near))
                    case Resize(layout=layout, cause=cause, message=message, limit=limit, near=near):
                        logger.info("%s: %s", job.id, message)
                        self._memory.order(job.id, layout, cause, limit, near)
                    case Pause(message=message, why=why):
                        logger.info("%s: %s", job.id, message)
                        self._memory.order(job.id, None, Cause.PREEMPTED, why=why)
        # What queued jobs wait for, if it has changed. Whatever happens changes the numbers of free resources and of
        # jobs ahead in all of these. So of long queues only some jobs have their turn in a pass, besides new ones and,
        # of few classes, the first of each; their number is a power of two so that none is left out when it changes.
        self._passes += 1
        turns = 1 << ((sum(len(each.entries) for each in explained) - 1) // _MOST_EXPLAINED).bit_length()
        news: dict[str, str] = {}
        for each in explained:
            for number, entry in enumerate(each.entries):
                job = entry.job
                has_turn = (self._passes - (job.arrival or 0)) % turns == 0
                first = number == 0 and len(explained) <= _MOST_EXPLAINED
                due = has_turn or first or job.waiting_for is None
                if due and (message := each.to(entry)) != job.waiting_for:
                    news[job.id] = message
        if news:
            self._store.explain(news)
        if self._autoscaling:
            jobs = [job for job in self._store.active() if self._memory.takes_part(job)]
            self._autoscaling.ask(*requested_nodes(jobs, self._limits(), self._decided.demand))
        self._faults.settle()

    def unseen(self, seconds: float) -> dict[str, datetime | None]:
        """Return when gangs that have been silent for ``seconds`` last answered; ``None``: before the service began."""
        now, time_now = self._clock(), time.time()
        return {  # to the second, so that two passes say the same of a gang that has not answered in between
            job_id: None
            if entry.seen_at is None
            else datetime.fromtimestamp(round(time_now - (now - entry.seen_at)), UTC)
            for job_id, entry in self._memory.entries.items()
            if now - (entry.begun_at if entry.seen_at is None else entry.seen_at) >= seconds
        }

    def store_updates(self, gangs: Collection[GangKey]) -> None:
        """Poll some gangs between two passes and store their reports; the next pass decides what follows.

        Raises:
            LeaseLost: Another process schedules now.
            Exception: The record or the cluster cannot be reached.
        """
        jobs = self._store.some({job_id for job_id, _ in gangs})
        self._follow([job for job in jobs if (job.id, job.attempt) in gangs])

    def _follow(self, jobs: Sequence[JobRecord]) -> None:
        """Carry out users' requests, poll the gangs of all other jobs at once, and store their reports."""
        # Adopt gangs that were started before this service; some have never reported.
        attempts = {job_id: entry.attempt for job_id, entry in self._memory.entries.items()}
        unknown = [job for job in jobs if job.has_gang and attempts.get(job.id) != job.attempt]
        stored = self._store.last_sequences([job.id for job in unknown]) if unknown else {}
        for job in unknown:
            with self._apart(job.id, job.attempt, job.traceparent):
                self._memory.start(job, job.attempt, _layout_in_record(job, stored[job.id]), stored=stored[job.id])

        polled: list[tuple[JobRecord, PollRequest]] = []
        for job in jobs:
            pauses = job.pause_requested and job.state is not JobState.PAUSED
            if not (pauses or job.has_gang or job.cancel_requested):
                continue  # as most jobs of a long queue, for each of which the context would be entered
            with self._apart(job.id, job.attempt, job.traceparent):
                if job.cancel_requested:
                    if job.has_gang:
                        self._gangs.end(job.id, job.attempt)
                    self._change(job, Reason.CANCELLED_BY_USER, "cancelled by its user")
                elif job.has_gang:
                    if job.commands:  # sent at most once: a drill that a dying service has lost can be requested again
                        for command in self._store.take_commands(job.id):
                            self._gangs.ask(job.id, job.attempt, command)
                    orders, stored_up_to = self._memory.orders(job), self._memory.entries[job.id].stored
                    polled.append((job, PollRequest((job.id, job.attempt), stored_up_to, orders)))
                else:
                    self._change(job, Reason.PAUSED_BY_USER, "paused before it had a gang")

        answered: list[tuple[JobRecord, GangStatus]] = []
        for (job, _), result in zip(polled, self._gangs.poll([request for _, request in polled]), strict=True):
            with self._apart(job.id, job.attempt, job.traceparent):
                if isinstance(result, Exception):
                    raise result
                starting = job.state is JobState.SCHEDULING
                patience = max(self._silent_seconds, _START_SECONDS if starting else 0.0)
                if result is not None and result.silent_seconds > patience:
                    self._gangs.end_hung(job.id, job.attempt)
                    silence = f"did not answer for {result.silent_seconds:.0f} s and was ended"
                    self._lost(job, f"the supervisor of gang {job.attempt} {silence}")
                elif result is not None:
                    self._memory.saw(job, result)
                    answered.append((job, result))
                elif not (starting and stored.get(job.id) == 0):
                    self._lost(job, f"gang {job.attempt} is gone")
                elif job.pause_requested:
                    self._change(job, Reason.PAUSED_BY_USER, "paused before it had a gang")
                else:  # it is in the record, but the previous service died before starting it
                    self._start_gang(job, self._memory.orders(job))
        self._record(answered)

    def _record(self, answered: Sequence[tuple[JobRecord, GangStatus]]) -> None:
        """Store the reports of many gangs, and then apply the changes that follow from their phases."""
        numbered: dict[str, list[NumberedReport]] = {
            job.id: [(each.sequence, each.time, each.report) for each in status.reports] for job, status in answered
        }
        reporting = [(job, numbered[job.id]) for job, status in answered if status.reports]
        stored: set[str] = set()
        for begin in range(0, len(reporting), _JOBS_A_TRANSACTION):
            together = reporting[begin : begin + _JOBS_A_TRANSACTION]
            try:
                self._store.append_many(together)
                stored |= {job.id for job, _ in together}
            except LeaseLost:
                raise
            except Exception as error:
                logger.info("the reports of %d jobs are stored one by one: %s", len(together), error)
        for job, status in answered:
            with self._apart(job.id, job.attempt, job.traceparent):
                if status.reports:
                    if job.id not in stored:
                        self._store.append_reports(job.id, job.attempt, numbered[job.id])
                    self._memory.entries[job.id].stored = status.reports[-1].sequence
                    for each in status.reports:
                        if self._tracing and isinstance(each.report, RestartReport):
                            self._tracing.restarted(job, each.time, each.report)
                # The change of state that a continuing gang's status brings, if it is new.
                phase, message = status.phase, status.message
                reason: Reason | None = None
                if job.state is JobState.SCHEDULING:
                    paused_for_others = phase is GangPhase.PAUSED and not job.pause_requested
                    if paused_for_others or phase in (GangPhase.TRAINING, GangPhase.SAVING, GangPhase.SUCCEEDED):
                        reason = Reason.GANG_STARTED
                    elif phase in _BEFORE_TRAINING:
                        reason = Reason.GANG_STARTING
                elif phase in (GangPhase.TRAINING, GangPhase.SUCCEEDED):
                    recovered = job.reason in (Reason.GANG_RECOVERING, Reason.WAITING_FOR_RESOURCES)
                    reason = Reason.GANG_STARTED if recovered else None
                elif (job.reason, job.message) != (_INTERRUPTED.get(phase), message):
                    reason = _INTERRUPTED.get(phase)
                if reason:
                    job = self._change(job, reason, message)
                ended = _ENDS.get(phase)
                if phase is GangPhase.PAUSED and job.pause_requested:
                    ended = Reason.PAUSED_BY_USER
                elif phase is GangPhase.PAUSED:
                    entry = self._memory.entries.get(job.id)
                    why = (entry and entry.why) or GAVE_WAY
                    ended = Reason.RESUMED_BY_USER if why == _WITHDRAWN else Reason.PAUSED_FOR_PRIORITY
                    message = f"{message} {why}"
                if ended:
                    self._change(job, ended, message)
                    self._gangs.end(job.id, job.attempt)

    def _lost(self, job: JobRecord, what: str) -> None:
        """Requeue a job whose supervisor is gone: at once the first time, then with exponential back-off."""
        window = job.spec.fault_tolerance.restart_window_seconds
        present = datetime.now(UTC)
        since = present - timedelta(seconds=window)
        # Losses with checkpoints in between do not stop a job. Later times are from before a clock was set back.
        since = max([since, *(time for time in (job.queued_at, job.checkpoint_at) if time and time <= present)])
        lost = self._store.count_changes(job.id, Reason.GANG_LOST, since) + 1
        if lost <= MOST_LOSSES:
            pause = 0.0 if lost == 1 else min(_LOSS_PAUSE * 2 ** (lost - 2), _LONGEST_PAUSE)
            now = self._clock()
            held = {job_id: until for job_id, until in self._memory.held.items() if until > now}
            self._memory.held = held | {job.id: now + pause}
            later = f" in {pause:g} s" if pause else ""
            self._change(job, Reason.GANG_LOST, f"{what}, through no fault of the job, which gets a new one{later}")
        else:
            cause = f"something ends the gangs' supervisors (the last message: {job.message})"
            remedy = f"see the logs of the service and of Ray's head, and then: boost retry {job.id}"
            message = f"{what}, the {lost}th within {window:g} s and without a new checkpoint; {cause}: {remedy}"
            self._change(job, Reason.RESTARTS_EXHAUSTED, message)

    def _start_gang(self, job: JobRecord, orders: Orders) -> None:
        checkpoint = job.spec.checkpoint.model_copy(update={"url": job.checkpoint_url})
        tag = JobTag(job.id, job.attempt, job.name, job.tenant, job.submitted_by)
        self._gangs.launch(tag, job.spec.model_copy(update={"checkpoint": checkpoint}), orders, job.basis)

    @contextmanager
    def _apart(self, job_id: str, attempt: int, traceparent: str | None = None) -> Iterator[None]:
        """Keep errors with one job from the others."""
        with about(job=job_id, attempt=attempt, trace_id=traceparent and traceparent.split("-")[1]):
            try:
                yield
            except LeaseLost:
                raise
            except (IllegalTransition, TakenBack) as overtaken:  # its user has cancelled or resumed it in the meantime
                logger.info("%s: %s", job_id, overtaken)
            except Exception as error:
                self._faults.occurred(f"{job_id}: this pass failed", error)

    def _change(self, job: JobRecord, reason: Reason, message: str, attempt: int | None = None) -> JobRecord:
        after = self._store.change(job.id, reason, message, attempt=attempt)
        if (after.state, after.reason) != (job.state, job.reason):
            with about(attempt=after.attempt):
                logger.info("%s is %s, %s: %s", job.id, after.state, after.reason, after.message)
        if self._tracing and job.state is JobState.SCHEDULING and after.state is not JobState.SCHEDULING:
            changes = EventFilter(kinds=("state",), since=job.waiting_since)
            self._tracing.left_queue(after, self._store.events(job.id, limit=_MOST_CHANGES, wanted=changes))
        return after
