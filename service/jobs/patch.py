"""What a job's user may change while it lives."""

from typing import Any

from pydantic import Field

from boost_core.config import DataParallelRange, ElasticityConfig, JobSpec
from boost_core.config.base import Config, FieldProblem, raise_problems
from boost_core.plan.devices import nothing_fits


class ReplicasPatch(Config):
    """New limits of the number of replicas."""

    min: int | None = None
    max: int | None = None


class JobPatch(Config):
    """What is to be different; what is left out or null stays as it is. The changed job must be legal as a whole."""

    name: str | None = None
    priority: int | None = None
    data_parallel_size: ReplicasPatch | None = Field(
        None,
        description="Of elasticity. A job without it gets it; its own number of replicas is then the limit left out.",
    )


def apply(changes: JobPatch, spec: JobSpec) -> tuple[JobSpec, dict[str, Any]]:
    """The changed spec, and ``from`` and ``to`` of each field that is different then.

    Raises:
        pydantic.ValidationError: The changed job is not legal, or fits its GPUs no more; names the fields of the spec.
    """
    given = changes.model_dump(exclude_none=True)
    limits = given.pop("data_parallel_size", {})
    job = spec.model_dump(mode="json") | given
    if limits:
        elasticity = _elasticity(spec).model_dump(mode="json")
        job["elasticity"] = elasticity | {"data_parallel_size": elasticity["data_parallel_size"] | limits}
    changed = JobSpec.model_validate(job)
    if limits and (problem := nothing_fits(changed)):
        raise_problems("JobSpec", [FieldProblem(("elasticity", "data_parallel_size"), limits, problem)])
    before, after = _changeable(spec), _changeable(changed)
    return changed, {
        field: {"from": before[field], "to": after[field]} for field in before if before[field] != after[field]
    }


def _elasticity(spec: JobSpec) -> ElasticityConfig:
    own = spec.parallelism.data_parallel_size
    return spec.elasticity or ElasticityConfig(data_parallel_size=DataParallelRange(min=own, max=own))


def _changeable(spec: JobSpec) -> dict[str, Any]:
    limits = spec.elasticity.data_parallel_size.model_dump() if spec.elasticity else None
    return {"name": spec.name, "priority": spec.priority, "data_parallel_size": limits}
