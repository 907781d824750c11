"""How a gang is split."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, TypeAdapter, ValidatorFunctionWrapHandler, field_validator

from boost_core.config.base import Config
from boost_core.config.layout import Layout

TensorSize = Annotated[int, Field(ge=1, le=1024)]
PipelineSize = Annotated[int, Field(ge=1, le=32)]  # the cost of planning a pipeline grows with its ranks
DataSize = Annotated[int, Field(ge=1, le=65_536)]
ContextSize = Annotated[int, Field(ge=1, le=64)]  # the host's time to plan each step grows with its ranks
# A block's modes, from the one that keeps most on the device to the one that keeps least.
RecomputeMode = Literal["none", "latent", "shared", "full", "offload"]
BlockCount = Annotated[int, Field(ge=0, le=100_000)]
StageLayers = Annotated[tuple[Annotated[int, Field(ge=1, le=100_000)], ...], Field(max_length=64)]
ModeRuns = tuple[tuple[RecomputeMode, int], ...]  # modes, each with its number of consecutive blocks


class ModeTraits(NamedTuple):
    """What a block's mode means.

    Attributes:
        again: What is recomputed: nothing, the segments between exchanges of latents, or everything, with the
            exchanges.
        slices: Whether each of several tensor parallel ranks keeps only its slice of the latents, to be gathered again.
        on_host: Whether the kept tensors are in the host's memory.
    """

    again: Literal["nothing", "segments", "all"]
    slices: bool = False
    on_host: bool = False


MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)
TRAITS: Mapping[RecomputeMode, ModeTraits] = {
    "none": ModeTraits("nothing"),
    "latent": ModeTraits("segments"),
    "shared": ModeTraits("segments", slices=True),
    "full": ModeTraits("all"),
    "offload": ModeTraits("segments", slices=True, on_host=True),
}


class SymmetricMemoryConfig(Config):
    """Message sizes up to which symmetric memory was measured to be faster than NCCL."""

    one_shot_bytes: int = Field(
        ge=0, le=2**30, description="For messages up to this size, every rank reads those of all others and sums them."
    )
    two_shot_bytes: int = Field(
        ge=0,
        le=2**30,
        description="For larger messages up to this size, every rank sums a part and writes it to all. Still larger "
        "ones go through NCCL.",
    )

    @field_validator("two_shot_bytes")
    @classmethod
    def _something_is_exchanged(cls, value: int, info: Any) -> int:
        if value == info.data.get("one_shot_bytes") == 0:
            raise ValueError("both are 0, so nothing would be exchanged this way; leave symmetric_memory out")
        return value

    @property
    def largest(self) -> int:
        """Size of the largest message exchanged through it, in bytes."""
        return max(self.one_shot_bytes, self.two_shot_bytes)


class StageModes(Config):
    """Number of blocks in each mode in one pipeline stage.

    Blocks that keep least on the device come first in the stage, whatever the order here: by the time they are
    recomputed, the memory of later blocks is free, and so is the link to the host.
    """

    offload: BlockCount = 0
    full: BlockCount = 0
    shared: BlockCount = 0
    latent: BlockCount = 0
    none: BlockCount = 0

    @property
    def runs(self) -> ModeRuns:
        """The modes of the stage's blocks, in order."""
        return tuple((mode, count) for mode in reversed(MODES) if (count := getattr(self, mode)))

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(count for _, count in self.runs)

    def __str__(self) -> str:
        return " + ".join(f"{mode} {count}" for mode, count in self.runs)


Listed = Annotated[tuple[StageModes, ...], Field(max_length=64)]  # the maximum number of stages

_MODE: TypeAdapter[str] = TypeAdapter(Literal[RecomputeMode, "auto"])
_LISTED: TypeAdapter[tuple[StageModes, ...]] = TypeAdapter(Listed)


class ContextConfig(Config):
    """What context parallel ranks send each other, and which rank computes what."""

    exchange: Literal["auto", "keys", "latents"] = Field(
        "auto",
        description="What ranks send each other. keys: keys and values. latents: the latents from which each rank "
        "computes keys and values itself; for btp. auto: keys and values within a node, and latents between nodes "
        "where that takes less time on the links. Moved tasks' queries and outputs travel as latents likewise.",
    )
    pool: Literal["none", "tasks"] = Field(
        "none",
        description="tasks: ranks with more work than others move the attention of some chunks to these, in "
        "micro-batches where that is predicted to save time. none: each rank computes its own tokens.",
    )


