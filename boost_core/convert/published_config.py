"""Writing ``config.json``: the published class that computes what the trainer does, and the fields that make it do so.

===========================================  ================  ===================================================
the model                                    the class         why
===========================================  ================  ===================================================
dense without a sliding window or QK-norm    LlamaForCausalLM  ``hidden_act`` is the gate's activation
cola and svd without grouped queries,        ColaForCausalLM   ``hidden_act`` is the activation of all bottlenecks,
scaled rotations, windows or QK-norm,                          and of the gate too unless ``only_lr_act``
whose gate has their activation or none
any other                                    BoostForCausalLM  no published class computes it, so none is named
===========================================  ================  ===================================================

ColaForCausalLM is CoLA's published code (https://github.com/alvin-zyl/CoLA, ``cola/modeling_cola.py``).
"""

from dataclasses import dataclass
from typing import Any

from boost_core.architecture.families import is_dense, is_low_rank
from boost_core.config import ModelConfig

LLAMA, COLA = "llama", "cola"
# Of what no published class computes. Nothing but ``boost_core.convert`` reads it.
OWN_TYPE = "boost"

_ARCHITECTURES = {LLAMA: "LlamaForCausalLM", COLA: "ColaForCausalLM", OWN_TYPE: "BoostForCausalLM"}


@dataclass(frozen=True)
class TrainedOn:
    """What a model was trained on, as far as those who run it need to know.

    Attributes:
        sequence_length: Tokens a sequence.
        end_of_document: The token that ends a document; ``None`` if it is not known.
    """

    sequence_length: int
    end_of_document: int | None


def model_type(model: ModelConfig) -> str:
    """Which class computes the model: ``llama``, ``cola``, or ``boost`` for none that is published."""
    if model.sliding_window is not None or model.qk_norm:
        return OWN_TYPE
    if is_dense(model):
        return LLAMA
    if model.rope_scaling is not None:
        return OWN_TYPE
    grouped_queries = model.key_value_heads != model.num_attention_heads
    gate_differs = model.gated_by_silu and not model.latent_activation
    return COLA if is_low_rank(model) and not grouped_queries and not gate_differs else OWN_TYPE


def published_config(model: ModelConfig, trained_on: TrainedOn) -> dict[str, Any]:
    """The content of ``config.json``."""
    kind = model_type(model)
    shape = {"model": described(model)} if kind == OWN_TYPE else _published_shape(model, kind)
    return {"architectures": [_ARCHITECTURES[kind]], "model_type": kind} | shape | {
        "max_position_embeddings": trained_on.sequence_length,
        # Written even if there is none, because the classes have defaults. The trainer puts no token before documents.
        "bos_token_id": None,
        "eos_token_id": trained_on.end_of_document,
        "torch_dtype": "float32",
    }  # fmt: skip


def described(model: ModelConfig) -> dict[str, Any]:
    """Everything that decides what a model computes, in the words of a job's ``model``, its defaults filled in."""
    filled = {"num_key_value_heads": model.key_value_heads, "gate_activation": model.gated_by_silu}
    return model.model_dump(mode="json", exclude={"preset"}) | filled


def _published_shape(model: ModelConfig, kind: str) -> dict[str, Any]:
    shape = {
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
    if kind == LLAMA:
        return shape | {"hidden_act": _activation(model.gated_by_silu)}
    return shape | {
        "hidden_act": _activation(model.latent_activation),
        "only_lr_act": not model.gated_by_silu,
        "rank": model.rank,
    }


def _activation(silu: bool) -> str:
    return "silu" if silu else "linear"
