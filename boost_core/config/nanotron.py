"""Conversion of configurations of nanotron, and of BOOST's published fork of it, to job specs.

Settings that mean the same here are carried over. Settings that would give another model or optimizer are refused.
All others that affect training are listed as not carried over. The data must always be set anew.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from boost_core.config.base import read_yaml
from boost_core.config.training import NO_CLIPPING

# Values of a foreign configuration by dotted path, and a record of what became of each.

_MISSING: Any = object()
_MOST = 10**15
_MOST_PATHS = 100_000  # of values
_LONGEST = 200  # characters of a value in a sentence

# Sections and fields that affect neither the model nor its trajectory.
_SECTIONS_WITHOUT_EFFECT = ("lighteval", "logging", "metrics_logging", "profiler")
_WITHOUT_EFFECT = {
    "checkpoints.checkpoints_path_is_shared_file_system", "checkpoints.load_lr_scheduler", "checkpoints.load_optimizer",
    "checkpoints.save_final_state", "checkpoints.save_initial_state",
    "general.benchmark_csv_path", "general.consumed_train_samples", "general.entity", "general.ignore_sanity_checks",
    "general.project", "general.step",
    "model.ddp_bucket_cap_mb",
    "optimizer.optimizer_factory.torch_adam_is_fused", "optimizer.torch_adam_is_fused",
    "parallelism.tp_linear_async_communication", "parallelism.tp_mode", "parallelism.tp_recompute_allgather",
    "tokenizer.tokenizer_max_length", "tokenizer.tokenizer_revision",
    "tokens.limit_test_batches",
}  # fmt: skip
_SECTIONS_READ = {"checkpoints", "general", "model", "optimizer", "parallelism", "tokenizer", "tokens"}


class Reader:
    """Reads values by path and tracks which have been read. Null values count as missing.

    Attributes:
        content: The whole configuration.
        notes: What was not carried over, or was changed.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.notes: list[str] = []
        self.refused: list[str] = []  # values for which the configuration will be refused, and why
        self._values: dict[str, Any] = {}
        parts: list[tuple[str, Any]] = [("", content)]
        for _ in range(_MOST_PATHS):
            if not parts:
                break
            path, value = parts.pop()
            inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            if value and inner:
                parts += reversed([(f"{path}.{key}" if path else str(key), each) for key, each in inner])
            elif value not in (None, {}, []):
                self._values[path] = value
        if parts:  # as of aliases of aliases
            raise ValueError(f"the configuration has more than {_MOST_PATHS} values; leave sections out")
        self._carried_over: set[str] = set()

    def take(self, path: str, default: Any = _MISSING) -> Any:
        """Return a value and count it as carried over.

        Raises:
            ValueError: The field is missing and has no default.
        """
        self._carried_over.add(path)
        value = self._values.get(path, default)
        if value is _MISSING:
            raise ValueError(f"{path} is missing; a configuration of nanotron has it")
        return value

    def whole(self, path: str, default: Any = _MISSING, least: int = 1) -> Any:
        """Return a whole number, or the default.

        Raises:
            ValueError: The value is not a whole number from ``least`` up, or the field is missing without a default.
        """
        value = self.take(path, default)
        if value is not default and (type(value) is not int or not least <= value <= _MOST):
            raise ValueError(f"{assignment(path, value)} is not a whole number from {least} to {_MOST:,}")
        return value

    def number(self, path: str, default: Any = _MISSING) -> Any:
        """Return a finite number, or the default.

        Raises:
            ValueError: The value is of another type, or the field is missing and has no default.
        """
        value = self.take(path, default)
        if value is not default and (type(value) not in (int, float) or not abs(value) <= sys.float_info.max):
            raise ValueError(f"{assignment(path, value)} is not a finite number")
        return value

    def flag(self, path: str, default: bool) -> bool:
        """Return true or false.

        Raises:
            ValueError: It is neither.
        """
        value = self.take(path, default)
        if not isinstance(value, bool):
            raise ValueError(f"{assignment(path, value)} is neither true nor false")
        return value

    def under(self, section: str) -> dict[str, Any]:
        """The values of a section that have not been read, by their path within the section."""
        unread = {path: value for path, value in self._values.items() if path not in self._carried_over}
        return {path.removeprefix(section): value for path, value in unread.items() if path.startswith(section)}

    def note(self, path: str, value: Any, remark: str) -> None:
        """Note that a value is not carried over, or is changed."""
        self.notes.append(f"{assignment(path, value)}: {remark}")

    def refuse(self, path: str, value: Any, remark: str) -> None:
        """Record a value for which the configuration will be refused."""
        self.refused.append(f"{assignment(path, value)}: {remark}")


