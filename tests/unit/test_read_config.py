"""Other people's config.json: read with the published class's defaults, or refused with field, theirs and ours."""

from typing import Any, get_args

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from boost_core.config import ModelConfig
from boost_core.config.model import FamilyName
from boost_core.convert.model_folder import refuse_another_function
from boost_core.convert.published_config import TrainedOn, model_of, published_config

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
}  # fmt: skip
LLAMA = SHAPE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
# The form of https://github.com/alvin-zyl/CoLA, cola_configs: 350m to 7b without only_lr_act, 60m and 130m with it.
COLA = SHAPE | {
    "architectures": ["ColaForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
    "initializer_range": 0.02, "max_sequence_length": 1024, "model_type": "cola", "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "use_cache": True, "rank": 16,
}  # fmt: skip


def job(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | {"family": "dense"} | changes)


def cola_job(**changes: Any) -> ModelConfig:
    return job(family="cola", rank=16, **changes)


def test_colas_published_form_is_read_with_its_classs_defaults() -> None:
    refuse_another_function(model_of(COLA), cola_job())
    refuse_another_function(model_of(COLA | {"only_lr_act": False}), cola_job(gate_activation=True))
    refuse_another_function(
        model_of(COLA | {"hidden_act": "linear"}), job(family="svd", rank=16, gate_activation=False)
    )
    without_rank = {name: value for name, value in COLA.items() if name != "rank"}
    assert model_of(without_rank).rank == 64 // 4
    assert model_of({"model_type": "llama"}).hidden_size == LlamaConfig().hidden_size


@pytest.mark.parametrize("window", [None, 24])
def test_what_transformers_writes_of_mistral_and_qwen3_is_read(window: int | None) -> None:
    shape = SHAPE | {"num_key_value_heads": 2, "sliding_window": window}
    refuse_another_function(
        model_of(MistralConfig(**shape).to_dict()), job(num_key_value_heads=2, sliding_window=window)
    )
    written = Qwen3Config(**shape, head_dim=16, use_sliding_window=window is not None, max_window_layers=0).to_dict()
    expected = job(num_key_value_heads=2, sliding_window=window, qk_norm=True)
    refuse_another_function(model_of(written), expected)
    assert model_of({"model_type": "mistral", "num_attention_heads": 32}).sliding_window == 4096


def test_mistral_without_its_window_is_a_llama() -> None:
    written = MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None).to_dict()
    refuse_another_function(model_of(written), job(num_key_value_heads=2))
    left_out = {"model_type": "mistral", "sliding_window": None}
    defaults = MistralConfig()
    assert model_of(left_out).intermediate_size == defaults.intermediate_size
    assert model_of(left_out).key_value_heads == defaults.num_key_value_heads


def test_what_exports_of_ours_had_first_is_read() -> None:
    model = {"family": "lax", "rank": 16, "lax": {"gate": "tensor"}} | SHAPE
    assert model_of({"model_type": "boost", "model": model}) == ModelConfig.model_validate(model)


def test_what_classes_of_earlier_exports_saved_is_read() -> None:
    code = {
        "AutoConfig": "modeling_boost.BoostConfig",
        "AutoModelForCausalLM": "team/mine--modeling_boost.BoostForCausalLM",
    }
    saved = SHAPE | {
        "model_type": "boost", "auto_map": code, "hidden_act": "silu", "gate_act": "silu", "only_lr_act": True,
        "rank": 16, "lax": None, "qk_norm": False, "sliding_window": None, "head_dim": 16,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    }  # fmt: skip
    refuse_another_function(model_of(saved), cola_job(gate_activation=True))
    refuse_another_function(model_of({**saved, "gate_act": "linear"}), cola_job())
    with pytest.raises(ValueError, match="auto_map is "):
        model_of(saved | {"auto_map": code | {"AutoModel": "team/mine--modeling_boost.Mine"}})


@pytest.mark.parametrize("family", get_args(FamilyName))
def test_every_family_is_read_back_as_itself_or_not_written(family: str) -> None:
    model = job(family=family, rank=None if family == "dense" else 16)
    try:
        written = published_config(model, TrainedOn(8, None))
    except ValueError:
        return  # no class computes it
    refuse_another_function(model_of(written), model)


