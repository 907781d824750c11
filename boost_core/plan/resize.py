"""Which of a job's layouts fit on the available nodes, and which of those is best.

A node is just a number here: the ranks that it could take now. A tensor parallel group always stays on one node; so
does a whole replica under ``placement: STRICT_PACK``. ``PACK`` and ``SPREAD`` are preferences and only decide which
nodes are taken first.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.plan.throughput import step_seconds


def fits(layout: Layout, slots: Iterable[int], placement: str = "PACK") -> bool:
    """Whether a gang of a layout can be placed.

    Args:
        layout: The gang's layout.
        slots: Ranks that each node can take.
        placement: ``PACK``, ``STRICT_PACK`` or ``SPREAD``, as in ``resources.placement``.
    """
    size, count = units(layout, placement)
    return sum(slot // size for slot in slots) >= count


def place(layout: Layout, slots: Sequence[int], placement: str = "PACK") -> list[int] | None:
    """Return the number of ranks on each node; ``None`` if they do not fit. Arguments as in ``fits``."""
    size, count = units(layout, placement)
    left = [slot // size for slot in slots]
    if sum(left) < count:
        return None
    taken = _spread(left, count) if placement == "SPREAD" else _pack(left, count)
    return [units * size for units in taken]


def own_slots(layout: Layout, placement: str = "PACK") -> list[int]:
    """Return the slots that a gang certainly has, knowing only its layout: one group per node."""
    size, count = units(layout, placement)
    return [size] * count


def units(layout: Layout, placement: str = "PACK") -> tuple[int, int]:
    """Return the number of ranks that share a node, and the number of such groups. Arguments as in ``fits``."""
    if placement == "STRICT_PACK":
        return layout.per_replica.world_size, layout.dp
    return layout.tp, layout.world_size // layout.tp


def legal(spec: JobSpec, slots: Sequence[int]) -> list[Layout]:
    """Return all layouts that a job allows and that fit, fewest ranks first."""
    return [layout for layout in spec.layouts() if fits(layout, slots, spec.resources.placement)]


def best(spec: JobSpec, slots: Sequence[int], allowed: Iterable[Layout] | None = None) -> Layout | None:
    """Return the layout with the highest predicted throughput; ties go to fewest ranks, then to the job's own layout.

    Args:
        spec: The job.
        slots: Ranks that each node can take.
        allowed: The layouts to choose from; by default all that the job allows.

    Returns:
        ``None`` if none fits.
    """
    choice = spec.layouts() if allowed is None else allowed
    return fastest(spec, (layout for layout in choice if fits(layout, slots, spec.resources.placement)))


def fastest(
    spec: JobSpec, layouts: Iterable[Layout], seconds: Callable[[Layout], float] | None = None
) -> Layout | None:
    """Return the best of some layouts of a job by the order of ``best``; ``None`` if there are none.

    Args:
        spec: The job.
        layouts: The layouts.
        seconds: Step time of a layout; predicted here by default.
    """
    own = Layout.of(spec.parallelism).per_replica
    predicted = seconds or partial(step_seconds, spec)
    return min(
        layouts,
        key=lambda layout: (predicted(layout), layout.world_size, layout.per_replica != own, layout),
        default=None,
    )


def why_not(spec: JobSpec, slots: Sequence[int], allowed: Iterable[Layout] | None = None) -> str:
    """Explain why none of a job's layouts fits, by what the one that needs least of a single node lacks."""
    placement = spec.resources.placement
    layouts = list(spec.layouts() if allowed is None else allowed)
    layout = min(layouts, key=lambda layout: (units(layout, placement)[0], layout.world_size))
    size, count = units(layout, placement)
    ranks, largest = "GPUs" if spec.resources.gpus_per_worker else "workers", max(slots, default=0)
    if largest < size:
        whole = f"a replica of {layout.replica_text}" if size > layout.tp else f"tp {size}"
        return f"{whole} needs {size} {ranks} on one node; the largest has {largest}"
    groups = sum(slot // size for slot in slots)
    together = f" in groups of {size}" if size > 1 else ""
    return f"{layout} needs {size * count} {ranks}{together}; there is room for {groups * size}"


def _pack(left: Sequence[int], count: int) -> list[int]:
    """Pack onto few nodes: take the smallest that holds all of the rest, or else the largest."""
    taken = [0] * len(left)
    while count:
        open_nodes = [node for node in range(len(left)) if left[node] > taken[node]]
        enough = [node for node in open_nodes if left[node] >= count]
        node = min(enough, key=lambda node: left[node]) if enough else max(open_nodes, key=lambda node: left[node])
        taken[node] = min(left[node], count)
        count -= taken[node]
    return taken


def _spread(left: Sequence[int], count: int) -> list[int]:
    """Spread over many nodes, about evenly."""
    taken = [0] * len(left)
    while count:
        open_nodes = [node for node in range(len(left)) if left[node] > taken[node]]
        share = max(1, count // len(open_nodes))
        for node in open_nodes:
            more = min(share, left[node] - taken[node], count)
            taken[node] += more
            count -= more
    return taken
