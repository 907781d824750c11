"""Writing ``config.json``: the published class that computes what the trainer does, and its fields.

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

from dataclasses import dataclass
from typing import Any

from boost_core.architecture.families import is_dense, is_low_rank
from boost_core.config import ModelConfig

LLAMA, MISTRAL, QWEN3, COLA = "llama", "mistral", "qwen3", "cola"
OWN_TYPE = "boost"
# The file that is exported with all models except dense ones, and the classes that transformers loads from it.
MODELING = "modeling_boost.py"
AUTO_MAPS = {
    kind: {
        "AutoConfig": f"modeling_boost.{name}Config",
        "AutoModel": f"modeling_boost.{name}Model",
        "AutoModelForCausalLM": f"modeling_boost.{name}ForCausalLM",
        "AutoModelForSequenceClassification": f"modeling_boost.{name}ForSequenceClassification",
    }
    for kind, name in ((COLA, "Cola"), (OWN_TYPE, "Boost"))
}

_ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM", MISTRAL: "MistralForCausalLM", QWEN3: "Qwen3ForCausalLM", COLA: "ColaForCausalLM",
    OWN_TYPE: "BoostForCausalLM",
}  # fmt: skip


@dataclass(frozen=True)
class TrainedOn:
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
        raise ValueError(
            f"neither a published class nor {MODELING} computes family={model.family}: it can be trained, but "
            "not exported, generated from or scored on tasks"
        )
    grouped_queries = model.key_value_heads != model.num_attention_heads
    gate_differs = model.gated_by_silu and not model.latent_activation
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
    # Batches are padded with the end of document, so that classifiers find the last token before it. Classes of
    # transformers, those of dense models, would no longer train its embedding.
    padding = {} if is_dense(model) else {"pad_token_id": trained_on.end_of_document}
    return {"architectures": [_ARCHITECTURES[kind]], "model_type": kind} | _shape(model, kind) | padding | {
        "max_position_embeddings": trained_on.sequence_length,
        # Written even if null, because the classes have defaults. The trainer puts no token before documents.
        "bos_token_id": None,
        "eos_token_id": trained_on.end_of_document,
        "torch_dtype": dtype,
    }  # fmt: skip


def described(model: ModelConfig) -> dict[str, Any]:
    """Everything that determines what a model computes, as fields of a job's ``model`` with defaults filled in."""
    filled = {"num_key_value_heads": model.key_value_heads, "gate_activation": model.gated_by_silu}
    return model.model_dump(mode="json", exclude={"preset"}) | filled


def _shape(model: ModelConfig, kind: str) -> dict[str, Any]:
    shape: dict[str, Any] = {
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
        own = {
            LLAMA: {},
            MISTRAL: window,
            QWEN3: window | {"use_sliding_window": window["sliding_window"] is not None, "max_window_layers": 0},
        }
        return shape | own[kind] | {"head_dim": model.head_size, "hidden_act": _activation(model.gated_by_silu)}
    shape |= {"hidden_act": _activation(model.latent_activation), "rank": model.rank, "auto_map": AUTO_MAPS[kind]}
    if kind == COLA:
        return shape | {"only_lr_act": not model.gated_by_silu}
    crossing = model.lax and {"gate": model.lax.gate, "chain_length": model.lax.chain_length}
    own_gate = {"gate_act": _activation(model.gated_by_silu), "lax": crossing}
    return shape | window | own_gate | {"qk_norm": model.qk_norm, "head_dim": model.head_size}


def _activation(silu: bool) -> str:
    return "silu" if silu else "linear"
