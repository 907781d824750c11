"""Which jobs may go before one that waits for room because they cannot delay it.

How long gangs run is not known, so a job B may start before a blocked job H only if it does no harm in whatever order
gangs end: for every set of gangs that may have ended, if H fits without B then it fits with B. Nor is it known where
gangs are, or where Ray will place B; so that must be true wherever they are. The test may refuse what would be
harmless. It never lets through what could harm, as long as gangs end, shrink for others' sake, or come back to their
targets; nodes that come and go, and what others do on the same cluster, can upset any plan.

All is counted in H's units: g ranks that share a node, of which H needs c. Let q(x) be the units for which a node has
room of which the amounts x are free: the least over the resources r of ⌊x_r / u_r⌋. When ranks that share a node and
take the amounts v come to it, then, whatever x is,

    min_r ⌊v_r / u_r⌋  ≤  q(x) − q(x − v)  ≤  max_r ⌈v_r / u_r⌉.

For with k units on the left, each resource has room for k units less than before; and the resource that is the
scarcest afterwards had room for at most ⌈v_r / u_r⌉ units more before. So a gang that stays takes between its sums of
the left and of the right sides, over its groups, of the Q units of the empty nodes; 0 at least if it may be on other
nodes than H's. What all that stay take is therefore among the sums of one number of each gang's range, or 0 if it has
ended: a set R of numbers, built gang by gang. H fits where no more than Q − c are taken. B adds at most D, the sum of
its right sides. So B delays H in no case if R has no number that is above Q − c − D and not above Q − c.

Resources that decide nothing are left out of a unit (``Scarcity``): so jobs that take CPUs only start beside GPUs that
are waited for. Where H allows groups of several sizes, B must pass for each: at the size at which H fits without B, it
fits with B.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations

from boost_core.config import Layout
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.scheduler.demand import Amounts, Demand
from tests.reference_scheduler.cluster_snapshot import ClusterSnapshot
from tests.reference_scheduler.placement import ROUNDING, copies


class AllocatedUnits:
    """The possible total numbers of units taken: every sum of one number from each of some ranges.

    Args:
        spare: Maximum that may be taken; larger sums are ignored.
    """

    def __init__(self, spare: int) -> None:
        self.spare, self._mask = spare, (1 << max(0, spare + 1)) - 1
        self.sums = 1 & self._mask  # a bit for each

    def add(self, low: int, high: int) -> None:
        """Add a gang that may take units: none, or a number from a range."""
        shifted, width = self.sums << low, 1
        while width <= high - low:
            step = min(width, high - low + 1 - width)
            shifted |= shifted << step
            width += step
        self.sums = (self.sums | shifted) & self._mask


class Scarcity:
    """The scarce resources for one job, so that plentiful ones can be left out.

    A resource r decides nothing next to another one s if on every node, whichever gangs end, there is room for as many
    units by r as by s: x_r / u_r ≥ ⌊x_s / u_s⌋, with x what is free and u a unit of the job. That is so for sure in two
    cases. Either x_r is enough now for all of s that the node has. Or x_r − ρ·x_s, with ρ = u_r / u_s, is 0 at least
    and stays so: a gang that ends adds v_r − ρ·v_s, so of all gangs those count that hold less of r than goes with what
    they hold of s.

    Args:
        nodes: Nodes that the job can use.
        each: Resources that one of its ranks takes.
        used_by_others: Resources of nodes that are used by others than our gangs.
    """

    def __init__(self, nodes: Sequence[NodeCapacity], each: Amounts, used_by_others: Mapping[str, float]) -> None:
        self._nodes, self._each = nodes, each
        self._known = {name for name in each if used_by_others.get(name, 0) <= ROUNDING}
        self._coming: dict[str, float] = defaultdict(float)
        self._short: dict[tuple[str, str], float] = defaultdict(float)
        self._enough: dict[tuple[int, str, str], float] = {}
        # How much of a resource every node has free beyond what matches the free amount of another.
        self._balance: dict[tuple[str, str], float] = {}
        for one, other in permutations(each, 2):
            rate = each[one] / each[other]
            useful = [node for node in nodes if node.total.get(other, 0) + ROUNDING >= each[other]]
            beyond = (node.free.get(one, 0) - rate * node.free.get(other, 0) for node in useful)
            self._balance[one, other] = min(beyond, default=math.inf)

    def account_for(self, demand: Demand, ranks: int, unseen: int) -> None:
        """Account for a gang that may be on some of the nodes.

        Args:
            demand: Its demand.
            ranks: Number of ranks it has or may have.
            unseen: Number of these whose resources nodes may still report as free.
        """
        for name, amount in demand.amounts(unseen).items():
            self._coming[name] += amount
        for one, other in self._balance:
            rate = self._each[one] / self._each[other]
            self._short[one, other] += ranks * max(0.0, rate * demand.each.get(other, 0) - demand.each.get(one, 0))

    def deciding(self, size: int, taken: Amounts) -> frozenset[str]:
        """The resources that may be scarce for groups of ``size`` ranks if ``taken`` is used on some node as well."""
        left = set(self._each)
        for one in self._each:
            needed = self._coming[one] + taken.get(one, 0)
            for other in left - {one}:
                # How much every node has free beyond what matches all of the other resource that it has.
                key = size, one, other
                if key not in self._enough:
                    unit = {other: self._each[other] * size}
                    units = [(node, copies(node.total, unit)) for node in self._nodes]
                    beyond = (node.free.get(one, 0) - self._each[one] * size * count for node, count in units if count)
                    self._enough[key] = min(beyond, default=math.inf)
                known = one in self._known and other in self._known
                balance = self._balance[one, other] - self._short[one, other] + ROUNDING if known else -math.inf
                if self._enough[key] >= needed or balance >= needed:
                    left.remove(one)
                    break
        return frozenset(left)


@dataclass(frozen=True)
class _Stay:
    """A gang that may stay.

    Attributes:
        demand: Its demand.
        layouts: Layouts that it may have.
        inside: Whether it is certainly on the head's nodes.
    """

    demand: Demand
    layouts: frozenset[Layout]
    inside: bool

    def units(self, unit: Amounts) -> tuple[int, int]:
        """The fewest and the most units for which it leaves no room: amounts that must be free together on one node."""
        low, high = [], []
        for layout in self.layouts:
            size, count = layout.units(self.demand.placement)
            parts = [size * self.demand.each.get(name, 0) / amount for name, amount in unit.items()] or [0.0]
            low.append(count * math.floor(min(parts) + ROUNDING))
            high.append(count * math.ceil(max(parts) - ROUNDING))
        return min(low) if self.inside else 0, max(high)


class Head:
    """A job that waits for room and must not be delayed.

    Args:
        cluster: The cluster snapshot; later decisions are taken into account, too.
        job: The waiting job.

    Attributes:
        job: The waiting job.
        nodes: Nodes that can hold ranks of it.
    """

    def __init__(self, cluster: ClusterSnapshot, job: JobRecord) -> None:
        self.job, self.nodes = job, cluster.nodes(job)
        self._cluster, self._demand = cluster, cluster.demands[job.id]
        steady = [node for node in cluster.capacities if not (node.draining or node.unusable)]
        self._capacities = [node for node in steady if self._demand.takes(node)]
        self._all_steady = len(steady) == len(cluster.capacities)
        self._of_others: dict[str, float] = defaultdict(float)  # used on the nodes by others than our gangs
        for node in cluster.capacities:
            for name, total in node.total.items():
                self._of_others[name] += total - node.free.get(name, 0)
        for job_id, gang in cluster.gangs.items():
            if gang.layout:
                for name, amount in cluster.demands[job_id].amounts(gang.layout.world_size).items():
                    self._of_others[name] -= amount
        self._fewest: dict[int, int] = {}  # groups that the job needs, by the ranks that share a node
        for size, count in (layout.units(self._demand.placement) for layout in self._demand.layouts):
            self._fewest[size] = min(count, self._fewest.get(size, count))
        self._known, self._resized = 0, -1  # of the cluster: gangs taken into account, and the number of resized ones
        self._stays: list[_Stay] = []
        # By the ranks that share a node and the resources that decide: a unit, and how many may be taken.
        self._allocated: dict[tuple[int, frozenset[str]], tuple[Amounts, AllocatedUnits]] = {}

    def delayed_by(self, job: JobRecord, layout: Layout) -> bool:
        """Whether a gang of another job that starts now might delay this one."""
        # Newly started gangs are taken into account; if one was resized, all are anew.
        if self._resized != self._cluster.resized:
            self._known, self._resized, self._stays, self._allocated = 0, self._cluster.resized, [], {}
            self._scarcity = Scarcity(self._capacities, self._demand.each, self._of_others)
        for job_id, gang in islice(self._cluster.gangs.items(), self._known, None):
            other = self._cluster.jobs[job_id]
            if other is self.job or not gang.claimed or not self._cluster.nodes(other) & self.nodes:
                continue
            demand, shown = self._cluster.demands[job_id], gang.layout.world_size if gang.layout else 0
            self._scarcity.account_for(demand, gang.claimed, unseen=gang.claimed - shown)
            layouts = {each for each in (gang.layout, gang.target) if each}
            if gang.layout != gang.target or other.spec.priority < self.job.spec.priority:  # may have to do with less
                layouts |= {each for each in demand.layouts if each.world_size <= gang.claimed}
            inside = self._all_steady and self._cluster.nodes(other) & ~self.nodes == 0
            stay = _Stay(demand, frozenset(layouts), inside)
            self._stays.append(stay)
            for unit, allocated in self._allocated.values():
                allocated.add(*stay.units(unit))
        self._known = len(self._cluster.gangs)

        demand = self._cluster.demands[job.id]
        for size in self._fewest:
            deciding = self._scarcity.deciding(size, demand.amounts(layout.world_size))
            if (size, deciding) not in self._allocated:
                unit = {name: amount for name, amount in self._demand.amounts(size).items() if name in deciding}
                # Units of the nodes in all, and of what is free; none if no resource decides.
                nodes = self._capacities if unit else []
                units = [(copies(node.total, unit), copies(node.free, unit)) for node in nodes]
                allocated = AllocatedUnits(sum(total for total, _ in units) - self._fewest[size])
                for stay in self._stays:
                    allocated.add(*stay.units(unit))
                if any(self._of_others[name] > ROUNDING for name in unit):
                    allocated.add(0, sum(total - free for total, free in units))
                self._allocated[size, deciding] = unit, allocated
            unit, allocated = self._allocated[size, deciding]
            _, most = _Stay(demand, frozenset({layout}), inside=False).units(unit)
            # Is some sum within the maximum, but not with these added?
            if most > 0 and allocated.sums >> max(0, allocated.spare - most + 1) != 0:
                return True
        return False
