"""Which models, layouts and batches can be combined."""

import math
from dataclasses import replace
from functools import lru_cache

from boost_core.config.attention_problems import attention_problems
from boost_core.config.base import FieldProblem, counted
from boost_core.config.chunks import EFFICIENT, MOST_CHUNKS, chunk_tokens
from boost_core.config.data import BYTE_TOKENS, BYTES, DataConfig
from boost_core.config.elasticity import MOST_LAYOUTS, ElasticityConfig
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.strategy import chosen_strategy, strategy_problems
from boost_core.config.training import OptimizerConfig, TrainingConfig

_REMEMBERED = 4096  # specs
_PIECE = 16  # columns


def job_problems(
    model: ModelConfig, parallelism: ParallelismConfig, data: DataConfig, training: TrainingConfig,
    optimizer: OptimizerConfig, gpus_per_worker: int,
) -> list[FieldProblem]:  # fmt: skip
    """Every problem of a job whose parts are valid one by one but cannot be combined."""
    return [
        *layout_problems(model, parallelism, training, optimizer, gpus_per_worker),
        *_vocabulary_problems(model, data),
        *_schedule_problems(training, optimizer),
        *_sample_problems(data, training),
    ]


def layout_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int,
) -> list[FieldProblem]:  # fmt: skip
    """The problems that depend on how the gang is split."""
    return [
        *strategy_problems(model, parallelism),
        *_pipeline_problems(model, parallelism, training),
        *_cut_problems(model, parallelism),
        *_context_problems(model, parallelism, training),
        *attention_problems(model, parallelism, training),
        *_batch_problems(parallelism, training),
        *_optimizer_problems(model, parallelism, optimizer),
        *_precision_problems(model, parallelism, training),
        *_device_problems(model, parallelism, training, gpus_per_worker),
        *_capture_problems(parallelism, training),
    ]


def _vocabulary_problems(model: ModelConfig, data: DataConfig) -> list[FieldProblem]:
    if data.tokenized or data.tokenizer not in (None, BYTES) or model.vocab_size >= BYTE_TOKENS:
        return []
    message = f"{model.vocab_size} is below {BYTE_TOKENS}, the number of byte-level tokens; use at least {BYTE_TOKENS}"
    return [FieldProblem(("model", "vocab_size"), model.vocab_size, message)]


def _sample_problems(data: DataConfig, training: TrainingConfig) -> list[FieldProblem]:
    if training.sample is None or data.tokenized or data.tokenizer not in (None, BYTES):
        return []  # only the trainer can count their tokens
    room = training.sequence_length - training.sample.max_new_tokens
    sizes = [len(prompt.encode(errors="replace")) for prompt in training.sample.prompts]
    return [
        FieldProblem(("training", "sample", "prompts"), None, too_long_a_prompt(number, size, room))
        for number, size in enumerate(sizes)
        if size > room
    ]


def too_long_a_prompt(number: int, size: int, room: int) -> str:
    """The message for a prompt of ``size`` tokens where there is room for fewer."""
    return (
        f"prompt {number} has {size} tokens, but with max_new_tokens a sequence has room for only {room}; shorten it, "
        "or lower max_new_tokens"
    )


def _device_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, gpus_per_worker: int
) -> list[FieldProblem]:
    """The problems that depend on whether workers compute on CPU or GPU."""
    if gpus_per_worker == 0:
        message = "CPUs have no CUDA graphs; use auto or off, or set resources.gpus_per_worker to 1"
        return [FieldProblem(("training", "cuda_graphs"), "on", message)] if training.cuda_graphs == "on" else []
    size = parallelism.context_parallel_size
    if size == 1 or flash_takes(model, training):
        return []
    message = (
        f"on GPUs, context parallelism needs flash attention, which does not support {training.precision} with heads "
        f"of {model.head_size}; use bf16 with a head size that is a multiple of 8, up to 256"
    )
    return [FieldProblem(("parallelism", "context_parallel_size"), size, message)]


