"""Which models, layouts and batches can be combined."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from boost_core.config.base import FieldProblem, counted
from boost_core.config.data import BYTE_TOKENS, BYTES, DataConfig
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import (
    EFFICIENT,
    MODES,
    MOST_CHUNKS,
    MOST_LAYOUTS,
    TRAITS,
    ElasticityConfig,
    Layout,
    ParallelismConfig,
    chunk_tokens,
)
from boost_core.config.training import OptimizerConfig, TrainingConfig

# Which tensor parallel strategy supports which family, and what it has to divide.

StrategyName = Literal["btp", "vanilla", "fullrank"]


def chosen_strategy(model: ModelConfig, parallelism: ParallelismConfig) -> StrategyName:
    """The strategy of a job, with the family's default filled in."""
    return parallelism.strategy or ("fullrank" if model.family == "dense" else "btp")


def strategy_problems(model: ModelConfig, parallelism: ParallelismConfig) -> list[FieldProblem]:
    """Why the chosen strategy does not support the family or the number of tensor parallel ranks."""
    strategy, family = chosen_strategy(model, parallelism), model.family
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
    elif strategy == "btp" and parallelism.norm == "sync" and not model.outputs_from_latents:
        message = f"sync norms what becomes latents, but family={family} reads more: use fused or online_paper"
        problems.append(FieldProblem(("parallelism", "norm"), parallelism.norm, message))
    if strategy != "btp" and parallelism.norm != "fused":
        message = f"norm={parallelism.norm} is for a residual sharded by btp; {strategy} keeps it whole: leave norm out"
        problems.append(FieldProblem(("parallelism", "norm"), parallelism.norm, message))

    # Recomputing segments, and halves that alternate, take work that is local between two exchanges.
    not_local = "norm=sync has a collective between them: use norm=fused" if parallelism.norm == "sync" else ""
    if strategy != "btp":
        not_local = f"{strategy} exchanges wide vectors between them: use btp"
    size, blocks, rank = parallelism.tensor_parallel_size, model.num_hidden_layers, model.rank or 0
    recompute, messages = parallelism.recompute, []
    modes: set[str] = (
        {recompute} if isinstance(recompute, str) else {mode for each in recompute for mode, _ in each.runs}
    )
    if isinstance(recompute, tuple):
        listed, named = len(recompute), sum(stage.blocks for stage in recompute)
        if listed != parallelism.stages:
            messages.append(
                f"it lists {counted(listed, 'stage')}, but there are {parallelism.stages}; give an entry for each"
            )
        elif named != blocks:
            messages.append(f"its counts add up to {named}, but model.num_hidden_layers is {blocks}; make them equal")
    for mode in (mode for mode in MODES if mode in modes and TRAITS[mode].again == "segments"):
        if not_local:
            message = f"{mode} recomputes the work between two exchanges of latents; {not_local}"
            messages.append(f"{message}, or use none or full")
        elif TRAITS[mode].slices and rank % size:
            messages.append(
                f"{mode}: model.rank={rank} cannot be split equally among {size} tensor parallel ranks; use latent, or "
                f"round up to model.rank={-(-rank // size) * size}"
            )
    text = parallelism.recompute_text
    problems += [FieldProblem(("parallelism", "recompute"), text, message) for message in messages]
    if parallelism.split_micro_batch:
        if "full" in text:  # which auto leaves out
            not_local = "recompute=full runs a block without pausing: use none, latent, shared or offload"
        if not_local:
            message = f"two halves alternate at the exchanges of latents; {not_local}, or leave split_micro_batch out"
            problems.append(FieldProblem(("parallelism", "split_micro_batch"), True, message))

    # The sizes that the strategy splits, each with what to do if the ranks do not divide it.
    if strategy == "vanilla":
        split = {"rank": (model.rank or size, True), "vocab_size": (model.vocab_size, True)}
    else:
        split = {"hidden_size": (model.hidden_size, False)} if strategy == "btp" else {}
        split |= {
            "num_attention_heads": (model.num_attention_heads, False),
            "num_key_value_heads": (model.key_value_heads, False),
            "intermediate_size": (model.intermediate_size, True),
            "vocab_size": (model.vocab_size, True),
        }
    for name, (value, can_grow) in split.items():
        if value % size:
            remedy = f"choose a divisor of {value}"
            remedy += f", or round up to model.{name}={-(-value // size) * size}" if can_grow else ""
            message = f"{size} does not divide model.{name}={value}; {remedy}"
            problems.append(FieldProblem(("parallelism", "tensor_parallel_size"), size, message))
    return problems


