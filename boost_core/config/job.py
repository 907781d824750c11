"""The job spec: everything a user can specify about a training job."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, StringConstraints, ValidationError, model_validator

from boost_core.config.base import Config, ResourceName, raise_problems, spelled
from boost_core.config.checkpoint import CheckpointConfig
from boost_core.config.data import DataConfig
from boost_core.config.elasticity import ElasticityConfig
from boost_core.config.faults import FaultToleranceConfig
from boost_core.config.layout import Layout
from boost_core.config.legality import door_problems, elasticity_problems, job_problems, legal_layouts
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.parsing.yaml_text import read_yaml
from boost_core.config.trackers import TrackersConfig
from boost_core.config.training import OptimizerConfig, TrainingConfig

Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$"),
    spelled("letters, digits, dots, underscores, spaces and hyphens, starting with a letter or digit"),
]
Label = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$"),
    spelled("letters, digits, underscores, dots, slashes and hyphens, at most 63, starting with a letter or digit"),
]
AcceleratorType = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,63}$"), spelled("Ray's name for it, such as H100")
]


class ResourcesConfig(Config):
    """What one worker needs from its node."""

    cpus_per_worker: float = Field(1, ge=0.01, le=1024)
    gpus_per_worker: Literal[0, 1] = Field(0, description="1: NCCL, one GPU per rank; 0: gloo on CPU.")
    accelerator_type: AcceleratorType | None = Field(None, description="Ray's name for the GPU model, such as H100.")
    node_labels: dict[Label, Label] = Field({}, max_length=16, description="Labels that nodes must have.")
    placement: Literal["PACK", "STRICT_PACK", "SPREAD"] = Field(
        "PACK",
        description="How to place a replica's tensor parallel groups, each of which stays on one node: on as few "
        "nodes as possible, on a single node, or on different nodes if there are enough.",
    )


class JobSpec(Config):
    """One training job.

    Raises:
        pydantic.ValidationError: A field is unknown, out of range, or conflicts with another; every problem is
            listed with its field and a remedy.
    """

    name: Name
    model: ModelConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resources: ResourcesConfig = ResourcesConfig()
    elasticity: ElasticityConfig | None = Field(
        None, description="Layouts that the gang may take; default: only the one in parallelism."
    )
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    trackers: TrackersConfig = TrackersConfig()
    queue: ResourceName = Field("default", description="The queue that the job waits and runs in.")
    credentials: ResourceName | None = Field(
        None,
        description="Name of the secret with credentials for s3:// data and checkpoints; default: the node's own "
        "credentials.",
    )
    priority: int = Field(
        0, ge=-1000, le=1000, description="Jobs with a higher priority start first and may preempt others."
    )

    @model_validator(mode="after")
    def _parts_go_together(self) -> "JobSpec":
        problems = job_problems(
            self.model, self.parallelism, self.data, self.training, self.optimizer, self.resources.gpus_per_worker
        )
        if not problems:
            problems = elasticity_problems(
                self.model, self.parallelism, self.training, self.optimizer, self.resources.gpus_per_worker,
                self.elasticity,
            )  # fmt: skip
        raise_problems("JobSpec", problems)
        return self

    def as_written(self) -> dict[str, Any]:
        """The job as JSON, without those fields of its model and optimizer that their others decide anyway.

        A change of one takes effect on the others, as in a job file: made dense, a model loses its preset's rank.
        """
        sections = {"model": self.model, "optimizer": self.optimizer}
        return self.model_dump(mode="json") | {name: _fewest_fields(section) for name, section in sections.items()}

    def layouts(self) -> tuple[Layout, ...]:
        """All layouts that the gang may take, largest last; at most ``MOST_LAYOUTS``.

        With ``layouts: auto``, these are the chosen ones or, before the choice, the one in parallelism.
        """
        if self.elasticity is None:
            return (Layout.of(self.parallelism),)
        if self.elasticity.automatic:
            return self.elasticity.chosen or (Layout.of(self.parallelism),)
        return legal_layouts(
            self.model, self.parallelism, self.training, self.optimizer, self.resources.gpus_per_worker, self.elasticity
        )

    def at(self, layout: Layout) -> "JobSpec":
        """Return the job with its gang in another layout."""
        return self.model_copy(update={"parallelism": self.parallelism.at(layout)})

    def with_parallelism(self, **changes: object) -> "JobSpec":
        """Return the job with other fields of ``parallelism``, which are not checked."""
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update=changes)})

    @property
    def leaves_layouts(self) -> bool:
        """Whether the job leaves the choice of its layouts to the service."""
        return self.elasticity is not None and self.elasticity.automatic

    @property
    def lacks_layouts(self) -> bool:
        """Whether the service has yet to choose the job's layouts."""
        return self.elasticity is not None and self.elasticity.automatic and not self.elasticity.resolved

    def with_layouts(self, layouts: tuple[Layout, ...] | None) -> "JobSpec":
        """Return the job with layouts chosen by the service; ``None`` undoes the choice."""
        if self.elasticity is None:
            return self
        return self.model_copy(update={"elasticity": self.elasticity.with_chosen(layouts)})


def _fewest_fields(section: Config) -> dict[str, Any]:
    """The fewest fields that make a section, as JSON."""
    content = section.model_dump(mode="json")

    def leave_out(fields: dict[str, Any]) -> None:
        for name, value in list(fields.items()):
            del fields[name]
            try:
                decided = type(section).model_validate(content) == section
            except ValidationError:
                decided = False
            if not decided:
                fields[name] = value
                if isinstance(value, dict):
                    leave_out(value)

    leave_out(content)
    return content


def load_job(path: str | Path) -> JobSpec:
    """Read a job spec from a YAML or JSON file.

    Raises:
        ValueError: The file is not a mapping or not a legal job spec (``pydantic.ValidationError``).
        OSError: The file cannot be read.
    """
    try:
        content: Any = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping with at least name, model and training")
    spec = JobSpec.model_validate(content)
    raise_problems(JobSpec.__name__, door_problems(spec.training))
    return spec