def _capture_problems(parallelism: ParallelismConfig, training: TrainingConfig) -> list[FieldProblem]:
    if training.cuda_graphs != "on" or not parallelism.keeps_on_host:
        return []
    message = "recompute=offload copies what blocks keep to the host and back, which is not captured; use auto or off"
    return [FieldProblem(("training", "cuda_graphs"), "on", message)]


def flash_takes(model: ModelConfig, training: TrainingConfig) -> bool:
    """Whether flash attention on a GPU supports a job's compute type and head size; see ``nn.documents``."""
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


def _context_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    size, field = parallelism.context_parallel_size, ("parallelism", "context_parallel_size")
    if size == 1:
        return []
    messages, length = [], training.sequence_length
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
    problems = [FieldProblem(field, size, message) for message in messages]
    if parallelism.context.exchange == "latents" and (why := cannot_send_latents(model, parallelism, training)):
        problems.append(FieldProblem(("parallelism", "context", "exchange"), "latents", f"{why}; use auto or keys"))
    if parallelism.context.pool == "tasks" and training.attention is not None:
        why = "sparse attention cannot choose keys before it has the queries, so these cannot be moved; use none"
        problems.append(FieldProblem(("parallelism", "context", "pool"), "tasks", why))
    return problems


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


def _cut_problems(model: ModelConfig, parallelism: ParallelismConfig) -> list[FieldProblem]:
    layers, blocks = parallelism.pipeline_layers_per_stage, model.num_hidden_layers
    if layers is None or (len(layers) == parallelism.stages and sum(layers) == blocks):
        return []
    name = "pipeline_layers_per_stage"
    message = f"the entries of {name} add up to {sum(layers)}, but model.num_hidden_layers is {blocks}; make them equal"
    if len(layers) != parallelism.stages:
        listed = counted(len(layers), "stage")
        message = f"{name} lists {listed}, but there are {parallelism.stages}; give an entry for each"
    return [FieldProblem(("parallelism", name), list(layers), f"{message}, or leave it out")]


def _batch_problems(parallelism: ParallelismConfig, training: TrainingConfig) -> list[FieldProblem]:
    problems = []
    if parallelism.split_micro_batch and training.micro_batch_size == 1:
        message = "a micro-batch of 1 sequence cannot be split; use 2 or more, or leave split_micro_batch out"
        problems.append(FieldProblem(("training", "micro_batch_size"), 1, message))
    portion = training.micro_batch_size * parallelism.data_parallel_size
    warmup = (stage.global_batch_size for stage in training.batch_size_warmup)
    for field, size in (
        ("global_batch_size", training.global_batch_size),
        *(("batch_size_warmup", of) for of in warmup),
    ):
        if size % portion:
            message = (
                f"{size} sequences cannot be split into micro-batches of "
                f"{training.micro_batch_size} on {parallelism.data_parallel_size} data parallel rank(s); "
                f"use a multiple of {portion} such as {-(-size // portion) * portion}, or a smaller micro_batch_size"
            )
            problems.append(FieldProblem(("training", field), size, message))
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


def _schedule_problems(training: TrainingConfig, optimizer: OptimizerConfig) -> list[FieldProblem]:
    warmup, decay, steps = optimizer.warmup_steps, optimizer.decay_steps or 0, f"training.steps={training.steps}"
    if warmup > training.steps:
        message = f"a warm-up of {warmup} steps does not fit into {steps}; shorten it"
        return [FieldProblem(("optimizer", "warmup_steps"), warmup, message)]
    if warmup + decay > training.steps:
        message = f"a decay of {decay} steps after a warm-up of {warmup} does not fit into {steps}; shorten one of them"
        return [FieldProblem(("optimizer", "decay_steps"), decay, message)]
    return []


