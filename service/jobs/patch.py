"""What a user may change about a job: until it ends, and its group, tags and notes at any time."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from boost_core.config import DataParallelRange, ElasticityConfig, JobSpec, Layout
from boost_core.config.base import Config, FieldProblem, raise_problems
from boost_core.config.job import Steering
from boost_core.config.training import Schedule
from boost_core.plan.machine import NOMINAL, Basis
from boost_core.plan.report import nothing_fits


class ReplicasPatch(Config):
    """New limits of the number of replicas."""

    min: int | None = None
    max: int | None = None


class GpusPatch(ReplicasPatch):
    """New limits of the number of GPUs."""


class SamplePatch(Config):
    """New values of ``training.sample``; what is missing stays as it is."""

    every_steps: int | None = None
    prompts: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = None
    max_new_tokens: int | None = None


class TrainingPatch(Config):
    """New values of ``training``; what is missing stays as it is, and null stands for the default."""

    steps: int | None = None
    evaluate_every_steps: int | None = None
    sample: SamplePatch | None = None


class OptimizerPatch(Config):
    """New values of ``optimizer``; what is missing stays as it is, and null stands for the default."""

    learning_rate: float | None = None
    schedule: Schedule | None = None
    decay_steps: int | None = None
    warmup_steps: int | None = None
    final_learning_rate_ratio: float | None = None


class CheckpointPatch(Config):
    """New values of ``checkpoint``; what is missing stays as it is, and null stands for the default."""

    every_steps: int | None = None


class JobPatch(Config):
    """Changes to a job; fields that are missing or null stay as they are. The changed job must be legal as a whole."""

    changes: ClassVar = JobSpec  # whose other fields ``service.models.problems`` tells from unknown ones

    name: str | None = None
    priority: int | None = None
    data_parallel_size: ReplicasPatch | None = Field(
        None,
        description="Of elasticity. A job without it gets it; its own number of replicas is then the limit left out.",
    )
    gpus: GpusPatch | None = Field(None, description="Of elasticity, with layouts=auto; they are chosen anew then.")
    group: str | None = Field(None, description="May be changed after the job has ended, too; an empty one removes it.")
    tags: Annotated[tuple[str, ...], Field(fail_fast=True)] | None = Field(None, description="All of them; likewise.")
    notes: str | None = Field(None, description="Likewise.")
    training: TrainingPatch | None = Field(
        None, description="All ranks of a job that trains take these values, and the next two, between the same steps."
    )
    optimizer: OptimizerPatch | None = None
    checkpoint: CheckpointPatch | None = None


_STEERED = set(Steering.model_fields)


def merged(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396): its members replace existing ones, ``null`` removes one."""
    if not isinstance(patch, dict):
        return patch
    old = target if isinstance(target, dict) else {}
    changed = {name: merged(old.get(name), value) for name, value in patch.items() if value is not None}
    return {name: value for name, value in old.items() if name not in patch} | changed


def changed_spec(changes: JobPatch, spec: JobSpec) -> JobSpec:
    """The spec with its changes, and without layouts that are to be chosen again.

    Raises:
        pydantic.ValidationError: The changed job is not legal; names the fields of the spec.
    """
    fields = changes.model_dump(exclude_none=True, exclude=_STEERED)
    replicas, gpus = fields.pop("data_parallel_size", {}), fields.pop("gpus", {})
    if replicas and spec.leaves_layouts:
        problem = "layouts=auto chooses the number of replicas, too; change gpus instead"
        raise_problems("JobSpec", [FieldProblem(("elasticity", "data_parallel_size"), replicas, problem)])
    if gpus and not spec.leaves_layouts:
        problem = "only goes with layouts=auto, which this job does not use; change data_parallel_size instead"
        raise_problems("JobSpec", [FieldProblem(("elasticity", "gpus"), gpus, problem)])
    if fields.get("group") == "":
        fields["group"] = None
    steered = changes.model_dump(mode="json", exclude_unset=True, include=_STEERED)
    job = spec.model_dump(mode="json") | fields
    if "steps" in (steered.get("training") or {}):
        job["training"]["tokens"] = None
    job = merged(job, {section: values for section, values in steered.items() if values is not None})
    if replicas:
        own = spec.parallelism.data_parallel_size
        of_job = spec.elasticity or ElasticityConfig(data_parallel_size=DataParallelRange(min=own, max=own))
        job["elasticity"] = of_job.model_dump(mode="json")
        job["elasticity"]["data_parallel_size"] |= replicas
    if gpus:
        job["elasticity"] |= {"gpus": job["elasticity"]["gpus"] | gpus, "resolved": None}
    return JobSpec.model_validate(job)


def apply(
    changes: JobPatch, spec: JobSpec, chosen: tuple[Layout, ...] | None = None, basis: Basis = NOMINAL
) -> tuple[JobSpec, dict[str, Any]]:
    """Return the changed spec, and ``from`` and ``to`` of each changed field that is not of ``Steering``.

    Args:
        changes: The changes.
        spec: The job.
        chosen: The layouts chosen for the changed job, if its limits of GPUs change.
        basis: The basis of its predictions.

    Raises:
        pydantic.ValidationError: The changed job is not legal, or fits its GPUs no more; names the fields of the spec.
    """
    changed = changed_spec(changes, spec)
    if changed.lacks_layouts:
        changed = changed.with_layouts(chosen)
    if changes.data_parallel_size and (problem := nothing_fits(changed, basis.machine(changed))):
        limits = changes.data_parallel_size.model_dump(exclude_none=True)
        raise_problems("JobSpec", [FieldProblem(("elasticity", "data_parallel_size"), limits, problem)])
    before, after = (
        {field: getattr(each, field) for field in ("name", "priority", "group", "tags", "notes")}
        | {field: limits.get(field) for field in ("data_parallel_size", "gpus")}
        for each in (spec, changed)
        for limits in [each.elasticity.model_dump() if each.elasticity else {}]
    )
    differing = (field for field in before if before[field] != after[field])
    return changed, {field: {"from": before[field], "to": after[field]} for field in differing}
