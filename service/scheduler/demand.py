"""What a job asks of nodes, worked out once for all jobs and passes that ask for the same."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from boost_core.config import JobSpec, Shape
from boost_core.plan import resize
from boost_core.plan.throughput import step_seconds
from service.gang.resources import gang_in_words, worker_resources

ACCELERATOR_LABEL = "ray.io/accelerator-type"  # which Ray gives to nodes with GPUs

_REMEMBERED = 4096  # specs; a few kilobytes each

Kind = tuple[Hashable, ...]  # what decides how many ranks a node can take


def required_labels(spec: JobSpec) -> dict[str, str]:
    """The labels that a node must have for a job."""
    kind = spec.resources.accelerator_type
    return dict(spec.resources.node_labels) | ({ACCELERATOR_LABEL: kind} if kind else {})


class Demand:
    """What a spec asks of nodes.

    Args:
        spec: A job's.

    Attributes:
        each: What a rank takes of its node, by Ray's names of resources.
        labels: What nodes must be labelled with.
        shapes: Those that the job allows, the fewest ranks first.
        placement: ``PACK``, ``STRICT_PACK`` or ``SPREAD``.
        smallest_group: The fewest ranks that must share a node, over all shapes.
        kind: Equal for demands of which each node takes equally many ranks.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.each = worker_resources(spec)
        self.labels = frozenset(required_labels(spec).items())
        self.shapes = tuple(spec.shapes())
        self.placement = spec.resources.placement
        self.smallest_group = min(self.groups(shape)[0] for shape in self.shapes)
        self.kind: Kind = (self.labels, tuple(self.each.items()))
        self._seconds: dict[Shape, float] = {}

    @cached_property
    def in_words(self) -> str:
        """What the job needs at least, for people."""
        shape, resources = self.shapes[0], self._spec.resources
        size, _ = self.groups(shape)
        words = gang_in_words(shape.world_size, self.each)
        kind = f" {resources.accelerator_type}" if resources.accelerator_type else ""
        return f"{words}{kind} in groups of {size}" if size > 1 else f"{words}{kind}"

    def amounts(self, ranks: int) -> dict[str, float]:
        """What so many ranks take."""
        return {name: amount * ranks for name, amount in self.each.items()}

    def groups(self, shape: Shape) -> tuple[int, int]:
        """Ranks that must share a node, and how many such groups a shape has."""
        return resize.units(shape, self.placement)

    def seconds(self, shape: Shape) -> float:
        """The predicted time of a step."""
        if shape not in self._seconds:
            self._seconds[shape] = step_seconds(self._spec, shape)
        return self._seconds[shape]

    def fastest(self, shapes: Iterable[Shape]) -> Shape | None:
        """The best of some shapes; ``None`` if there are none."""
        return resize.fastest(self._spec, shapes, self.seconds)


@dataclass(frozen=True)
class _Key:
    """A spec of which only the parts count that a demand depends on; it has others that cannot be hashed."""

    parts: tuple[Hashable, ...]
    spec: JobSpec = field(compare=False)


def demand_of(spec: JobSpec) -> Demand:
    """The demand of a spec; the same object for specs that ask for the same."""
    resources = spec.resources
    each = (resources.cpus_per_worker, resources.gpus_per_worker, resources.placement, resources.accelerator_type)
    labels = frozenset(resources.node_labels.items())
    parts = (spec.model, spec.parallelism, spec.data, spec.training, spec.optimizer, spec.elasticity, each, labels)
    return _remembered(_Key(parts, spec))


@lru_cache(_REMEMBERED)
def _remembered(key: _Key) -> Demand:
    return Demand(key.spec)
