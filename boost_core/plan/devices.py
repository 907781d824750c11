"""Which of a job's layouts fit the memory of which GPUs.

What is planned for a rank is held to what torch's allocator has; CUDA's context, NCCL's buffers and the allocator's
gaps are not in it. They are left the difference between the gigabytes of data sheets (``hardware``) and what drivers
report, which is some 6 % more.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf

from boost_core.config.job import JobSpec, ResourcesConfig
from boost_core.config.layout import Layout
from boost_core.config.parallelism import ParallelismConfig
from boost_core.hardware import DEVICE_BYTES
from boost_core.plan.machine import kind_of_gpu
from boost_core.plan.memory import rank_memory
from boost_core.plan.stages import miscounted

SPARE = 0.04  # of a GPU's memory, where what is planned for a job is chosen for it


def device_bytes(resources: ResourcesConfig) -> int | None:
    """Memory of the GPU that a job asks for; ``None`` if it asks for none, or for a kind that is not known."""
    kind = kind_of_gpu(resources)
    return DEVICE_BYTES.get(kind) if resources.gpus_per_worker and kind else None


def needed_bytes(spec: JobSpec, layout: Layout) -> int:
    """What the rank that needs most of a gang of one layout needs of its device."""
    if spec.parallelism.recompute == "auto":
        return _recomputing(_Asked.of(spec, layout))[1]
    return rank_memory(spec, layout).total


def at(spec: JobSpec, layout: Layout) -> JobSpec:
    """The job as a gang of one layout trains it.

    In place of ``recompute: auto`` comes the least costly mix of modes with which every rank fits its GPU (``mixes``),
    or else the mode with which the fullest holds least. Losses are the same to the bit in all of them.
    """
    if spec.parallelism.recompute != "auto":
        return spec.at(layout)
    return spec.model_copy(update={"parallelism": _recomputing(_Asked.of(spec, layout))[0]})


@dataclass(frozen=True)
class _Asked:
    """A job at a layout. Only the parts count that its memory and seconds depend on: others cannot be hashed."""

    parts: tuple[Hashable, ...]
    job: JobSpec = field(compare=False)
    layout: Layout = field(compare=False)
    limit: float = field(compare=False)

    @classmethod
    def of(cls, spec: JobSpec, layout: Layout) -> "_Asked":
        job, device = spec.at(layout), device_bytes(spec.resources) or inf
        on_gpu, apart = job.resources.gpus_per_worker, job.data.documents_apart
        kind = kind_of_gpu(job.resources)
        parts = job.model, job.parallelism, job.training, job.optimizer, apart, on_gpu, device, kind
        return cls(parts, job, layout, device * (1 - SPARE))


@lru_cache(4096)  # a plan, the door and the scheduler ask the same
def _recomputing(asked: _Asked) -> tuple[ParallelismConfig, int]:
    """What comes in place of ``auto``, and the bytes that a rank needs then."""
    # Imported here because the seconds of mixes are those of a step, and those of a job's step depend on what it mixes.
    from boost_core.plan.mixes import least_costly, legal_modes

    whole = asked.job.parallelism.model_copy(update={"recompute": legal_modes(asked.job)[0]})
    needed = rank_memory(asked.job.model_copy(update={"parallelism": whole}), asked.layout).total
    if needed <= asked.limit:
        return whole, needed
    mixed = least_costly(asked.job, asked.layout, asked.limit)
    return mixed.parallelism, rank_memory(mixed, asked.layout).total


def nothing_fits(spec: JobSpec) -> str | None:
    """Why a job can run in none of its layouts on the GPUs that it asks for, and what to change; ``None`` if it can.

    Also where it lists modes for other stages than a layout has.
    """
    jobs = map(spec.at, spec.layouts()) if isinstance(spec.parallelism.recompute, tuple) else ()
    wrong = (miscounted(job.model, job.parallelism, job.training.sequence_length) for job in jobs)
    if problem := next(filter(None, wrong), None):
        return problem
    device = device_bytes(spec.resources)
    if device is None:
        return _auto_of_what(spec)
    needed = {}
    for layout in reversed(spec.layouts()):  # the largest fits if any does, most often
        needed[layout] = needed_bytes(spec, layout)
        if needed[layout] <= device:
            return None
    return too_large(spec, needed, device)


def _auto_of_what(spec: JobSpec) -> str | None:
    """Why a job cannot choose what to recompute by the memory of a GPU that is not known."""
    if spec.parallelism.recompute != "auto" or not spec.resources.gpus_per_worker:
        return None
    return (
        "recompute=auto goes by the memory of the GPU; set resources.accelerator_type to one of "
        f"{', '.join(DEVICE_BYTES)}, or recompute to one of the others"
    )


def too_large(spec: JobSpec, needed: Mapping[Layout, int], device: int) -> str:
    """The same for people.

    Args:
        spec: The job.
        needed: Bytes that each of its layouts needs.
        device: Bytes that a GPU has.
    """
    layout = min(needed, key=lambda layout: needed[layout])
    sizes = f"{needed[layout] / 1e9:.1f} GB of {device / 1e9:g} GB"
    return f"no layout fits: {layout} needs least, {sizes}; {', '.join(remedies(spec, layout))}"


def remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """What would need less memory in a layout, and is not done yet."""
    parallelism, training = spec.parallelism, spec.training
    sizes = f"parallelism.tensor_parallel_size or {'pipeline' if layout.cp == 1 else 'context'}_parallel_size"
    found = [f"raise {'elasticity.gpus.max' if spec.leaves_layouts else sizes}"]
    if training.micro_batch_size > 1:
        found.append(f"lower training.micro_batch_size={training.micro_batch_size}")
    if parallelism.recompute not in ("full", "auto"):
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
