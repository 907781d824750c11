"""How a gang is split."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, field_validator

from boost_core.config.base import Config
from boost_core.config.layout import Layout

TensorSize = Annotated[int, Field(ge=1, le=1024)]
PipelineSize = Annotated[int, Field(ge=1, le=32)]  # what it costs to plan a pipeline grows with its ranks
DataSize = Annotated[int, Field(ge=1, le=65_536)]
ContextSize = Annotated[int, Field(ge=1, le=64)]  # each step's plan costs the host time that grows with its ranks
RecomputeMode = Literal["none", "latent", "shared", "full"]  # of a block; from what keeps most to what keeps least
BlockCount = Annotated[int, Field(ge=0, le=100_000)]
StageLayers = Annotated[tuple[Annotated[int, Field(ge=1, le=100_000)], ...], Field(max_length=64)]
ModeRuns = tuple[tuple[RecomputeMode, int], ...]  # so many blocks in a row


class SymmetricMemoryConfig(Config):
    """Up to which sizes of a message symmetric memory is faster than NCCL, as it was measured."""

    one_shot_bytes: int = Field(
        ge=0, le=2**30, description="Messages up to this size: every rank reads those of all others and sums them."
    )
    two_shot_bytes: int = Field(
        ge=0,
        le=2**30,
        description="Larger ones up to this size: every rank sums a part, and writes it to all. NCCL has what is "
        "larger still.",
    )

    @field_validator("two_shot_bytes")
    @classmethod
    def _something_is_exchanged(cls, value: int, info: Any) -> int:
        if value == info.data.get("one_shot_bytes") == 0:
            raise ValueError("both are 0, so nothing would be exchanged so; leave symmetric_memory out")
        return value

    @property
    def largest(self) -> int:
        """Bytes of the largest message that is exchanged through it."""
        return max(self.one_shot_bytes, self.two_shot_bytes)


class StageModes(Config):
    """How many of a pipeline stage's blocks keep what for their backward pass.

    Those that compute most again come first in the stage, whatever the order here: what later blocks keep is free by
    the time that these are computed again.
    """

    full: BlockCount = 0
    shared: BlockCount = 0
    latent: BlockCount = 0
    none: BlockCount = 0

    @property
    def runs(self) -> ModeRuns:
        """The modes of its blocks, in order."""
        counts: ModeRuns = (("full", self.full), ("shared", self.shared), ("latent", self.latent), ("none", self.none))
        return tuple(run for run in counts if run[1])

    @property
    def blocks(self) -> int:
        """How many there are."""
        return self.full + self.shared + self.latent + self.none

    def __str__(self) -> str:
        return " + ".join(f"{mode} {count}" for mode, count in self.runs)


Listed = Annotated[tuple[StageModes, ...], Field(max_length=64)]  # as many as there may be stages

_MODE: TypeAdapter[str] = TypeAdapter(Literal["none", "latent", "shared", "full", "auto"])
_LISTED: TypeAdapter[tuple[StageModes, ...]] = TypeAdapter(Listed)


class ContextConfig(Config):
    """What context parallel ranks send each other."""

    exchange: Literal["auto", "keys", "latents"] = Field(
        "auto",
        description="keys: keys and values; latents: what these are made of, under btp, and each rank makes them "
        "itself. auto: latents between nodes where they take less of the links' time, keys and values within a node.",
    )


class ParallelismConfig(Config):
    """How the gang is split. The world size is the product; tensor parallel ranks are innermost."""

    tensor_parallel_size: TensorSize = 1
    pipeline_parallel_size: PipelineSize = 1
    data_parallel_size: DataSize = 1
    context_parallel_size: ContextSize = Field(
        1,
        description="Ranks to which the tokens of each sequence are dealt, in chunks of even work, for sequences that "
        "one rank cannot hold.",
    )
    context: ContextConfig = ContextConfig()
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b",
        description="Pipeline schedule. interleaved_1f1b: two stages per rank; zero_bubble: the same with weight "
        "gradients computed in the bubbles; for btp.",
    )
    pipeline_layers_per_stage: StageLayers | None = Field(
        None,
        description="Blocks of each pipeline stage, in order, such as [9, 8, 8, 7]; interleaved_1f1b and zero_bubble "
        "have two stages per rank, stage i on pipeline rank i mod pipeline_parallel_size. Default: stages of about "
        "equal work, the last with fewer blocks by what the head costs.",
    )
    zero_stage: Literal[0, 1, 2] = Field(
        1,
        description="0: every data parallel rank keeps the whole optimizer state; 1: master weights and moments "
        "are sharded; 2: gradients, too, which are then reduced once per micro-batch.",
    )
    optimizer_offload: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of each rank's master weights and moments that the host's memory has, from where it passes "
        "through the GPU for each update, with the same results: with AdamW 12 bytes a weight less on the GPU, or 8 "
        "where the masters are the weights. A last resort: these copies make steps longer.",
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
    recompute: Literal["none", "latent", "shared", "full", "auto"] | Listed = Field(
        "none",
        description="Activation checkpointing. latent: recompute everything but the latents, the residual and, of "
        "context parallel ranks, attention's output, without a collective; for btp. shared: as latent, but each tensor "
        "parallel rank keeps its slice of the latents, and the backward pass gathers them a block ahead. full: "
        "recompute every block from its input, collectives included. auto: in each layout the least costly mix of "
        "them that fits the GPU, whose kind the job has to name. A list has an entry for each pipeline stage, such as "
        "{full: 2, latent: 6}: how many of its blocks do what, those that compute most again first.",
    )
    split_micro_batch: bool = Field(
        False,
        description="Interleave two halves of a micro-batch, so that one's exchange overlaps the other's "
        "computation; for btp.",
    )
    symmetric_memory: SymmetricMemoryConfig | None = Field(
        None,
        description="Tensor parallel all-reduces through the memory of the ranks' GPUs, latents in one pass with norm "
        "and activation, up to the sizes that boost bench comm --profile has found; where GPUs do not reach each other "
        "NCCL has them all. Default: NCCL.",
    )

    @field_validator("recompute", mode="wrap")
    @classmethod
    def _one_mode_or_a_list(cls, value: Any, _: ValidatorFunctionWrapHandler) -> Any:
        """Name what is wrong as one of them: a union's error would speak of both."""
        if isinstance(value, dict | StageModes):
            raise ValueError(
                "modes of blocks are a list with an entry for each pipeline stage, such as [{latent: 6, none: 4}]"
            )
        return _LISTED.validate_python(value) if isinstance(value, list | tuple) else _MODE.validate_python(value)

    @property
    def stages(self) -> int:
        """Stages of the pipeline over all ranks."""
        return self.pipeline_parallel_size * (1 if self.pipeline_schedule == "1f1b" else 2)

    @property
    def recompute_text(self) -> str:
        """What is computed again, for people: stage by stage where it is so given."""
        return self.recompute if isinstance(self.recompute, str) else " | ".join(map(str, self.recompute))

    @property
    def layers_text(self) -> str | None:
        """Blocks of each stage, for people; ``None`` where stages are cut by their work."""
        listed = self.pipeline_layers_per_stage
        return None if listed is None else " | ".join(map(str, listed))

    def modes(self, stage: int, blocks: int) -> ModeRuns:
        """What a pipeline stage's blocks keep for the backward pass, in order; ``auto`` is resolved before.

        Args:
            stage: The stage's number.
            blocks: How many it has, where all are alike.
        """
        if isinstance(self.recompute, tuple):
            return self.recompute[stage].runs
        if self.recompute == "auto":
            raise AssertionError("recompute=auto comes to something else in each layout")
        return ((self.recompute, blocks),)

    def modes_of_all(self, blocks: int) -> Mapping[RecomputeMode, int]:
        """How many of all of a model's blocks keep what."""
        if not isinstance(self.recompute, tuple):
            return dict(self.modes(0, blocks))
        counts: Counter[RecomputeMode] = Counter()
        for stage in self.recompute:
            counts.update(dict(stage.runs))
        return counts

    @property
    def world_size(self) -> int:
        """Number of workers in the gang."""
        return Layout.of(self).world_size

    def at(self, layout: Layout) -> "ParallelismConfig":
        """The same in another layout; a single stage needs no pipeline schedule but the default."""
        return self.model_copy(update=layout.sizes | ({"pipeline_schedule": "1f1b"} if layout.pp == 1 else {}))
