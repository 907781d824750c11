"""Which nodes a job can use and what they can take."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from boost_core.config import Layout
from boost_core.plan import resize
from service.gang.status import Labels, NodeCapacity
from service.scheduler.demand import Demand, Kind

ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4

Nodes = int  # a set of nodes, a bit for each: such sets are compared all the time


@dataclass(frozen=True)
class Part:
    """A part of the network.

    Attributes:
        labels: What its nodes have that others have not; none of the whole.
        nodes: Those, by their numbers; ``None``: all.
    """

    labels: Labels = ()
    nodes: frozenset[int] | None = None


_WHOLE = Part()
_SELECTABLE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # values that Ray's selectors take


class Room:
    """What is free on the nodes, less and less as gangs are placed. Draining nodes take nothing.

    What nodes say is free lags behind: a gang that was just started does not show yet. So sums are kept beside it: the
    gangs that can be on some nodes only never get more than these nodes have in all.

    Args:
        nodes: The alive nodes.
        free: What is free on each.
        held: What gangs ask for that there are, and how many ranks are theirs.
        topology: Names of the labels by which nodes are in the same part of the network, the outermost first.
    """

    def __init__(
        self,
        nodes: Sequence[NodeCapacity],
        free: Sequence[Mapping[str, float]],
        held: Iterable[tuple[Demand, int]] = (),
        topology: Sequence[str] = (),
    ) -> None:
        steady = [(node, dict(left)) for node, left in zip(nodes, free, strict=True) if not node.draining]
        self._nodes = [node for node, _ in steady]
        self._free = [left for _, left in steady]
        self._to_come, self._topology = [dict(left) for left in self._free], topology
        self._everywhere: Nodes = (1 << len(self._nodes)) - 1
        self._held: dict[Nodes, dict[str, float]] = {}
        self._usable: dict[Kind, Nodes] = {}
        self._totals: dict[Nodes, dict[str, float]] = {}
        # Of demands of a kind: the ranks that each node can take, their groups in all, and the ranks by the sums.
        self._slots: dict[Kind, list[int]] = {}
        self._groups: dict[tuple[Kind, int], int] = {}
        self._ranks: dict[Kind, int] = {}
        self._shown: dict[tuple[Nodes, str], float] = {}
        for demand, ranks in held:
            self.hold(demand, ranks)

    @classmethod
    def now(
        cls, nodes: Sequence[NodeCapacity], held: Iterable[tuple[Demand, int]], topology: Sequence[str] = ()
    ) -> "Room":
        """What is free beside the gangs that already run."""
        return cls(nodes, [node.free for node in nodes], held, topology)

    @classmethod
    def empty(cls, nodes: Sequence[NodeCapacity]) -> "Room":
        """What would be free if nothing ran."""
        return cls(nodes, [node.total for node in nodes])

    def nodes_for(self, demand: Demand) -> Nodes:
        """The nodes that a job can use."""
        if demand.kind not in self._usable:
            self._usable[demand.kind] = sum(
                1 << number for number, node in enumerate(self._nodes) if demand.takes(node)
            )
        return self._usable[demand.kind]

    def slots(self, demand: Demand) -> list[int]:
        """How many of a job's ranks each node can take."""
        if demand.kind not in self._slots:
            usable = self.nodes_for(demand)
            self._slots[demand.kind] = [
                max(0, copies(left, demand.each)) if usable >> number & 1 else 0
                for number, left in enumerate(self._free)
            ]
        return self._slots[demand.kind]

    def ranks(self, demand: Demand) -> int:
        """How many of a job's ranks the sums leave room for; below 0 when too many are held already."""
        if demand.kind not in self._ranks:
            usable = self.nodes_for(demand)
            sets = {usable, self._everywhere, *(nodes for nodes in self._held if usable & nodes == usable)}
            self._ranks[demand.kind] = min(copies(self._left(nodes), demand.each) for nodes in sets)
        return self._ranks[demand.kind]

    def fits(self, demand: Demand, layout: Layout, own: Layout | None = None, held: int = 0) -> bool:
        """Whether a gang can be placed, or changed.

        Args:
            demand: What its job asks for.
            layout: The layout that it would have.
            own: The one that it has. Where its groups are is not known, so each counts as a node of its own.
            held: Ranks that are its own already.
        """
        if layout.world_size > held and layout.world_size - held > self.ranks(demand):
            return False
        size, count = self._lacking(demand, layout, own)
        return self._groups_of(demand, size) >= count

    def nearest(self, demand: Demand, layout: Layout, own: Layout | None = None, beside: Collection[str] = ()) -> Part:
        """The innermost part of the network in which there is room for all of a gang, the one that it leaves least of.

        Args:
            demand: What its job asks for.
            layout: The layout that it would have.
            own: The layout that it has.
            beside: The nodes that it has, which are to be in the same part.

        Returns:
            The whole network if no part has room, or the gang needs none, or is to be spread.
        """
        size, count = self._lacking(demand, layout, own)
        if not self._topology or count <= 0 or demand.placement == "SPREAD":
            return _WHOLE
        groups = [slot // size for slot in self._slots_to_come(demand)]
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
        """Count a gang that is about to get workers, which nodes need not show yet, where ``nearest`` looks for room.

        Arguments as ``fits``, and the labels of the part in which it is to get them.
        """
        (size, count), labels = self._lacking(demand, layout, own), dict(near).items()
        for number, node in enumerate(self._nodes):
            if labels <= node.labels.items():
                groups = min(count, copies(self._to_come[number], demand.each) // size)
                if groups > 0:
                    _subtract(self._to_come[number], demand.each, groups * size)
                    count -= groups

    def _slots_to_come(self, demand: Demand) -> list[int]:
        """How many of a job's ranks each node can take once those that start have their places."""
        return [
            min(slot, max(0, copies(left, demand.each))) if slot else 0
            for slot, left in zip(self.slots(demand), self._to_come, strict=True)
        ]

    @cached_property
    def _parts(self) -> list[dict[Labels, set[int]]]:
        """The parts of each level by their labels, and those of the levels around it: numbers of their nodes."""
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
        """Take what a gang needs of the nodes beyond what it has, of a part's if one is given; ``hold`` counts it.

        Arguments as ``fits``.
        """
        own_slots = resize.own_slots(own, demand.placement) if own else []
        slots = self.slots(demand)
        if part is not None and part.nodes is not None:
            slots = [slot if number in part.nodes else 0 for number, slot in enumerate(slots)]
        taken = resize.place(layout, slots + own_slots, demand.placement)
        if taken is None:
            raise AssertionError(f"{layout} was placed where it does not fit")
        for left, to_come, ranks in zip(self._free, self._to_come, taken, strict=False):  # the gang's own come last
            if ranks:
                _subtract(left, demand.each, ranks)
                _subtract(to_come, demand.each, ranks)
        self._slots.clear()
        self._groups.clear()
        self._shown.clear()

    def hold(self, demand: Demand, ranks: int) -> None:
        """Count ranks of a job as taken, wherever they are; below 0: as given back."""
        # What can be on none of these nodes takes no room on them.
        if nodes := self.nodes_for(demand):
            _subtract(self._held.setdefault(nodes, defaultdict(float)), demand.each, -ranks)
            self._ranks.clear()
            self._shown.clear()

    def copy(self) -> "Room":
        """The same, to try things on."""
        other = Room(self._nodes, self._free, topology=self._topology)
        other._held = {nodes: defaultdict(float, held) for nodes, held in self._held.items()}
        return other

    def total(self, demand: Demand, resource: str) -> float:
        """How much of a resource the nodes that a job can use have in all."""
        return self._total(self.nodes_for(demand)).get(resource, 0)

    def free(self, demand: Demand, resource: str) -> float:
        """How much of a resource is free on the nodes that a job can use."""
        usable = self.nodes_for(demand)
        key = usable, resource
        if key not in self._shown:
            shown = sum(left.get(resource, 0) for number, left in enumerate(self._free) if usable >> number & 1)
            self._shown[key] = max(0.0, min(shown, self._left(usable).get(resource, 0)))
        return self._shown[key]

    @staticmethod
    def _lacking(demand: Demand, layout: Layout, own: Layout | None) -> tuple[int, int]:
        """Ranks of a group, and how many groups a gang lacks."""
        size, count = demand.groups(layout)
        if own:
            own_size, own_count = demand.groups(own)
            count -= own_size // size * own_count
        return size, count

    def _groups_of(self, demand: Demand, size: int) -> int:
        key = demand.kind, size
        if key not in self._groups:
            self._groups[key] = sum(slot // size for slot in self.slots(demand))
        return self._groups[key]

    def _left(self, nodes: Nodes) -> dict[str, float]:
        """What some nodes have in all, less what gangs hold that can be nowhere else."""
        left = dict(self._total(nodes))
        for within, held in self._held.items():
            if within & nodes == within:
                _subtract(left, held, 1)
        return left

    def _total(self, nodes: Nodes) -> dict[str, float]:
        if nodes not in self._totals:
            total: dict[str, float] = defaultdict(float)
            for number, node in enumerate(self._nodes):
                if nodes >> number & 1:
                    _subtract(total, node.total, -1)
            self._totals[nodes] = total
        return self._totals[nodes]


def copies(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """How often what is free has room for some amounts."""
    return math.floor(min((resources.get(name, 0) + ROUNDING) / amount for name, amount in each.items()))


def _subtract(resources: dict[str, float], each: Mapping[str, float], times: int) -> None:
    for name, amount in each.items():
        resources[name] = resources.get(name, 0) - amount * times
