"""A job's step metrics over its whole length."""

from datetime import datetime

from pydantic import BaseModel, Field


class MetricsSample(BaseModel):
    """Consecutive steps, as one point of a curve. Numbers that JSON cannot represent are null."""

    step: int = Field(description="The last of these steps.")
    time: datetime = Field(description="When that step was done.")
    loss: float | None = Field(description="Mean cross entropy, in nats per token.")
    loss_min: float | None = Field(description="The lowest loss of a step.")
    loss_max: float | None = Field(description="The highest loss of a step.")
    learning_rate: float | None = Field(description="Mean learning rate.")
    gradient_norm: float | None = Field(description="Mean global norm before clipping.")
    tokens_per_second: float | None = Field(description="Mean throughput of the gang, in tokens per second.")
    step_seconds: float | None = Field(description="Mean duration of a step.")
    exposed_communication_seconds: float | None = Field(
        description="Mean part of a step spent waiting for collectives."
    )
    model_flops_per_second: float | None = Field(description="Mean model FLOPs per second of the whole gang.")


class ValidationPoint(BaseModel):
    """The loss on some text, in three forms."""

    loss: float | None = Field(description="Mean cross entropy, in nats per token.")
    perplexity: float | None = Field(None, description="Exponential of the loss.")
    bits_per_byte: float | None = Field(
        None, description="The loss in bits per byte of the text; null if the text's size in bytes is not known."
    )


class NamedValidationPoint(ValidationPoint):
    """The loss on one set of data.validation."""

    name: str = Field(description="The set's name.")


class EvaluationPoint(ValidationPoint):
    """One evaluation on validation text."""

    step: int = Field(description="Step at which it ran.")
    sets: list[NamedValidationPoint] = Field([], description="The named sets, in the job's order.")


class RankTimes(BaseModel):
    """How long each rank computed in a step."""

    step: int = Field(description="The step.")
    busy_seconds: list[float | None] = Field(description="Seconds that each rank computed, by rank.")


class MetricsHistory(BaseModel):
    """A job's curves between two steps, downsampled to a number of points."""

    job_id: str = Field(description="The job.")
    from_step: int = Field(description="First step requested.")
    to_step: int = Field(description="Last step available of those requested.")
    bucket_steps: int = Field(description="Steps per point.")
    samples: list[MetricsSample] = Field(description="In order of steps.")
    evaluations: list[EvaluationPoint] = Field(description="In order of steps.")
    ranks: list[RankTimes] = Field(description="In order of steps; empty if nothing was measured by rank.")
