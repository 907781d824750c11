"""Which nodes a job can use, and how much they can hold; quotas of tenants and queues, and their usage.

Every rank of a job's gang counts towards its tenant's quota and its queue's. A job needs room in its tenant's quota
first, then in its queue's, then on the nodes: at each it reserves what it has found so far, and waits if there is too
little. So a job that waits for a quota takes nothing from jobs that do not use it, yet its turn comes: no job behind it
can take what it has already found.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from boost_core.config import Layout
from boost_core.plan import resolve
from service.gang.status import Labels, NodeCapacity
from service.jobs.model import JobRecord
from service.scheduler.demand import Amounts, Demand, Kind

_NO_LIMITS: Mapping[str, Amounts] = MappingProxyType({})
ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4

Nodes = int  # a set of nodes as a bit mask, because such sets are compared all the time


@dataclass(frozen=True)
class Part:
    """A part of the network.

    Attributes:
        labels: Labels that distinguish its nodes; none for the whole network.
        nodes: Numbers of its nodes; ``None``: all.
    """

    labels: Labels = ()
    nodes: frozenset[int] | None = None


_WHOLE = Part()
_SELECTABLE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # values that Ray's selectors accept


class Room:
    """The free resources of the nodes, which shrink as gangs are placed. Draining and unusable nodes accept nothing.

    Nodes' reports of free resources lag behind: a gang that was just started does not show yet. So totals are kept as
    well: gangs that can only be on certain nodes never get more than these nodes have in total.

    Args:
        nodes: The alive nodes.
        free: Free resources of each.
        allocated: Demands of the existing gangs, and the number of their ranks.
        topology: Names of the labels that define the parts of the network, outermost first.
    """

    def __init__(
        self,
        nodes: Sequence[NodeCapacity],
        free: Sequence[Mapping[str, float]],
        allocated: Iterable[tuple[Demand, int]] = (),
        topology: Sequence[str] = (),
    ) -> None:
        steady = [
            (node, dict(left))
            for node, left in zip(nodes, free, strict=True)
            if not node.draining and node.unusable is None
        ]
        self._nodes = [node for node, _ in steady]
        self._free = [left for _, left in steady]
        self._to_come, self._topology = [dict(left) for left in self._free], topology
        self._everywhere: Nodes = (1 << len(self._nodes)) - 1
        self._allocated: dict[Nodes, dict[str, float]] = {}
        self._usable: dict[Kind, Nodes] = {}
        self._totals: dict[Nodes, dict[str, float]] = {}
        # By kind of demand: the ranks that each node can hold, their groups in total, and the ranks by the totals.
        self._slots: dict[Kind, list[int]] = {}
        self._groups: dict[tuple[Kind, int], int] = {}
        self._ranks: dict[Kind, int] = {}
        self._shown: dict[tuple[Nodes, str], float] = {}
        for demand, ranks in allocated:
            self.hold(demand, ranks)

    def nodes_for(self, demand: Demand) -> Nodes:
        """The nodes that a job can use."""
        if demand.kind not in self._usable:
            self._usable[demand.kind] = sum(
                1 << number for number, node in enumerate(self._nodes) if demand.takes(node)
            )
        return self._usable[demand.kind]

    def slots(self, demand: Demand) -> list[int]:
        """How many of a job's ranks each node can hold."""
        if demand.kind not in self._slots:
            usable = self.nodes_for(demand)
            self._slots[demand.kind] = [
                max(0, copies(left, demand.each)) if usable >> number & 1 else 0
                for number, left in enumerate(self._free)
            ]
        return self._slots[demand.kind]

    def ranks(self, demand: Demand) -> int:
        """How many of a job's ranks there is room for in total; below 0 if too many are held already."""
        if demand.kind not in self._ranks:
            usable = self.nodes_for(demand)
            sets = {usable, self._everywhere, *(nodes for nodes in self._allocated if usable & nodes == usable)}
            self._ranks[demand.kind] = min(copies(self._left(nodes), demand.each) for nodes in sets)
        return self._ranks[demand.kind]

    def fits(self, demand: Demand, layout: Layout, own: Layout | None = None, allocated: int = 0) -> bool:
        """Whether a gang can be placed, or changed.

        Args:
            demand: The job's demand.
            layout: The gang's new layout.
            own: Its present layout. Where its groups are is not known, so each counts as a node of its own.
            allocated: Ranks that it has already.
        """
        if layout.world_size > allocated and layout.world_size - allocated > self.ranks(demand):
            return False
        size, count = self._lacking(demand, layout, own)
        key = demand.kind, size
        if key not in self._groups:
            self._groups[key] = sum(slot // size for slot in self.slots(demand))
        return self._groups[key] >= count

    def nearest(self, demand: Demand, layout: Layout, own: Layout | None = None, beside: Collection[str] = ()) -> Part:
        """The innermost part of the network with room for all of a gang; of several, the one with the least room.

        Args:
            demand: The job's demand.
            layout: The gang's new layout.
            own: Its present layout.
            beside: Its present nodes, which must be in the same part.

        Returns:
            The whole network if no part has room, the gang needs none, or it is to be spread.
        """
        size, count = self._lacking(demand, layout, own)
        if not self._topology or count <= 0 or demand.placement == "SPREAD":
            return _WHOLE
        groups = [  # on each node, once starting gangs have their places
            min(slot, max(0, copies(left, demand.each))) // size if slot else 0
            for slot, left in zip(self.slots(demand), self._to_come, strict=True)
        ]
        names = frozenset(beside)
        present = {number for number, node in enumerate(self._nodes) if node.node_id in names}
        for parts in reversed(self._parts):
            room = {labels: sum(groups[number] for number in nodes) for labels, nodes in parts.items()}
            fitting = [(left, labels) for labels, left in room.items() if left >= count and present <= parts[labels]]
            if fitting:
                labels = min(fitting)[1]
                return Part(labels, frozenset(parts[labels]))
        return _WHOLE

    def expect(self, demand: Demand, layout: Layout, own: Layout | None, near: Labels) -> None:
        """Reserve room in ``nearest`` for a gang that is about to get workers, which nodes may not show yet.

        Arguments as for ``fits``, and the labels of the part in which it is to get them.
        """
        (size, count), labels = self._lacking(demand, layout, own), dict(near).items()
        for number, node in enumerate(self._nodes):
            if labels <= node.labels.items():
                groups = min(count, copies(self._to_come[number], demand.each) // size)
                if groups > 0:
                    _subtract(self._to_come[number], demand.each, groups * size)
                    count -= groups

    @cached_property
    def _parts(self) -> list[dict[Labels, set[int]]]:
        """For each level, the node numbers of its parts by their labels, including those of outer levels."""
        levels: list[dict[Labels, set[int]]] = [defaultdict(set) for _ in self._topology]
        for number, node in enumerate(self._nodes):
            labels: Labels = ()
            for label, parts in zip(self._topology, levels, strict=True):
                value = node.labels.get(label, "")
                if _SELECTABLE.fullmatch(value):
                    labels += ((label, value),)
                    parts[labels].add(number)
        return levels

    def place(self, demand: Demand, layout: Layout, own: Layout | None = None, part: Part | None = None) -> None:
        """Take what a gang needs beyond what it has from the nodes, or from a part's; ``hold`` counts the totals.

        Arguments as for ``fits``.
        """
        own_slots = resolve.own_slots(own, demand.placement) if own else []
        slots = self.slots(demand)
        if part is not None and part.nodes is not None:
            slots = [slot if number in part.nodes else 0 for number, slot in enumerate(slots)]
        placed = resolve.place(layout, slots + own_slots, demand.placement)
        if placed is None:
            raise AssertionError(f"{layout} was placed where it does not fit")
        for left, to_come, ranks in zip(self._free, self._to_come, placed, strict=False):  # the gang's own come last
            if ranks:
                _subtract(left, demand.each, ranks)
                _subtract(to_come, demand.each, ranks)
        self._slots.clear()
        self._groups.clear()
        self._shown.clear()

    def hold(self, demand: Demand, ranks: int) -> None:
        """Count ranks of a job as taken, wherever they are; a negative number as given back."""
        # Ranks that cannot be on any of these nodes take no room on them.
        if nodes := self.nodes_for(demand):
            _subtract(self._allocated.setdefault(nodes, defaultdict(float)), demand.each, -ranks)
            self._ranks.clear()
            self._shown.clear()

    def copy(self) -> "Room":
        """A copy to try changes on."""
        other = Room(self._nodes, self._free, topology=self._topology)
        other._allocated = {nodes: defaultdict(float, amounts) for nodes, amounts in self._allocated.items()}
        return other

    def free(self, demand: Demand, resource: str) -> float:
        """Free amount of a resource on the nodes that a job can use."""
        usable = self.nodes_for(demand)
        key = usable, resource
        if key not in self._shown:
            shown = sum(left.get(resource, 0) for number, left in enumerate(self._free) if usable >> number & 1)
            self._shown[key] = max(0.0, min(shown, self._left(usable).get(resource, 0)))
        return self._shown[key]

    @staticmethod
    def _lacking(demand: Demand, layout: Layout, own: Layout | None) -> tuple[int, int]:
        """The ranks per group, and the number of groups that a gang lacks."""
        size, count = layout.units(demand.placement)
        if own:
            own_size, own_count = own.units(demand.placement)
            count -= own_size // size * own_count
        return size, count

    def _left(self, nodes: Nodes) -> dict[str, float]:
        """Total resources of some nodes, less what is held by gangs that cannot be elsewhere."""
        left = dict(self.total(nodes))
        for within, amounts in self._allocated.items():
            if within & nodes == within:
                _subtract(left, amounts, 1)
        return left

    def total(self, nodes: Nodes) -> dict[str, float]:
        """Total resources of some nodes."""
        if nodes not in self._totals:
            total: dict[str, float] = defaultdict(float)
            for number, node in enumerate(self._nodes):
                if nodes >> number & 1:
                    _subtract(total, node.total, -1)
            self._totals[nodes] = total
        return self._totals[nodes]


def copies(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """How many times some amounts fit into free resources."""
    return math.floor(min((resources.get(name, 0) + ROUNDING) / amount for name, amount in each.items()))


def _subtract(resources: dict[str, float], each: Mapping[str, float], times: int) -> None:
    for name, amount in each.items():
        resources[name] = resources.get(name, 0) - amount * times


@dataclass(frozen=True)
class Limits:
    """Quotas: how much of each resource the gangs may hold in total. Resources not named have no limit.

    Attributes:
        tenants: Quota of each tenant.
        queues: Quota of each queue.
    """

    tenants: Mapping[str, Amounts] = field(default_factory=lambda: _NO_LIMITS)
    queues: Mapping[str, Amounts] = field(default_factory=lambda: _NO_LIMITS)


class Account(NamedTuple):
    """The quota of one tenant or queue for one resource; ``holder`` is for messages: ``tenant team-a``."""

    holder: str
    resource: str


@dataclass
class Quotas:
    """The quotas during one pass.

    Attributes:
        limits: The quotas.
        demand: Returns a job's demand.
        heads: By account, the first job that waits for room in it.
        limit: By account, how much gangs may hold.
        allocated: By account, how much they hold.
        reserved: By account, what is kept for jobs that have room there and wait for something else, by their ids.
    """

    limits: Limits
    demand: Callable[[JobRecord], Demand]
    heads: dict[Account, JobRecord] = field(default_factory=dict, init=False)
    limit: dict[Account, float] = field(default_factory=dict, init=False)
    allocated: dict[Account, float] = field(default_factory=lambda: defaultdict(float), init=False)
    reserved: dict[Account, dict[str, float]] = field(default_factory=lambda: defaultdict(dict), init=False)
    _accounts: dict[tuple[str, str], list[Account]] = field(default_factory=dict, init=False)

    def accounts(self, job: JobRecord) -> list[Account]:
        """What a job draws on that is limited, in the order in which it has to find room there."""
        key, each = (job.tenant, job.queue), self.demand(job).each
        if key not in self._accounts:
            holders = (
                (f"tenant {job.tenant}", self.limits.tenants.get(job.tenant, {})),
                (f"queue {job.queue}", self.limits.queues.get(job.queue, {})),
            )
            new = {Account(holder, name): amounts[name] for holder, amounts in holders for name in sorted(amounts)}
            self.limit |= new
            self._accounts[key] = list(new)
        return [account for account in self._accounts[key] if account.resource in each]

    def left(self, account: Account) -> float:
        """How much is neither allocated nor reserved."""
        return self.limit[account] - self.allocated[account] - sum(self.reserved[account].values())

    def take(self, job: JobRecord, ranks: int) -> None:
        """Count ranks as allocated."""
        each = self.demand(job).each
        for account in self.accounts(job):
            self.allocated[account] += each[account.resource] * ranks

    def keep(self, job: JobRecord, ranks: int, until: Account | None = None) -> None:
        """Keep room for a job, in all its accounts or in those that come before one."""
        each = self.demand(job).each
        for account in self.accounts(job):
            if account == until:
                return
            self.reserved[account][job.id] = each[account.resource] * ranks

    def allows(self, job: JobRecord, ranks: int) -> bool:
        """Whether there is room for some more ranks of a job; always for none."""
        return ranks <= 0 or all(
            self.left(account) >= self.needs(job, account, ranks) for account in self.accounts(job)
        )

    def too_small(self, job: JobRecord, ranks: int) -> Account | None:
        """The first account that could not hold a gang of this many ranks even if it were empty."""
        accounts = self.accounts(job)
        return next((one for one in accounts if self.limit[one] < self.needs(job, one, ranks)), None)

    def needs(self, job: JobRecord, account: Account, ranks: int) -> float:
        """How much of an account some ranks of a job need."""
        return self.demand(job).each[account.resource] * ranks - ROUNDING
