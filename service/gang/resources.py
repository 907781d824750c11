"""What a worker needs of its node, by Ray's names. Torch-free, and does not import Ray."""

from collections.abc import Collection, Iterable, Mapping

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.plan.devices import at
from boost_core.plan.memory import rank_memory

ON_THE_HEAD = {"node:__internal_head__": 0.001}  # for what should not go with a node of a gang
_NONE_OF = "!in("  # Ray's way to say which values a label must not have


def worker_resources(spec: JobSpec) -> dict[str, float]:
    """The bundle that one worker takes, for example ``{"CPU": 1, "GPU": 1}``."""
    resources: dict[str, float] = {"CPU": spec.resources.cpus_per_worker}
    if spec.resources.gpus_per_worker:
        resources["GPU"] = spec.resources.gpus_per_worker
    return resources


def node_selector(
    spec: JobSpec, avoid: Collection[str], avoid_kinds: Collection[str] = (), near: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """What a node must have, or must not be, as Ray's labels say it.

    Args:
        spec: The job.
        avoid: Nodes.
        avoid_kinds: Kinds of GPU; none if the job names the one that it takes.
        near: Other labels that it must have.
    """
    selector = {**dict(near), **spec.resources.node_labels}
    if spec.resources.accelerator_type:
        selector[ACCELERATOR_LABEL] = spec.resources.accelerator_type
    if avoid_kinds:
        selector[ACCELERATOR_LABEL] = f"{_NONE_OF}{','.join(sorted(avoid_kinds))})"
    if avoid:
        selector["ray.io/node-id"] = f"{_NONE_OF}{','.join(sorted(avoid))})"
    return selector


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with some labels is one that ``node_selector`` asks for."""
    for name, wanted in selector.items():
        found = labels.get(name)
        if wanted.startswith(_NONE_OF):
            if found in wanted.removeprefix(_NONE_OF).removesuffix(")").split(","):
                return False
        elif found != wanted:
            return False
    return True


def without_resources(spec: JobSpec) -> JobSpec:
    """The job as processes see it that only keep its state, on the CPUs that others leave."""
    resources = spec.resources.model_copy(update={"gpus_per_worker": 0, "cpus_per_worker": 1})
    return spec.model_copy(update={"resources": resources})


def bytes_to_keep(spec: JobSpec, layout: Layout) -> int:
    """What a process needs of its node's memory to take over a rank's state: that, and two copies to store."""
    needed = rank_memory(at(spec, layout), layout)
    return 3 * (needed.weights + needed.gradients + needed.optimizer)


def gang_in_words(workers: int, resources: dict[str, float]) -> str:
    """A gang's size for people, for example ``2 × {CPU: 1}``."""
    bundle = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
    return f"{workers} × {{{bundle}}}"