def assignment(path: str, value: Any) -> str:
    """Format a path and value for a line on a terminal, truncated if long and without control characters."""
    text = path if value == "" else f"{path}={value}"
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in shown)


# The data of a foreign configuration, which can only be described and must be set by its owner.


def data_section(reader: Reader) -> tuple[dict[str, Any], dict[str, str]]:
    """Data of the same kind without paths, which does not validate, and the fields that must be set."""
    # Of the first stage; later ones, if the run reaches them, are dropped.
    stages, steps = reader.content.get("data_stages"), reader.whole("tokens.train_steps")
    if not isinstance(stages, list) or not stages:
        first, path = _mapping(reader.content.get("data")), "data"  # earlier versions of nanotron
    else:
        first, path = _mapping(_mapping(stages[0]).get("data")), "data_stages.0.data"
        seed, run = first.get("seed"), reader.take("general.seed", None)
        if seed not in (None, run):
            reader.note(f"{path}.seed", seed, f"training.seed={run} also orders the data")
        for number, stage in enumerate(stages[1:], start=1):
            start = _mapping(stage).get("start_training_step")
            if not (isinstance(start, int) and start > steps):
                remark = "the job uses the first stage's data throughout; data.mixture combines sources by weight"
                reader.note(f"data_stages.{number}.start_training_step", start, remark)
    dataset = first.get("dataset")
    tokenizer = reader.take("tokenizer.tokenizer_name_or_path", None)
    if isinstance(dataset, dict):
        shown = ("dataset_folder", "dataset_weights", "hf_dataset_or_datasets", "hf_dataset_config_name",
                 "hf_dataset_splits", "load_from_disk")  # fmt: skip
        fields = ", ".join(assignment(name, dataset[name]) for name in shown if dataset.get(name))
        described = f"{path}.dataset has {fields}"
    else:
        described = f"{assignment(f'{path}.dataset', dataset)} is random tokens"
    if not isinstance(dataset, dict) or "dataset_folder" in dataset or dataset.get("load_from_disk"):
        remedy = "tokenize the documents with `boost data tokenize` and name the folder that it writes"
        return {"source": {"kind": "tokenized", "paths": []}}, {"data.source.paths": f"{described}; {remedy}"}
    source: dict[str, Any] = {"kind": "dataset", "paths": [], "text_field": dataset.get("text_column_name") or "text"}
    remedy = "nothing is downloaded; save it with save_to_disk of Hugging Face's datasets and name the folder"
    unset = {
        "data.source.paths": f"{described}; {remedy}",
        "data.tokenizer": f"{assignment('tokenizer.tokenizer_name_or_path', tokenizer)}; name its tokenizer.json",
    }
    return {"source": source, "tokenizer": ""}, unset


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# The model of a foreign configuration; unsupported ones are refused, never replaced by the nearest supported one.

_AT = "model.model_config."
_FAMILIES = {"is_llama_config": "dense", "is_cola_llama_config": "cola"}
_RANK = 1024  # default of BOOST's CoLA class

_FIRST_WEIGHTS = {
    "dense": "all weights start with a standard deviation of 0.02 here; nanotron divides that of output projections by "
    "the root of 2 × layers",
    "cola": "the embedding and the head start with a standard deviation of 0.02 here; bottlenecks as in BOOST and CoLA",
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Fields that do not change the function, whatever their value: caches, token ids and kernel choices.
_MODEL_WITHOUT_EFFECT = {
    "_attn_implementation", "bos_token_id", "eos_token_id", "initializer_range", "max_position_embeddings",
    "pad_token_id", "pretraining_tp", "use_cache", "z_loss_coefficient",
}  # fmt: skip

# Fields with the only value that matches what is computed here.
_THE_SAME_HERE: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False}


