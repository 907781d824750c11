"""How a gang is split."""

from typing import Annotated, Literal

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.layout import Layout

TensorSize = Annotated[int, Field(ge=1, le=1024)]
PipelineSize = Annotated[int, Field(ge=1, le=32)]  # what it costs to plan a pipeline grows with its ranks
DataSize = Annotated[int, Field(ge=1, le=65_536)]


class ParallelismConfig(Config):
    """How the gang is split. The world size is the product; tensor parallel ranks are innermost."""

    tensor_parallel_size: TensorSize = 1
    pipeline_parallel_size: PipelineSize = 1
    data_parallel_size: DataSize = 1
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b",
        description="Pipeline schedule. interleaved_1f1b: two stages per rank; zero_bubble: the same with weight "
        "gradients computed in the bubbles; for btp.",
    )
    zero_stage: Literal[0, 1, 2] = Field(
        1,
        description="0: every data parallel rank keeps the whole optimizer state; 1: master weights and moments "
        "are sharded; 2: gradients, too, which are then reduced once per micro-batch.",
    )
    strategy: Literal["btp", "vanilla", "fullrank"] | None = Field(
        None,
        description="btp exchanges latents; vanilla splits each low-rank pair by itself (a baseline); fullrank is "
        "Megatron's, for family=dense. Default: btp for low-rank families, fullrank for dense.",
    )
    norm: Literal["fused", "online_paper", "sync"] = Field(
        "fused",
        description="RMSNorm of a sharded residual under btp. fused: no pass, statistic in the latent's collective; "
        "online_paper: local normalise, recover after the all-reduce; sync: a collective of its own.",
    )
    group_projections: bool = Field(
        True, description="Compute q, k, v (and gate, up) in one matrix product and one exchange instead of one each."
    )
    recompute: Literal["none", "latent", "full"] = Field(
        "none",
        description="Activation checkpointing. latent: recompute everything but the latents and the residual, "
        "without a collective; for btp. full: recompute every block from its input, collectives "
        "included.",
    )
    split_micro_batch: bool = Field(
        False,
        description="Interleave two halves of a micro-batch, so that one's exchange overlaps the other's "
        "computation; for btp.",
    )

    @property
    def stages(self) -> int:
        """Stages of the pipeline over all ranks."""
        return self.pipeline_parallel_size * (1 if self.pipeline_schedule == "1f1b" else 2)

    @property
    def world_size(self) -> int:
        """Number of workers in the gang."""
        return Layout.of(self).world_size

    def at(self, layout: Layout) -> "ParallelismConfig":
        """The same in another layout; a single stage needs no pipeline schedule but the default."""
        return self.model_copy(update=layout.sizes | ({"pipeline_schedule": "1f1b"} if layout.pp == 1 else {}))
