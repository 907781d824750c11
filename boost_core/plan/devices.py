"""Whether a job's layouts fit the memory of its GPUs.

A rank's planned memory is what torch's allocator hands out, without CUDA's context, NCCL's buffers and the allocator's
fragmentation. For these remains the difference between the gigabytes of data sheets (``hardware``) and what drivers
report, about 6 % more.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from boost_core.config.job import JobSpec, ResourcesConfig
from boost_core.config.parallelism import Layout, ParallelismConfig
from boost_core.hardware import DEVICE_BYTES
from boost_core.plan.machine import Machine, kind_of_gpu, machine_for
from boost_core.plan.memory import host_remedies, kept_on_host, lack_in_words, lacking, node_bytes, rank_memory
from boost_core.plan.work import miscounted

SPARE = 0.04  # share of a GPU's memory kept free where the plan makes the choices


def device_bytes(resources: ResourcesConfig) -> int | None:
    """Return the memory of the GPU that a job requests; ``None`` if it requests none, or an unknown kind."""
    kind = kind_of_gpu(resources)
    return DEVICE_BYTES.get(kind) if resources.gpus_per_worker and kind else None


def needed_bytes(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> int:
    """Return the device memory needed by the rank that needs most in a layout; ``machine`` as for ``at``."""
    if _leaves_open(spec):
        return _resolved(_Asked.of(spec, layout, machine))[1]
    return rank_memory(spec, layout).total


def at(spec: JobSpec, layout: Layout, machine: Machine | None = None) -> JobSpec:
    """Return the job as a gang of one layout trains it.

    ``recompute: auto`` is replaced by the least costly mix of modes with which every rank fits its GPU (``mixes``), or
    else by the mode with which the fullest rank holds least. With ``layouts: auto``, a layout that fits in no other way
    has all of the optimizer's state on the host, if that makes it fit. Losses are bit-identical in any case.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        machine: What it runs on, whose corrections do not matter; by default what ``machine_for`` returns. Blocks are
            kept in the host's memory only if the machine has a known amount of it.
    """
    if not _leaves_open(spec):
        return spec.at(layout)
    return spec.model_copy(update={"parallelism": _resolved(_Asked.of(spec, layout, machine))[0]})


def _leaves_open(spec: JobSpec) -> bool:
    """Whether what a job keeps where depends on its layout."""
    return spec.parallelism.recompute == "auto" or spec.leaves_layouts


@dataclass(frozen=True)
class _Asked:
    """A job at a layout, compared by the parts that affect its memory and time; others cannot be hashed."""

    parts: tuple[Hashable, ...]
    machine: Machine
    job: JobSpec = field(compare=False)
    layout: Layout = field(compare=False)
    limit: float = field(compare=False)

    @classmethod
    def of(cls, spec: JobSpec, layout: Layout, machine: Machine | None) -> "_Asked":
        job, device = spec.at(layout), device_bytes(spec.resources) or inf
        on_gpu, apart = job.resources.gpus_per_worker, job.data.documents_apart
        kind, copies = kind_of_gpu(job.resources), job.fault_tolerance.memory_copy_every_steps is not None
        facts = apart, on_gpu, device, kind, copies, job.leaves_layouts
        parts = job.model, job.parallelism, job.training, job.optimizer, *facts
        on = machine or machine_for(job.resources, job.training.precision)
        # Each job has corrections of its own, which say little about modes compared with each other.
        return cls(parts, replace(on, fitted=None), job, layout, device * (1 - SPARE))


@lru_cache(4096)  # shared by plans, admission and the scheduler
def _resolved(asked: _Asked) -> tuple[ParallelismConfig, int]:
    """Return what replaces what is left open, and the bytes that a rank then needs."""
    job, needed = _recomputing(asked.job, asked)
    knows_hosts = asked.job.resources.gpus_per_worker > 0 and asked.machine.node_memory_bytes is not None
    if needed > asked.limit and job.leaves_layouts and knows_hosts and job.parallelism.optimizer_offload < 1:
        offloaded, less = _recomputing(asked.job.with_parallelism(optimizer_offload=1.0), asked)
        of_node = node_bytes(rank_memory(offloaded, asked.layout), asked.layout, asked.machine)
        if less <= asked.limit and not lacking(of_node, asked.machine):
            return offloaded.parallelism, less
    return job.parallelism, needed


def _recomputing(job: JobSpec, asked: _Asked) -> tuple[JobSpec, int]:
    """Return a job without ``recompute: auto``, and the bytes that a rank then needs."""
    # Imported here to break a cycle: the time of a mix is that of a step, and a step's time depends on its mix.
    from boost_core.plan.mixes import Mixes, legal_modes

    if job.parallelism.recompute != "auto":
        return job, rank_memory(job, asked.layout).total
    whole = job.with_parallelism(recompute=legal_modes(job, asked.machine)[0])
    needed = rank_memory(whole, asked.layout).total
    if needed <= asked.limit:
        return whole, needed
    mixed = Mixes(job, asked.layout, asked.machine).least_costly(asked.limit)
    return mixed, rank_memory(mixed, asked.layout).total


def node_host_bytes(spec: JobSpec, layout: Layout, machine: Machine) -> int:
    """Return the host memory that a node's ranks need in one layout."""
    return node_bytes(rank_memory(at(spec, layout, machine), layout), layout, machine)


