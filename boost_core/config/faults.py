"""How a job handles faults."""

from typing import Literal

from pydantic import Field

from boost_core.config.base import Config, Count

# Faults that no job causes, within its restart_window_seconds: a node or a gang's supervisor that is gone. They do not
# count as restarts; but a job that keeps losing them without a new checkpoint in between stops.
MOST_LOSSES = 10


class FaultToleranceConfig(Config):
    """How often to restart, how to detect faults, and what to do about them."""

    max_restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="Restarts after faults of the job's own within restart_window_seconds before the job fails. "
        f"Lost nodes and supervisors do not count; it survives {MOST_LOSSES} of these without a new checkpoint.",
    )
    restart_window_seconds: float = Field(3600, gt=0, le=30 * 86_400)
    memory_copy_every_steps: Count | None = Field(
        10,
        description="Copy each rank's state into its own memory and a peer's every this many steps, to recover "
        "without the store; null: never.",
    )
    hang_factor: float = Field(
        20, ge=2, le=1e6, description="A gang counts as hung if a step takes this many times the median step,"
    )
    hang_seconds: float = Field(600, ge=1, le=30 * 86_400, description="and at least this many seconds.")
    slow_rank_factor: float = Field(
        1.5,
        gt=1,
        le=1e6,
        description="Report a rank as slow if it computes this many times as long as the median rank.",
    )
    on_divergence: Literal["stop", "skip", "roll_back"] = Field(
        "stop",
        description="If a step's loss or gradient is not finite, or the loss jumps: fail the job; skip the "
        "update; or roll back to the newest copy of the state and skip the batches since.",
    )
    loss_jump: float | None = Field(
        None, gt=0, le=1e6, description="Nats above the median loss of the last 32 steps that count as divergence."
    )
    max_divergences: Count = Field(10, description="Divergences within 100 steps before the job fails anyway.")
