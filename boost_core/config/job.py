"""The job spec: everything a user may say about a training job."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from boost_core.config.base import Config, raise_problems
from boost_core.config.checkpoint import CheckpointConfig
from boost_core.config.data import DataConfig
from boost_core.config.legality import job_problems
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.training import OptimizerConfig, TrainingConfig


class ResourcesConfig(Config):
    """What one worker needs of its node."""

    cpus_per_worker: float = Field(1, gt=0, le=1024)
    gpus_per_worker: Literal[0, 1] = Field(0, description="1: NCCL on a GPU a rank; 0: gloo on CPU.")


class JobSpec(Config):
    """One training job.

    Raises:
        pydantic.ValidationError: A field is unknown, out of range, or does not go with another one;
            every problem is listed with its field and a remedy.
    """

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$")
    model: ModelConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resources: ResourcesConfig = ResourcesConfig()
    max_restarts: int = Field(3, ge=0, le=1000, description="Restarts after lost workers before the job fails.")

    @model_validator(mode="after")
    def _parts_go_together(self) -> "JobSpec":
        raise_problems("JobSpec", job_problems(self.model, self.parallelism, self.data, self.training, self.optimizer))
        return self


def load_job(path: str | Path) -> JobSpec:
    """Read a job spec from a YAML or JSON file.

    Raises:
        ValueError: The file is not a mapping or not a legal job spec (``pydantic.ValidationError``).
        OSError: The file cannot be read.
    """
    try:
        content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping with at least name, model and training")
    return JobSpec.model_validate(content)
