"""The optimizer's trajectory: steps, batches, learning rate."""

from typing import Annotated, Literal

from pydantic import Field

from boost_core.config.base import Config


class TrainingConfig(Config):
    """How long and in what portions to train."""

    steps: int = Field(ge=1, le=100_000_000, description="Optimizer steps.")
    sequence_length: int = Field(256, ge=2, le=1_048_576, description="Tokens a sequence.")
    global_batch_size: int = Field(16, ge=1, description="Sequences an optimizer step, whatever the gang's size.")
    micro_batch_size: int = Field(16, ge=1, description="Sequences a rank holds at once.")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Compute type; master weights stay fp32.")
    seed: int = Field(0, ge=0, lt=2**31)
    evaluate_every_steps: int = Field(100, ge=1, description="Evaluate on held-out text this often, and at the end.")
    evaluate_sequences: int = Field(64, ge=1, description="Held-out sequences in one evaluation.")


class OptimizerConfig(Config):
    """AdamW with a cosine schedule after a linear warm-up; defaults of the CoLA paper."""

    learning_rate: float = Field(3e-3, gt=0, lt=10)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    epsilon: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    clip_norm: float = Field(0.5, gt=0, description="Largest global gradient norm.")
    warmup_steps: int = Field(0, ge=0)
    final_learning_rate_ratio: float = Field(0.1, ge=0, le=1, description="Learning rate at the end over its peak.")