_REMEMBERED = 4096  # specs
_PIECE = 16  # columns


def job_problems(
    model: ModelConfig, parallelism: ParallelismConfig, data: DataConfig, training: TrainingConfig,
    optimizer: OptimizerConfig, gpus_per_worker: int,
) -> list[FieldProblem]:  # fmt: skip
    """Every problem of a job whose parts are valid one by one but cannot be combined."""
    problems = layout_problems(model, parallelism, training, optimizer, gpus_per_worker)
    in_bytes = not data.tokenized and data.tokenizer in (None, BYTES)  # otherwise only the trainer can count tokens
    if in_bytes and model.vocab_size < BYTE_TOKENS:
        message = (
            f"{model.vocab_size} is below {BYTE_TOKENS}, the number of byte-level tokens; use at least {BYTE_TOKENS}"
        )
        problems.append(FieldProblem(("model", "vocab_size"), model.vocab_size, message))

    warmup, decay, steps = optimizer.warmup_steps, optimizer.decay_steps or 0, f"training.steps={training.steps}"
    if warmup > training.steps:
        message = f"a warm-up of {warmup} steps does not fit into {steps}; shorten it"
        problems.append(FieldProblem(("optimizer", "warmup_steps"), warmup, message))
    elif warmup + decay > training.steps:
        message = f"a decay of {decay} steps after a warm-up of {warmup} does not fit into {steps}; shorten one of them"
        problems.append(FieldProblem(("optimizer", "decay_steps"), decay, message))

    if in_bytes and training.sample is not None:
        room = training.sequence_length - training.sample.max_new_tokens
        for number, prompt in enumerate(training.sample.prompts):
            if (size := len(prompt.encode(errors="replace"))) > room:
                message = too_long_a_prompt(number, size, room)
                problems.append(FieldProblem(("training", "sample", "prompts"), None, message))
    return problems


def layout_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int,
) -> list[FieldProblem]:  # fmt: skip
    """The problems that depend on how the gang is split."""
    problems = strategy_problems(model, parallelism) + _pipeline_problems(model, parallelism, training)
    layers, blocks, name = parallelism.pipeline_layers_per_stage, model.num_hidden_layers, "pipeline_layers_per_stage"
    if layers is not None and (len(layers) != parallelism.stages or sum(layers) != blocks):
        if len(layers) != parallelism.stages:
            listed = counted(len(layers), "stage")
            message = f"{name} lists {listed}, but there are {parallelism.stages}; give an entry for each"
        else:
            sums = f"the entries of {name} add up to {sum(layers)}, but model.num_hidden_layers is {blocks}"
            message = f"{sums}; make them equal"
        problems.append(FieldProblem(("parallelism", name), list(layers), f"{message}, or leave it out"))
    problems += _sequence_problems(model, parallelism, training)

    if parallelism.split_micro_batch and training.micro_batch_size == 1:
        message = "a micro-batch of 1 sequence cannot be split; use 2 or more, or leave split_micro_batch out"
        problems.append(FieldProblem(("training", "micro_batch_size"), 1, message))
    portion = training.micro_batch_size * parallelism.data_parallel_size
    warmup = (("batch_size_warmup", stage.global_batch_size) for stage in training.batch_size_warmup)
    for field, size in (("global_batch_size", training.global_batch_size), *warmup):
        if size % portion:
            message = (
                f"{size} sequences cannot be split into micro-batches of "
                f"{training.micro_batch_size} on {parallelism.data_parallel_size} data parallel rank(s); "
                f"use a multiple of {portion} such as {-(-size // portion) * portion}, or a smaller micro_batch_size"
            )
            problems.append(FieldProblem(("training", field), size, message))

    kind, strategy, message = optimizer.kind, chosen_strategy(model, parallelism), ""
    if kind == "loro" and model.family != "svd":
        message = f"optimizer.kind=loro requires model.family=svd, not {model.family}; use family=svd or adamw"
    elif kind == "muon" and model.family == "dense":
        message = "muon is for low-rank factors, but model.family=dense has none; use another family, or adamw"
    elif kind != "adamw" and strategy != "btp":
        message = f"{kind} needs factors that are whole along their rank; use strategy=btp"
    if message:
        problems.append(FieldProblem(("optimizer", "kind"), kind, message))

    # Tensor cores take 8-bit matrices in multiples of 16 along every axis except tokens.
    ranks = parallelism.tensor_parallel_size
    if training.precision == "fp8" and strategy != "btp":
        message = f"fp8 is for btp; {strategy} computes in bf16 or fp32: use bf16"
        problems.append(FieldProblem(("training", "precision"), "fp8", message))
    elif training.precision == "fp8" and model.rank is not None:  # otherwise refused already
        widths = {
            "hidden_size": model.hidden_size / ranks,
            "num_key_value_heads": model.key_value_size / ranks,
            "intermediate_size": model.intermediate_size / ranks,
            "rank": model.bottleneck_rank,
        }
        problems += [
            FieldProblem(
                ("training", "precision"), "fp8",
                f"fp8 needs multiples of {_PIECE}, but model.{name} gives a rank {width:g} columns; change "
                f"model.{name} or parallelism.tensor_parallel_size, or use bf16",
            )
            for name, width in widths.items()
            if width % _PIECE
        ]  # fmt: skip

    # Whether workers compute on CPU or GPU, and what keeps a step from being captured.
    size = parallelism.context_parallel_size
    if gpus_per_worker == 0:
        if training.cuda_graphs == "on":
            message = "CPUs have no CUDA graphs; use auto or off, or set resources.gpus_per_worker to 1"
            problems.append(FieldProblem(("training", "cuda_graphs"), "on", message))
    elif size > 1 and not flash_takes(model, training):
        message = (
            f"on GPUs, context parallelism needs flash attention, which does not support {training.precision} with "
            f"heads of {model.head_size}; use bf16 with a head size that is a multiple of 8, up to 256"
        )
        problems.append(FieldProblem(("parallelism", "context_parallel_size"), size, message))
    if training.cuda_graphs == "on" and parallelism.keeps_on_host:
        why = "recompute=offload copies what blocks keep to the host and back, which is not captured"
        problems.append(FieldProblem(("training", "cuda_graphs"), "on", f"{why}; use auto or off"))
    return problems


