"""``config.json``, written and read: the published class that computes what the trainer does, and its fields.

===========================================  ================  ===================================================
the model                                    the class         why
===========================================  ================  ===================================================
dense                                        LlamaForCausalLM  ``hidden_act`` is the gate's activation; with a sliding
                                                               window MistralForCausalLM, with QK-norm
                                                               Qwen3ForCausalLM
cola and svd without grouped queries,        ColaForCausalLM   ``hidden_act`` is the activation of all bottlenecks,
scaled rotations, windows or QK-norm,                          and also of the gate unless ``only_lr_act``
whose gate has their activation or none
any other                                    BoostForCausalLM  ours, exported with the model: ``gate_act`` is the
                                                               gate's activation, ``lax`` says what crosses blocks
===========================================  ================  ===================================================

ColaForCausalLM is CoLA's published code (https://github.com/alvin-zyl/CoLA, ``cola/modeling_cola.py``). transformers
does not have it, so ``auto_map`` names a class of ours for it as well, which computes the same from the same fields.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from boost_core.architecture import is_dense, is_low_rank
from boost_core.config import Activation, ModelConfig
from boost_core.config.base import in_lines
from boost_core.config.model import RopeScalingConfig

LLAMA, MISTRAL, QWEN3, COLA = "llama", "mistral", "qwen3", "cola"
OWN_TYPE = "boost"
# The file that is exported with all models except dense ones, and the classes that transformers loads from it.
MODELING = "modeling_boost.py"
_NAMES = {LLAMA: "Llama", MISTRAL: "Mistral", QWEN3: "Qwen3", COLA: "Cola", OWN_TYPE: "Boost"}  # of their classes
AUTO_MAPS = {
    kind: {
        "AutoConfig": f"modeling_boost.{_NAMES[kind]}Config",
        "AutoModel": f"modeling_boost.{_NAMES[kind]}Model",
        "AutoModelForCausalLM": f"modeling_boost.{_NAMES[kind]}ForCausalLM",
        "AutoModelForSequenceClassification": f"modeling_boost.{_NAMES[kind]}ForSequenceClassification",
    }
    for kind in (COLA, OWN_TYPE)
}


class TrainedOn(NamedTuple):
    """What users of a model need to know about its training data.

    Attributes:
        sequence_length: Tokens per sequence.
        end_of_document: The token that ends a document; ``None`` if unknown.
    """

    sequence_length: int
    end_of_document: int | None


def model_type(model: ModelConfig) -> str:
    """The ``model_type`` of the class that computes the model; ``boost`` if no published class does.

    Raises:
        ValueError: Ours does not compute it either: its outputs depend on their inputs other than through latents.
    """
    if is_dense(model):
        return QWEN3 if model.qk_norm else LLAMA if model.sliding_window is None else MISTRAL
    if not model.outputs_from_latents:
        problem = f"neither a published class nor {MODELING} computes family={model.family}"
        raise ValueError(f"{problem}: it can be trained, but not exported, generated from or scored on tasks")
    grouped_queries = model.key_value_heads != model.num_attention_heads
    gate_differs = model.mlp_activation not in (model.bottleneck_activation, Activation.LINEAR)
    later = model.qk_norm or model.sliding_window is not None or model.rope_scaling is not None
    return COLA if is_low_rank(model) and not (grouped_queries or gate_differs or later) else OWN_TYPE


def published_config(model: ModelConfig, trained_on: TrainedOn, dtype: str = "float32") -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        model: The model.
        trained_on: What it was trained on.
        dtype: torch's name for the type of its tensors.

    Raises:
        ValueError: No class computes the model.
    """
    kind = model_type(model)
    config: dict[str, Any] = {
        "architectures": [f"{_NAMES[kind]}ForCausalLM"],
        "model_type": kind,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.key_value_heads,
        "rope_theta": model.rope_theta,
        "rope_scaling": model.rope_scaling and model.rope_scaling.model_dump(exclude_none=True),
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }
    window = {"sliding_window": model.sliding_window}
    if is_dense(model):
        if kind in (MISTRAL, QWEN3):
            config |= window
        if kind == QWEN3:
            config |= {"use_sliding_window": model.sliding_window is not None, "max_window_layers": 0}
        config |= {"head_dim": model.head_size, "hidden_act": model.mlp_activation.value}
    else:
        config |= {"hidden_act": model.bottleneck_activation.value, "rank": model.rank, "auto_map": AUTO_MAPS[kind]}
        if kind == COLA:
            config["only_lr_act"] = model.mlp_activation is Activation.LINEAR
        else:
            crossing = model.lax and {"gate": model.lax.gate, "chain_length": model.lax.chain_length}
            config |= window | {"gate_act": model.mlp_activation.value, "lax": crossing, "qk_norm": model.qk_norm}
            config["head_dim"] = model.head_size
        # Batches are padded with the end of document, so that classifiers find the last token before it. Classes of
        # transformers, those of dense models, would no longer train its embedding.
        config["pad_token_id"] = trained_on.end_of_document
    return config | {
        "max_position_embeddings": trained_on.sequence_length,
        # Written even if null, because the classes have defaults. The trainer puts no token before documents.
        "bos_token_id": None,
        "eos_token_id": trained_on.end_of_document,
        "torch_dtype": dtype,
    }