class ParallelismConfig(Config):
    """How the gang is split. The world size is the product of the sizes; tensor parallel ranks are innermost."""

    tensor_parallel_size: TensorSize = 1
    pipeline_parallel_size: PipelineSize = 1
    data_parallel_size: DataSize = 1
    context_parallel_size: ContextSize = Field(
        1,
        description="Number of ranks that share the tokens of each sequence, in chunks with work balanced, for "
        "sequences that one rank cannot hold.",
    )
    context: ContextConfig = ContextConfig()
    pipeline_schedule: Literal["1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b",
        description="Pipeline schedule. interleaved_1f1b: two stages per rank. zero_bubble: the same, with weight "
        "gradients computed in the bubbles; for btp.",
    )
    pipeline_layers_per_stage: StageLayers | None = Field(
        None,
        description="Number of blocks in each pipeline stage, in order, such as [9, 8, 8, 7]; interleaved_1f1b and "
        "zero_bubble have two stages per rank, stage i on pipeline rank i mod pipeline_parallel_size. Default: stages "
        "of about equal work, the last with fewer blocks to make up for the head.",
    )
    zero_stage: Literal[0, 1, 2] = Field(
        1,
        description="0: every data parallel rank keeps the whole optimizer state. 1: master weights and moments "
        "are sharded. 2: gradients are sharded, too, and reduced once per micro-batch.",
    )
    optimizer_offload: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of each rank's master weights and moments kept in the host's memory and copied through the "
        "GPU for each update, with the same results. With AdamW, saves 12 bytes per weight on the GPU, or 8 where the "
        "masters are the weights themselves. A last resort: the copies make steps longer.",
    )
    strategy: Literal["btp", "vanilla", "fullrank"] | None = Field(
        None,
        description="Tensor parallel strategy. btp: exchanges latents. vanilla: splits each low-rank pair by itself (a "
        "baseline). fullrank: Megatron's, for family=dense. Default: btp for low-rank families, fullrank for dense.",
    )
    norm: Literal["fused", "online_paper", "sync"] = Field(
        "fused",
        description="RMSNorm of a sharded residual under btp. fused: no separate pass, the statistic travels in the "
        "latent's collective. online_paper: normalise locally, correct after the all-reduce. sync: a collective of its "
        "own.",
    )
    group_projections: bool = Field(
        True,
        description="Compute q, k and v (and gate and up) in one matrix product and one exchange instead of one each.",
    )
    recompute: Literal[RecomputeMode, "auto"] | Listed = Field(
        "none",
        description="Activation checkpointing. latent: keep the latents, the residual and, with context parallelism, "
        "attention's output, and recompute everything else without collectives; for btp. shared: as latent, but each "
        "tensor parallel rank keeps its slice of the latents, and the backward pass gathers them a block ahead. full: "
        "recompute every block from its input, collectives included. offload: as shared, or as latent on one tensor "
        "parallel rank, but what is kept, residual included, is in the host's memory. auto: in each layout the "
        "cheapest mix of these that fits the GPU, whose kind the job has to name; offload only if the memory of the "
        "nodes' hosts is known and suffices. "
        "A list has an entry for each pipeline stage, such as {full: 2, latent: 6}: the number of blocks in each mode, "
        "those that keep least on the GPU first.",
    )
    split_micro_batch: bool = Field(
        False,
        description="Interleave two halves of each micro-batch, so that one half's exchange overlaps the other's "
        "computation; for btp. Over context parallel ranks, keys are exchanged meanwhile, elsewhere latents.",
    )
    symmetric_memory: SymmetricMemoryConfig | None = Field(
        None,
        description="Do tensor parallel all-reduces through the memory of the ranks' GPUs, for latents in one pass "
        "with norm and activation, up to the sizes found by boost bench comm --profile. NCCL does them all where GPUs "
        "cannot reach each other's memory. Default: NCCL.",
    )

    @field_validator("recompute", mode="wrap")
    @classmethod
    def _one_mode_or_a_list(cls, value: Any, _: ValidatorFunctionWrapHandler) -> Any:
        """Report what is wrong with the one that was meant: a union's error would mention both."""
        if isinstance(value, dict | StageModes):
            raise ValueError(
                "modes of blocks must be a list with an entry for each pipeline stage, such as [{latent: 6, none: 4}]"
            )
        return _LISTED.validate_python(value) if isinstance(value, list | tuple) else _MODE.validate_python(value)

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pipeline_parallel_size * (1 if self.pipeline_schedule == "1f1b" else 2)

    @property
    def recompute_text(self) -> str:
        """``recompute`` for people, stage by stage if it is a list."""
        return self.recompute if isinstance(self.recompute, str) else " | ".join(map(str, self.recompute))

    @property
    def layers_text(self) -> str | None:
        """Blocks of each stage, for people; ``None`` if stages are cut by their work."""
        listed = self.pipeline_layers_per_stage
        return None if listed is None else " | ".join(map(str, listed))

    def modes(self, stage: int, blocks: int) -> ModeRuns:
        """The modes of a pipeline stage's blocks, in order; ``auto`` has to be resolved before.

        Args:
            stage: The stage's number.
            blocks: The number of its blocks, used if all have the same mode.
        """
        if isinstance(self.recompute, tuple):
            return self.recompute[stage].runs
        if self.recompute == "auto":
            raise AssertionError("recompute=auto means something else in each layout")
        return ((self.recompute, blocks),)

    def modes_of_all(self, blocks: int) -> Mapping[RecomputeMode, int]:
        """The number of a model's blocks in each mode."""
        if not isinstance(self.recompute, tuple):
            return dict(self.modes(0, blocks))
        counts: Counter[RecomputeMode] = Counter()
        for stage in self.recompute:
            counts.update(dict(stage.runs))
        return counts

    @property
    def keeps_on_host(self) -> bool:
        """Whether any block keeps tensors for its backward pass on the host; not known of ``auto`` (``devices.at``)."""
        named = self.recompute
        modes = {named} if isinstance(named, str) else {mode for stage in named for mode, _ in stage.runs}
        return any(mode != "auto" and TRAITS[mode].on_host for mode in modes)

    @property
    def world_size(self) -> int:
        """Number of workers in the gang."""
        return Layout.of(self).world_size

    def at(self, layout: Layout) -> "ParallelismConfig":
        """The same in another layout; a single stage takes the default pipeline schedule."""
        return self.model_copy(update=layout.sizes | ({"pipeline_schedule": "1f1b"} if layout.pp == 1 else {}))