@pytest.mark.parametrize("changes", [{}, {"rope_theta": 500_000.0}, {"tie_word_embeddings": True}], ids=str)
def test_what_transformers_writes_is_read(changes: dict) -> None:
    written = LlamaConfig(**SHAPE, rms_norm_eps=1e-5, **changes).to_dict()
    expected = {"tie_embeddings": "tie_word_embeddings" in changes, "rope_theta": changes.get("rope_theta", 10_000.0)}
    refuse_another_function(model_of(written), job(norm_epsilon=1e-5, **expected))


def test_what_changes_nothing_is_passed_over() -> None:
    theirs = {
        "torch_dtype": "bfloat16", "transformers_version": "4.31.0", "max_position_embeddings": 4096, "bos_token_id": 1,
        "pretraining_tp": 1, "rope_scaling": None, "sliding_window": None, "attention_dropout": 0.0, "head_dim": 16,
        "rope_interleaved": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
    }  # fmt: skip
    refuse_another_function(model_of(LLAMA | theirs), job())


# What is in config.json, the job's model, and what the refusal says.
ANOTHER_FUNCTION = [
    (LLAMA | {"rope_theta": 500_000}, job(), "rope_theta (published as rope_theta or rope_parameters) is 500000.0 "
     "there and 10000.0 in the job"),
    (LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}, job(), "is 500000.0 there"),
    (LLAMA | {"rms_norm_eps": 1e-5}, job(), "norm_epsilon (published as rms_norm_eps) is 1e-05 there and 1e-06"),
    (LLAMA | {"hidden_act": "linear"}, job(), "gate_activation (published as hidden_act and only_lr_act) is False "
     "there and True in the job"),
    (LLAMA | {"tie_word_embeddings": True}, job(), "tie_embeddings (published as tie_word_embeddings) is True there"),
    (LLAMA | {"num_key_value_heads": 2}, job(), "num_key_value_heads is 2 there and 4 in the job"),
    (LLAMA | {"num_attention_heads": 8, "head_dim": 8}, job(), "num_attention_heads is 8 there and 4 in the job"),
    (LLAMA, job(family="lax", rank=16), "family (published as model_type and hidden_act) is dense there and lax"),
    (LLAMA, job(family="svd", rank=16, gate_activation=False), "is True there and False in the job"),
    (COLA, cola_job(gate_activation=True), "is False there and True in the job"),
    (COLA, job(family="svd", rank=16), "is cola there and svd in the job"),
    (COLA | {"rank": 8}, cola_job(), "rank is 8 there and 16 in the job"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "ours", "says"), ANOTHER_FUNCTION, ids=[case[2] for case in ANOTHER_FUNCTION])
