"""Host memory that a node's ranks need, and whether nodes have it.

It holds the masters and moments that ``parallelism.optimizer_offload`` puts there, what blocks with ``recompute:
offload`` keep for their backward pass, and copies of the state for checkpoints and recovery. Other memory of workers
and their data is not counted. The need is compared with the memory that Ray reserves for workers on a node, which is
less than the node has.
"""

from math import ceil

from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.plan.machine import Machine
from boost_core.plan.memory import RankMemory


def node_bytes(memory: RankMemory, layout: Layout, machine: Machine) -> int:
    """Return the most host memory that a node's ranks need.

    Args:
        memory: Memory of one rank.
        layout: The gang's layout.
        machine: What it runs on.
    """
    return _ranks_of_a_node(layout, machine) * (memory.host + memory.copies)


def room_of_a_rank(copies: int, machine: Machine) -> float:
    """Return the bytes of a host's memory that a rank is given for what blocks keep; none if unknown.

    They are the share of its GPU: the others may be those of other jobs, of whose memory this one's plan knows nothing.

    Args:
        copies: Bytes of a rank's copies of the state.
        machine: What it runs on.
    """
    if machine.node_memory_bytes is None:
        return 0
    return machine.node_memory_bytes // machine.cluster.levels[0].fan_out - copies


def _ranks_of_a_node(layout: Layout, machine: Machine) -> int:
    return min(layout.world_size, machine.cluster.levels[0].fan_out)


def lacking(needed: int, machine: Machine) -> int:
    """Return the bytes that a node is short of; 0 if it has enough or if its memory is unknown."""
    return 0 if machine.node_memory_bytes is None else max(0, needed - machine.node_memory_bytes)


def lack_in_words(needed: int, machine: Machine) -> str:
    """Describe a lack of host memory."""
    has = machine.node_memory_bytes or 0
    lacks = ceil((needed - has) / 1e8) / 10
    return f"lacks {lacks:.1f} GB of host memory: a node has {has / 1e9:.1f} GB for workers"


def kept_on_host(spec: JobSpec) -> str:
    """Describe what a job's ranks keep in the host's memory."""
    parts = ["state"] * (spec.parallelism.optimizer_offload > 0) + ["activations"] * spec.parallelism.keeps_on_host
    return " and ".join([*parts, "copies of the state"])


def host_remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """List changes that would reduce a layout's host memory and are not made yet."""
    parallelism, found = spec.parallelism, []
    if spec.fault_tolerance.memory_copy_every_steps is not None:
        fewer = "a quarter" if layout.world_size > 1 else "half"
        found.append(f"set fault_tolerance.memory_copy_every_steps=null, which leaves {fewer} of the copies")
    if parallelism.optimizer_offload:
        found.append(f"lower parallelism.optimizer_offload={parallelism.optimizer_offload:g}")
    if parallelism.keeps_on_host:
        elsewhere = spec.leaves_layouts or len({each.pp for each in spec.layouts()}) > 1  # where lists are not legal
        found.append(
            "set parallelism.recompute=auto" if elsewhere else "have fewer blocks with parallelism.recompute=offload"
        )
    if parallelism.zero_stage == 0 and layout.same_weights > 1:
        found.append("set parallelism.zero_stage=1")
    larger = "larger ones, or ones on which Ray starts with a smaller --object-store-memory or with --memory"
    return [*found, f"submit or clone it for other nodes: {larger}"]
