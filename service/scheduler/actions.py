"""What the scheduler knows of gangs and what it may decide. Plain data."""

from dataclasses import dataclass
from math import inf

from boost_core.config import JobSpec, Layout
from boost_core.messages.reports import Cause
from boost_core.plan.measured import NOMINAL, Basis
from service.gang.status import Labels, Orders
from service.jobs.model import JobRecord
from service.scheduler.demand import Demand, demand_of


@dataclass(frozen=True)
class ResizePolicy:
    """When a gang may grow. Without it gangs would change their layout at every coming and going.

    Attributes:
        cooldown_seconds: A gang grows when its layout has been the same for this long,
        settle_seconds: when there has been room for this long,
        minimum_gain: and when its throughput is predicted to rise by this share at least,
        layout_gain: by this share if tensor, pipeline or context parallelism have to change for it.
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
        layout: That it trains at; ``None`` while it has no workers.
        target: The layout last ordered; ``None`` to pause.
        cause: Why.
        waiting: Whether it has no workers because it cannot get any.
        unchanged_seconds: Since its layout or its target was another, or it recovered from something.
        stalled_seconds: Since it last trained; 0 while it does.
        limits_changed: Whether the layouts that its job allows have just been changed.
        limit: Bytes that its ranks may need; ``None`` if that is not known any more.
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
    def own(self) -> Layout | None:
        """The layout whose place on nodes is its own: it has it or is about to."""
        return self.layout or (None if self.waiting else self.target)

    @property
    def held(self) -> int:
        """Ranks that it has, or that are kept free for it."""
        return 0 if self.waiting else self.claimed

    @property
    def claimed(self) -> int:
        """Ranks that count for quotas. One that waits for workers may take what it was ordered to be at any time."""
        return max(layout.world_size if layout else 0 for layout in (self.layout, self.target))

    @property
    def kept(self) -> int:
        """Ranks that it will have when it has done as ordered."""
        return 0 if self.waiting or self.target is None else self.target.world_size

    def demand(self, spec: JobSpec, basis: Basis = NOMINAL) -> Demand:
        """What it asks of nodes. Arguments as ``demand_of``."""
        demand = demand_of(spec, basis)
        return demand.holding(self.layout, self.target) if self.limit is None else demand.within(self.limit)

    def orders(self, spec: JobSpec, basis: Basis = NOMINAL) -> Orders:
        """What to tell it. Arguments as ``demand_of``."""
        if self.target is None:
            return Orders(None, (), self.cause)
        replica, most = self.target.per_replica, self.target.world_size
        demand = self.demand(spec, basis)
        allowed = tuple(one for one in demand.layouts if one.per_replica == replica and one.world_size <= most)
        # A gang that is what it was to become changes only to come back to that.
        arrived = self.layout == self.target
        cause, avoid = Cause.WORKER_BACK if arrived else self.cause, tuple(sorted(demand.avoid))
        return Orders(self.target, allowed, cause, avoid, self.near)


@dataclass(frozen=True)
class Admit:
    """The job comes out of the queue."""

    job: JobRecord


@dataclass(frozen=True)
class Launch:
    """The job's next gang starts; ``limit``: with so many bytes that its ranks may need; ``near``: as of ``Orders``."""

    job: JobRecord
    layout: Layout
    message: str
    limit: float
    near: Labels = ()


@dataclass(frozen=True)
class Wait:
    """The job, which is SCHEDULING, stays where it is."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class Explain:
    """The job stays in the queue; why, as it is in this round, whether or not that was said before."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class Resize:
    """The job's gang gets another target; ``limit`` and ``near`` as of ``Launch``."""

    job: JobRecord
    layout: Layout
    cause: Cause
    message: str
    limit: float
    near: Labels = ()


@dataclass(frozen=True)
class Pause:
    """The job's gang ends, to start again when there is room."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class CapacityObserved:
    """There is room for the job to start or to grow, by the sums; it counts when it is there for a while."""

    job: JobRecord


Action = Admit | Launch | Wait | Explain | Resize | Pause | CapacityObserved