def too_long_a_prompt(number: int, size: int, room: int) -> str:
    """The message for a prompt of ``size`` tokens where there is room for fewer."""
    return (
        f"prompt {number} has {size} tokens, but with max_new_tokens a sequence has room for only {room}; shorten it, "
        "or lower max_new_tokens"
    )


def flash_takes(model: ModelConfig, training: TrainingConfig) -> bool:
    """Whether flash attention on a GPU supports a job's compute type and head size; see ``model.attention``."""
    return training.precision != "fp32" and model.head_size % 8 == 0 and model.head_size <= 256


def cannot_send_latents(model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig) -> str | None:
    """Why context parallel ranks cannot send each other latents of keys and values; ``None`` if they can."""
    tensor = parallelism.tensor_parallel_size
    if not model.outputs_from_latents:
        return f"keys and values of family={model.family} are not computed from latents alone"
    if training.attention is not None:
        return "sparse attention sends each head's keys by themselves, but heads share their latents"
    if chosen_strategy(model, parallelism) != "btp":
        return "only under strategy=btp do tensor parallel ranks have the whole latents"
    if model.bottleneck_rank % tensor:
        return f"model.rank={model.rank} cannot be split equally among {tensor} tensor parallel ranks"
    if training.precision == "fp8":
        return "with products in 8 bits, keys computed from them would differ from their owner's"
    return None


