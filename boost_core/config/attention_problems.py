"""What sparse attention cannot be combined with."""

from boost_core.config.base import FieldProblem
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.training import TrainingConfig


def attention_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    """Why a job cannot train with the sparse attention it asks for."""
    attention, length = training.attention, training.sequence_length
    if attention is None:
        return []
    messages, field = [], ("training", "attention")
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
    shortest = attention.from_length
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
    return [FieldProblem(field, None, message) for message in messages]
