"""Stands in for boost_core.plan.report until that is there."""

from pydantic import BaseModel, Field


class Memory(BaseModel):
    """Bytes that one rank needs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    total: int


class Communication(BaseModel):
    """What the ranks exchange."""

    all_reduces: int
    elements_per_token: float


class PlannedShape(BaseModel):
    """What one shape of the gang comes to."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    world_size: int
    memory: Memory
    device_memory_bytes: int | None
    fits_device: bool | None
    step_seconds: float
    tokens_per_second: float
    total_seconds: float
    communication: Communication


class Plan(BaseModel):
    """What a job takes in each of its shapes."""

    parameters: int
    flops_per_token: float
    tokens_per_step: int
    shapes: list[PlannedShape]
    fastest: int | None
    notes: list[str] = Field([])