def _sequence_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    """Why sequences cannot be shared by context parallel ranks, or not use the sparse attention that is asked for."""
    problems, attention, length = [], training.attention, training.sequence_length
    if (size := parallelism.context_parallel_size) > 1:
        messages = []
        if length % size:
            messages.append(
                f"training.sequence_length={length} cannot be split equally among {size} ranks; choose a divisor"
            )
        elif (chunks := length // size // chunk_tokens(length, size)) > MOST_CHUNKS:
            unit = size * EFFICIENT
            messages.append(
                f"training.sequence_length={length} would be cut into {chunks:,} chunks for each of {size} ranks, but "
                f"{MOST_CHUNKS} is the limit; use a multiple of {unit} such as {-(-length // unit) * unit}"
            )
        if training.cuda_graphs == "on":
            messages.append("the host plans each micro-batch, which cannot be captured; set cuda_graphs to auto or off")
        problems = [FieldProblem(("parallelism", "context_parallel_size"), size, message) for message in messages]
        if parallelism.context.exchange == "latents" and (why := cannot_send_latents(model, parallelism, training)):
            problems.append(FieldProblem(("parallelism", "context", "exchange"), "latents", f"{why}; use auto or keys"))
        if parallelism.context.pool == "tasks" and attention is not None:
            why = "sparse attention cannot choose keys before it has the queries, so these cannot be moved; use none"
            problems.append(FieldProblem(("parallelism", "context", "pool"), "tasks", why))

    if attention is None:
        return problems
    messages, shortest = [], attention.from_length
    if parallelism.split_micro_batch:
        messages.append("the halves of split_micro_batch use dense attention; leave one of the two out")
    if model.sliding_window is not None:
        messages.append(
            f"model.sliding_window={model.sliding_window} already says what each query sees; leave one of the two out"
        )
    if training.cuda_graphs == "on":
        messages.append(
            "the host chooses what to compute in each step, which cannot be captured; set cuda_graphs to auto or off"
        )
    if shortest > length:
        messages.append(
            f"from_length={shortest} is above training.sequence_length={length}, so no document would use sparse "
            f"attention; use at most {length}"
        )
    always, budget = attention.always_pairs(shortest), attention.pairs(shortest)
    if always > budget:
        messages.append(
            f"sink and window alone take {always} pairs in a document of from_length={shortest}, but budget="
            f"{attention.budget:g} allows {budget}; lower window or sink, or raise from_length or budget"
        )
    return problems + [FieldProblem(("training", "attention"), None, message) for message in messages]


def _pipeline_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    size, schedule = parallelism.pipeline_parallel_size, parallelism.pipeline_schedule
    of_schedule = ("parallelism", "pipeline_schedule")
    if size == 1:
        message = f"{schedule} is for several pipeline stages; leave it out, or set pipeline_parallel_size"
        return [] if schedule == "1f1b" else [FieldProblem(of_schedule, schedule, message)]
    problems = []
    if parallelism.stages > model.num_hidden_layers:
        message = (
            f"{parallelism.stages} stages need at least as many blocks, but model.num_hidden_layers is "
            f"{model.num_hidden_layers}"
        )
        problems.append(FieldProblem(("parallelism", "pipeline_parallel_size"), size, f"{message}; use fewer stages"))
    if schedule == "zero_bubble" and chosen_strategy(model, parallelism) != "btp":
        message = "zero_bubble defers weight gradients, which only btp supports; use interleaved_1f1b"
        problems.append(FieldProblem(of_schedule, schedule, message))
    if training.cuda_graphs == "on":
        message = "the host takes part in pipeline schedules, which cannot be captured; use auto or off"
        problems.append(FieldProblem(("training", "cuda_graphs"), "on", message))
    if parallelism.split_micro_batch:
        message = "pipeline stages take whole micro-batches; leave split_micro_batch out"
        problems.append(FieldProblem(("parallelism", "split_micro_batch"), True, message))
    if training.batch_size_warmup:
        message = "a pipeline has a fixed number of micro-batches; leave it out, or use pipeline_parallel_size=1"
        problems.append(FieldProblem(("training", "batch_size_warmup"), None, message))
    count = training.micro_batches(parallelism.data_parallel_size)
    if count < size:
        message = (
            f"{size} pipeline ranks need at least {size} micro-batches per step and data parallel rank, but the batch "
            f"gives {count}"
        )
        remedy = "raise global_batch_size, or lower micro_batch_size"
        problems.append(
            FieldProblem(("training", "global_batch_size"), training.global_batch_size, f"{message}; {remedy}")
        )
    elif schedule != "1f1b" and count % size:
        message = (
            f"{schedule} needs a multiple of {size} micro-batches per step and data parallel rank, but there are "
            f"{count}; change training.global_batch_size or micro_batch_size, or use 1f1b"
        )
        problems.append(FieldProblem(of_schedule, schedule, message))
    return problems


def door_problems(training: TrainingConfig) -> list[FieldProblem]:
    """Problems for which only new jobs are refused; jobs that were accepted earlier may have them."""
    if not training.batch_size_warmup or (until := training.batch_size_warmup[-1].until_step) < training.steps:
        return []
    message = (
        f"its last stage lasts until step {until} of training.steps={training.steps}, which leaves no step for "
        f"global_batch_size={training.global_batch_size}; end it earlier, or raise training.steps"
    )
    return [FieldProblem(("training", "batch_size_warmup"), until, message)]


@lru_cache(_REMEMBERED)
def legal_layouts(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int, elasticity: ElasticityConfig,
) -> tuple[Layout, ...]:  # fmt: skip
    """All layouts that a job allows and that are legal with the rest of its spec, fewest ranks first.

    Args:
        model: The job's model.
        parallelism: Its own parallelism.
        training: Its batches: only numbers of replicas that divide a step's micro-batches are legal.
        optimizer: Its optimizer.
        gpus_per_worker: GPUs of each worker, 0 or 1.
        elasticity: The layouts it allows.
    """
    sizes = elasticity.data_parallel_size
    layouts = [
        layout
        for replica in elasticity.replicas(Layout.of(parallelism))
        for number in ([] if sizes is None else numbers_of_replicas(training, sizes.min, sizes.max))
        if not layout_problems(
            model, parallelism.at(layout := replace(replica, dp=number)), training, optimizer, gpus_per_worker
        )
    ]
    return tuple(sorted(layouts, key=lambda layout: (layout.world_size, layout)))


def elasticity_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int, elasticity: ElasticityConfig | None,
) -> list[FieldProblem]:  # fmt: skip
    """Why a job cannot run in the layouts it allows: each kind of replica needs a legal number of replicas."""
    if elasticity is None:
        return []
    if elasticity.automatic and (size := parallelism.context_parallel_size) > 1:
        message = "layouts=auto chooses among layouts without context parallelism; leave it out, or list layouts"
        return [FieldProblem(("parallelism", "context_parallel_size"), size, message)]
    if elasticity.automatic and isinstance(parallelism.recompute, tuple):
        message = "layouts=auto tries other numbers of stages; use recompute=auto, or one mode for all blocks"
        return [FieldProblem(("parallelism", "recompute"), parallelism.recompute_text, message)]
    if elasticity.automatic and parallelism.pipeline_layers_per_stage is not None:
        message = "layouts=auto tries other numbers of stages; leave it out, or list layouts"
        value = list(parallelism.pipeline_layers_per_stage)
        return [FieldProblem(("parallelism", "pipeline_layers_per_stage"), value, message)]
    sizes = elasticity.data_parallel_size
    if sizes is None:
        # The layouts recorded as chosen by the service.
        gpus, problems = elasticity.gpus, []
        for layout in elasticity.chosen:
            illegal = layout_problems(model, parallelism.at(layout), training, optimizer, gpus_per_worker)
            causes = [problem.message for problem in illegal]
            if gpus and not gpus.min <= layout.world_size <= gpus.max:
                causes.append(f"it has {layout.world_size} ranks, but gpus allows {gpus.min} to {gpus.max}")
            if causes:
                message = f"{layout} is not legal: {'; '.join(causes)}; leave resolved out, the service writes it"
                problems.append(FieldProblem(("elasticity", "resolved"), [layout.tp, layout.pp, layout.dp], message))
        return problems
    replicas = elasticity.replicas(Layout.of(parallelism))
    numbers = len(numbers_of_replicas(training, sizes.min, sizes.max))
    if len(replicas) * numbers > MOST_LAYOUTS:
        message = (
            f"{numbers} numbers of replicas from {sizes.min} to {sizes.max} split the batch, which makes "
            f"{len(replicas) * numbers} layouts with {len(replicas)} kind(s) of replica; a job may allow at most "
            f"{MOST_LAYOUTS}: narrow the range, or list fewer kinds"
        )
        return [FieldProblem(("elasticity", "data_parallel_size"), sizes.max, message)]
    layouts = legal_layouts(model, parallelism, training, optimizer, gpus_per_worker, elasticity)
    legal = {layout.per_replica for layout in layouts}
    problems = []
    for replica in replicas:
        if replica not in legal:
            where = ("elasticity", "layouts" if elasticity.layouts else "data_parallel_size")
            smallest = parallelism.at(replace(replica, dp=sizes.min))
            illegal = layout_problems(model, smallest, training, optimizer, gpus_per_worker)
            reasons = "; ".join(problem.message for problem in illegal) or "the batch cannot be split that way"
            message = f"{replica.replica_text} is legal with no number of replicas from {sizes.min} to {sizes.max}"
            problems.append(FieldProblem(where, [replica.tp, replica.pp, replica.cp], f"{message}: {reasons}"))
    return problems


def numbers_of_replicas(training: TrainingConfig, least: int, most: int) -> list[int]:
    """Numbers of replicas from ``least`` to ``most`` that divide a step's micro-batches."""
    batches = (training.global_batch_size, *(stage.global_batch_size for stage in training.batch_size_warmup))
    micro_batches = math.gcd(*(size // training.micro_batch_size for size in batches))
    return [number for number in _divisors(micro_batches) if least <= number <= most]


@lru_cache(_REMEMBERED)
def _divisors(number: int) -> tuple[int, ...]:
    lower = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*lower, *(number // divisor for divisor in lower)}))
