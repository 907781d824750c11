"""Which tensor parallel strategy supports which family, and what it has to divide."""

from typing import Literal

from boost_core.config.base import FieldProblem, counted
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import MODES, TRAITS, ParallelismConfig

StrategyName = Literal["btp", "vanilla", "fullrank"]


def chosen_strategy(model: ModelConfig, parallelism: ParallelismConfig) -> StrategyName:
    """The strategy of a job, with the family's default filled in."""
    return parallelism.strategy or ("fullrank" if model.family == "dense" else "btp")


def strategy_problems(model: ModelConfig, parallelism: ParallelismConfig) -> list[FieldProblem]:
    """Why the chosen strategy does not support the family or the number of tensor parallel ranks."""
    strategy = chosen_strategy(model, parallelism)
    problems = []
    if unfit := _unfit(strategy, model):
        problems.append(FieldProblem(("parallelism", "strategy"), strategy, unfit))
    elif strategy == "btp" and parallelism.norm == "sync" and not model.outputs_from_latents:
        message = f"sync norms what becomes latents, but family={model.family} reads more: use fused or online_paper"
        problems.append(FieldProblem(("parallelism", "norm"), parallelism.norm, message))
    if strategy != "btp" and parallelism.norm != "fused":
        message = f"norm={parallelism.norm} is for a residual sharded by btp; {strategy} keeps it whole: leave norm out"
        problems.append(FieldProblem(("parallelism", "norm"), parallelism.norm, message))
    problems += _recompute_problems(strategy, model, parallelism) + _split_problems(strategy, parallelism)
    size = parallelism.tensor_parallel_size
    return problems + [
        FieldProblem(
            ("parallelism", "tensor_parallel_size"), size, f"{size} does not divide model.{name}={divided}; {remedy}"
        )
        for name, divided, remedy in _divided(strategy, model, size)
        if divided % size
    ]


def _recompute_problems(
    strategy: StrategyName, model: ModelConfig, parallelism: ParallelismConfig
) -> list[FieldProblem]:
    field, recompute, rank = ("parallelism", "recompute"), parallelism.recompute, model.rank or 0
    size, blocks = parallelism.tensor_parallel_size, model.num_hidden_layers
    messages, modes = [], {recompute}
    if isinstance(recompute, tuple):
        modes = {mode for stage in recompute for mode, _ in stage.runs}
        listed, named = len(recompute), sum(stage.blocks for stage in recompute)
        if listed != parallelism.stages:
            messages.append(
                f"it lists {counted(listed, 'stage')}, but there are {parallelism.stages}; give an entry for each"
            )
        elif named != blocks:
            messages.append(f"its counts add up to {named}, but model.num_hidden_layers is {blocks}; make them equal")
    for mode in MODES:
        if mode not in modes or TRAITS[mode].again != "segments":
            continue
        if reason := _not_local_between_exchanges(strategy, parallelism):
            message = f"{mode} recomputes the work between two exchanges of latents; {reason}"
            messages.append(f"{message}, or use none or full")
        elif TRAITS[mode].slices and rank % size:
            messages.append(
                f"{mode}: model.rank={rank} cannot be split equally among {size} tensor parallel ranks; use latent, or "
                f"round up to model.rank={-(-rank // size) * size}"
            )
    return [FieldProblem(field, parallelism.recompute_text, message) for message in messages]


def _split_problems(strategy: StrategyName, parallelism: ParallelismConfig) -> list[FieldProblem]:
    if not parallelism.split_micro_batch:
        return []
    reason = _not_local_between_exchanges(strategy, parallelism)
    if "full" in parallelism.recompute_text:  # which auto leaves out
        reason = "recompute=full runs a block without pausing: use none, latent, shared or offload"
    message = f"two halves alternate at the exchanges of latents; {reason}, or leave split_micro_batch out"
    return [FieldProblem(("parallelism", "split_micro_batch"), True, message)] if reason else []


def _not_local_between_exchanges(strategy: StrategyName, parallelism: ParallelismConfig) -> str | None:
    if strategy != "btp":
        return f"{strategy} exchanges wide vectors between them: use btp"
    if parallelism.norm == "sync":
        return "norm=sync has a collective between them: use norm=fused"
    return None


def _unfit(strategy: StrategyName, model: ModelConfig) -> str | None:
    if strategy == "fullrank" and model.family != "dense":
        return f"fullrank splits dense matrices, but family={model.family} has low-rank pairs; use btp or vanilla"
    if strategy != "fullrank" and model.family == "dense":
        return f"{strategy} splits low-rank pairs, but family=dense has none; use fullrank"
    if strategy == "vanilla" and not model.outputs_from_latents:
        return f"vanilla splits pairs of factors, but family={model.family} adds to their products; use btp"
    if strategy == "vanilla" and model.qk_norm:
        return "vanilla has all heads on every rank, but model.qk_norm's scales need them split; use btp"
    if strategy == "vanilla" and model.family == "lax":
        return "vanilla splits the latent among ranks, but LaX's norm and gate need it whole; use btp"
    return None


def _divided(strategy: StrategyName, model: ModelConfig, size: int) -> list[tuple[str, int, str]]:
    """Name, value and remedy for each size that the strategy splits."""
    heads = [
        ("num_attention_heads", model.num_attention_heads, f"choose a divisor of {model.num_attention_heads}"),
        ("num_key_value_heads", model.key_value_heads, f"choose a divisor of {model.key_value_heads}"),
    ]
    mlp = ("intermediate_size", model.intermediate_size, _round_up("intermediate_size", model.intermediate_size, size))
    vocabulary = ("vocab_size", model.vocab_size, _round_up("vocab_size", model.vocab_size, size))
    hidden = ("hidden_size", model.hidden_size, f"choose a divisor of {model.hidden_size}")
    if strategy == "vanilla":
        rank = model.rank or size
        return [("rank", rank, _round_up("rank", rank, size)), vocabulary]
    return [*([hidden] if strategy == "btp" else []), *heads, mlp, vocabulary]


def _round_up(name: str, value: int, size: int) -> str:
    return f"choose a divisor of {value}, or round up to model.{name}={-(-value // size) * size}"
