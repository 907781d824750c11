"""Which model, layout and batch go together."""

from collections.abc import Callable, Sequence

from boost_core.config.base import FieldProblem
from boost_core.config.data import BYTE_TOKENS, BYTES, DataConfig
from boost_core.config.elasticity import ElasticityConfig, Shape
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.strategy import chosen_strategy, strategy_problems
from boost_core.config.training import OptimizerConfig, TrainingConfig

ProblemsAt = Callable[[ParallelismConfig], list[FieldProblem]]  # what is wrong with a job at another parallelism


def job_problems(
    model: ModelConfig, parallelism: ParallelismConfig, data: DataConfig, training: TrainingConfig,
    optimizer: OptimizerConfig,
) -> list[FieldProblem]:  # fmt: skip
    """Everything about a job whose parts are fine one by one but do not go together."""
    return [
        *strategy_problems(model, parallelism),
        *_vocabulary_problems(model, data),
        *_pipeline_problems(model, parallelism, training),
        *_batch_problems(parallelism, training),
        *_schedule_problems(training, optimizer),
        *_optimizer_problems(model, parallelism, optimizer),
    ]


def _vocabulary_problems(model: ModelConfig, data: DataConfig) -> list[FieldProblem]:
    if data.tokenized or data.tokenizer not in (None, BYTES) or model.vocab_size >= BYTE_TOKENS:
        return []
    message = f"{model.vocab_size} is below {BYTE_TOKENS}, the number of byte-level tokens; use at least {BYTE_TOKENS}"
    return [FieldProblem(("model", "vocab_size"), model.vocab_size, message)]


def _pipeline_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    size, schedule = parallelism.pipeline_parallel_size, parallelism.pipeline_schedule
    of_schedule = ("parallelism", "pipeline_schedule")
    if size == 1:
        message = f"{schedule} orders the micro-batches of several stages; leave it out, or set pipeline_parallel_size"
        return [] if schedule == "1f1b" else [FieldProblem(of_schedule, schedule, message)]
    problems = []
    if parallelism.stages > model.num_hidden_layers:
        message = (
            f"{parallelism.stages} stages need as many blocks; model.num_hidden_layers is {model.num_hidden_layers}"
        )
        problems.append(FieldProblem(("parallelism", "pipeline_parallel_size"), size, f"{message}; use fewer stages"))
    if schedule == "zero_bubble" and chosen_strategy(model, parallelism) != "btp":
        message = "zero_bubble puts weight gradients off, which only btp can; use interleaved_1f1b"
        problems.append(FieldProblem(of_schedule, schedule, message))
    if parallelism.split_micro_batch:
        message = "a pipeline's stages take whole micro-batches; leave split_micro_batch out"
        problems.append(FieldProblem(("parallelism", "split_micro_batch"), True, message))
    count = training.micro_batches(parallelism.data_parallel_size)
    if count < size:
        message = f"{size} stages need as many micro-batches a step and data parallel rank, and there are {count}"
        remedy = "raise global_batch_size, or lower micro_batch_size"
        problems.append(
            FieldProblem(("training", "global_batch_size"), training.global_batch_size, f"{message}; {remedy}")
        )
    elif schedule != "1f1b" and count % size:
        message = (
            f"{schedule} needs a multiple of {size} micro-batches a step and data parallel rank, and there are "
            f"{count}; change training.global_batch_size or micro_batch_size, or use 1f1b"
        )
        problems.append(FieldProblem(of_schedule, schedule, message))
    return problems