def described(model: ModelConfig) -> dict[str, Any]:
    """Everything that determines what a model computes, as fields of a job's ``model`` with defaults filled in."""
    gate = model.mlp_activation is not Activation.LINEAR
    filled = {"num_key_value_heads": model.key_value_heads, "gate_activation": gate}
    return model.model_dump(mode="json", exclude={"preset"}) | filled


# Reading ``config.json``: the trainer's model that computes the same as the published class, or a refusal.
#
# Fields that are known to change nothing are ignored; unknown fields are assumed to change something.

# Defaults of LlamaConfig, from which CoLA's class inherits.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_DEFAULTS_OF_MISTRAL = _DEFAULTS | {"intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
_DEFAULTS_OF_QWEN3 = _DEFAULTS | {
    "vocab_size": 151936, "intermediate_size": 22016, "head_dim": 128, "use_sliding_window": False,
    "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
# Features of LLaMA-like models that the trainer's models do not have.
_OTHERS = {
    "qwen2": "its query, key and value projections have biases",
    "qwen2_moe": "its MLP is a mixture of experts", "qwen3_moe": "its MLP is a mixture of experts",
    "mixtral": "its MLP is a mixture of experts", "gemma": "its embeddings are scaled and its gate is a GELU",
    "phi3": "its rotary embedding may be partial or scaled",
}  # fmt: skip
_JOBS_NAMES = {"rms_norm_eps": "norm_epsilon", "tie_word_embeddings": "tie_embeddings"}

# The fields that describe the rotary embedding, and the scaling methods that the trainer supports.
_ROPES = ("rope_parameters", "rope_scaling")
_SCALED = get_args(RopeScalingConfig.model_fields["rope_type"].annotation)

_ACTIVATIONS = {each.value: each for each in Activation} | {"swish": Activation.SILU}

# Fields that may be set, but only to the value at which they change nothing.
_ONLY: dict[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "partial_rotary_factor": 1,
    "use_sliding_window": False, "is_encoder_decoder": False, "add_cross_attention": False,
    "tie_encoder_decoder": False, "pruned_heads": {}, "rope_interleaved": False, "is_llama_config": True,
}  # fmt: skip

# Fields that do not affect logits: how a model was made or stored, or how it is batched or sampled from.
_WITHOUT_EFFECT = frozenset((
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range",
    "max_position_embeddings", "max_sequence_length", "pretraining_tp", "name_or_path", "_name_or_path",
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "bos_token_id", "eos_token_id",
    "pad_token_id", "sep_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "prefix", "tokenizer_class", "finetuning_task",
    "task_specific_params", "problem_type", "id2label", "label2id", "num_labels", "return_dict", "output_attentions",
    "output_hidden_states", "output_scores", "return_dict_in_generate", "torchscript", "use_bfloat16", "is_decoder",
    "chunk_size_feed_forward", "remove_invalid_values", "do_sample", "early_stopping", "max_length", "min_length",
    "num_beams", "num_beam_groups", "num_return_sequences", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "diversity_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "transformers.js_config",
))  # fmt: skip

_AGAIN = "(export the model again if an earlier version wrote this)"  # ends problems that only those have

_SIZES = (*_DEFAULTS, "num_key_value_heads")
_READ = {"head_dim", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters", *_SIZES}


def model_of(config: Any, file: str = "config.json") -> ModelConfig:
    """The model that a configuration describes, with the defaults of its published class.

    Args:
        config: The content of the file.
        file: Its name, for errors.

    Raises:
        ValueError: Its class is not supported, or the trainer has no model that computes the same.
    """
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        has = f": {_OTHERS[str(kind)]}, and the trainer's models do not" if str(kind) in _OTHERS else ""
        raise ValueError(f"{file}: model_type is {_short(kind)}{has}; give a model of type {', '.join(_KINDS)}")
    own_fields, defaults = _KINDS[kind]
    config, problems = defaults | config, []
    our_classes = {each for auto_map in AUTO_MAPS.values() for each in auto_map.items()}
    for name, value in config.items():
        if value is None or name in _READ | own_fields or name in _WITHOUT_EFFECT:
            continue
        is_auto_map = name == "auto_map" and isinstance(value, dict)
        # ``REPOSITORY--`` is put before the classes of models that were loaded from a hub.
        if is_auto_map and {(use, str(each).rpartition("--")[2]) for use, each in value.items()} <= our_classes:
            continue
        if name not in _ONLY:
            problems.append(f"{name} is {_short(value)}, which the trainer does not know")
        elif value != _ONLY[name]:
            problems.append(f"{name} is {_short(value)}, and the trainer's models support {_short(_ONLY[name])} only")
    _refuse(file, problems)
    if config.get("model") is not None:  # as in early exports of ours
        return _validated(file, config["model"])
    _refuse(file, _problems(config, kind))
    common = {_JOBS_NAMES.get(name, name): config.get(name) for name in _SIZES}
    common["rope_theta"] = next(iter(_rope_thetas(config).values()), 10_000.0)
    common["rope_scaling"] = next(filter(None, (_scaling(config.get(name)) for name in _ROPES)), None)
    model = _validated(file, common | _function(config, kind))
    problems, head_dim = [], config.get("head_dim")
    if head_dim not in (None, model.head_size):
        supported = f"hidden_size/num_attention_heads={model.head_size}"
        problems.append(f"head_dim is {_short(head_dim)}, and the trainer's models support {supported} only")
    if kind == COLA and model.key_value_heads != model.num_attention_heads:
        heads = f"{model.key_value_heads} of {model.num_attention_heads}"
        problems.append(f"num_key_value_heads is {heads}, with which ColaForCausalLM does not run {_AGAIN}")
    _refuse(file, problems)
    return model


def _refuse(file: str, problems: Iterable[str]) -> None:
    if text := "; ".join(problems):
        remedy = f"start from another model, or remove from {file} what changes nothing in this one"
        raise ValueError(f"{file}: {text}; {remedy}")


def _validated(file: str, model: Any) -> ModelConfig:
    try:
        return ModelConfig.model_validate(model)
    except ValidationError as error:
        raise ValueError(f"{file}: {'; '.join(in_lines(error).splitlines())}") from error


# For each type, its additional fields, and the defaults of its class.
_KINDS: dict[str, tuple[set[str], dict[str, Any]]] = {
    LLAMA: (set(), _DEFAULTS),
    MISTRAL: ({"sliding_window"}, _DEFAULTS_OF_MISTRAL),
    QWEN3: ({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}, _DEFAULTS_OF_QWEN3),
    COLA: ({"rank", "lr_act_type", "only_lr_act"}, _DEFAULTS),
    OWN_TYPE: ({"rank", "gate_act", "only_lr_act", "lax", "sliding_window", "qk_norm", "model"}, _DEFAULTS),
}


def _function(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """What a class computes, as fields of a job's model."""
    linear = _ACTIVATIONS[str(config.get("hidden_act", "silu"))] is Activation.LINEAR
    if kind == COLA:
        rank, hidden_size = config.get("rank"), config["hidden_size"]
        return {
            "family": "svd" if linear else "cola",
            "gate_activation": not linear and not config.get("only_lr_act", True),
            "rank": hidden_size // 4 if rank is None and isinstance(hidden_size, int) else rank,
        }
    if kind == OWN_TYPE:
        # Saved by the class of earlier exports, it also has only_lr_act, to which gate_act has preference there.
        lax, base = config.get("lax"), "svd" if linear else "cola"
        return {
            "family": base if lax is None else "lax",
            "lax": lax | {"base": base} if isinstance(lax, dict) else lax,
            "gate_activation": _ACTIVATIONS[str(config.get("gate_act", "linear"))] is not Activation.LINEAR,
            "rank": config.get("rank"),
            "sliding_window": config.get("sliding_window"),
            "qk_norm": config.get("qk_norm", False),
        }
    dense = {"family": "dense", "gate_activation": not linear}
    if kind == MISTRAL:
        dense["sliding_window"] = config["sliding_window"]
    if kind == QWEN3:
        window = config["sliding_window"] if config["use_sliding_window"] else None
        dense |= {"sliding_window": window, "qk_norm": True}
    return dense


def _rope_thetas(config: dict[str, Any]) -> dict[str, Any]:
    """The base of the rotary frequencies under each name by which it is given."""
    places = {"": config} | {f"{name}.": config[name] for name in _ROPES if isinstance(config.get(name), dict)}
    thetas = {f"{prefix}rope_theta": place.get("rope_theta") for prefix, place in places.items()}
    return {name: theta for name, theta in thetas.items() if theta is not None}


def _scaling(rope: Any) -> dict[str, Any] | None:
    """A job's ``rope_scaling``, whose fields have the published names; ``None`` if unscaled or not supported."""
    is_supported = isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _SCALED
    return _settings(rope) if is_supported else None


def _settings(rope: dict[str, Any]) -> dict[str, Any]:
    """The settings of a scaling method by their newer names, apart from the base."""
    settings = {name: value for name, value in rope.items() if name not in ("type", "rope_theta") and value is not None}
    return {"rope_type": rope.get("type", "default")} | settings


def _problems(config: dict[str, Any], kind: str) -> Iterator[str]:
    """Problems with the rotary embedding, in the older form of configuration or the newer one, activations and windows.

    Invalid settings of a supported scaling method are reported by the trainer's model configuration.
    """
    for name in _ROPES:
        rope = config.get(name)
        if rope is None or (kind != COLA and _scaling(rope)):
            continue
        expected = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
        others = set(rope) - {"rope_theta"} if isinstance(rope, dict) else set()
        if not isinstance(rope, dict) or any(rope[key] not in (None, expected.get(key)) for key in others):
            missing = "neither scaled in this way nor partial"
            yield f"{name} is {_short(rope)}, but the trainer's rotary embeddings are {missing}"
    settings = [_settings(config[name]) for name in _ROPES if isinstance(config.get(name), dict)]
    if len(settings) == len(_ROPES) and settings[0] != settings[1]:
        yield " and ".join(f"{name} is {_short(config[name])}" for name in _ROPES)
    thetas = _rope_thetas(config)
    if any(theta != next(iter(thetas.values())) for theta in thetas.values()):
        yield " and ".join(f"{name} is {_short(theta)}" for name, theta in thetas.items())

    activation, of_bottleneck = str(config.get("hidden_act", "silu")), config.get("lr_act_type")
    for name in ("hidden_act", "gate_act") if kind == OWN_TYPE else ("hidden_act",):
        if (value := str(config.get(name, "silu"))) not in _ACTIVATIONS:
            yield f"{name} is {_short(value)}, and the trainer's models support silu or linear only"
    if kind == COLA and of_bottleneck not in (None, activation):
        both = f"lr_act_type is {_short(of_bottleneck)} and hidden_act {_short(activation)}"
        yield f"{both}, but ColaForCausalLM uses only hidden_act {_AGAIN}"

    slides = bool(config.get("use_sliding_window"))
    if slides and (full := config["max_window_layers"]):  # only Qwen3's have the option
        yield f"max_window_layers is {full}, and the trainer's windows slide in all layers: 0 only"
    alike, kinds = "sliding_attention" if slides else "full_attention", config.get("layer_types")
    if kinds and not (isinstance(kinds, list) and all(each == alike for each in kinds)):
        yield f"layer_types is {_short(kinds)}, and the trainer's layers are all {alike!r} here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
