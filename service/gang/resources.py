"""What a worker needs from its node, by Ray's names. Imports neither torch nor Ray."""

from collections.abc import Collection, Iterable, Mapping

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.plan.memory import rank_memory

ON_THE_HEAD = {"node:__internal_head__": 0.001}  # for what should not go down with a gang's node
_NONE_OF = "!in("  # Ray's syntax for values that a label must not have


def worker_resources(spec: JobSpec) -> dict[str, float]:
    """Return one worker's bundle, for example ``{"CPU": 1, "GPU": 1}``."""
    resources: dict[str, float] = {"CPU": spec.resources.cpus_per_worker}
    if spec.resources.gpus_per_worker:
        resources["GPU"] = spec.resources.gpus_per_worker
    return resources


def node_selector(
    spec: JobSpec, avoid: Collection[str], avoid_kinds: Collection[str] = (), near: Iterable[tuple[str, str]] = ()
) -> dict[str, str]:
    """Return the constraints on a node, in Ray's syntax for label selectors.

    Args:
        spec: The job.
        avoid: Nodes not to use.
        avoid_kinds: Kinds of GPU not to use; empty if the job names its kind.
        near: Further labels that the node must have.
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
    """Whether a node with these labels matches a selector from ``node_selector``."""
    for name, wanted in selector.items():
        found = labels.get(name)
        if wanted.startswith(_NONE_OF):
            if found in wanted.removeprefix(_NONE_OF).removesuffix(")").split(","):
                return False
        elif found != wanted:
            return False
    return True


def without_resources(spec: JobSpec) -> JobSpec:
    """Return the job for processes that only keep its state, on CPUs that others leave free."""
    resources = spec.resources.model_copy(update={"gpus_per_worker": 0, "cpus_per_worker": 1})
    return spec.model_copy(update={"resources": resources})


def bytes_to_keep(spec: JobSpec, layout: Layout) -> int:
    """Return the bytes of node memory needed to take over a rank's state: the state, and two copies to store."""
    # Such processes have no GPU: what the gang has in its hosts' memory is theirs to hold, too.
    kept = spec.at(layout).with_parallelism(recompute="none", optimizer_offload=0.0)
    needed = rank_memory(kept, layout)
    return 3 * (needed.weights + needed.gradients + needed.optimizer)


def gang_in_words(workers: int, resources: dict[str, float]) -> str:
    """Format a gang's size, for example ``2 × {CPU: 1}``."""
    bundle = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
    return f"{workers} × {{{bundle}}}"
