"""A job's demand on nodes, computed once for all jobs and passes with the same demand.

A job that names a kind of GPU only takes layouts that fit its memory. One that names none may be placed on any kind, so
its gang has a *limit*: it only takes layouts that fit into this much memory, and avoids kinds that have less than the
largest of these needs. Nothing is checked for unknown kinds and without GPUs.

No job takes a layout that needs more host memory than nodes had when it was submitted.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL, DEVICE_BYTES
from boost_core.plan import report
from boost_core.plan.machine import NOMINAL, Basis, Machine, device_bytes, kind_of_gpu, required_labels
from boost_core.plan.memory import lacking
from boost_core.plan.report import needed_bytes, node_host_bytes, planned_values, step_seconds
from service.gang.assignment import gang_in_words, worker_resources
from service.gang.status import NodeCapacity

_NOTHING: Mapping[Layout, int] = MappingProxyType({})
_REMEMBERED = 4096  # specs; a few kilobytes each

Amounts = Mapping[str, float]  # by Ray's names of resources


class Kind(NamedTuple):
    """What determines how many ranks a node can hold; fields as in ``Demand``."""

    labels: frozenset[tuple[str, str]]
    avoid: frozenset[str]
    each: tuple[tuple[str, float], ...]


class Demand:
    """The demand of a spec on nodes.

    Args:
        spec: A job's spec.
        limit: Bytes that a rank may need; default: the memory of the kind of GPU that the job names.
        needed: Bytes that a rank needs in each layout, if already known.
        basis: The basis of its predictions.
        beyond: Layouts for which nodes' hosts have too little memory, if already known.

    Attributes:
        limit: The limit; infinite if there is none.
        each: Resources that a rank takes from its node, by Ray's names.
        labels: Labels that nodes must have.
        avoid: Kinds of GPU that have too little memory for some of the layouts.
        any_kind: Whether it takes GPUs of any kind, so that it has a limit.
        layouts: Layouts that the job allows, that are within the limit, and for which hosts have enough memory; fewest
            ranks first.
        lacks_hosts: Whether layouts that fit the device need more memory of a node's host than the job is planned for.
        least_bytes: Minimum device memory of a rank, regardless of the limit; 0 if it does not matter.
        placement: ``PACK``, ``STRICT_PACK`` or ``SPREAD``.
        smallest_group: The fewest ranks that must share a node, over all layouts.
        kind: Equal for demands of which each node can hold equally many ranks.
    """

    def __init__(
        self, spec: JobSpec, limit: float | None = None, needed: Mapping[Layout, int] = _NOTHING,
        basis: Basis = NOMINAL, beyond: frozenset[Layout] | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._basis = spec, basis
        self.limit = (device_bytes(spec.resources) or inf) if limit is None else limit
        self.each = worker_resources(spec)
        self.labels = frozenset(required_labels(spec.resources).items())
        self.any_kind = spec.resources.gpus_per_worker > 0 and kind_of_gpu(spec.resources) is None
        allowed = spec.layouts()
        if not needed and (self.any_kind or self.limit < inf):
            needed = {layout: needed_bytes(spec, layout, self._machine) for layout in allowed}
        if beyond is None and basis.node_memory_bytes is not None:
            machine = self._machine
            beyond = frozenset(layout for layout in allowed if lacking(node_host_bytes(spec, layout, machine), machine))
        beyond = beyond or frozenset()
        self.layouts = tuple(each for each in allowed if needed.get(each, 0) <= self.limit and each not in beyond)
        most = max((needed[layout] for layout in self.layouts), default=0) if self.any_kind else 0
        self.avoid = frozenset(kind for kind, size in DEVICE_BYTES.items() if size < most)
        self.lacks_hosts = any(needed.get(layout, 0) <= self.limit for layout in beyond)
        self.least_bytes = min(needed.values(), default=0)
        self._needed, self._beyond, self._smallest = needed, beyond, allowed[0]
        self.placement = spec.resources.placement
        self.smallest_group = min(layout.units(self.placement)[0] for layout in self.layouts or allowed)
        self.kind = Kind(self.labels, self.avoid, tuple(self.each.items()))
        self._seconds: dict[Layout, float] = {}
        self._within: dict[float, Demand] = {}

    def within(self, limit: float) -> "Demand":
        """The demand of a gang with a limit, if the job names no kind of GPU."""
        if not self.any_kind or limit == self.limit:
            return self
        if limit not in self._within:
            self._within[limit] = Demand(self._spec, limit, self._needed, self._basis, self._beyond)
        return self._within[limit]

    def of_gang(self, limit: float | None, *layouts: Layout | None) -> "Demand":
        """The demand of a gang with these layouts; if its limit is unknown, with the lowest that fits them."""
        if limit is None and self.any_kind:
            of_each = (self._needed.get(one) or needed_bytes(self._spec, one, self._machine) for one in layouts if one)
            needed = max(of_each, default=0)
            limit = min((size for size in DEVICE_BYTES.values() if size >= needed), default=inf)
        return self if limit is None else self.within(limit)

    def limits(self, nodes: Iterable[NodeCapacity]) -> list[float]:
        """The limits that a gang may have on some nodes, lowest first."""
        if not self.any_kind:
            return [self.limit]
        usable = [node for node in nodes if self.labels <= node.labels.items() and node.total.get("GPU", 0) > 0]
        return sorted({DEVICE_BYTES.get(node.labels.get(ACCELERATOR_LABEL, ""), inf) for node in usable}) or [inf]

    def takes(self, node: NodeCapacity) -> bool:
        """Whether ranks may be placed on a node, if it has room."""
        return self.labels <= node.labels.items() and node.labels.get(ACCELERATOR_LABEL) not in self.avoid

    @cached_property
    def in_words(self) -> str:
        """The job's minimum needs, for messages."""
        layout, resources = self.layouts[0] if self.layouts else self._smallest, self._spec.resources
        size, _ = layout.units(self.placement)
        words = gang_in_words(layout.world_size, self.each)
        kind = f" {resources.accelerator_type}" if resources.accelerator_type else ""
        return f"{words}{kind} in groups of {size}" if size > 1 else f"{words}{kind}"

    def amounts(self, ranks: int) -> dict[str, float]:
        """Resources that a number of ranks take."""
        return {name: amount * ranks for name, amount in self.each.items()}

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
        return report.fastest(self._spec, layouts, self.seconds)