def model_section(reader: Reader) -> dict[str, Any]:
    """The model that computes the same function.

    Raises:
        ValueError: Its family is not supported, or a size is missing.
    """
    markers = [name for name, value in reader.under(_AT).items() if name.startswith("is_") and value is True]
    foreign = [marker for marker in markers if marker not in _FAMILIES]
    if foreign or len(markers) > 1:
        for marker in foreign or markers:
            reader.refuse(f"{_AT}{marker}", "", f"not supported here; use {' or '.join(_FAMILIES)}")
        raise ValueError("\n".join(reader.refused))
    family = "cola" if {"attn_rank", "mlp_rank"} & reader.under(_AT).keys() else "dense"  # without a marker
    for marker in markers:
        reader.take(f"{_AT}{marker}")
        family = _FAMILIES[marker]
    model: dict[str, Any] = {size: reader.whole(f"{_AT}{size}") for size in _SIZES}
    # As nanotron pads it: rounded up so that tensor parallel ranks get equal shares.
    size = model["vocab_size"]
    multiple: int = reader.whole("parallelism.tp") * reader.whole("model.make_vocab_size_divisible_by", 1)
    model["vocab_size"] = padded = -(-size // multiple) * multiple
    if padded != size:
        reader.note(f"{_AT}vocab_size", size, f"model.vocab_size={padded}, to which nanotron pads it")
    model["family"] = family
    optional = {
        "num_key_value_heads": reader.whole(f"{_AT}num_key_value_heads", None),
        "rope_theta": reader.number(f"{_AT}rope_theta", None),
        "norm_epsilon": reader.number(f"{_AT}rms_norm_eps", None),
        "tie_embeddings": reader.flag(f"{_AT}tie_word_embeddings", False) or None,
    }
    if family == "cola":
        older = reader.whole(f"{_AT}rank", None)  # an earlier class had a single rank
        attention, mlp = (reader.whole(f"{_AT}{name}", older or _RANK) for name in ("attn_rank", "mlp_rank"))
        for name, size in (("mlp_rank", mlp), ("rank", older or attention)):
            if size != attention:
                remark = f"attention has {attention}; all bottlenecks of a model have one rank here"
                reader.refuse(f"{_AT}{name}", size, remark)
        norm, ranks = reader.take(f"{_AT}rmsnorm_type", "triton"), reader.whole("parallelism.tp")
        if norm == "triton" and ranks > 1:
            there = f"is over each rank's shard alone, another function for every parallelism.tp (here {ranks})"
            here = "all norms here are over the whole hidden state, as BOOST's sync and online are"
            remark = f"under BOOST's tensor parallelism this norm {there}; {here}"
            reader.note(f"{_AT}rmsnorm_type", norm, f"{remark}; compare with a run of rmsnorm_type=sync")
        elif norm not in ("triton", "sync", "online"):
            reader.refuse(f"{_AT}rmsnorm_type", norm, "no such norm in BOOST; it has triton, sync and online")
        gated = reader.flag(f"{_AT}both_act", False)
        optional |= {"rank": attention, "gate_activation": True if gated else None}
    if reader.flag(f"{_AT}rope_interleaved", False):
        remark = "rotary embeddings rotate halves of a head here, not neighbours"
        reader.note(f"{_AT}rope_interleaved", True, f"{remark}: the same except for the order of weights")

    # Where the weights start.
    if (std := reader.number("model.init_method.std", None)) is not None:
        reader.note("model.init_method.std", std, _FIRST_WEIGHTS[family])
    if reader.take("model.init_method.use_mup", False):
        reader.refuse("model.init_method.use_mup", True, "maximal update parametrization is not supported here")
    if (path := reader.take("model.init_method.path", None)) is not None:
        remedy = "convert these weights with `python -m boost_core.convert start`"
        remedy += " and name the result in checkpoint.weights_from of the job"
        reader.refuse("model.init_method.path", path, f"leave it out; {remedy}")

    # Whatever else may change the function: values other than ours and unknown fields.
    for field, same in _THE_SAME_HERE.items():
        if (value := reader.take(f"{_AT}{field}", same)) != same:
            reader.refuse(f"{_AT}{field}", value, f"it is {str(same).lower()} here")
    if reader.flag(f"{_AT}z_loss_enabled", False):
        reader.refuse(f"{_AT}z_loss_enabled", True, "leave it out, and set training.z_loss of the job instead")
    for field, value in reader.under(_AT).items():
        if field not in _MODEL_WITHOUT_EFFECT:
            remark = "not supported here, and may change what the model computes; if it does not, leave it out"
            reader.refuse(f"{_AT}{field}", value, remark)
    return model | {field: value for field, value in optional.items() if value is not None}


# How a foreign configuration trains: batches, optimizer, layout, checkpoints.

_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_SEED = 42  # nanotron's default
_SCHEDULE = "optimizer.learning_rate_scheduler."


def layout_and_batches(reader: Reader) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections parallelism and training."""
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
        reader.note("parallelism.expert_parallel_size", size, "not supported; the gang has tp x cp x pp x dp ranks")
    if reader.flag("parallelism.recompute_layer", False):
        parallelism["recompute"] = "full"
        reader.note("parallelism.recompute_layer", True, "recompute=full does the same; latent sends nothing again")
    stage = reader.whole("optimizer.zero_stage", 0, least=0)
    parallelism["zero_stage"] = min(stage, 2)
    if stage > 2:
        reader.note("optimizer.zero_stage", stage, "stage 2 is the highest supported here")

    micro_batch, replicas = reader.whole("tokens.micro_batch_size"), reader.whole("parallelism.dp")
    training: dict[str, Any] = {
        "steps": reader.whole("tokens.train_steps"),
        "sequence_length": reader.whole("tokens.sequence_length"),
        "micro_batch_size": micro_batch,
        "global_batch_size": micro_batch * replicas * reader.whole("tokens.batch_accumulation_per_replica", 1),
        "seed": reader.whole("general.seed", _SEED, least=0),
    }
    precision = reader.take("model.dtype", "bfloat16")
    if precision not in _PRECISIONS:
        reader.note("model.dtype", precision, "bf16 is used")
    if not reader.flag("optimizer.accumulate_grad_in_fp32", True) and precision != "float32":
        reader.note("optimizer.accumulate_grad_in_fp32", False, "master weights and gradients are fp32 here")
    training["precision"] = _PRECISIONS.get(precision, "bf16")
    interval = reader.whole("tokens.val_check_interval", -1, least=-1)
    batches = reader.whole("tokens.limit_val_batches", 0, least=0)
    if interval > 0 and batches > 0:
        training["evaluate_every_steps"] = interval
        training["evaluate_sequences"] = batches * micro_batch * replicas
    return parallelism, training


def optimizer_section(reader: Reader) -> dict[str, Any]:
    """AdamW and its learning-rate schedule."""
    beta1, beta2, epsilon = (  # which earlier versions of nanotron have one level up
        reader.number(f"optimizer.optimizer_factory.{name}", reader.number(f"optimizer.{name}", default))
        for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.95), ("adam_eps", 1e-8))
    )
    optimizer = {"betas": [beta1, beta2], "epsilon": epsilon, "weight_decay": reader.number("optimizer.weight_decay")}
    optimizer["clip_norm"] = reader.number("optimizer.clip_grad", 0) or NO_CLIPPING
    kind = reader.take("optimizer.optimizer_factory.name", "adamW")
    if str(kind).lower() != "adamw":
        reader.refuse("optimizer.optimizer_factory.name", kind, "of these only adamW is supported here")
    if optimizer["weight_decay"]:
        reader.note("optimizer.weight_decay", optimizer["weight_decay"], "the weights of norms do not decay here")
    steps, warmup = reader.whole("tokens.train_steps"), reader.whole(f"{_SCHEDULE}lr_warmup_steps", 0, least=0)
    rate = reader.number(f"{_SCHEDULE}learning_rate")
    lowest = reader.number(f"{_SCHEDULE}min_decay_lr", rate)

    # The schedule after the warm-up: linear or cosine to the last step, or linear in the last steps only.
    style = reader.take(f"{_SCHEDULE}lr_decay_style", "linear")
    if style not in ("cosine", "linear"):
        reader.note(f"{_SCHEDULE}lr_decay_style", style, "it is cosine here")
    if (warmup_style := reader.take(f"{_SCHEDULE}lr_warmup_style", "linear")) != "linear":
        reader.note(f"{_SCHEDULE}lr_warmup_style", warmup_style, "it is linear here")
    start = reader.whole(f"{_SCHEDULE}lr_decay_starting_step", warmup, least=0)
    duration = reader.whole(f"{_SCHEDULE}lr_decay_steps", steps - warmup, least=0)
    decay: dict[str, Any] = {"schedule": "linear"} if style == "linear" else {}
    if style == "linear" and warmup < start < steps == start + duration:
        decay = {"schedule": "wsd", "decay_steps": duration}
    elif warmup <= steps and (start, duration) != (warmup, steps - warmup):
        remark = f"the decay is from the end of the warm-up, step {warmup}, to the last step, {steps}"
        reader.note(f"{_SCHEDULE}lr_decay_steps", duration, f"{remark}; there it is {duration} steps from step {start}")
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
    return optimizer | schedule


@dataclass(frozen=True)
class Imported:
    """A job spec converted from another configuration.

    Attributes:
        job: The job spec, as a mapping; it does not validate until the data is set.
        notes: What was not carried over, or was changed.
        unset: Fields that must be set before the job validates, and what to do about each.
    """

    job: dict[str, Any]
    notes: list[str]
    unset: dict[str, str]


def import_config(path: str | Path) -> Imported:
    """Read a YAML configuration of nanotron or of BOOST's fork.

    Raises:
        ValueError: The file is not YAML, is not such a configuration, or has an unsupported model or optimizer; with
            one line per problem.
        OSError: The file cannot be read.
    """
    try:
        content = read_yaml(Path(path).read_text(encoding="utf-8"), foreign=True)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict) or "tokens" not in content:
        raise ValueError(f"{path} is not a nanotron configuration: it lacks model and tokens")
    reader = Reader(content)
    model = model_section(reader)
    data, unset = data_section(reader)
    run = str(reader.take("general.run", "imported"))
    name = re.sub(r"[^A-Za-z0-9._ -]+", "-", run.replace("%date", "").replace("%jobid", "")).strip("-_. ")
    parallelism, training = layout_and_batches(reader)
    job: dict[str, Any] = {"name": name[:100] or "imported", "model": model, "parallelism": parallelism, "data": data}
    job |= {"training": training, "optimizer": optimizer_section(reader)}
    url = reader.take("checkpoints.checkpoints_path", None)
    every = reader.whole("checkpoints.checkpoint_interval", None)
    job["checkpoint"] = {name: value for name, value in (("url", url), ("every_steps", every)) if value is not None}
    job["resources"] = {"gpus_per_worker": 1}
    if (earlier := reader.take("checkpoints.resume_checkpoint_path", None)) is not None:
        remark = "its files have another format; training starts from scratch"
        reader.note("checkpoints.resume_checkpoint_path", earlier, remark)
    if reader.refused:
        raise ValueError("\n".join(reader.refused))
    for section in content:  # what has not been read; each unknown section only once
        if section in _SECTIONS_READ:
            for field, value in reader.under(f"{section}.").items():
                if f"{section}.{field}" not in _WITHOUT_EFFECT and not f"{section}.{field}".startswith(_AT):
                    reader.note(f"{section}.{field}", value, "not carried over")
        elif section not in (*_SECTIONS_WITHOUT_EFFECT, "data", "data_stages") and content[section] is not None:
            reader.note(str(section), "", "this section is not carried over")
    return Imported({section: content for section, content in job.items() if content}, reader.notes, unset)