def _batch_problems(parallelism: ParallelismConfig, training: TrainingConfig) -> list[FieldProblem]:
    problems = []
    if parallelism.split_micro_batch and training.micro_batch_size == 1:
        message = "a micro-batch of 1 sequence has no halves; use 2 or more, or leave split_micro_batch out"
        problems.append(FieldProblem(("training", "micro_batch_size"), 1, message))
    portion = training.micro_batch_size * parallelism.data_parallel_size
    if training.global_batch_size % portion == 0:
        return problems
    multiple = -(-training.global_batch_size // portion) * portion
    message = (
        f"{training.global_batch_size} sequences do not split into micro-batches of "
        f"{training.micro_batch_size} on {parallelism.data_parallel_size} data parallel rank(s); "
        f"use a multiple of {portion} such as {multiple}, or a smaller micro_batch_size"
    )
    return [*problems, FieldProblem(("training", "global_batch_size"), training.global_batch_size, message)]


def _schedule_problems(training: TrainingConfig, optimizer: OptimizerConfig) -> list[FieldProblem]:
    if optimizer.warmup_steps <= training.steps:
        return []
    return [
        FieldProblem(
            ("optimizer", "warmup_steps"),
            optimizer.warmup_steps,
            f"a warm-up of {optimizer.warmup_steps} steps does not fit training.steps={training.steps}; shorten it",
        )
    ]


def _optimizer_problems(
    model: ModelConfig, parallelism: ParallelismConfig, optimizer: OptimizerConfig
) -> list[FieldProblem]:
    if optimizer.kind != "loro":
        return []
    field = ("optimizer", "kind")
    if model.family != "svd":
        message = (
            f"loro moves products A·B of two matrices, which family={model.family} has not; use family=svd or adamw"
        )
        return [FieldProblem(field, "loro", message)]
    if chosen_strategy(model, parallelism) != "btp":
        return [FieldProblem(field, "loro", "loro needs factors that are whole along their rank; use strategy=btp")]
    return []


def legal_shapes(
    parallelism: ParallelismConfig, elasticity: ElasticityConfig, training: TrainingConfig, problems_at: ProblemsAt
) -> list[Shape]:
    """All shapes that a job allows and that go with the rest of it, the fewest ranks first.

    Args:
        parallelism: The job's own.
        elasticity: What it allows.
        training: Its batches; more replicas than micro-batches are not tried.
        problems_at: What is wrong with the job at another parallelism.
    """
    sizes, most = elasticity.data_parallel_size, training.micro_batches(1)
    shapes = [
        Shape(tensor, pipeline, data)
        for tensor, pipeline in dict.fromkeys(_layouts(parallelism, elasticity))
        for data in range(sizes.min, min(sizes.max, most) + 1)
        if most % data == 0 and not problems_at(parallelism.at(tensor, pipeline, data))
    ]
    return sorted(shapes, key=lambda shape: (shape.world_size, shape))


def elasticity_problems(
    parallelism: ParallelismConfig, elasticity: ElasticityConfig | None, training: TrainingConfig,
    problems_at: ProblemsAt,
) -> list[FieldProblem]:  # fmt: skip
    """Why a job cannot run at shapes that it allows: each layout needs a number of replicas that is legal."""
    if elasticity is None:
        return []
    sizes, alone = elasticity.data_parallel_size, elasticity.model_copy(update={"layouts": None})
    problems = []
    for tensor, pipeline in _layouts(parallelism, elasticity):
        layout = parallelism.at(tensor, pipeline, sizes.min)
        if not legal_shapes(layout, alone, training, problems_at):
            where = ("elasticity", "layouts" if elasticity.layouts else "data_parallel_size")
            causes = "; ".join(problem.message for problem in problems_at(layout)) or "the batch does not split so"
            message = f"tp {tensor} × pp {pipeline} is legal with no number of replicas from {sizes.min} to {sizes.max}"
            problems.append(FieldProblem(where, [tensor, pipeline], f"{message}: {causes}"))
    return problems


def _layouts(parallelism: ParallelismConfig, elasticity: ElasticityConfig) -> Sequence[tuple[int, int]]:
    own = (parallelism.tensor_parallel_size, parallelism.pipeline_parallel_size)
    return elasticity.layouts or [own]
