"""How a foreign configuration trains: batches, optimizer, layout, checkpoints."""

import re
from typing import Any

from boost_core.config.nanotron.reader import Reader
from boost_core.config.training import NO_CLIPPING

_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_SEED = 42  # nanotron's default
_SCHEDULE = "optimizer.learning_rate_scheduler."


def name(reader: Reader) -> str:
    """The name of the run."""
    run = str(reader.take("general.run", "imported"))
    cleaned = re.sub(r"[^A-Za-z0-9._ -]+", "-", run.replace("%date", "").replace("%jobid", "")).strip("-_. ")
    return cleaned[:100] or "imported"


def parallelism_section(reader: Reader) -> dict[str, Any]:
    """The layout."""
    parallelism = {
        "tensor_parallel_size": reader.whole("parallelism.tp"),
        "pipeline_parallel_size": reader.whole("parallelism.pp"),
        "data_parallel_size": reader.whole("parallelism.dp"),
        "context_parallel_size": reader.whole("parallelism.context_parallel_size", 1),
    }
    engine = reader.take("parallelism.pp_engine", "afab")
    if engine != "1f1b" and parallelism["pipeline_parallel_size"] > 1:
        reader.note("parallelism.pp_engine", engine, "1f1b gives the same result with less memory")
    if (size := reader.whole("parallelism.expert_parallel_size", 1)) > 1:
        reader.note(
            "parallelism.expert_parallel_size", size, "not supported here; the gang has tp x cp x pp x dp ranks"
        )
    if reader.flag("parallelism.recompute_layer", False):
        parallelism["recompute"] = "full"
        reader.note("parallelism.recompute_layer", True, "recompute=full does the same; latent sends nothing again")
    stage = reader.whole("optimizer.zero_stage", 0, least=0)
    parallelism["zero_stage"] = min(stage, 2)
    if stage > 2:
        reader.note("optimizer.zero_stage", stage, "stage 2 is the highest supported here")
    return parallelism


def training_section(reader: Reader) -> dict[str, Any]:
    """Steps and batches."""
    micro_batch, replicas = reader.whole("tokens.micro_batch_size"), reader.whole("parallelism.dp")
    training = {
        "steps": reader.whole("tokens.train_steps"),
        "sequence_length": reader.whole("tokens.sequence_length"),
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * replicas * reader.whole("tokens.batch_accumulation_per_replica", 1),
        "seed": reader.whole("general.seed", _SEED, least=0),
        "precision": _precision(reader),
    }
    interval = reader.whole("tokens.val_check_interval", -1, least=-1)
    batches = reader.whole("tokens.limit_val_batches", 0, least=0)
    if interval > 0 and batches > 0:
        training["evaluate_every_steps"] = interval
        training["evaluate_sequences"] = batches * micro_batch * replicas
    return training


def _precision(reader: Reader) -> str:
    precision = reader.take("model.dtype", "bfloat16")
    if precision not in _PRECISIONS:
        reader.note("model.dtype", precision, "bf16 is used")
    if not reader.flag("optimizer.accumulate_grad_in_fp32", True) and precision != "float32":
        reader.note("optimizer.accumulate_grad_in_fp32", False, "master weights and gradients are fp32 here")
    return _PRECISIONS.get(precision, "bf16")


def optimizer_section(reader: Reader) -> dict[str, Any]:
    """AdamW and its learning-rate schedule."""
    optimizer = {
        "betas": [_of_adam(reader, "adam_beta1", 0.9), _of_adam(reader, "adam_beta2", 0.95)],
        "epsilon": _of_adam(reader, "adam_eps", 1e-8),
        "weight_decay": reader.number("optimizer.weight_decay"),
        "clip_norm": reader.number("optimizer.clip_grad", 0) or NO_CLIPPING,
    }
    kind = reader.take("optimizer.optimizer_factory.name", "adamW")
    if str(kind).lower() != "adamw":
        reader.refuse("optimizer.optimizer_factory.name", kind, "of these only adamW is supported here")
    if optimizer["weight_decay"]:
        reader.note("optimizer.weight_decay", optimizer["weight_decay"], "the weights of norms do not decay here")
    return optimizer | _schedule(reader)


def _of_adam(reader: Reader, field: str, default: float) -> Any:
    """A field of Adam, which earlier versions of nanotron have one level up."""
    return reader.number(f"optimizer.optimizer_factory.{field}", reader.number(f"optimizer.{field}", default))


def _schedule(reader: Reader) -> dict[str, Any]:
    steps, warmup = reader.whole("tokens.train_steps"), reader.whole(f"{_SCHEDULE}lr_warmup_steps", 0, least=0)
    rate = reader.number(f"{_SCHEDULE}learning_rate")
    lowest = reader.number(f"{_SCHEDULE}min_decay_lr", rate)
    decay = _decay(reader, steps, warmup)
    if rate <= 0 or lowest < 0:
        raise ValueError(f"{_SCHEDULE}learning_rate={rate} and min_decay_lr={lowest} are not both positive")
    schedule = {"learning_rate": rate, "warmup_steps": warmup, "final_learning_rate_ratio": lowest / rate} | decay
    if warmup > steps:
        reached = rate * steps / warmup
        remark = f"the run ends within it, at learning_rate={reached:g} after warmup_steps={steps}"
        reader.note(f"{_SCHEDULE}lr_warmup_steps", warmup, remark)
        schedule |= {"learning_rate": reached, "warmup_steps": steps}
    elif warmup > 0:
        remark = "step n has the rate of nanotron's step n + 1, whose first has none"
        reader.note(f"{_SCHEDULE}lr_warmup_steps", warmup, remark)
    return schedule


def _decay(reader: Reader, steps: int, warmup: int) -> dict[str, Any]:
    """The schedule after the warm-up: linear or cosine to the last step, or linear in the last steps only."""
    style = reader.take(f"{_SCHEDULE}lr_decay_style", "linear")
    if style not in ("cosine", "linear"):
        reader.note(f"{_SCHEDULE}lr_decay_style", style, "it is cosine here")
    if (warmup_style := reader.take(f"{_SCHEDULE}lr_warmup_style", "linear")) != "linear":
        reader.note(f"{_SCHEDULE}lr_warmup_style", warmup_style, "it is linear here")
    start = reader.whole(f"{_SCHEDULE}lr_decay_starting_step", warmup, least=0)
    duration = reader.whole(f"{_SCHEDULE}lr_decay_steps", steps - warmup, least=0)
    if style == "linear" and warmup < start < steps == start + duration:
        return {"schedule": "wsd", "decay_steps": duration}
    if warmup <= steps and (start, duration) != (warmup, steps - warmup):
        remark = f"the decay is from the end of the warm-up, step {warmup}, to the last step, {steps}"
        reader.note(f"{_SCHEDULE}lr_decay_steps", duration, f"{remark}; there it is {duration} steps from step {start}")
    return {"schedule": "linear"} if style == "linear" else {}


def checkpoint_section(reader: Reader) -> dict[str, Any]:
    """Where and how often to save."""
    checkpoint = {
        "url": reader.take("checkpoints.checkpoints_path", None),
        "every_steps": reader.whole("checkpoints.checkpoint_interval", None),
    }
    if (source := reader.take("checkpoints.resume_checkpoint_path", None)) is not None:
        reader.note(
            "checkpoints.resume_checkpoint_path", source, "its files have another format; training starts from scratch"
        )
    return {field: value for field, value in checkpoint.items() if value is not None}
