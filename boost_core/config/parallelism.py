"""How a gang is split, and which tensor parallel strategy can split which model."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema, WrapValidator, field_validator, model_validator
from pydantic_core import PydanticKnownError

from boost_core.config.base import Config, FieldProblem, Frozen, Share, counted, raise_problems
from boost_core.config.model import ModelConfig
from boost_core.config.training import TrainingConfig

# How the ranks of a gang are laid out: one type for job files, plan, scheduler, gang and metrics.


class LayoutSizes(Frozen):
    """What reports and plans say of a gang's layout."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    context_parallel_size: int = 1


_SIZES = (*LayoutSizes.model_fields,)
_sizes_of = attrgetter(*_SIZES)


@dataclass(frozen=True, order=True)
class Layout:
    """The number of ranks of a gang along each dimension.

    Attributes:
        tp: Tensor parallel ranks; a group of them shares a node.
        pp: Pipeline parallel ranks: tensor parallel groups per replica.
        dp: Data parallel ranks: replicas of the gang.
        cp: Context parallel ranks, to which a replica's tensor parallel groups deal the tokens of a sequence.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 1

    @classmethod
    def of(cls, sizes: BaseModel) -> "Layout":
        """The layout given by a job's ``parallelism`` or a report, which have its sizes under the job file's names."""
        return cls(*_sizes_of(sizes))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes under the job file's names."""
        return dict(zip(_SIZES, (self.tp, self.pp, self.dp, self.cp), strict=True))

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def same_weights(self) -> int:
        """Number of ranks with the same weights, which share their state and sum their gradients."""
        return self.dp * self.cp

    @property
    def per_replica(self) -> "Layout":
        """The layout of one replica, which stays the same as replicas come and go."""
        return Layout(self.tp, self.pp, dp=1, cp=self.cp)

    def units(self, placement: str = "PACK") -> tuple[int, int]:
        """Return the number of ranks that share a node, and the number of such groups.

        Args:
            placement: ``resources.placement``: a whole replica shares a node under ``STRICT_PACK``, else a tensor
                parallel group.
        """
        size = self.per_replica.world_size if placement == "STRICT_PACK" else self.tp
        return size, self.world_size // size

    @property
    def replica_text(self) -> str:
        """The part of the text form that all its replicas share."""
        return f"tp {self.tp} × pp {self.pp}" + (f" × cp {self.cp}" if self.cp > 1 else "")

    def coordinates(self, rank: int) -> "Layout":
        """A rank's tensor, pipeline, data and context parallel ranks; tp varies fastest, then cp, pp and dp."""
        group, tp = divmod(rank, self.tp)
        stage, cp = divmod(group, self.cp)
        dp, pp = divmod(stage, self.pp)
        return Layout(tp, pp, dp, cp)

    def __str__(self) -> str:
        return f"{self.replica_text} × dp {self.dp}"


