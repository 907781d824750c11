"""An export computes what the decoder does, in transformers and wherever its config.json names a published class."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from boost_core.config import ModelConfig
from boost_core.convert.model_folder import ModelFolder
from boost_core.convert.names import to_published
from boost_core.convert.published_config import described
from tests.exports import COLA, DENSE, OWN, TOKENS, export_to, log_probabilities, model_with, weights_of
from tests.numerics import published_cola


def by_name(cases: dict[str, Any]) -> Any:
    return pytest.mark.parametrize("changes", cases.values(), ids=cases.keys())


@by_name(DENSE)
def test_a_dense_export_is_what_transformers_computes(tmp_path: Path, changes: dict) -> None:
    model = model_with(changes)
    export_to(tmp_path, model)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(llama) is LlamaForCausalLM
    with torch.no_grad():
        theirs = llama(TOKENS[None]).logits[0].log_softmax(-1)
    # Norms, angles and softmax are in fp32 there: some thirty roundings of 6e-8 in three blocks, on values of order 1.
    torch.testing.assert_close(theirs, log_probabilities(model), rtol=0, atol=2e-6)


@by_name(COLA)
def test_a_cola_export_is_what_colas_class_computes(tmp_path: Path, changes: dict) -> None:
    model = model_with(changes)
    export_to(tmp_path, model)
    theirs = published_cola.log_probabilities(tmp_path, TOKENS)
    # Both are in float64: sums of up to 48 products, thirty deep, on log-probabilities of up to 6.
    torch.testing.assert_close(theirs, log_probabilities(model), rtol=0, atol=1e-12)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["ColaForCausalLM"], "cola")
    assert config.keys() <= published_cola.DEFAULTS.keys() | published_cola.WITHOUT_EFFECT


@pytest.mark.parametrize("wrong", [{"only_lr_act": False}, {"hidden_act": "linear"}, {"rope_theta": 500}], ids=str)
def test_colas_class_computes_something_else_with_other_fields(tmp_path: Path, wrong: dict) -> None:
    model = model_with(COLA["preset 7b"])
    export_to(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    theirs = published_cola.log_probabilities(tmp_path, TOKENS)
    assert (theirs - log_probabilities(model)).abs().max() > 0.1


FIELDS = {
    "preset 60m": {"hidden_act": "silu", "only_lr_act": False, "rank": 8},
    "preset 7b": {"hidden_act": "silu", "only_lr_act": True, "rank": 8},
    "svd, no gate": {"hidden_act": "linear", "only_lr_act": True, "rank": 8},
    "cola, rope base": {"rope_theta": 500.0, "rms_norm_eps": 1e-6},
    "cola, epsilon": {"rope_theta": 10000.0, "rms_norm_eps": 0.05},
    "cola, tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", FIELDS)
def test_the_fields_by_which_colas_class_goes(tmp_path: Path, name: str) -> None:
    export_to(tmp_path, model_with(COLA[name]))
    config = json.loads((tmp_path / "config.json").read_text())
    assert {field: config[field] for field in FIELDS[name]} == FIELDS[name]


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


@by_name(DENSE | COLA | OWN)
def test_every_export_is_what_transformers_computes(tmp_path: Path, changes: dict) -> None:
    model = model_with(changes)
    export_to(tmp_path, model)
    theirs = loaded(tmp_path)
    assert theirs.dtype is torch.float32
    with torch.no_grad():
        logits = theirs(TOKENS[None]).logits[0].log_softmax(-1).double()
    # Both in fp32 would differ as much: some thirty roundings of 6e-8 in three blocks.
    ours = log_probabilities(model)
    assert (logits - ours).norm() / ours.norm() < 1e-5
    kept = {name for name, _ in theirs.named_parameters() if name.endswith("cola_a")}
    assert len(kept) == (0 if model.rank is None else 7 * model.num_hidden_layers)


@by_name(
    {
        name: (COLA | OWN)[name]
        for name in ("preset 7b", "svd, tied", "cola, grouped queries", "cola, window", "cola, QK-norm", "lax, tensor")
    }
)
def test_an_export_generates_with_a_cache_what_it_does_without(tmp_path: Path, changes: dict) -> None:
    export_to(tmp_path, model_with(changes))
    model = loaded(tmp_path)
    prompts = torch.stack((TOKENS[:6], TOKENS[6:]))
    greedy = {
        "attention_mask": torch.ones_like(prompts), "max_new_tokens": 16, "do_sample": False, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    with_cache = model.generate(prompts, **greedy, return_dict_in_generate=True)
    assert with_cache.past_key_values.get_seq_length() == 6 + 16 - 1
    assert torch.equal(with_cache.sequences, model.generate(prompts, **greedy, use_cache=False))
    with torch.no_grad():
        whole = model(with_cache.sequences).logits.argmax(-1)
    assert torch.equal(with_cache.sequences[:, 6:], whole[:, 5:-1])


def test_an_export_needs_nothing_of_ours(tmp_path: Path) -> None:
    export_to(tmp_path / "model", model_with(OWN["lax, dense"]))
    code = """
