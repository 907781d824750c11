"""An export computes what the decoder does where its config.json names a published class, and names none otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from boost_core.convert.model_folder import read_model
from boost_core.convert.names import fill_from_published
from boost_core.convert.published_config import described
from boost_core.convert.whole import empty_weights
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


@by_name(OWN)
def test_what_no_published_class_computes_names_none_and_is_loaded_by_none(tmp_path: Path, changes: dict) -> None:
    export_to(tmp_path, model_with(changes))
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["BoostForCausalLM"], "boost")
    with pytest.raises(ValueError, match="does not recognize this architecture"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    # CoLA's classes look for the same files.
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        LlamaForCausalLM.from_pretrained(tmp_path)


@by_name(DENSE | COLA | OWN)
def test_out_and_in_again_is_the_same_model(tmp_path: Path, changes: dict) -> None:
    model = model_with(changes)
    export_to(tmp_path, model)
    there, published = read_model(tmp_path)
    again = empty_weights(there)
    fill_from_published(there, again, published)
    assert all(torch.equal(again[name], weight) for name, weight in weights_of(model).items())
    assert described(there) == described(model)


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
    tensors = load_file(tmp_path / "boost.safetensors")
    value = "model.layers.2.self_attn.v_proj.crossing"
    gates = weights_of(model)["blocks.2.query_key_value.crossing.gate_matrix"]
    assert torch.equal(tensors[f"{value}.gate_matrix"], gates[2])
    assert tensors[f"{value}.norm_shift"].shape == (8,)
    assert not [name for name in tensors if name.startswith("model.layers.0.") and "crossing" in name]
