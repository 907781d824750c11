"""Which nodes a job can use, and how much they can hold."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import compress
from operator import ne

from boost_core.config import Layout
from boost_core.plan import resolve
from service.gang.status import Labels, NodeCapacity
from service.scheduler.demand import Demand, Kind

ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4
_OF_RANKS = ("CPU", "GPU")  # what ranks take; Ray reports more, such as ``node:ADDRESS``, in which no nodes are equal

Nodes = int  # a set of nodes as a bit mask, because such sets are compared all the time
Free = tuple[tuple[str, float], ...]  # free resources of a node, by Ray's names


_SELECTABLE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # values that Ray's selectors accept


class Room:
    """The free resources of the nodes, which shrink as gangs are placed. Draining and unusable nodes accept nothing.

    Nodes' reports of free resources lag behind: a gang that was just started does not show yet. So totals are kept as
    well: gangs that can only be on certain nodes never get more than these nodes have in total.

    Nodes with equal free resources are one class, and for each kind of demand nodes are indexed by how many ranks they
    can hold. So a question costs as much as there are different answers, and a gang that is placed, or a node that
    reports something else, as many classes as it changes.

    Args:
        nodes: The alive nodes.
        free: Free resources of each.
        topology: Names of the labels that define the parts of the network, outermost first.

    Attributes:
        others: Numbers of the nodes that accept nothing.
    """

    def __init__(
        self, nodes: Sequence[NodeCapacity], free: Sequence[Mapping[str, float]], topology: Sequence[str] = ()
    ) -> None:
        # Of all nodes, which the scheduler numbers, those that accept ranks, which are numbered here.
        self._steady = [number for number, node in enumerate(nodes) if not node.draining and node.unusable is None]
        self.others = sorted(set(range(len(nodes))) - set(self._steady))
        self._nodes, self._topology = [nodes[number] for number in self._steady], topology
        self._everywhere: Nodes = (1 << len(self._nodes)) - 1
        self._allocated: dict[Nodes, dict[str, float]] = {}
        self._usable: dict[Kind, Nodes] = {}
        self._totals: dict[Nodes, dict[str, float]] = {}
        # By kind of demand: the nodes by how many ranks they can hold, and the ranks by the totals.
        self._index: dict[Kind, dict[int, Nodes]] = {}
        self._ranks: dict[Kind, int] = {}
        self._shown: dict[tuple[Nodes, str], float] = {}
        self._asked: set[Kind] = set()  # since the last renewal
        self._seen = list(map(dict, free))  # of all nodes; copies, which others cannot change
        self._told = [_of_ranks(free[number]) for number in self._steady]  # as reported
        self._free = list(self._told)  # less what has been placed since
        self._equal, self._equal_totals = defaultdict[Free, Nodes](int), defaultdict[Free, Nodes](int)
        for number, (left, node) in enumerate(zip(self._free, self._nodes, strict=True)):
            self._equal[left] |= 1 << number
            self._equal_totals[_of_ranks(node.total)] |= 1 << number
        # For each level of the topology, the node numbers of its parts by their labels, those of outer levels included.
        self._parts: list[dict[Labels, set[int]]] = [defaultdict(set) for _ in topology]
        for number, node in enumerate(self._nodes):
            labels: Labels = ()
            for label, parts in zip(topology, self._parts, strict=True):
                value = node.labels.get(label, "")
                if _SELECTABLE.fullmatch(value):
                    labels += ((label, value),)
                    parts[labels].add(number)
        self.renew(free, ())

    def renew(self, free: Sequence[Mapping[str, float]], allocated: Iterable[tuple[Demand, int]]) -> None:
        """Begin another pass over the same nodes.

        Args:
            free: Free resources of each.
            allocated: Demands of the existing gangs, and the number of their ranks.
        """
        changed: dict[tuple[Free, Free], list[int]] = defaultdict(list)
        # A comparison of all at a time, where most are as they were, is several times faster than one after the other.
        differ, numbers_of_all = list(map(ne, free, self._seen)), range(len(self._steady))
        for number in compress(numbers_of_all, map(differ.__getitem__, self._steady)):
            position = self._steady[number]
            self._seen[position] = dict(free[position])
            self._told[number] = _of_ranks(free[position])
        for number in compress(numbers_of_all, map(ne, self._told, self._free)):
            changed[self._free[number], self._told[number]].append(number)
        self.prune()
        for (before, after), numbers in changed.items():
            self._change(before, after, numbers)
        self._reported = dict(self._equal)
        self._to_come = [dict(left) for left in self._free] if self._topology else []
        self._allocated.clear()
        self._ranks.clear()
        self._shown.clear()
        for demand, ranks in allocated:
            self.hold(demand, ranks)

    def prune(self) -> None:
        """Forget what no job of the last pass has asked for."""
        self._index = {kind: index for kind, index in self._index.items() if kind in self._asked}
        self._usable = {kind: nodes for kind, nodes in self._usable.items() if kind in self._asked}
        self._ranks = {kind: ranks for kind, ranks in self._ranks.items() if kind in self._asked}
        self._asked.clear()

    def nodes_for(self, demand: Demand) -> Nodes:
        """The nodes that a job can use."""
        self._asked.add(demand.kind)
        if demand.kind not in self._usable:
            self._usable[demand.kind] = sum(1 << bit for bit, node in enumerate(self._nodes) if demand.takes(node))
        return self._usable[demand.kind]

    def reported_classes(self, demand: Demand | None = None) -> Iterator[tuple[int, int]]:
        """The number of one node of each class with equal totals that reported equally much free, and the class's size.

        Nodes that accept nothing are in none; with a demand, only nodes that the job can use are.
        """
        usable = self._everywhere if demand is None else self.nodes_for(demand)
        for equal in self._reported.values():
            for alike in self._equal_totals.values():
                if nodes := equal & alike & usable:
                    yield self._steady[(nodes & -nodes).bit_length() - 1], nodes.bit_count()

    def by_slots(self, demand: Demand) -> Mapping[int, Nodes]:
        """The nodes by how many of a job's ranks they can hold, without those that hold none."""
        usable, index = self.nodes_for(demand), self._index.get(demand.kind)
        if index is None:
            index = self._index[demand.kind] = defaultdict(int)
            for left, equal in self._equal.items():
                if (nodes := equal & usable) and (slots := copies(dict(left), demand.each)) > 0:
                    index[slots] |= nodes
        return index

    def slots(self, demand: Demand) -> list[int]:
        """How many of a job's ranks each node can hold, in no order, without nodes that hold none."""
        return [slots for slots, nodes in self.by_slots(demand).items() for _ in range(nodes.bit_count())]

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
        return sum(slots // size * nodes.bit_count() for slots, nodes in self.by_slots(demand).items()) >= count

    def nearest(
        self, demand: Demand, layout: Layout, own: Layout | None = None, beside: Collection[str] = ()
    ) -> Labels:
        """Labels of the innermost part of the network that has room for a gang; of several, that with the least room.

        Args:
            demand: The job's demand.
            layout: The gang's new layout.
            own: Its present layout.
            beside: Its present nodes, which must be in the same part.

        Returns:
            No labels, for the whole network, if no part has room, the gang needs none, or it is to be spread.
        """
        size, count = self._lacking(demand, layout, own)
        if not self._topology or count <= 0 or demand.placement == "SPREAD":
            return ()
        # On each node, once starting gangs have their places.
        each = zip(self._each_nodes_slots(demand), self._to_come, strict=True)
        groups = [min(slot, max(0, copies(left, demand.each))) // size if slot else 0 for slot, left in each]
        names = frozenset(beside)
        present = {number for number, node in enumerate(self._nodes) if node.node_id in names}
        for parts in reversed(self._parts):
            room = {labels: sum(groups[number] for number in nodes) for labels, nodes in parts.items()}
            fitting = [(left, labels) for labels, left in room.items() if left >= count and present <= parts[labels]]
            if fitting:
                return min(fitting)[1]
        return ()

    def expect(self, demand: Demand, layout: Layout, own: Layout | None, near: Labels) -> None:
        """Reserve room in ``nearest`` for a gang that is about to get workers, which nodes may not show yet.

        Arguments as for ``fits``, and the labels of the part in which it is to get them.
        """
        (size, count), labels = self._lacking(demand, layout, own), dict(near).items()
        for node, left in zip(self._nodes, self._to_come, strict=False):  # none without a topology
            if labels <= node.labels.items():
                groups = min(count, copies(left, demand.each) // size)
                if groups > 0:
                    _subtract(left, demand.each, groups * size)
                    count -= groups

    def place(self, demand: Demand, layout: Layout, own: Layout | None = None, near: Labels = ()) -> None:
        """Take what a gang needs beyond what it has from the nodes, or from a part's; ``hold`` counts the totals.

        Arguments as for ``fits``, and the labels of the part.
        """
        within = self._everywhere
        if near:
            within = sum(1 << number for parts in self._parts for number in parts.get(near, ()))
        changed: dict[tuple[Free, int], list[int]] = defaultdict(list)
        # Numbers of nodes and of the ranks on each, as ``resolve.place`` chooses them; the gang's own come last.
        taken = list[tuple[int, int]]()
        if demand.placement == "SPREAD":
            own_slots = resolve.own_slots(own, demand.placement) if own else []
            numbered = enumerate(self._each_nodes_slots(demand))
            present = [slots if within >> number & 1 else 0 for number, slots in numbered]
            placed = resolve.place(layout, present + own_slots, demand.placement)
            if placed is None:
                raise AssertionError(f"{layout} was placed where it does not fit")
            taken = [(number, ranks) for number, ranks in enumerate(placed[: len(present)]) if ranks]
        else:
            size, count = layout.units(demand.placement)
            room: dict[int, Nodes] = defaultdict(int)  # nodes by how many groups they can hold
            for slots, nodes in self.by_slots(demand).items():
                if slots >= size and nodes & within:
                    room[slots // size] |= nodes & within
            if own:
                own_size, own_count = own.units(demand.placement)
                if own_size >= size:
                    room[own_size // size] |= ((1 << own_count) - 1) << len(self._nodes)
            while count:  # onto few nodes: the smallest that holds all of the rest, or else the largest
                if not room:
                    raise AssertionError(f"{layout} was placed where it does not fit")
                groups = min((each for each in room if each >= count), default=max(room))
                node = room[groups] & -room[groups]
                room[groups] ^= node
                if not room[groups]:
                    del room[groups]
                number = node.bit_length() - 1
                if number < len(self._nodes):
                    taken.append((number, min(groups, count) * size))
                count -= min(groups, count)
        for number, ranks in taken:
            changed[self._free[number], ranks].append(number)
            if self._to_come:
                _subtract(self._to_come[number], demand.each, ranks)
        for (before, ranks), numbers in changed.items():
            left = dict(before)
            _subtract(left, demand.each, ranks)
            self._change(before, tuple(left.items()), numbers)
        self._shown.clear()

    def hold(self, demand: Demand, ranks: int) -> None:
        """Count ranks of a job as taken, wherever they are; a negative number as given back."""
        # Ranks that cannot be on any of these nodes take no room on them.
        if nodes := self.nodes_for(demand):
            _subtract(self._allocated.setdefault(nodes, defaultdict(float)), demand.each, -ranks)
            self._ranks.clear()
            self._shown.clear()

    def copy(self) -> "Room":
        """A copy to try on it what gangs ``hold``; nothing can be placed in it."""
        other = copy(self)
        other._allocated = {nodes: defaultdict(float, amounts) for nodes, amounts in self._allocated.items()}
        other._ranks, other._shown = {}, {}
        return other

    def free(self, demand: Demand, resource: str) -> float:
        """Free amount of a resource on the nodes that a job can use."""
        usable = self.nodes_for(demand)
        key = usable, resource
        if key not in self._shown:
            classes = ((dict(left).get(resource, 0), nodes & usable) for left, nodes in self._equal.items())
            shown = sum(left * nodes.bit_count() for left, nodes in classes)
            self._shown[key] = max(0.0, min(shown, self._left(usable).get(resource, 0)))
        return self._shown[key]

    def _change(self, before: Free, after: Free, numbers: Iterable[int]) -> None:
        """Move nodes from one class to another."""
        nodes = 0
        for number in numbers:
            self._free[number] = after
            nodes |= 1 << number
        self._equal[before] ^= nodes
        if not self._equal[before]:
            del self._equal[before]
        self._equal[after] |= nodes
        old, new = dict(before), dict(after)
        for kind, index in self._index.items():
            each = dict(kind.each)
            slots, then = max(0, copies(old, each)), max(0, copies(new, each))
            if slots != then and (moved := nodes & self._usable[kind]):
                if slots:
                    index[slots] ^= moved
                    if not index[slots]:
                        del index[slots]
                if then:
                    index[then] |= moved

    def _each_nodes_slots(self, demand: Demand) -> list[int]:
        """How many of a job's ranks each node can hold, in the order of the nodes."""
        usable = self.nodes_for(demand)
        slots = {left: max(0, copies(dict(left), demand.each)) for left in self._equal}
        return [slots[left] if usable >> number & 1 else 0 for number, left in enumerate(self._free)]

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
                    _subtract(total, dict(_of_ranks(node.total)), -1)
            self._totals[nodes] = total
        return self._totals[nodes]


def copies(resources: Mapping[str, float], each: Mapping[str, float]) -> int:
    """How many times some amounts fit into free resources."""
    return math.floor(min((resources.get(name, 0) + ROUNDING) / amount for name, amount in each.items()))


def _of_ranks(resources: Mapping[str, float]) -> Free:
    return tuple([(name, resources[name]) for name in _OF_RANKS if name in resources])


def _subtract(resources: dict[str, float], each: Mapping[str, float], times: int) -> None:
    for name, amount in each.items():
        resources[name] = resources.get(name, 0) - amount * times
