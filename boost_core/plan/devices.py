"""Which of a job's layouts fit the memory of which GPUs.

What is planned for a rank is held to what torch's allocator has; CUDA's context, NCCL's buffers and the allocator's
gaps are not in it. They are left the difference between the gigabytes of data sheets (``hardware``) and what drivers
report, which is some 6 % more.
"""

from collections.abc import Mapping

from boost_core.config.job import JobSpec, ResourcesConfig
from boost_core.config.layout import Layout
from boost_core.hardware import ACCELERATOR_LABEL, DEVICE_BYTES
from boost_core.plan.memory import rank_memory


def kind_of_gpu(resources: ResourcesConfig) -> str | None:
    """The kind that a job asks for; ``None`` where any will do."""
    return resources.accelerator_type or resources.node_labels.get(ACCELERATOR_LABEL)


def device_bytes(resources: ResourcesConfig) -> int | None:
    """Memory of the GPU that a job asks for; ``None`` if it asks for none, or for a kind that is not known."""
    kind = kind_of_gpu(resources)
    return DEVICE_BYTES.get(kind) if resources.gpus_per_worker and kind else None


def needed_bytes(spec: JobSpec, layout: Layout) -> int:
    """What the rank that needs most of a gang of one layout needs of its device."""
    return rank_memory(spec, layout).total


def nothing_fits(spec: JobSpec) -> str | None:
    """Why a job can run in none of its layouts on the GPUs that it asks for, and what to change; ``None`` if it can."""
    device = device_bytes(spec.resources)
    if device is None:
        return None
    needed = {}
    for layout in reversed(spec.layouts()):  # the largest fits if any does, most often
        needed[layout] = needed_bytes(spec, layout)
        if needed[layout] <= device:
            return None
    return too_large(spec, needed, device)


def too_large(spec: JobSpec, needed: Mapping[Layout, int], device: int) -> str:
    """The same for people.

    Args:
        spec: The job.
        needed: Bytes that each of its layouts needs.
        device: Bytes that a GPU has.
    """
    layout = min(needed, key=lambda layout: needed[layout])
    sizes = f"{needed[layout] / 1e9:.1f} GB of {device / 1e9:g} GB"
    return f"no layout fits: {layout} needs least, {sizes}; {', '.join(_remedies(spec, layout))}"


def _remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """What would need less memory, and is not done yet."""
    parallelism, training = spec.parallelism, spec.training
    remedies = ["raise parallelism.tensor_parallel_size or pipeline_parallel_size"]
    if training.micro_batch_size > 1:
        remedies.append(f"lower training.micro_batch_size={training.micro_batch_size}")
    if parallelism.recompute != "full":
        latent = parallelism.recompute == "none" and spec.model.rank is not None
        remedies.append(f"set parallelism.recompute={'latent or full' if latent else 'full'}")
    if parallelism.zero_stage == 0 and layout.dp > 1:
        remedies.append("set parallelism.zero_stage=1")
    if parallelism.zero_stage > 0 and spec.optimizer.kind == "adamw":
        remedies.append("use more replicas, which share the optimizer's state")
    if training.precision == "fp32":
        remedies.append("set training.precision=bf16")
    return remedies
