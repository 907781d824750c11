"""``config.json``: a model's shape in the words of Hugging Face's LLaMA and of CoLA's code."""

from typing import Any

from boost_core.config import ModelConfig

_SAME_NAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rope_theta",
)  # fmt: skip


def published_config(model: ModelConfig) -> dict[str, Any]:
    """A model's shape for ``config.json``."""
    shared = {name: getattr(model, name) for name in _SAME_NAME} | {
        "num_key_value_heads": model.key_value_heads,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu" if model.gated_by_silu else "linear",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    if model.family == "dense":
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | shared
    return {"architectures": ["ColaForCausalLM"], "model_type": "cola"} | shared | {
        "rank": model.rank,
        "lr_act_type": "silu" if model.latent_activation else "linear",
        "only_lr_act": not model.gated_by_silu,
    }  # fmt: skip


def model_of(config: dict[str, Any]) -> ModelConfig:
    """The shape that a ``config.json`` describes.

    Raises:
        ValueError: It is neither of a LLaMA nor of a CoLA model, or has what these have not here.
    """
    kind = config.get("model_type")
    if kind not in ("llama", "cola"):
        raise ValueError(f"config.json: model_type is {kind!r}; llama and cola can be read")
    if unknown := [name for name in ("rope_scaling", "attention_bias", "mlp_bias") if config.get(name)]:
        raise ValueError(f"config.json: {', '.join(unknown)} is set, which the trainer's models do not have")
    family = "dense" if kind == "llama" else "cola" if config.get("lr_act_type") == "silu" else "svd"
    return ModelConfig.model_validate(
        {name: config[name] for name in _SAME_NAME if name in config}
        | {
            "family": family,
            "rank": config.get("rank"),
            "num_key_value_heads": config.get("num_key_value_heads"),
            "norm_epsilon": config.get("rms_norm_eps", 1e-6),
            "tie_embeddings": config.get("tie_word_embeddings", False),
            "gate_activation": config.get("hidden_act") == "silu" and (kind == "llama" or not config["only_lr_act"]),
        }
    )
