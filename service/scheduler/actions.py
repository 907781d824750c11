"""The scheduler's view of gangs, and its possible decisions. Plain data."""

from dataclasses import dataclass
from math import inf

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause
from boost_core.plan.machine import NOMINAL, Basis
from service.gang.status import Labels, Orders
from service.jobs.model import JobRecord
from service.scheduler.demand import Demand, demand_of


@dataclass(frozen=True)
class ResizePolicy:
    """When a gang may grow. Without limits, gangs would change their layout whenever nodes or jobs come and go.

    Attributes:
        cooldown_seconds: A gang grows if its layout has been the same for this long,
        settle_seconds: if there has been room for this long,
        minimum_gain: and if its throughput is predicted to rise by at least this share,
        layout_gain: or by this share if tensor, pipeline or context parallelism must change.
        patience_seconds: A gang that lacks workers may wait for them to come back for this long.
    """

    cooldown_seconds: float = 30.0
    settle_seconds: float = 5.0
    minimum_gain: float = 0.05
    layout_gain: float = 0.2
    patience_seconds: float = 60.0


@dataclass(frozen=True)
class Gang:
    """A gang as the scheduler knows it.

    Attributes:
        layout: Its current layout; ``None`` while it has no workers.
        target: The layout last ordered; ``None`` to pause.
        cause: The reason for the target.
        waiting: Whether it has no workers because it cannot get any.
        unchanged_seconds: Time since its layout or target last changed, or it recovered from something.
        stalled_seconds: Time since it last trained; 0 while it trains.
        limits_changed: Whether the layouts that its job allows have just been changed.
        limit: Bytes that its ranks may need; ``None`` if no longer known.
        near: Labels of the nodes on which it is to get its workers.
    """

    layout: Layout | None
    target: Layout | None
    cause: Cause = Cause.WORKER_BACK
    waiting: bool = False
    unchanged_seconds: float = inf
    stalled_seconds: float = 0.0
    limits_changed: bool = False
    limit: float | None = None
    near: Labels = ()

    @property
    def allocated(self) -> int:
        """Ranks that it has or that are reserved for it."""
        return 0 if self.waiting else self.claimed

    @property
    def claimed(self) -> int:
        """Ranks that count towards quotas. A gang waiting for workers may take its target at any time."""
        return max(layout.world_size if layout else 0 for layout in (self.layout, self.target))

    @property
    def remaining(self) -> int:
        """Ranks that it will have once it has followed its orders."""
        return 0 if self.waiting or self.target is None else self.target.world_size

    def demand(self, spec: JobSpec, basis: Basis = NOMINAL) -> Demand:
        """Its demand on nodes. Arguments as for ``demand_of``."""
        demand = demand_of(spec, basis)
        return demand.holding(self.layout, self.target) if self.limit is None else demand.within(self.limit)

    def orders(self, spec: JobSpec, basis: Basis = NOMINAL) -> Orders:
        """Its orders. Arguments as for ``demand_of``."""
        if self.target is None:
            return Orders(None, (), self.cause)
        replica, most = self.target.per_replica, self.target.world_size
        demand = self.demand(spec, basis)
        allowed = tuple(one for one in demand.layouts if one.per_replica == replica and one.world_size <= most)
        # A gang that has reached its target changes only to return to it.
        arrived = self.layout == self.target
        cause, avoid = Cause.WORKER_BACK if arrived else self.cause, tuple(sorted(demand.avoid))
        return Orders(self.target, allowed, cause, avoid, self.near)


@dataclass(frozen=True)
class Admit:
    """The job leaves the queue."""

    job: JobRecord


@dataclass(frozen=True)
class Launch:
    """The job's next gang starts. ``limit``: bytes that its ranks may need; ``near``: as in ``Orders``."""

    job: JobRecord
    layout: Layout
    message: str
    limit: float
    near: Labels = ()


@dataclass(frozen=True)
class Wait:
    """The job stays SCHEDULING."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class Explain:
    """The job stays in the queue, for the reason that holds in this pass, whether or not it was given before."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class Resize:
    """The job's gang gets another target; ``limit`` and ``near`` as in ``Launch``."""

    job: JobRecord
    layout: Layout
    cause: Cause
    message: str
    limit: float
    near: Labels = ()


@dataclass(frozen=True)
class Pause:
    """The job's gang ends and will start again when there is room.

    ``message`` is for operators; ``why`` goes on from "paused after step 7" for the job's tenant, to whom it names no
    other tenant's job.
    """

    job: JobRecord
    message: str
    why: str


@dataclass(frozen=True)
class CapacityObserved:
    """In total there is room for the job to start or to grow; it counts once it has lasted for a while."""

    job: JobRecord


Action = Admit | Launch | Wait | Explain | Resize | Pause | CapacityObserved