def test_a_model_that_computes_something_else_is_refused(config: dict, ours: ModelConfig, says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        refuse_another_function(model_of(config), ours)
    assert says in str(refusal.value)
    assert str(refusal.value).endswith("make the job's model the same, or start from another")


def test_a_cut_to_low_rank_is_compared_in_all_that_it_keeps() -> None:
    refuse_another_function(model_of(LLAMA), job(family="svd", rank=16))
    refuse_another_function(model_of(LLAMA), cola_job())
    with pytest.raises(ValueError, match=r"rope_theta .* is 10000\.0 there and 500\.0 in the job; norm_ep"):
        refuse_another_function(model_of(LLAMA), cola_job(rope_theta=500.0, norm_epsilon=1e-5))


YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize("scaling", [YARN, LLAMA_3_1], ids=lambda scaling: scaling["rope_type"])
def test_scaled_rotary_frequencies_are_read(scaling: dict) -> None:
    written = LlamaConfig(**SHAPE, max_position_embeddings=1 << 20, rope_parameters={"rope_theta": 1e4} | scaling)
    ours = {name: value for name, value in scaling.items() if name != "rope_theta"}
    for config in (written.to_dict(), LLAMA | {"rope_scaling": ours}):
        refuse_another_function(model_of(config | {"rms_norm_eps": 1e-6}), job(rope_scaling=ours))
    with pytest.raises(
        ValueError, match=r"rope_scaling \(published as rope_scaling or rope_parameters\) is \{'rope_type"
    ):
        refuse_another_function(model_of(LLAMA | {"rope_scaling": ours}), job())
    with pytest.raises(ValueError, match="are neither scaled in this way nor partial"):
        model_of(COLA | {"rope_scaling": ours})


NOT_OURS = [
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is {'type': 'linear', 'factor': 2.0}"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 8192}},
     "rope_scaling is {'rope_type': 'longrope'"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}},
     "rope_scaling.original_max_position_embeddings: is missing; add it"),
    ({"rope_parameters": YARN | {"mscale": 0.7}}, "rope_scaling.mscale: is unknown here; leave it out"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "nor partial"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters is {'full_attention'"),
    ({"rope_parameters": "default"}, "rope_parameters is 'default'"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
     "rope_theta is 10000.0 and rope_parameters.rope_theta is 500000.0"),
    ({"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     "rope_parameters is {'rope_type': 'default', 'rope_theta': 10000.0} and rope_scaling is {'rope_type': 'yarn'"),
    ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 2.0}}, " and rope_scaling is {'rope_type': 'yarn'"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25, and the trainer's models support 1 only"),
    ({"attention_bias": True}, "attention_bias is True, and the trainer's models support False only"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"rope_interleaved": True}, "rope_interleaved is True, and the trainer's models support False only"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and the trainer's models support silu or linear only"),
    ({"hidden_act": ["silu"]}, "hidden_act is \"['silu']\""),
    ({"head_dim": 32}, "head_dim is 32, and the trainer's models support hidden_size/num_attention_heads=16"),
    ({"sliding_window": 4096}, "sliding_window is 4096, which the trainer does not know"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is {'quant_method': 'gptq'}"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map is"),
    ({"logit_scale": 0.1}, "logit_scale is 0.1, which the trainer does not know"),
    ({"rms_norm_eps": "small"}, "config.json: norm_epsilon: "),
    ({"hidden_size": None}, "config.json: hidden_size: "),
    ({"model_type": "gpt2"}, "model_type is 'gpt2'; give a model of type llama, mistral, qwen3, cola, boost"),
    ({"model_type": "qwen2"}, "model_type is 'qwen2': its query, key and value projections have biases, and the"),
    ({"model_type": "qwen3"}, "head_dim is 128, and the trainer's models support hidden_size/num_attention_heads=16"),
    (
        {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": True},
        "max_window_layers is 28, and the trainer's windows slide in all layers",
    ),
    (
        {"model_type": "qwen3", "head_dim": 16, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types is ['full_attention', 'sliding_attention'], and the trainer's layers are all 'full_attention'",
    ),
    *(({"model_type": "qwen3", "head_dim": 16, "layer_types": kinds}, "layer_types is ")
      for kinds in (5, "full_attention", [{}], {"full_attention": 1})),
    ({"model_type": "boost", "rank": 16, "gate_act": "gelu"}, "gate_act is 'gelu', and the trainer's models support"),
    ({"model_type": "boost", "rank": 16, "lax": {"gate": "wide"}}, "config.json: lax.gate: "),
    ({"model_type": "boost", "rank": 16, "lax": "identity"}, "config.json: lax: "),
    ({"model_type": "boost"}, "config.json: rank: "),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), NOT_OURS, ids=[str(changes)[:60] for changes, _ in NOT_OURS])
def test_what_the_trainer_does_not_have_is_refused(changes: dict, says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        model_of(LLAMA | changes)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Earlier versions wrote the gate's activation as hidden_act and the bottleneck's as lr_act_type.
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "linear", "lr_act_type": "silu", "only_lr_act": True}, "lr_act_type is 'silu' and hidden_act"),
        ({"hidden_act": "silu", "lr_act_type": "linear", "only_lr_act": False}, "uses only hidden_act"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2 of 4, with which ColaForCausalLM does not run"),
    ],
    ids=str,
)
def test_what_colas_class_would_compute_otherwise_is_refused(changes: dict, says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        model_of(COLA | changes)
    assert says in str(refusal.value)


@pytest.mark.parametrize("config", [[], None, {}, {"model_type": "boost"}, {"model_type": "boost", "model": {"x": 1}}])
def test_what_is_no_configuration_of_a_model_is_refused_in_a_line(config: Any) -> None:
    with pytest.raises(ValueError, match=r"^config\.json: ") as refusal:
        model_of(config)
    assert "\n" not in str(refusal.value)
