"""What the scheduler knows of gangs and what it may decide. Plain data."""

from dataclasses import dataclass
from math import inf

from boost_core.config import JobSpec, Shape
from boost_core.config.reports import Cause
from service.gang.status import Orders
from service.jobs.model import JobRecord
from service.scheduler.demand import Demand, demand_of


@dataclass(frozen=True)
class ResizePolicy:
    """When a gang may grow. Without it gangs would change their shape at every coming and going.

    Attributes:
        cooldown_seconds: A gang grows when its shape has been the same for this long,
        settle_seconds: when there has been room for this long,
        minimum_gain: and when its throughput is predicted to rise by this share at least,
        layout_gain: by this share if tensor or pipeline parallelism have to change for it.
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
        shape: That it trains at; ``None`` while it has no workers.
        target: The shape last ordered; ``None`` to pause.
        cause: Why.
        waiting: Whether it has no workers because it cannot get any.
        unchanged_seconds: Since its shape or its target was another, or it recovered from something.
        stalled_seconds: Since it last trained; 0 while it does.
        limits_changed: Whether the shapes that its job allows have just been changed.
        limit: Bytes that its ranks may need; ``None`` if that is not known any more.
    """

    shape: Shape | None
    target: Shape | None
    cause: Cause = Cause.WORKER_BACK
    waiting: bool = False
    unchanged_seconds: float = inf
    stalled_seconds: float = 0.0
    limits_changed: bool = False
    limit: float | None = None

    @property
    def own(self) -> Shape | None:
        """The shape whose place on nodes is its own: it has it or is about to."""
        return self.shape or (None if self.waiting else self.target)

    @property
    def held(self) -> int:
        """Ranks that it has, or that are kept free for it."""
        return 0 if self.waiting else self.claimed

    @property
    def claimed(self) -> int:
        """Ranks that count for quotas. One that waits for workers may take what it was ordered to be at any time."""
        return max(shape.world_size if shape else 0 for shape in (self.shape, self.target))

    @property
    def kept(self) -> int:
        """Ranks that it will have when it has done as ordered."""
        return 0 if self.waiting or self.target is None else self.target.world_size

    def demand(self, spec: JobSpec) -> Demand:
        """What it asks of nodes."""
        demand = demand_of(spec)
        return demand.holding(self.shape, self.target) if self.limit is None else demand.within(self.limit)

    def orders(self, spec: JobSpec) -> Orders:
        """What to tell it."""
        if self.target is None:
            return Orders(None, (), self.cause)
        demand, most, layout = self.demand(spec), self.target.world_size, self.target.layout
        allowed = tuple(shape for shape in demand.shapes if shape.layout == layout and shape.world_size <= most)
        # A gang that is what it was to become changes only to come back to that.
        arrived = self.shape == self.target
        return Orders(self.target, allowed, Cause.WORKER_BACK if arrived else self.cause, tuple(sorted(demand.avoid)))


@dataclass(frozen=True)
class Admit:
    """The job comes out of the queue."""

    job: JobRecord


@dataclass(frozen=True)
class Launch:
    """The job's next gang starts; ``limit``: with so many bytes that its ranks may need."""

    job: JobRecord
    shape: Shape
    message: str
    limit: float


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
    """The job's gang gets another target; ``limit`` as of ``Launch``."""

    job: JobRecord
    shape: Shape
    cause: Cause
    message: str
    limit: float


@dataclass(frozen=True)
class Pause:
    """The job's gang ends, to start again when there is room."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class RoomSeen:
    """There is room for the job to start or to grow, by the sums; it counts when it is there for a while."""

    job: JobRecord


Action = Admit | Launch | Wait | Explain | Resize | Pause | RoomSeen
