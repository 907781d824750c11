"""Which resources decide whether a job fits, so that plentiful ones can be left out.

A resource r decides nothing next to another one s if on every node, whichever gangs end, there is room for as many
units by r as by s: x_r / u_r ≥ ⌊x_s / u_s⌋, with x what is free and u a unit of the job. That is so for sure in two
cases. Either x_r is enough now for all of s that the node has. Or x_r − ρ·x_s, with ρ = u_r / u_s, is 0 at least and
stays so: a gang that ends adds v_r − ρ·v_s, so of all gangs those count that hold less of r than goes with what they
hold of s.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations

from service.gang.status import NodeCapacity
from service.scheduler.demand import Amounts, Demand
from service.scheduler.placement import ROUNDING
from service.scheduler.units import units_in


class Scarcity:
    """The scarce resources for one job.

    Args:
        nodes: Nodes that the job can use.
        each: Resources that one of its ranks takes.
        held_by_others: Resources of nodes that are used by others than our gangs.
    """

    def __init__(self, nodes: Sequence[NodeCapacity], each: Amounts, held_by_others: Mapping[str, float]) -> None:
        self._nodes, self._each = nodes, each
        self._known = {name for name in each if held_by_others.get(name, 0) <= ROUNDING}
        self._coming: dict[str, float] = defaultdict(float)
        self._short: dict[tuple[str, str], float] = defaultdict(float)
        self._enough: dict[tuple[int, str, str], float] = {}
        self._balance = {pair: self._balance_now(*pair) for pair in permutations(each, 2)}

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
        for name in self._each:
            if any(self._plenty(size, name, other, taken.get(name, 0)) for other in left - {name}):
                left.remove(name)
        return frozenset(left)

    def _plenty(self, size: int, one: str, other: str, taken: float) -> bool:
        needed = self._coming[one] + taken
        if self._enough_for_all(size, one, other) >= needed:
            return True
        known = one in self._known and other in self._known
        return known and self._balance[one, other] - self._short[one, other] + ROUNDING >= needed

    def _enough_for_all(self, size: int, one: str, other: str) -> float:
        """How much of a resource every node has free beyond what matches all of another resource that it has."""
        key = size, one, other
        if key not in self._enough:
            unit = {other: self._each[other] * size}
            units = [(node, units_in(node.total, unit)) for node in self._nodes]
            left = (node.free.get(one, 0) - self._each[one] * size * count for node, count in units if count)
            self._enough[key] = min(left, default=math.inf)
        return self._enough[key]

    def _balance_now(self, one: str, other: str) -> float:
        """How much of a resource every node has free beyond what matches the free amount of another."""
        rate = self._each[one] / self._each[other]
        useful = [node for node in self._nodes if node.total.get(other, 0) + ROUNDING >= self._each[other]]
        return min((node.free.get(one, 0) - rate * node.free.get(other, 0) for node in useful), default=math.inf)
