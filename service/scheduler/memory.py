"""The scheduler's memory of gangs from one pass to the next. It does not survive the service."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from boost_core.config import ElasticityConfig, Layout
from boost_core.messages import Cause
from service.gang.status import GangPhase, GangStatus, Labels, Orders
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler.actions import Gang
from service.scheduler.demand import demand_of

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
        why: Why it was ordered to pause, as in ``Pause``.
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

    Attributes:
        entries: By job, its gang.
        unusable: Nodes on which no rank can run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.entries: dict[str, GangEntry] = {}
        self.unusable: tuple[str, ...] = ()
        self._held: dict[str, float] = {}  # when jobs that lost their gangs may have another

    def start(
        self, job: JobRecord, attempt: int, target: Layout, limit: float | None = None, near: Labels = ()
    ) -> Orders:
        """Note that a gang is about to start, and return its orders. ``limit``: bytes that its ranks may need."""
        gang, now = Gang(None, target, limit=limit, near=near), self._clock()
        self.entries[job.id] = GangEntry(attempt, gang, job.spec.elasticity, now, now, now, stored=0)
        return replace(gang.orders(job.spec, job.basis), unusable=self.unusable)

    def recall(self, job: JobRecord, stored: int) -> None:
        """Adopt a gang that was started before the service, keeping the layout in the record.

        Args:
            job: Its job.
            stored: Sequence number of its newest report in the record; 0 if there is none.
        """
        gang, now = Gang(None, _layout_in_record(job)), self._clock()
        self.entries[job.id] = GangEntry(job.attempt, gang, job.spec.elasticity, now, now, now, stored)

    def takes_part(self, job: JobRecord) -> bool:
        """Whether a job has or wants resources. A gang that only keeps a state does not, unless it has lost it."""
        if self._held.get(job.id, 0.0) > self._clock():
            return False
        entry = self.entries.get(job.id)
        return not (job.has_gang and job.keeps) or (entry is not None and entry.gang.waiting)

    def hold(self, job: JobRecord, seconds: float) -> None:
        """Let a job take no part for some time."""
        now = self._clock()
        self._held = {job_id: until for job_id, until in self._held.items() if until > now} | {job.id: now + seconds}

    def orders(self, job: JobRecord) -> Orders:
        """Orders for a job's gang."""
        entry = self.entries[job.id]
        if job.pause_requested:
            self.order(job.id, None, Cause.PAUSED)
        elif entry.gang.target is None and entry.gang.cause is Cause.PAUSED:  # the user has withdrawn it
            self.order(job.id, entry.gang.layout or _layout_in_record(job), Cause.WORKER_BACK)
        if entry.gang.near and entry.looked_at is not None and self._clock() >= entry.looked_at + _NEAR_SECONDS:
            entry.gang = replace(entry.gang, near=())
        return replace(entry.gang.orders(job.spec, job.basis), unusable=self.unusable)

    def saw(self, job: JobRecord, status: GangStatus) -> None:
        """Note a gang's status."""
        entry, now = self.entries[job.id], self._clock()
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
        now, gangs = self._clock(), {}
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
            entry.changed_at = self._clock()
        entry.gang = gang


def _layout_in_record(job: JobRecord) -> Layout:
    demand, layout = demand_of(job.spec, job.basis), job.present_layout
    if layout in demand.layouts or job.state is JobState.RUNNING:
        return layout
    return demand.fastest(demand.layouts) or layout
