"""Which of a job's shapes fit on the nodes at hand, and which of those is best.

Nodes are plain numbers here: how many ranks each could take now. A tensor parallel group is whole on one node; so is a
whole replica under ``placement: STRICT_PACK``. ``PACK`` and ``SPREAD`` are wishes and decide only which nodes are
taken first.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from boost_core.config.elasticity import Shape
from boost_core.config.job import JobSpec
from boost_core.plan.throughput import step_seconds


def fits(shape: Shape, slots: Iterable[int], placement: str = "PACK") -> bool:
    """Whether a gang of a shape can be placed.

    Args:
        shape: The gang's.
        slots: Ranks that each node can take.
        placement: ``PACK``, ``STRICT_PACK`` or ``SPREAD``, as ``resources.placement``.
    """
    size, count = units(shape, placement)
    return sum(slot // size for slot in slots) >= count


def place(shape: Shape, slots: Sequence[int], placement: str = "PACK") -> list[int] | None:
    """How many ranks each node takes; ``None`` if they do not fit. Arguments as ``fits``."""
    size, count = units(shape, placement)
    left = [slot // size for slot in slots]
    if sum(left) < count:
        return None
    taken = _spread(left, count) if placement == "SPREAD" else _pack(left, count)
    return [units * size for units in taken]


def own_slots(shape: Shape, placement: str = "PACK") -> list[int]:
    """What a gang has for sure if all that is known of it is its shape: nodes that take one of its groups each."""
    size, count = units(shape, placement)
    return [size] * count


def units(shape: Shape, placement: str = "PACK") -> tuple[int, int]:
    """(Ranks that share a node, how many such groups). Arguments as ``fits``."""
    if placement == "STRICT_PACK":
        return shape.tensor * shape.pipeline, shape.data
    return shape.tensor, shape.pipeline * shape.data


def legal(spec: JobSpec, slots: Sequence[int]) -> list[Shape]:
    """All shapes that a job allows and that fit, the fewest ranks first."""
    return [shape for shape in spec.shapes() if fits(shape, slots, spec.resources.placement)]


def best(spec: JobSpec, slots: Sequence[int], allowed: Iterable[Shape] | None = None) -> Shape | None:
    """The shape of the highest predicted throughput; of equals the one of fewest ranks, then of the job's own layout.

    Args:
        spec: The job.
        slots: Ranks that each node can take.
        allowed: The shapes to choose from; by default all that the job allows.

    Returns:
        ``None`` if none fits.
    """
    choice = spec.shapes() if allowed is None else allowed
    return fastest(spec, (shape for shape in choice if fits(shape, slots, spec.resources.placement)))


def fastest(spec: JobSpec, shapes: Iterable[Shape], seconds: Callable[[Shape], float] | None = None) -> Shape | None:
    """The best of some shapes of a job, as ``best``, wherever they fit; ``None`` if there are none.

    Args:
        spec: The job.
        shapes: The shapes.
        seconds: What is known of their steps' time; by default it is predicted here.
    """
    own = Shape.of(spec.parallelism).layout
    predicted = seconds or partial(step_seconds, spec)
    return min(
        shapes,
        key=lambda shape: (predicted(shape), shape.world_size, shape.layout != own, shape),
        default=None,
    )


def why_not(spec: JobSpec, slots: Sequence[int], allowed: Iterable[Shape] | None = None) -> str:
    """Why none of a job's shapes fits, for people; told of the one that asks least of a single node."""
    placement = spec.resources.placement
    shapes = list(spec.shapes() if allowed is None else allowed)
    shape = min(shapes, key=lambda shape: (units(shape, placement)[0], shape.world_size))
    size, count = units(shape, placement)
    ranks, largest = "GPUs" if spec.resources.gpus_per_worker else "workers", max(slots, default=0)
    if largest < size:
        whole = f"a replica of tp {shape.tensor} × pp {shape.pipeline}" if size > shape.tensor else f"tp {size}"
        return f"{whole} needs {size} {ranks} on one node; the largest has {largest}"
    groups = sum(slot // size for slot in slots)
    together = f" in groups of {size}" if size > 1 else ""
    return f"{shape} needs {size * count} {ranks}{together}; there is room for {groups * size}"


def _pack(left: Sequence[int], count: int) -> list[int]:
    """On few nodes: the smallest that takes all of the rest, or else the largest."""
    taken = [0] * len(left)
    while count:
        open_nodes = [node for node in range(len(left)) if left[node] > taken[node]]
        enough = [node for node in open_nodes if left[node] >= count]
        node = min(enough, key=lambda node: left[node]) if enough else max(open_nodes, key=lambda node: left[node])
        taken[node] = min(left[node], count)
        count -= taken[node]
    return taken


def _spread(left: Sequence[int], count: int) -> list[int]:
    """On many nodes, about equally many on each."""
    taken = [0] * len(left)
    while count:
        open_nodes = [node for node in range(len(left)) if left[node] > taken[node]]
        share = max(1, count // len(open_nodes))
        for node in open_nodes:
            more = min(share, left[node] - taken[node], count)
            taken[node] += more
            count -= more
    return taken