import sys, torch, transformers
sys.modules["boost_core"] = None
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=4, do_sample=False).shape)
"""
    run = subprocess.run([sys.executable, "-c", code, "model"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("torch.Size([1, ")


def test_the_class_can_be_trained_and_saved_again(tmp_path: Path) -> None:
    export_to(tmp_path / "first", model_with(OWN["lax, tensor"]))
    model = loaded(tmp_path / "first")
    model(TOKENS[None], labels=TOKENS[None]).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())
    model.save_pretrained(tmp_path / "second")
    with torch.no_grad():
        before, after = (each(TOKENS[None]).logits for each in (model, loaded(tmp_path / "second")))
    assert torch.equal(before, after)
    fresh = type(model)(model.config)
    assert all(bool(weight.isfinite().all()) and weight.abs().max() < 3 for weight in fresh.parameters())


MERGED = {name: (COLA | OWN)[name] for name in ("svd", "svd, tied", "svd, grouped queries", "svd, no gate")}


@by_name(MERGED)
def test_a_merged_model_is_a_plain_llama_that_computes_the_same(tmp_path: Path, changes: dict) -> None:
    model = model_with(changes)
    export_to(tmp_path, model, merge=True)
    llama = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(llama) is LlamaForCausalLM
    stored = load_file(tmp_path / "model.safetensors")
    for name, product_oi in products(model):
        assert torch.equal(stored[f"{name}.weight"], product_oi.float())
        llama.get_submodule(name).weight.data.copy_(product_oi)  # not rounded: weights enlarge that in the sum
    with torch.no_grad():
        theirs = llama(TOKENS[None]).logits[0].log_softmax(-1)
    ours = log_probabilities(model)
    assert (theirs - ours).norm() / ours.norm() < 1e-6  # its rotary embeddings are in fp32 in three blocks


PLACES = {
    "query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def products(model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """LLaMA's projections by name, as products of ours in float64, ``[o, i]``."""
    weights = weights_of(model)
    for block in range(model.num_hidden_layers):
        for group, names in PLACES.items():
            ours = f"blocks.{block}.{group}"
            downs = weights[f"{ours}.down"].double().unbind(1)
            ups = [up for name, each in weights.items() if name.startswith(f"{ours}.up_") for up in each.double()]
            for name, down_ir, up_ro in zip(names, downs, ups, strict=True):
                yield f"model.layers.{block}.{name}", (down_ir @ up_ro).T


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("preset 7b", "family=cola has a SiLU between the two factors"),
        ("lax of svd, chains", "family=lax has projections that are more than a product of two factors"),
        ("dense", "the model is dense already"),
    ],
)
def test_what_is_no_product_is_not_merged(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        export_to(tmp_path / "model", model_with((DENSE | COLA | OWN)[name]), merge=True)
    assert not (tmp_path / "model").exists()


def test_every_field_of_a_model_is_published() -> None:
    """A field that is added to a job's model has to be written, read and computed, or refused."""
    assert ModelConfig.model_fields.keys() == {
        "preset", "family", "lax", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "rank", "gate_activation", "tie_embeddings", "rope_theta",
        "norm_epsilon", "rope_scaling", "sliding_window", "qk_norm",
    }  # fmt: skip


@by_name(DENSE | COLA | OWN)
def test_out_and_in_again_is_the_same_model(tmp_path: Path, changes: dict) -> None:
    model = model_with(changes)
    export_to(tmp_path, model)
    found, expected = ModelFolder(tmp_path), to_published(model, weights_of(model))
    assert found.shapes.keys() == expected.keys()
    assert all(torch.equal(found.read(name), tensor) for name, tensor in expected.items())
    assert described(found.model) == described(model)


@by_name({name: (DENSE | COLA | OWN)[name] for name in ("dense", "preset 7b", "lax, tensor")})
def test_an_export_says_how_it_was_trained(tmp_path: Path, changes: dict) -> None:
    export_to(tmp_path, model_with(changes))
    config = json.loads((tmp_path / "config.json").read_text())
    names = ("max_position_embeddings", "bos_token_id", "eos_token_id")
    assert [config[name] for name in names] == [48, None, 0]
    if changes["family"] == "dense":
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert [getattr(theirs, name) for name in names] == [48, None, 0]


def test_a_crossing_is_beside_the_projection_that_it_crosses_into(tmp_path: Path) -> None:
    model = model_with(OWN["lax, dense"])
    export_to(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    value = "model.layers.2.self_attn.v_proj.crossing"
    gates = weights_of(model)["blocks.2.query_key_value.crossing.gate_matrix"]
    assert torch.equal(tensors[f"{value}.gate_matrix"], gates[2])
    assert tensors[f"{value}.norm_shift"].shape == (8,)
    assert not [name for name in tensors if name.startswith("model.layers.0.") and "crossing" in name]