TensorSize = Annotated[int, Field(ge=1, le=1024)]
PipelineSize = Annotated[int, Field(ge=1, le=32)]  # the cost of planning a pipeline grows with its ranks
DataSize = Annotated[int, Field(ge=1, le=65_536)]
MOST_CONTEXT = 64  # the host's time to plan each step grows with its ranks
ContextSize = Annotated[int, Field(ge=1, le=MOST_CONTEXT)]
# A block's modes, from the one that keeps most on the device to the one that keeps least.
RecomputeMode = Literal["none", "latent", "shared", "full", "offload"]
BlockCount = Annotated[int, Field(ge=0, le=100_000)]
StageLayers = Annotated[tuple[Annotated[int, Field(ge=1, le=100_000)], ...], Field(max_length=64)]
MessageSize = Annotated[int, Field(ge=0, le=2**30)]  # bytes
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

    one_shot_bytes: MessageSize = Field(
        description="For messages up to this size, every rank reads those of all others and sums them."
    )
    two_shot_bytes: MessageSize = Field(
        description="For larger messages up to this size, every rank sums a part and writes it to all. Still larger "
        "ones go through NCCL."
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


RecomputeList = Annotated[tuple[StageModes, ...], Field(max_length=64)]  # the maximum number of stages

_MODE: TypeAdapter[str] = TypeAdapter(Literal[RecomputeMode, "auto"])
_RECOMPUTE_LIST: TypeAdapter[tuple[StageModes, ...]] = TypeAdapter(RecomputeList)


class ContextConfig(Config):
    """What context parallel ranks send each other, and which rank computes what."""

    exchange: Literal["auto", "keys", "latents"] = Field(
        "auto",
        description="What ranks send each other. keys: keys and values. latents: the latents from which each rank "
        "computes keys and values itself; for btp. auto: keys and values within a node, and latents between nodes "
        "where that takes less time on the links. Offloaded tasks' queries and outputs travel as latents likewise.",
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
    optimizer_offload: Share = Field(
        0.0,
        description="Share of each rank's master weights and moments kept in the host's memory and copied through the "
        "GPU for each update, with the same results. With AdamW, saves 12 bytes per weight on the GPU, or 8 where the "
        "masters are the weights themselves. A last resort: the copies make steps longer.",
    )
    strategy: Literal["btp", "vanilla", "fullrank"] | None = Field(
        None,
        description="Tensor parallel strategy. btp: exchanges latents. vanilla: splits each low-rank pair by itself (a "
        "baseline). fullrank: Megatron's with sequence parallelism, for family=dense. Default: btp for low-rank "
        "families, fullrank for dense.",
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
    recompute: Literal[RecomputeMode, "auto"] | RecomputeList = Field(
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
        "computation; for btp. Over context parallel ranks, keys are exchanged meanwhile, elsewhere latents. "
        "Halves that recompute nothing have one backward pass; only they can be halves of one sequence.",
    )
    symmetric_memory: SymmetricMemoryConfig | None = Field(
        None,
        description="Do tensor parallel all-reduces through the memory of the ranks' GPUs, for latents in one pass "
        "with norm and activation, up to the sizes found by boost bench comm --profile. NCCL does them all where GPUs "
        "cannot reach each other's memory. Default: NCCL.",
    )

    @field_validator("recompute", mode="wrap")
    @classmethod
    def _one_mode_or_a_list(cls, value: Any, _: Any) -> Any:
        """Report what is wrong with the one that was meant: a union's error would mention both."""
        if isinstance(value, dict | StageModes):
            form = "must be a list with an entry for each pipeline stage, such as [{latent: 6, none: 4}]"
            raise ValueError(f"modes of blocks {form}")
        meant: TypeAdapter[Any] = _RECOMPUTE_LIST if isinstance(value, list | tuple) else _MODE
        return meant.validate_python(value)

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pipeline_parallel_size * (1 if self.pipeline_schedule == "1f1b" else 2)

    @property
    def recompute_text(self) -> str:
        """``recompute`` for people, stage by stage if it is a list."""
        return self.recompute if isinstance(self.recompute, str) else " | ".join(map(str, self.recompute))

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
        return sum((Counter(dict(stage.runs)) for stage in self.recompute), Counter[RecomputeMode]())

    @property
    def keeps_on_host(self) -> bool:
        """Whether any block keeps tensors for its backward pass on the host; not known of ``auto`` (``report.at``)."""
        return self.recompute != "auto" and any(TRAITS[mode].on_host for mode in self.modes_of_all(blocks=1))

    @property
    def world_size(self) -> int:
        """Number of workers in the gang."""
        return Layout.of(self).world_size

    def at(self, layout: Layout) -> "ParallelismConfig":
        """The same in another layout; a single stage takes the default pipeline schedule."""
        return self.model_copy(update=layout.sizes | ({"pipeline_schedule": "1f1b"} if layout.pp == 1 else {}))


# The chunks into which the tokens of a sequence are cut for context parallel ranks.

EFFICIENT = 2048  # tokens per chunk, below which attention kernels slow down considerably
MOST_CHUNKS = 64  # per rank: with more, planning takes the host too long
_CHUNKS, _FEWEST_CHUNKS = 8, 4  # per rank: enough to balance the work, and the minimum


@lru_cache(1024)
def chunk_tokens(sequence_length: int, ranks: int) -> int:
    """Tokens per chunk: a divisor of a rank's part of a sequence.

    Args:
        sequence_length: Tokens per sequence; a multiple of ``ranks``.
        ranks: Size of the context parallel group.
    """
    tokens = sequence_length // ranks
    largest = max(tokens // _CHUNKS, min(EFFICIENT, tokens // _FEWEST_CHUNKS), 1)
    return next(size for size in range(largest, 0, -1) if tokens % size == 0)


# Which layouts a gang may take while its job runs.

MOST_LAYOUTS = 32  # per job, over all numbers of replicas: each is examined when a job is checked and scheduled

Pair = tuple[TensorSize, PipelineSize]
Triple = tuple[TensorSize, PipelineSize, ContextSize]

_PAIR: TypeAdapter[tuple[int, int]] = TypeAdapter(Pair)
_TRIPLE: TypeAdapter[tuple[int, int, int]] = TypeAdapter(Triple)


def _pair_or_triple(value: Any, _: Any) -> tuple[int, int] | tuple[int, int, int]:
    """Validate as either a pair or a triple, so that errors do not mention both as a union's would."""
    three = isinstance(value, list | tuple) and len(value) > 2
    return _TRIPLE.validate_python(value) if three else _PAIR.validate_python(value)


# In the schema one list, so that editors' errors do not mention both, either.
_EITHER_FORM = WithJsonSchema(_TRIPLE.json_schema() | {"minItems": len(get_args(Pair))})
ReplicaSizes = Annotated[Pair | Triple, WrapValidator(_pair_or_triple), _EITHER_FORM]
LayoutList = Annotated[tuple[ReplicaSizes, ...], Field(max_length=16)]
Chosen = Annotated[tuple[tuple[TensorSize, PipelineSize, DataSize], ...], Field(max_length=MOST_LAYOUTS)]

_LAYOUT_LIST: TypeAdapter[tuple[tuple[int, int] | tuple[int, int, int], ...]] = TypeAdapter(LayoutList)


class DataParallelRange(Config):
    """The minimum and maximum number of replicas."""

    min: DataSize = 1
    max: DataSize

    @model_validator(mode="after")
    def _not_empty(self) -> "DataParallelRange":
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        return self


class GpuRange(DataParallelRange):
    """The minimum and maximum number of a gang's GPUs; on CPUs, of workers."""


def _auto_or_listed(value: Any, handler: Any) -> Any:
    """Report only the entry at fault; a union's error would mention all its types."""
    if value is None or value == "auto":
        return handler(value)
    if isinstance(value, str):
        raise ValueError(f"{value!r} is not auto, nor a list of sizes such as [[2, 1], [1, 1]]; use one of these")
    # A min_length would also be reported for layouts that are given but wrong.
    if not (listed := _LAYOUT_LIST.validate_python(value)):
        raise ValueError("this allows no sizes; give one pair or more, or leave layouts out")
    return listed


class ElasticityConfig(Config):
    """How the service may resize a gang as nodes and other jobs come and go. The global batch stays the same."""

    layouts: Annotated[Literal["auto"] | LayoutList | None, WrapValidator(_auto_or_listed)] = Field(
        None,
        json_schema_extra={"minItems": 1},
        description="Allowed sizes of a replica, each as [tensor_parallel_size, pipeline_parallel_size] with the "
        "context_parallel_size of parallelism, or as [tensor_parallel_size, pipeline_parallel_size, "
        "context_parallel_size]; default: those of parallelism. auto: for each number of gpus the service chooses "
        "among all sizes without context parallelism that are legal and fit the GPUs.",
    )
    gpus: GpuRange | None = Field(
        None, description="With layouts=auto: minimum and maximum number of the gang's GPUs; on CPUs, of workers."
    )
    data_parallel_size: DataParallelRange | None = Field(
        None,
        validate_default=True,
        description="Minimum and maximum number of replicas; required unless layouts=auto, where gpus determines it.",
    )
    resolved: Chosen | None = Field(
        None,
        description="With layouts=auto: the layouts chosen by the service, as [tensor_parallel_size, "
        "pipeline_parallel_size, data_parallel_size]. Written by the service, which chooses again when the "
        "job is submitted.",
    )

    @field_validator("data_parallel_size")
    @classmethod
    def _needed_without_auto(cls, value: DataParallelRange | None, info: Any) -> DataParallelRange | None:
        layouts, gpus = info.data.get("layouts", "auto"), info.data.get("gpus")  # absent if they are invalid themselves
        if value is None and layouts != "auto" and gpus is None:  # gpus without layouts=auto is reported by itself
            raise PydanticKnownError("missing")
        return value

    @model_validator(mode="after")
    def _limits_of_one_kind(self) -> "ElasticityConfig":
        why, automatic = dict[str, str](), self.layouts == "auto"
        if automatic and self.gpus is None:
            why["gpus"] = "required with layouts=auto, for example gpus: {min: 1, max: 8}"
        if automatic and self.data_parallel_size is not None:
            why["data_parallel_size"] = "layouts=auto also chooses the number of replicas; leave it out, and limit gpus"
        if not automatic and self.gpus is not None:
            why["gpus"] = "only goes with layouts=auto; set that, or limit data_parallel_size instead"
        if not automatic and self.resolved is not None:
            why["resolved"] = "is only for layouts=auto; leave it out"
        raise_problems("ElasticityConfig", [FieldProblem((field,), None, each) for field, each in why.items()])
        return self

    def replicas(self, own: Layout) -> tuple[Layout, ...]:
        """The distinct layouts that a replica may have, with dp 1.

        Args:
            own: The layout in parallelism, which also supplies the cp that pairs leave out.
        """
        listed = self.layouts if isinstance(self.layouts, tuple) else ()
        allowed = (Layout(tp, pp, dp=1, cp=cp[0] if cp else own.cp) for tp, pp, *cp in listed)
        return tuple(dict.fromkeys(allowed)) or (own.per_replica,)

    @property
    def chosen(self) -> tuple[Layout, ...]:
        """The layouts that the service has chosen, fewest ranks first; empty before the choice."""
        layouts = (Layout(*sizes) for sizes in self.resolved or ())
        return tuple(sorted(layouts, key=lambda layout: (layout.world_size, layout)))


# Which tensor parallel strategy supports which family, and what it has to divide.

StrategyName = Literal["btp", "vanilla", "fullrank"]


def strategy_of(model: ModelConfig, parallelism: ParallelismConfig) -> StrategyName:
    """The strategy of a job, with the family's default filled in."""
    return parallelism.strategy or ("fullrank" if model.family == "dense" else "btp")


def strategy_problems(model: ModelConfig, parallelism: ParallelismConfig) -> list[FieldProblem]:
    """Why the chosen strategy does not support the family or the number of tensor parallel ranks."""
    strategy, family, norm = strategy_of(model, parallelism), model.family, parallelism.norm
    problems, unfit = [], ""
    if strategy == "fullrank" and family != "dense":
        unfit = f"fullrank splits dense matrices, but family={family} has low-rank pairs; use btp or vanilla"
    elif strategy != "fullrank" and family == "dense":
        unfit = f"{strategy} splits low-rank pairs, but family=dense has none; use fullrank"
    elif strategy == "vanilla" and not model.outputs_from_latents:
        unfit = f"vanilla splits pairs of factors, but family={family} adds to their products; use btp"
    elif strategy == "vanilla" and model.qk_norm:
        unfit = "vanilla has all heads on every rank, but model.qk_norm's scales need them split; use btp"
    elif strategy == "vanilla" and family == "lax":
        unfit = "vanilla splits the latent among ranks, but LaX's norm and gate need it whole; use btp"
    if unfit:
        problems.append(FieldProblem(("parallelism", "strategy"), strategy, unfit))
    elif strategy == "btp" and norm == "sync" and not model.outputs_from_latents:
        message = f"sync norms what becomes latents, but family={family} reads more: use fused or online_paper"
        problems.append(FieldProblem(("parallelism", "norm"), norm, message))
    if strategy != "btp" and norm != "fused":
        message = f"norm={norm} is for residual vectors split by btp; {strategy} keeps them whole: leave norm out"
        problems.append(FieldProblem(("parallelism", "norm"), norm, message))

    # Recomputing segments, and halves that alternate, take work that is local between two exchanges.
    not_local = "norm=sync has a collective between them: use norm=fused" if norm == "sync" else ""
    if strategy != "btp":
        not_local = f"{strategy} exchanges wide vectors between them: use btp"
    size, blocks, rank = parallelism.tensor_parallel_size, model.num_hidden_layers, model.rank or 0
    recompute, messages = parallelism.recompute, []
    modes = {} if recompute == "auto" else parallelism.modes_of_all(blocks)
    if isinstance(recompute, tuple):
        listed, stages, named = len(recompute), parallelism.stages, sum(stage.blocks for stage in recompute)
        if listed != stages:
            messages.append(f"it lists {counted(listed, 'stage')}, but there are {stages}; give an entry for each")
        elif named != blocks:
            messages.append(f"its counts add up to {named}, but model.num_hidden_layers is {blocks}; make them equal")
    for mode in (mode for mode in MODES if mode in modes and TRAITS[mode].again == "segments"):
        if not_local:
            work = f"{mode} recomputes the work between two exchanges of latents"
            messages.append(f"{work}; {not_local}, or use none or full")
        elif TRAITS[mode].slices and rank % size:
            uneven_rank = f"{mode}: model.rank={rank} cannot be split equally among {size} tensor parallel ranks"
            messages.append(f"{uneven_rank}; use latent, or round up to model.rank={-(-rank // size) * size}")
    text = parallelism.recompute_text
    problems += [FieldProblem(("parallelism", "recompute"), text, message) for message in messages]
    if parallelism.split_micro_batch:
        if "full" in text:  # which auto leaves out
            not_local = "recompute=full runs a block without pausing: use none, latent, shared or offload"
        if not_local:
            message = f"two halves alternate at the exchanges of latents; {not_local}, or leave split_micro_batch out"
            problems.append(FieldProblem(("parallelism", "split_micro_batch"), True, message))

    # The sizes that the strategy splits: those of a model that is as it is, and those that can be rounded up.
    if strategy == "vanilla":
        fixed, growing = dict[str, int](), {"rank": model.rank or size, "vocab_size": model.vocab_size}
    else:
        fixed = {"hidden_size": model.hidden_size} if strategy == "btp" else {}
        fixed |= {"num_attention_heads": model.num_attention_heads, "num_key_value_heads": model.key_value_heads}
        growing = {"intermediate_size": model.intermediate_size, "vocab_size": model.vocab_size}
    if uneven := [f"model.{name}={value}" for name, value in (fixed | growing).items() if value % size]:
        most, dividing = gcd(*fixed.values()), divisors(gcd(*fixed.values(), *growing.values()))
        message = f"{size} does not divide {', '.join(uneven)}; use {', '.join(map(str, dividing))}"
        if most % size == 0:
            up = (f"model.{name}={-(-value // size) * size}" for name, value in growing.items() if value % size)
            message += f", or round up to {', '.join(up)}"
        elif larger := [str(each) for each in divisors(most) if each not in dividing]:
            names = " and ".join(f"model.{name}" for name, value in growing.items() if value % most)
            message += f"; or, with {names} rounded up to a multiple of it, {', '.join(larger)}"
        problems.append(FieldProblem(("parallelism", "tensor_parallel_size"), size, message))
    return problems


@lru_cache(4096)
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, the smallest first."""
    lower = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*lower, *(number // divisor for divisor in lower)}))


def cannot_send_latents(model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig) -> str | None:
    """Why context parallel ranks cannot send each other latents of keys and values; ``None`` if they can."""
    tensor = parallelism.tensor_parallel_size
    if not model.outputs_from_latents:
        return f"keys and values of family={model.family} are not computed from latents alone"
    if training.attention is not None:
        return "sparse attention sends each head's keys by themselves, but heads share their latents"
    if strategy_of(model, parallelism) != "btp":
        return "only under strategy=btp do tensor parallel ranks have the whole latents"
    if model.bottleneck_rank % tensor:
        return f"model.rank={model.rank} cannot be split equally among {tensor} tensor parallel ranks"
    if training.precision == "fp8":
        return "with products in 8 bits, keys computed from them would differ from their owner's"
    return None
