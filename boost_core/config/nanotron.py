"""Configurations of nanotron, and of BOOST's published fork of it, as job specs.

What means the same here is carried over; what changes nothing about the trained model (logging, kernel switches) is
left; of all else it is said that it is not carried over.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from boost_core.config.yaml_text import read_yaml

_MISSING = object()
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_SCHEDULES = {"1f1b": "1f1b", "afab": "1f1b"}

# Neither the model nor its trajectory depends on these.
_WITHOUT_EFFECT = (
    "logging.", "lighteval", "profiler", "general.project", "general.benchmark_csv_path",
    "general.ignore_sanity_checks", "general.step", "general.consumed_train_samples", "model.ddp_bucket_cap_mb",
    "model.model_config.use_cache", "model.model_config.pretraining_tp", "model.model_config.max_position_embeddings",
    "model.model_config.is_", "model.model_config._", "model.model_config.bos_token_id",
    "model.model_config.pad_token_id", "model.model_config.initializer_range", "optimizer.accumulate_grad_in_fp32",
    "optimizer.optimizer_factory.torch_adam_is_fused", "parallelism.tp_", "checkpoints.checkpoints_path_is",
    "checkpoints.save_", "tokenizer.tokenizer_max_length", "tokenizer.tokenizer_revision",
    "tokens.limit_test_batches", "data_stages.0.name", "data_stages.0.start_training_step",
    "data_stages.0.data.num_loading_workers", "data_stages.0.data.seed", "data_stages.0.data.dataset.dataset_",
)  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A job spec made of another configuration.

    Attributes:
        job: The job spec, as a mapping; it has yet to be validated.
        notes: What was not carried over, or not as it was.
    """

    job: dict[str, Any]
    notes: list[str]


def import_config(path: str | Path) -> Imported:
    """Read a YAML configuration of nanotron or of BOOST's fork.

    Raises:
        ValueError: The file is not YAML, or no such configuration.
        OSError: It cannot be read.
    """
    try:
        content = read_yaml(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict) or "tokens" not in content:
        raise ValueError(f"{path} is no configuration of nanotron: it has no model and tokens")
    reader = _Reader(content)
    job = {
        "name": _name(reader),
        "model": _model(reader),
        "parallelism": _parallelism(reader),
        "data": _data(reader),
        "training": _training(reader),
        "optimizer": _optimizer(reader),
        "checkpoint": _checkpoint(reader),
        "resources": {"gpus_per_worker": 1},
    }
    reader.note_the_rest()
    return Imported({section: content for section, content in job.items() if content}, reader.notes)


def _name(reader: "_Reader") -> str:
    run = str(reader.take("general.run", "imported"))
    cleaned = re.sub(r"[^A-Za-z0-9._ -]+", "-", run.replace("%date", "").replace("%jobid", "")).strip("-_. ")
    return cleaned[:100] or "imported"


def _model(reader: "_Reader") -> dict[str, Any]:
    at = "model.model_config."
    model = {
        ours: reader.take(f"{at}{theirs}")
        for ours, theirs in {
            "vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
            "num_hidden_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
        }.items()
    }  # fmt: skip
    optional = {
        "num_key_value_heads": "num_key_value_heads", "rope_theta": "rope_theta", "norm_epsilon": "rms_norm_eps",
        "tie_embeddings": "tie_word_embeddings",
    }  # fmt: skip
    for ours, theirs in optional.items():
        if (value := reader.take(f"{at}{theirs}", None)) is not None:
            model[ours] = value
    attention_rank, mlp_rank = reader.take(f"{at}attn_rank", None), reader.take(f"{at}mlp_rank", None)
    if attention_rank is None:
        model["family"] = "dense"
    else:
        model |= {"family": "cola", "rank": attention_rank}
        if attention_rank != mlp_rank:
            reader.note(f"{at}mlp_rank", mlp_rank, f"all bottlenecks have one rank here, {attention_rank}")
    if (norm := reader.take(f"{at}rmsnorm_type", None)) is not None:
        reader.note(
            f"{at}rmsnorm_type", norm, "every form of the norm gives the same values; norm=fused is the fastest"
        )
    if (activation := reader.take(f"{at}hidden_act", "silu")) != "silu":
        reader.note(f"{at}hidden_act", activation, "activations are SiLU here")
    if reader.take("model.make_vocab_size_divisible_by", 1) != 1:
        reader.note("model.make_vocab_size_divisible_by", "", "give model.vocab_size as it is to be")
    if (std := reader.take("model.init_method.std", None)) is not None:
        reader.note("model.init_method.std", std, "weights start as in the CoLA paper")
    reader.take_if_empty(f"{at}rope_scaling")
    if reader.take(f"{at}rope_interleaved", False):
        reader.note(f"{at}rope_interleaved", True, "rotary embeddings turn the halves of a head here, not neighbours")
    return model


def _parallelism(reader: "_Reader") -> dict[str, Any]:
    parallelism = {
        "tensor_parallel_size": reader.take("parallelism.tp"),
        "pipeline_parallel_size": reader.take("parallelism.pp"),
        "data_parallel_size": reader.take("parallelism.dp"),
    }
    engine = reader.take("parallelism.pp_engine", "1f1b")
    if engine != "1f1b":
        reader.note("parallelism.pp_engine", engine, "1f1b gives the same with less memory")
    if reader.take("parallelism.expert_parallel_size", 1) != 1:
        reader.note("parallelism.expert_parallel_size", "", "there are no experts here")
    if reader.take("parallelism.recompute_layer", False):
        parallelism["recompute"] = "full"
        reader.note("parallelism.recompute_layer", True, "recompute=full does the same; latent sends nothing again")
    stage = reader.take("optimizer.zero_stage", 0)
    parallelism["zero_stage"] = min(stage, 2)
    if stage > 2:
        reader.note("optimizer.zero_stage", stage, "stage 2 is the highest here")
    return parallelism


