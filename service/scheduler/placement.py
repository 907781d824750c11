"""Which nodes a job can use and what they can take."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from boost_core.config import JobSpec, Shape
from boost_core.plan import resize
from service.gang.resources import worker_resources
from service.gang.status import NodeCapacity

ACCELERATOR_LABEL = "ray.io/accelerator-type"  # which Ray gives to nodes with GPUs

_ROUNDING = 1e-6  # Ray counts resources in steps of 1e-4

Nodes = frozenset[str]


def required_labels(spec: JobSpec) -> dict[str, str]:
    """The labels that a node must have for a job."""
    kind = spec.resources.accelerator_type
    return dict(spec.resources.node_labels) | ({ACCELERATOR_LABEL: kind} if kind else {})


class Room:
    """What is free on the nodes, less and less as gangs are placed. Draining nodes take nothing.

    What nodes say is free lags behind: a gang that was just started does not show yet. So sums are kept beside it: the
    gangs that can be on some nodes only never get more than these nodes have in all.

    Args:
        nodes: The alive nodes.
        free: What is free on each.
        held: Jobs that have a gang, and how many ranks are theirs.
    """

    def __init__(
        self, nodes: Sequence[NodeCapacity], free: Sequence[dict[str, float]], held: Iterable[tuple[JobSpec, int]] = ()
    ) -> None:
        steady = [(node, dict(left)) for node, left in zip(nodes, free, strict=True) if not node.draining]
        self._nodes = [node for node, _ in steady]
        self._free = [left for _, left in steady]
        self._everywhere = frozenset(node.node_id for node in self._nodes)
        self._held: dict[Nodes, dict[str, float]] = {}
        for spec, ranks in held:
            self.hold(spec, ranks)

    @classmethod
    def now(cls, nodes: Sequence[NodeCapacity], held: Iterable[tuple[JobSpec, int]]) -> "Room":
        """What is free beside the gangs that already run."""
        return cls(nodes, [node.free for node in nodes], held)

    @classmethod
    def empty(cls, nodes: Sequence[NodeCapacity]) -> "Room":
        """What would be free if nothing ran."""
        return cls(nodes, [node.total for node in nodes])

    def nodes_for(self, spec: JobSpec) -> Nodes:
        """The nodes that a job can use."""
        wanted = required_labels(spec).items()
        return frozenset(node.node_id for node in self._nodes if wanted <= node.labels.items())

    def slots(self, spec: JobSpec) -> list[int]:
        """How many of a job's ranks each node can take."""
        usable, each = self.nodes_for(spec), worker_resources(spec)
        return [
            max(0, _copies(left, each)) if node.node_id in usable else 0
            for node, left in zip(self._nodes, self._free, strict=True)
        ]

    def ranks(self, spec: JobSpec) -> int:
        """How many of a job's ranks the sums leave room for; below 0 when too many are held already."""
        usable = self.nodes_for(spec)
        sets = {usable, self._everywhere, *(nodes for nodes in self._held if usable <= nodes)}
        return min(_copies(self._left(nodes), worker_resources(spec)) for nodes in sets)

    def fits(self, spec: JobSpec, shape: Shape, own: Shape | None = None, held: int = 0) -> bool:
        """Whether a gang can be placed, or changed.

        Args:
            spec: Its job.
            shape: The shape that it would have.
            own: The one that it has. Where its groups are is not known, so each counts as a node of its own.
            held: Ranks that are its own already.
        """
        if shape.world_size > held and shape.world_size - held > self.ranks(spec):
            return False
        return resize.fits(shape, self._with_own(spec, own), spec.resources.placement)

    def place(self, spec: JobSpec, shape: Shape, own: Shape | None = None) -> None:
        """Take what a gang needs of the nodes beyond what it has. Arguments as ``fits``; ``hold`` counts it."""
        taken = resize.place(shape, self._with_own(spec, own), spec.resources.placement)
        if taken is None:
            raise AssertionError(f"{shape} was placed where it does not fit")
        for left, ranks in zip(self._free, taken, strict=False):  # the gang's own come last
            _subtract(left, worker_resources(spec), ranks)

    def hold(self, spec: JobSpec, ranks: int) -> None:
        """Count ranks of a job as taken, wherever they are; below 0: as given back."""
        # What can be on none of these nodes takes no room on them.
        if nodes := self.nodes_for(spec):
            _subtract(self._held.setdefault(nodes, defaultdict(float)), worker_resources(spec), -ranks)

    def copy(self) -> "Room":
        """The same, to try things on."""
        other = Room(self._nodes, self._free)
        other._held = {nodes: defaultdict(float, held) for nodes, held in self._held.items()}
        return other

    def total(self, spec: JobSpec, resource: str) -> float:
        """How much of a resource the nodes that a job can use have in all."""
        usable = self.nodes_for(spec)
        return sum(node.total.get(resource, 0) for node in self._nodes if node.node_id in usable)

    def free(self, spec: JobSpec, resource: str) -> float:
        """How much of a resource is free on the nodes that a job can use."""
        usable = self.nodes_for(spec)
        shown = sum(
            left.get(resource, 0)
            for node, left in zip(self._nodes, self._free, strict=True)
            if node.node_id in usable
        )  # fmt: skip
        return max(0.0, min(shown, self._left(usable).get(resource, 0)))

    def _with_own(self, spec: JobSpec, own: Shape | None) -> list[int]:
        return self.slots(spec) + (resize.own_slots(own, spec.resources.placement) if own else [])

    def _left(self, nodes: Nodes) -> dict[str, float]:
        """What some nodes have in all, less what gangs hold that can be nowhere else."""
        left: dict[str, float] = defaultdict(float)
        for node in self._nodes:
            if node.node_id in nodes:
                _subtract(left, node.total, -1)
        for within, held in self._held.items():
            if within <= nodes:
                _subtract(left, held, 1)
        return left


def _copies(resources: dict[str, float], each: dict[str, float]) -> int:
    return math.floor(min((resources.get(name, 0) + _ROUNDING) / amount for name, amount in each.items()))


def _subtract(resources: dict[str, float], each: dict[str, float], times: int) -> None:
    for name, amount in each.items():
        resources[name] = resources.get(name, 0) - amount * times
