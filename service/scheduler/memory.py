"""The scheduler's memory of gangs from one pass to the next. It does not survive the service."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from boost_core.config import ElasticityConfig, Layout
from boost_core.messages import Cause
from service.gang.status import GangPhase, GangStatus, Labels, NodeCapacity, Orders
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler import messages
from service.scheduler.actions import Gang
from service.scheduler.demand import demand_of

_NEAR_SECONDS = 10.0  # to get workers where there was room; then anywhere, since others may have been faster


@dataclass
class _Entry:
    """One gang's entry.

    Attributes:
        changed_at: When its layout or target last changed, or it recovered.
        seen_at: When it last answered; ``None`` if it has not since the service began.
        why: Why it was ordered to pause, as in ``Pause``.
        stored: Sequence number of its newest report in the record.
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


class GangMemory:
    """The gangs of all jobs that have one.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._room_since: dict[str, float] = {}
        self._unusable: tuple[str, ...] = ()  # nodes
        self._held: dict[str, float] = {}  # when jobs that lost their gangs may have another

    def start(
        self, job: JobRecord, attempt: int, target: Layout, limit: float | None = None, near: Labels = ()
    ) -> Orders:
        """Note that a gang is about to start, and return its orders. ``limit``: bytes that its ranks may need."""
        gang, now = Gang(None, target, limit=limit, near=near), self._clock()
        self._entries[job.id] = _Entry(attempt, gang, job.spec.elasticity, now, now, now, stored=0)
        return replace(gang.orders(job.spec, job.basis), unusable=self._unusable)

    def recall(self, job: JobRecord, stored: int) -> None:
        """Adopt a gang that was started before the service, keeping the layout in the record.

        Args:
            job: Its job.
            stored: Sequence number of its newest report in the record; 0 if there is none.
        """
        gang, now = Gang(None, _layout_in_record(job)), self._clock()
        self._entries[job.id] = _Entry(job.attempt, gang, job.spec.elasticity, now, now, now, stored)

    def knows(self, job: JobRecord) -> bool:
        """Whether a job's newest gang has been seen or started since the service began."""
        entry = self._entries.get(job.id)
        return entry is not None and entry.attempt == job.attempt

    def takes_part(self, job: JobRecord) -> bool:
        """Whether a job has or wants resources. A gang that only keeps a state does not, unless it has lost it."""
        if self._held.get(job.id, 0.0) > self._clock():
            return False
        entry = self._entries.get(job.id)
        return not (job.has_gang and job.keeps) or (entry is not None and entry.gang.waiting)

    def hold(self, job: JobRecord, seconds: float) -> None:
        """Let a job take no part for some time."""
        now = self._clock()
        self._held = {job_id: until for job_id, until in self._held.items() if until > now} | {job.id: now + seconds}

    def orders(self, job: JobRecord) -> Orders:
        """Orders for a job's gang."""
        entry = self._entries[job.id]
        if job.pause_requested:
            self.order(job.id, None, Cause.PAUSED)
        elif entry.gang.target is None and entry.gang.cause is Cause.PAUSED:  # the user has withdrawn it
            self.order(job.id, entry.gang.layout or _layout_in_record(job), Cause.WORKER_BACK)
        if entry.gang.near and entry.looked_at is not None and self._clock() >= entry.looked_at + _NEAR_SECONDS:
            entry.gang = replace(entry.gang, near=())
        return replace(entry.gang.orders(job.spec, job.basis), unusable=self._unusable)

    def saw_nodes(self, nodes: Collection[NodeCapacity]) -> None:
        """Note on which nodes no rank can run."""
        self._unusable = tuple(sorted(node.node_id for node in nodes if node.unusable is not None))

    def stored(self, job: JobRecord) -> int:
        """Sequence number of the newest report of a job's gang in the record.

        Only this process writes reports while it has the lease, so the record need not be read.
        """
        return self._entries[job.id].stored

    def saw_stored(self, job: JobRecord, sequence: int) -> None:
        """Note that the record has a gang's reports up to a sequence number."""
        self._entries[job.id].stored = sequence

    def saw(self, job: JobRecord, status: GangStatus) -> None:
        """Note a gang's status."""
        entry, now = self._entries[job.id], self._clock()
        if status.phase is not GangPhase.STARTING or job.state is JobState.SCHEDULING:
            entry.seen_at = now
        if status.phase is GangPhase.WAITING:
            self._change(entry, replace(entry.gang, layout=None, waiting=True))
        elif status.phase is not GangPhase.STARTING:
            self._change(entry, replace(entry.gang, layout=status.layout, waiting=False))
        elif job.state is JobState.SCHEDULING:  # a training gang only appears as STARTING when it is slow to answer
            self._change(entry, replace(entry.gang, waiting=False))
        if status.phase is GangPhase.RECOVERING:
            entry.changed_at = now
        # It looks for any workers it needs, unless it must stop first because its replicas' layout is to change.
        target = entry.gang.target
        stays = status.layout and target and status.layout.per_replica == target.per_replica
        looks = stays or status.phase in (GangPhase.STARTING, GangPhase.WAITING, GangPhase.RECOVERING)
        if entry.looked_at is None and looks:
            entry.looked_at = now
        if status.phase in (GangPhase.TRAINING, GangPhase.SAVING):
            entry.trained_at = now

    def unseen(self, seconds: float) -> dict[str, float | None]:
        """Return how long gangs have been silent, if for at least ``seconds``; ``None``: since the service began."""
        now = self._clock()
        return {
            job_id: None if entry.seen_at is None else now - entry.seen_at
            for job_id, entry in self._entries.items()
            if now - (entry.begun_at if entry.seen_at is None else entry.seen_at) >= seconds
        }

    def why_paused(self, job: JobRecord) -> str:
        """Why a job's gang was ordered to pause for another job, as in ``Pause``."""
        entry = self._entries.get(job.id)
        return (entry and entry.why) or messages.GAVE_WAY

    def order(
        self, job_id: str, target: Layout | None, cause: Cause, limit: float | None = None, near: Labels = (),
        why: str | None = None,
    ) -> None:  # fmt: skip
        """Change a gang's orders; without a limit, its present one stays. ``why``: of a pause."""
        entry = self._entries[job_id]
        entry.why = why
        limit = entry.gang.limit if limit is None else limit
        entry.looked_at = None
        self._change(entry, replace(entry.gang, target=target, cause=cause, limit=limit, near=near))

    def forget_others(self, job_ids: Collection[str]) -> None:
        """Forget all gangs but those of these jobs."""
        self._entries = {job_id: entry for job_id, entry in self._entries.items() if job_id in job_ids}

    def gangs(self, jobs: Collection[JobRecord]) -> dict[str, Gang]:
        """The gangs of some jobs as they are now. A change of a job's limits is reported once."""
        now, gangs = self._clock(), {}
        for job in jobs:
            if entry := self._entries.get(job.id):
                gangs[job.id] = replace(
                    entry.gang,
                    unchanged_seconds=now - entry.changed_at,
                    stalled_seconds=now - entry.trained_at,
                    limits_changed=entry.limits != job.spec.elasticity,
                )
                entry.limits = job.spec.elasticity
        return gangs

    def room_seconds(self) -> dict[str, float]:
        """By job, for how long there has been room according to the decisions so far."""
        now = self._clock()
        return {job_id: now - since for job_id, since in self._room_since.items()}

    def observed_capacity(self, job_ids: Collection[str]) -> None:
        """Note all jobs that there is room for now."""
        now = self._clock()
        self._room_since = {job_id: self._room_since.get(job_id, now) for job_id in job_ids}

    def _change(self, entry: _Entry, gang: Gang) -> None:
        if (gang.layout, gang.target) != (entry.gang.layout, entry.gang.target):
            entry.changed_at = self._clock()
        entry.gang = gang


def _layout_in_record(job: JobRecord) -> Layout:
    demand, layout = demand_of(job.spec, job.basis), job.present_layout
    if layout in demand.layouts or job.state is JobState.RUNNING:
        return layout
    return demand.fastest(demand.layouts) or layout