def _training(reader: "_Reader") -> dict[str, Any]:
    micro_batch, replicas = reader.take("tokens.micro_batch_size"), reader.look("parallelism.dp")
    training = {
        "steps": reader.take("tokens.train_steps"),
        "sequence_length": reader.take("tokens.sequence_length"),
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * replicas * reader.take("tokens.batch_accumulation_per_replica", 1),
        "seed": reader.take("general.seed", 0),
    }
    precision = reader.take("model.dtype", "bfloat16")
    training["precision"] = _PRECISIONS.get(precision, "bf16")
    if precision not in _PRECISIONS:
        reader.note("model.dtype", precision, "bf16 is used")
    interval, batches = reader.take("tokens.val_check_interval", -1), reader.take("tokens.limit_val_batches", 0)
    if interval > 0:
        training["evaluate_every_steps"] = interval
    if batches > 0:
        training["evaluate_sequences"] = batches * micro_batch
    return training


def _optimizer(reader: "_Reader") -> dict[str, Any]:
    factory, schedule = "optimizer.optimizer_factory.", "optimizer.learning_rate_scheduler."
    name = reader.take(f"{factory}name", "adamW")
    if str(name).lower() != "adamw":
        reader.note(f"{factory}name", name, "adamw is used")
    rate, lowest = reader.take(f"{schedule}learning_rate"), reader.take(f"{schedule}min_decay_lr", None)
    optimizer = {
        "learning_rate": rate,
        "betas": [reader.take(f"{factory}adam_beta1", 0.9), reader.take(f"{factory}adam_beta2", 0.95)],
        "epsilon": reader.take(f"{factory}adam_eps", 1e-8),
        "weight_decay": reader.take("optimizer.weight_decay"),
        "clip_norm": reader.take("optimizer.clip_grad", None) or 1e9,
        "warmup_steps": min(reader.take(f"{schedule}lr_warmup_steps", 0), reader.look("tokens.train_steps")),
        "final_learning_rate_ratio": (rate if lowest is None else lowest) / rate,
    }
    for key, same in (("lr_decay_style", "cosine"), ("lr_warmup_style", "linear")):
        if (style := reader.take(f"{schedule}{key}", same)) not in (same, None):
            reader.note(f"{schedule}{key}", style, f"it is {same} here")
    for key in ("lr_decay_steps", "lr_decay_starting_step"):
        if (value := reader.take(f"{schedule}{key}", None)) is not None:
            reader.note(f"{schedule}{key}", value, "the decay goes from the warm-up to the last step")
    return optimizer


def _data(reader: "_Reader") -> dict[str, Any]:
    at = "data_stages.0.data.dataset."
    name, field = reader.take(f"{at}hf_dataset_or_datasets", None), reader.take(f"{at}text_column_name", "text")
    from_disk = reader.take(f"{at}load_from_disk", False)
    split, configuration = reader.take(f"{at}hf_dataset_splits", None), reader.take(f"{at}hf_dataset_config_name", None)
    tokenizer = reader.take("tokenizer.tokenizer_name_or_path", None)
    data: dict[str, Any] = {}
    if from_disk and isinstance(name, str):
        data["source"] = {"kind": "dataset", "paths": [name], "text_field": field}
    elif name is not None:
        which = " ".join(str(each) for each in (name, configuration, split) if each)
        reader.note(f"{at}hf_dataset_or_datasets", which, "nothing is downloaded; save it to disk and set data.source")
    if isinstance(tokenizer, str) and tokenizer.endswith(".json"):
        data["tokenizer"] = tokenizer
    elif tokenizer is not None:
        reader.note("tokenizer.tokenizer_name_or_path", tokenizer, "save its tokenizer.json and set data.tokenizer")
    reader.take("model.model_config.eos_token_id", None)
    return data


def _checkpoint(reader: "_Reader") -> dict[str, Any]:
    checkpoint = {
        "url": reader.take("checkpoints.checkpoints_path", None),
        "every_steps": reader.take("checkpoints.checkpoint_interval", None),
    }
    if (source := reader.take("checkpoints.resume_checkpoint_path", None)) is not None:
        reader.note("checkpoints.resume_checkpoint_path", source, "its files are of another format")
    return {name: value for name, value in checkpoint.items() if value is not None}


class _Reader:
    """Reads values by their path and knows which have been read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._values = dict(_leaves(content, ""))
        self._taken: set[str] = set()
        self.notes: list[str] = []

    def take(self, path: str, default: Any = _MISSING) -> Any:
        """A value, which then counts as carried over.

        Raises:
            ValueError: It is not there, and there is no default.
        """
        self._taken.add(path)
        return self.look(path, default)

    def look(self, path: str, default: Any = _MISSING) -> Any:
        """A value."""
        value = self._values.get(path, default)
        if value is _MISSING:
            raise ValueError(f"{path} is missing; a configuration of nanotron has it")
        return value

    def take_if_empty(self, path: str) -> None:
        """Let a value pass that says nothing."""
        if self._values.get(path) is None:
            self._taken.add(path)

    def note(self, path: str, value: Any, remark: str) -> None:
        """Say that a value is not carried over, or not as it is."""
        self.notes.append(f"{path}{f'={value}' if value != '' else ''}: {remark}")

    def note_the_rest(self) -> None:
        """Say of everything that was not read that it is not carried over."""
        for path, value in self._values.items():
            if path not in self._taken and not path.startswith(_WITHOUT_EFFECT) and value is not None:
                self.note(path, value, "not carried over")


def _leaves(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else None
    if inner is None or not content:
        yield path, content
        return
    for key, value in inner:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))
