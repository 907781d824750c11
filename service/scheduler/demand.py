"""What a job asks of nodes, worked out once for all jobs and passes that ask for the same.

A job that names a kind of GPU takes only layouts that fit its memory. One that names none may be placed on any kind, so
a gang of it has a *limit*: it takes only layouts that fit into so much memory, and keeps off the kinds that have less
than the largest of these needs. Of kinds that are not known, and without GPUs, nothing is asked.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf
from types import MappingProxyType

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL, DEVICE_BYTES
from boost_core.plan import resize
from boost_core.plan.devices import device_bytes, needed_bytes
from boost_core.plan.machine import Machine, kind_of_gpu, required_labels
from boost_core.plan.measured import NOMINAL, Basis
from boost_core.plan.throughput import step_seconds
from service.gang.resources import gang_in_words, worker_resources
from service.gang.status import NodeCapacity

_NOTHING: Mapping[Layout, int] = MappingProxyType({})
_REMEMBERED = 4096  # specs; a few kilobytes each

Amounts = Mapping[str, float]  # by Ray's names of resources
Kind = tuple[Hashable, ...]  # what decides how many ranks a node can take


class Demand:
    """What a spec asks of nodes.

    Args:
        spec: A job's.
        limit: Bytes that a rank may need; by default what the kind of GPU that the job names has.
        needed: Bytes that a rank needs in each layout, where that is known already.
        basis: What its seconds are predicted by.

    Attributes:
        limit: The same; infinite where nothing limits it.
        each: What a rank takes of its node, by Ray's names of resources.
        labels: What nodes must be labelled with.
        avoid: Kinds of GPU that have too little memory for one layout or another.
        layouts: Those that the job allows and that are within the limit, the fewest ranks first.
        placement: ``PACK``, ``STRICT_PACK`` or ``SPREAD``.
        smallest_group: The fewest ranks that must share a node, over all layouts.
        kind: Equal for demands of which each node takes equally many ranks.
    """

    def __init__(
        self,
        spec: JobSpec,
        limit: float | None = None,
        needed: Mapping[Layout, int] = _NOTHING,
        basis: Basis = NOMINAL,
    ) -> None:
        self._spec, self._basis = spec, basis
        self.limit = (device_bytes(spec.resources) or inf) if limit is None else limit
        self.each = worker_resources(spec)
        self.labels = frozenset(required_labels(spec.resources).items())
        self._any_kind = spec.resources.gpus_per_worker > 0 and kind_of_gpu(spec.resources) is None
        allowed = spec.layouts()
        if not needed and (self._any_kind or self.limit < inf):
            needed = {layout: needed_bytes(spec, layout) for layout in allowed}
        self.layouts = tuple(layout for layout in allowed if needed.get(layout, 0) <= self.limit)
        most = max((needed[layout] for layout in self.layouts), default=0) if self._any_kind else 0
        self.avoid = frozenset(kind for kind, size in DEVICE_BYTES.items() if size < most)
        self._needed, self._smallest = needed, allowed[0]
        self.placement = spec.resources.placement
        self.smallest_group = min(self.groups(layout)[0] for layout in self.layouts or allowed)
        self.kind: Kind = (self.labels, self.avoid, tuple(self.each.items()))
        self._seconds: dict[Layout, float] = {}
        self._within: dict[float, Demand] = {}

    def within(self, limit: float) -> "Demand":
        """The same for a gang that has a limit, if the job names no kind of GPU."""
        if not self._any_kind or limit == self.limit:
            return self
        if limit not in self._within:
            self._within[limit] = Demand(self._spec, limit, self._needed, self._basis)
        return self._within[limit]

    def holding(self, *layouts: Layout | None) -> "Demand":
        """The same for a gang of which no limit is known, but these layouts: the lowest limit of a kind for them."""
        known = (self._needed.get(layout) or needed_bytes(self._spec, layout) for layout in layouts if layout)
        needed = max(known, default=0) if self._any_kind else 0
        return self.within(min((size for size in DEVICE_BYTES.values() if size >= needed), default=inf))

    def limits(self, nodes: Iterable[NodeCapacity]) -> list[float]:
        """The limits that a gang may have on some nodes, the lowest first."""
        if not self._any_kind:
            return [self.limit]
        usable = [node for node in nodes if self.labels <= node.labels.items() and node.total.get("GPU", 0) > 0]
        return sorted({DEVICE_BYTES.get(node.labels.get(ACCELERATOR_LABEL, ""), inf) for node in usable}) or [inf]

    def takes(self, node: NodeCapacity) -> bool:
        """Whether ranks may be on a node, if it has room."""
        return self.labels <= node.labels.items() and node.labels.get(ACCELERATOR_LABEL) not in self.avoid

    @cached_property
    def in_words(self) -> str:
        """What the job needs at least, for people."""
        layout, resources = self.layouts[0] if self.layouts else self._smallest, self._spec.resources
        size, _ = self.groups(layout)
        words = gang_in_words(layout.world_size, self.each)
        kind = f" {resources.accelerator_type}" if resources.accelerator_type else ""
        return f"{words}{kind} in groups of {size}" if size > 1 else f"{words}{kind}"

    @cached_property
    def least_bytes(self) -> int:
        """What a rank needs of its device at least, whatever the limit; 0 if that does not matter."""
        return min(self._needed.values(), default=0)

    def amounts(self, ranks: int) -> dict[str, float]:
        """What so many ranks take."""
        return {name: amount * ranks for name, amount in self.each.items()}

    def groups(self, layout: Layout) -> tuple[int, int]:
        """Ranks that must share a node, and how many such groups a layout has."""
        return resize.units(layout, self.placement)

    @cached_property
    def _machine(self) -> Machine:
        return self._basis.machine(self._spec)

    def seconds(self, layout: Layout) -> float:
        """The predicted time of a step."""
        if layout not in self._seconds:
            self._seconds[layout] = step_seconds(self._spec, layout, self._machine)
        return self._seconds[layout]

    def fastest(self, layouts: Iterable[Layout]) -> Layout | None:
        """The best of some layouts; ``None`` if there are none."""
        return resize.fastest(self._spec, layouts, self.seconds)


@dataclass(frozen=True)
class _Key:
    """A spec of which only the parts count that a demand depends on; it has others that cannot be hashed."""

    parts: tuple[Hashable, ...]
    basis: Basis
    spec: JobSpec = field(compare=False)


@dataclass(frozen=True, eq=False)
class _Same:
    """A spec that equals itself alone, so that it is found without looking at its fields, nor at those of its basis."""

    spec: JobSpec
    basis: Basis

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.spec is other.spec and self.basis == other.basis

    def __hash__(self) -> int:
        return id(self.spec)


def demand_of(spec: JobSpec, basis: Basis = NOMINAL) -> Demand:
    """The demand of a spec; the same object for specs that ask for the same.

    Args:
        spec: A job's.
        basis: What its seconds are predicted by.
    """
    return _known(_Same(spec, basis))


@lru_cache(_REMEMBERED)
def _known(same: _Same) -> Demand:
    spec = same.spec
    resources = spec.resources
    each = (resources.cpus_per_worker, resources.gpus_per_worker, resources.placement, resources.accelerator_type)
    labels, apart = frozenset(resources.node_labels.items()), spec.data.documents_apart
    parts = (spec.model, spec.parallelism, apart, spec.training, spec.optimizer, spec.elasticity, each, labels)
    return _remembered(_Key(parts, same.basis, spec))


@lru_cache(_REMEMBERED)
def _remembered(key: _Key) -> Demand:
    any_basis = replace(key, basis=NOMINAL)
    if key.basis == NOMINAL:
        return Demand(key.spec)
    # Bytes do not depend on it, and of many jobs each has another.
    return Demand(key.spec, needed=_remembered(any_basis)._needed, basis=key.basis)
