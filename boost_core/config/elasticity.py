"""Which layouts a gang may take while its job runs."""

from pydantic import Field, field_validator, model_validator

from boost_core.config.base import Config
from boost_core.config.parallelism import DataSize, PipelineSize, TensorSize

MOST_LAYOUTS = 32  # that a job may allow, replicas counted: each is looked at when a job is checked and scheduled


class DataParallelRange(Config):
    """The fewest and the most replicas."""

    min: DataSize = 1
    max: DataSize

    @model_validator(mode="after")
    def _not_empty(self) -> "DataParallelRange":
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        return self


class ElasticityConfig(Config):
    """What the service may do to a gang when nodes and other jobs come and go. The global batch stays what it is."""

    data_parallel_size: DataParallelRange
    layouts: tuple[tuple[TensorSize, PipelineSize], ...] | None = Field(
        None,
        max_length=16,
        json_schema_extra={"minItems": 1},
        description="Allowed pairs [tensor_parallel_size, pipeline_parallel_size]; default: parallelism's own.",
    )

    @field_validator("layouts")
    @classmethod
    def _some_layout(cls, value: tuple[tuple[int, int], ...] | None) -> tuple[tuple[int, int], ...] | None:
        # As a min_length this would also be said of layouts that are there and wrong.
        if value == ():
            raise ValueError("no pair of sizes is allowed so; give one, or leave layouts out")
        return value