def nothing_fits(spec: JobSpec, machine: Machine | None = None) -> str | None:
    """Explain why none of a job's layouts fits the GPUs it requests, and what to change; ``None`` if one fits.

    Also checks that listed modes match the number of stages of each layout, and that a network could hold its ranks.

    Args:
        spec: The job.
        machine: What it runs on; the memory of its nodes' hosts is checked if known. By default it is not checked.
    """
    jobs = map(spec.at, spec.layouts()) if isinstance(spec.parallelism.recompute, tuple) else ()
    wrong = (miscounted(job.model, job.parallelism, job.training.sequence_length) for job in jobs)
    if problem := next(filter(None, wrong), None):
        return problem
    if machine is not None and (problem := _beyond_network(spec, machine)):
        return problem
    device = device_bytes(spec.resources)
    if device is None and (problem := _auto_of_what(spec)):
        return problem
    checks_hosts = machine is not None and machine.node_memory_bytes is not None
    if device is None and not checks_hosts:
        return None
    needed, of_hosts = {}, {}
    for layout in reversed(spec.layouts()):  # usually the largest fits if any does
        needed[layout] = 0 if device is None else needed_bytes(spec, layout, machine)
        if needed[layout] <= (device or 0):
            if machine is None or not checks_hosts:
                return None
            of_hosts[layout] = node_host_bytes(spec, layout, machine)
            if not lacking(of_hosts[layout], machine):
                return None
    if machine is not None and of_hosts:
        return too_large_for_hosts(spec, of_hosts, machine)
    return too_large(spec, needed, device or 0)


def _beyond_network(spec: JobSpec, machine: Machine) -> str | None:
    """Explain that a layout has more ranks than the network has places, so that it can be neither planned nor run."""
    largest = max(spec.layouts(), key=lambda layout: layout.world_size)
    try:
        machine.cluster.rows([largest.world_size])
    except ValueError as error:
        return f"{largest}: {error}"
    return None


def _auto_of_what(spec: JobSpec) -> str | None:
    """Explain why ``recompute: auto`` cannot be resolved for a GPU whose memory is unknown; ``None`` if not needed."""
    if spec.parallelism.recompute != "auto" or not spec.resources.gpus_per_worker:
        return None
    return (
        "recompute=auto needs to know the GPU's memory; set resources.accelerator_type to one of "
        f"{', '.join(DEVICE_BYTES)}, or recompute to another mode"
    )


def too_large(spec: JobSpec, needed: Mapping[Layout, int], device: int) -> str:
    """Explain that no layout fits, and what to change.

    Args:
        spec: The job.
        needed: Bytes that each of its layouts needs.
        device: Bytes that a GPU has.
    """
    layout = min(needed, key=lambda layout: needed[layout])
    sizes = f"{needed[layout] / 1e9:.1f} GB of {device / 1e9:g} GB"
    return f"no layout fits: {layout} needs the least, {sizes}; {', '.join(remedies(spec, layout))}"


def too_large_for_hosts(spec: JobSpec, needed: Mapping[Layout, int], machine: Machine) -> str:
    """Explain why no layout fits the host memory of its nodes, and what to change.

    Args:
        spec: The job.
        needed: Bytes of host memory that a node's ranks need, by layout, for the layouts that fit their GPU.
        machine: What it runs on.
    """
    layout = min(needed, key=lambda layout: (needed[layout], layout))
    return (
        f"no layout fits the nodes: {layout} needs the least, {needed[layout] / 1e9:.1f} GB per node for "
        f"{kept_on_host(spec)}, and "
        f"{lack_in_words(needed[layout], machine)}; {', '.join(host_remedies(spec, layout))}"
    )


def remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """List changes that would reduce a layout's device memory and are not made yet."""
    parallelism, training = spec.parallelism, spec.training
    sizes = f"parallelism.tensor_parallel_size or {'pipeline' if layout.cp == 1 else 'context'}_parallel_size"
    found = [f"raise {'elasticity.gpus.max' if spec.leaves_layouts else sizes}"]
    if training.micro_batch_size > 1:
        found.append(f"lower training.micro_batch_size={training.micro_batch_size}")
    if parallelism.recompute not in ("full", "auto") and not parallelism.keeps_on_host:
        found.append("set parallelism.recompute=auto")
    if parallelism.zero_stage == 0 and layout.same_weights > 1:
        found.append("set parallelism.zero_stage=1")
    if parallelism.zero_stage > 0 and spec.optimizer.kind == "adamw" and not spec.leaves_layouts:
        found.append("use more replicas, which share the optimizer's state")
    if training.precision == "fp32":
        found.append("set training.precision=bf16")
    if parallelism.optimizer_offload < 1:
        found.append("set parallelism.optimizer_offload=1 as a last resort")
    return found