@dataclass(frozen=True)
class _Key:
    """A spec compared only by the parts that a demand depends on; others cannot be hashed."""

    parts: tuple[Hashable, ...]
    basis: Basis
    spec: JobSpec = field(compare=False)


@dataclass(frozen=True)
class _Same:
    """A spec compared by identity, so that it is found without comparing its fields."""

    identity: int
    basis: Basis = field(hash=False)
    spec: JobSpec = field(compare=False)  # kept, so that no other gets its identity


def demand_of(spec: JobSpec, basis: Basis = NOMINAL) -> Demand:
    """The demand of a spec; the same object for specs with the same demand.

    Args:
        spec: A job's spec.
        basis: The basis of its predictions.
    """
    return _known(_Same(id(spec), basis, spec))


@lru_cache(_REMEMBERED)
def _known(same: _Same) -> Demand:
    spec = same.spec
    resources = spec.resources
    each = (resources.cpus_per_worker, resources.gpus_per_worker, resources.placement, resources.accelerator_type)
    labels, apart = frozenset(resources.node_labels.items()), spec.data.documents_apart
    copies = spec.fault_tolerance.memory_copy_every_steps is not None
    parts = (spec.model, spec.parallelism, apart, *planned_values(spec), spec.elasticity, each, labels, copies)
    return _remembered(_Key(parts, same.basis, spec))


@lru_cache(_REMEMBERED)
def _remembered(key: _Key) -> Demand:
    # Many jobs differ only in profile or correction, on which bytes do not depend, but modes do on the profile.
    profile = key.basis.profile if key.spec.parallelism.recompute == "auto" else None
    nodes = Basis(profile=profile, node_gpus=key.basis.node_gpus, node_memory_bytes=key.basis.node_memory_bytes)
    if key.basis == nodes:
        return Demand(key.spec, basis=nodes)
    same = _remembered(replace(key, basis=nodes))
    return Demand(key.spec, needed=same._needed, basis=key.basis, beyond=same._beyond)
