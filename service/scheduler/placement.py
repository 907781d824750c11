"""How many workers of a kind fit on the nodes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from boost_core.config import JobSpec
from service.gang.resources import gang_in_words, worker_resources
from service.gang.status import NodeCapacity

_ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4


@dataclass(frozen=True)
class Demand:
    """What a gang takes: so many workers, each whole on one node."""

    workers: int
    each: dict[str, float]

    @classmethod
    def of(cls, spec: JobSpec) -> "Demand":
        """The demand of a job."""
        return cls(spec.parallelism.world_size, worker_resources(spec))

    def __str__(self) -> str:
        return gang_in_words(self.workers, self.each)


class Room:
    """What is free on the nodes, less and less as gangs are placed.

    Args:
        nodes: Free resources of each node.
        taken: Demands that the nodes' free resources may not show yet: no more than the rest of the whole is given out.
        total: Resources of all nodes together.
    """

    def __init__(self, nodes: Sequence[dict[str, float]], total: dict[str, float], taken: Iterable[Demand]) -> None:
        self._nodes = [dict(node) for node in nodes]
        self._budget = dict(total)
        for demand in taken:
            self._spend(demand)

    @classmethod
    def now(cls, nodes: Sequence[NodeCapacity], taken: Iterable[Demand]) -> "Room":
        """What is free beside the gangs that already run."""
        return cls([node.free for node in nodes], total_resources(nodes), taken)

    @classmethod
    def empty(cls, nodes: Sequence[NodeCapacity]) -> "Room":
        """What would be free if nothing ran."""
        return cls([node.total for node in nodes], total_resources(nodes), ())

    def workers(self, each: dict[str, float]) -> int:
        """How many workers of this kind would fit now."""
        return min(_copies(self._budget, each), sum(_copies(node, each) for node in self._nodes))

    def place(self, demand: Demand) -> bool:
        """Take a gang's resources if all of it fits."""
        if self.workers(demand.each) < demand.workers:
            return False
        missing = demand.workers
        for node in self._nodes:
            here = min(missing, _copies(node, demand.each))
            _subtract(node, demand.each, here)
            missing -= here
        self._spend(demand)
        return True

    def free(self, resource: str) -> float:
        """How much of a resource is free on all nodes together."""
        on_nodes = sum(node.get(resource, 0) for node in self._nodes)
        return max(0.0, min(on_nodes, self._budget.get(resource, 0)))

    def _spend(self, demand: Demand) -> None:
        _subtract(self._budget, demand.each, demand.workers)


def total_resources(nodes: Sequence[NodeCapacity]) -> dict[str, float]:
    """Resources of all nodes together."""
    names = {name for node in nodes for name in node.total}
    return {name: sum(node.total.get(name, 0) for node in nodes) for name in names}


def _copies(resources: dict[str, float], each: dict[str, float]) -> int:
    fits = min((resources.get(name, 0) + _ROUNDING) / amount for name, amount in each.items())
    return max(0, math.floor(fits))


def _subtract(resources: dict[str, float], each: dict[str, float], times: int) -> None:
    for name, amount in each.items():
        resources[name] = resources.get(name, 0) - amount * times