def _optimizer_problems(
    model: ModelConfig, parallelism: ParallelismConfig, optimizer: OptimizerConfig
) -> list[FieldProblem]:
    kind = optimizer.kind
    if kind == "adamw":
        return []
    message = ""
    if kind == "loro" and model.family != "svd":
        message = f"optimizer.kind=loro requires model.family=svd, not {model.family}; use family=svd or adamw"
    elif kind == "muon" and model.family == "dense":
        message = "muon is for low-rank factors, but model.family=dense has none; use another family, or adamw"
    elif chosen_strategy(model, parallelism) != "btp":
        message = f"{kind} needs factors that are whole along their rank; use strategy=btp"
    return [FieldProblem(("optimizer", "kind"), kind, message)] if message else []


def _precision_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    """Tensor cores take 8-bit matrices in multiples of 16 along every axis except tokens."""
    if training.precision != "fp8" or (model.rank is None and parallelism.strategy == "btp"):  # refused already
        return []
    field, strategy = ("training", "precision"), chosen_strategy(model, parallelism)
    if strategy != "btp":
        return [FieldProblem(field, "fp8", f"fp8 is for btp; {strategy} computes in bf16 or fp32: use bf16")]
    ranks = parallelism.tensor_parallel_size
    widths = {
        "hidden_size": model.hidden_size / ranks,
        "num_key_value_heads": model.key_value_size / ranks,
        "intermediate_size": model.intermediate_size / ranks,
        "rank": model.bottleneck_rank,
    }
    return [
        FieldProblem(
            field, "fp8", f"fp8 needs multiples of {_PIECE}, but model.{name} gives a rank {width:g} columns; "
            f"change model.{name} or parallelism.tensor_parallel_size, or use bf16",
        )
        for name, width in widths.items()
        if width % _PIECE
    ]  # fmt: skip


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
    layouts = [
        layout
        for replica in elasticity.replicas(Layout.of(parallelism))
        for number in _allowed_numbers(training, elasticity)
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
        return _problems_of_chosen(model, parallelism, training, optimizer, gpus_per_worker, elasticity)
    replicas = elasticity.replicas(Layout.of(parallelism))
    numbers = len(_allowed_numbers(training, elasticity))
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
            found = layout_problems(model, smallest, training, optimizer, gpus_per_worker)
            causes = "; ".join(problem.message for problem in found) or "the batch cannot be split that way"
            message = f"{replica.replica_text} is legal with no number of replicas from {sizes.min} to {sizes.max}"
            problems.append(FieldProblem(where, [replica.tp, replica.pp, replica.cp], f"{message}: {causes}"))
    return problems


def _problems_of_chosen(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int, elasticity: ElasticityConfig,
) -> list[FieldProblem]:  # fmt: skip
    """What is wrong with the layouts recorded as chosen by the service."""
    field, gpus = ("elasticity", "resolved"), elasticity.gpus
    problems = []
    for layout in elasticity.chosen:
        problems_of_it = layout_problems(model, parallelism.at(layout), training, optimizer, gpus_per_worker)
        found = [problem.message for problem in problems_of_it]
        if gpus and not gpus.min <= layout.world_size <= gpus.max:
            found.append(f"it has {layout.world_size} ranks, but gpus allows {gpus.min} to {gpus.max}")
        if found:
            message = f"{layout} is not legal: {'; '.join(found)}; leave resolved out, the service writes it"
            problems.append(FieldProblem(field, [layout.tp, layout.pp, layout.dp], message))
    return problems


def _allowed_numbers(training: TrainingConfig, elasticity: ElasticityConfig) -> list[int]:
    sizes = elasticity.data_parallel_size
    return [] if sizes is None else numbers_of_replicas(training, sizes.min, sizes.max)


def numbers_of_replicas(training: TrainingConfig, least: int, most: int) -> list[int]:
    """Numbers of replicas from ``least`` to ``most`` that divide a step's micro-batches."""
    batches = (training.global_batch_size, *(stage.global_batch_size for stage in training.batch_size_warmup))
    micro_batches = math.gcd(*(size // training.micro_batch_size for size in batches))
    return [number for number in _divisors(micro_batches) if least <= number <= most]


@lru_cache(_REMEMBERED)
def _divisors(number: int) -> tuple[int, ...]:
    lower = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*lower, *(number // divisor for divisor in lower)}))
