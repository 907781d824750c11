"""An export computes what the decoder does, in transformers and wherever its config.json names a published class."""

import functools
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForCausalLM,
)

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec, ModelConfig
from boost_core.convert.__main__ import start
from boost_core.convert.model_folder import ModelFolder, read_weights, to_published
from boost_core.convert.published_config import described
from tests.exports import COLA, DENSE, OWN, TOKENS, export_to, log_probabilities, model_with, weights_of
from tests.numerics import published_cola


def by_name(cases: dict[str, Any], some: Container[str] | None = None) -> Any:
    """A case per model; all but ``some`` of them are for the full layer."""
    marks = {name: () if some is None or name in some else pytest.mark.nightly for name in cases}
    cells = [pytest.param(changes, marks=marks[name], id=name) for name, changes in cases.items()]
    return pytest.mark.parametrize("changes", cells)


Exported = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The export of a model, written once for all tests that only read it."""

    @functools.cache
    def folder_of(model: ModelConfig) -> Path:
        folder = tmp_path_factory.mktemp("export") / "model"
        export_to(folder, model)
        return folder

    return lambda changes: folder_of(model_with(changes))


@pytest.mark.full
@by_name(DENSE)
def test_a_dense_export_is_what_transformers_computes(exported: Exported, changes: dict) -> None:
    model = model_with(changes)
    llama = AutoModelForCausalLM.from_pretrained(exported(changes), dtype=torch.float64)
    assert type(llama) is LlamaForCausalLM
    with torch.no_grad():
        theirs = llama(TOKENS[None]).logits[0].log_softmax(-1)
    # Norms, angles and softmax are in fp32 there: some thirty roundings of 6e-8 in three blocks, on values of order 1.
    torch.testing.assert_close(theirs, log_probabilities(model), rtol=0, atol=2e-6)


@by_name(COLA)
def test_a_cola_export_is_what_colas_class_computes(exported: Exported, changes: dict) -> None:
    model, folder = model_with(changes), exported(changes)
    theirs = published_cola.log_probabilities(folder, TOKENS)
    # Both are in float64: sums of up to 48 products, thirty deep, on log-probabilities of up to 6.
    torch.testing.assert_close(theirs, log_probabilities(model), rtol=0, atol=1e-12)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["ColaForCausalLM"], "cola")
    assert config.keys() <= published_cola.DEFAULTS.keys() | published_cola.WITHOUT_EFFECT


@pytest.mark.parametrize("wrong", [{"only_lr_act": False}, {"hidden_act": "linear"}, {"rope_theta": 500}], ids=str)
def test_colas_class_computes_something_else_with_other_fields(exported: Exported, tmp_path: Path, wrong: dict) -> None:
    model = model_with(COLA["preset 7b"])
    shutil.copytree(exported(COLA["preset 7b"]), tmp_path, dirs_exist_ok=True)
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
def test_the_fields_by_which_colas_class_goes(exported: Exported, name: str) -> None:
    config = json.loads((exported(COLA[name]) / "config.json").read_text())
    assert {field: config[field] for field in FIELDS[name]} == FIELDS[name]


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


@pytest.mark.full
@by_name(DENSE | COLA | OWN)
def test_every_export_is_what_transformers_computes(exported: Exported, changes: dict) -> None:
    model, theirs = model_with(changes), loaded(exported(changes))
    assert theirs.dtype is torch.float32
    with torch.no_grad():
        logits = theirs(TOKENS[None]).logits[0].log_softmax(-1).double()
    # Both in fp32 would differ as much: some thirty roundings of 6e-8 in three blocks.
    ours = log_probabilities(model)
    assert (logits - ours).norm() / ours.norm() < 1e-5
    kept = {name for name, _ in theirs.named_parameters() if name.endswith("cola_a")}
    assert len(kept) == (0 if model.rank is None else 7 * model.num_hidden_layers)


@pytest.mark.full
@by_name(
    {
        name: (COLA | OWN)[name]
        for name in ("preset 7b", "svd, tied", "cola, grouped queries", "cola, window", "cola, QK-norm", "lax, tensor")
    }
)
def test_an_export_generates_with_a_cache_what_it_does_without(exported: Exported, changes: dict) -> None:
    model = loaded(exported(changes))
    prompts = torch.stack((TOKENS[:6], TOKENS[6:]))
    greedy = {
        "attention_mask": torch.ones_like(prompts), "max_new_tokens": 16, "do_sample": False, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    with_cache = model.generate(prompts, **greedy, return_dict_in_generate=True)
    assert with_cache.past_key_values.get_seq_length() == 6 + 16 - 1
    assert torch.equal(with_cache.sequences, model.generate(prompts, **greedy, use_cache=False))
    static = model.generate(prompts, **greedy, cache_implementation="static")
    assert torch.equal(with_cache.sequences, static)
    with torch.no_grad():
        whole = model(with_cache.sequences).logits.argmax(-1)
    assert torch.equal(with_cache.sequences[:, 6:], whole[:, 5:-1])


@pytest.mark.nightly
def test_an_export_needs_nothing_of_ours(exported: Exported) -> None:
    code = """
import sys, torch, transformers
sys.modules["boost_core"] = None
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=4, do_sample=False).shape)
"""
    run = subprocess.run([sys.executable, "-c", code, exported(OWN["lax, dense"])], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("torch.Size([1, ")


@pytest.mark.full
def test_the_class_can_be_trained(exported: Exported) -> None:
    model = loaded(exported(OWN["lax, tensor"]))
    model(TOKENS[None], labels=TOKENS[None]).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in model.parameters())
    fresh = type(model)(model.config)
    assert all(bool(weight.isfinite().all()) and weight.abs().max() < 3 for weight in fresh.parameters())


MERGED = {name: (COLA | OWN)[name] for name in ("svd", "svd, tied", "svd, grouped queries", "svd, no gate")}


@pytest.mark.full
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


@pytest.mark.full
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


def assert_is(folder: Path, model: ModelConfig) -> None:
    """Hold a folder to a model and its weights."""
    imported, expected = ModelFolder(folder), to_published(model, weights_of(model))
    assert imported.shapes.keys() == expected.keys()
    assert all(torch.equal(imported.read(name), tensor) for name, tensor in expected.items())
    assert described(imported.model) == described(model)


@pytest.mark.full
@by_name(DENSE | COLA | OWN)
def test_out_and_in_again_is_the_same_model(exported: Exported, changes: dict) -> None:
    assert_is(exported(changes), model_with(changes))


ONCE = {
    name: changes for name, changes in (DENSE | COLA | OWN).items() if not name.startswith("preset") or "7b" in name
}


SOME_TWICE = {"dense", "dense, yarn", "cola, grouped queries", "preset 7b", "svd, no gate", "lax, tensor"}


@pytest.mark.full
@by_name(ONCE, SOME_TWICE)
def test_what_transformers_saves_twice_is_a_start_of_the_same_job(
    exported: Exported, tmp_path: Path, changes: dict
) -> None:
    model, folder = model_with(changes), exported(changes)
    for name in ("once", "twice"):
        loaded(folder).save_pretrained(tmp_path / name)
        folder = tmp_path / name
    assert_is(folder, model)
    job = JobSpec.model_validate({"name": "again", "model": model.model_dump(), "training": {"steps": 1}})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    start(folder, tmp_path / "job.json", str(tmp_path / "start"))
    _, weights = read_weights(CheckpointFolder(str(tmp_path / "start")), 0)
    assert all(torch.equal(weights[name], weight) for name, weight in weights_of(model).items())
    if changes in COLA.values():
        theirs = published_cola.log_probabilities(folder, TOKENS)
        torch.testing.assert_close(theirs, log_probabilities(model), rtol=0, atol=1e-12)


def test_an_export_loads_without_a_warning(exported: Exported, caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("transformers")  # it does not propagate
    library.addHandler(caplog.handler)
    try:
        for name in ("preset 7b", "lax, tensor"):
            loaded(exported((COLA | OWN)[name]))
    finally:
        library.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_threads_share_a_model_and_no_latents(exported: Exported) -> None:
    model = loaded(exported(OWN["lax, tensor"]))
    batches = (TOKENS[None, :6], TOKENS[None, 6:])
    alone = [model(tokens).logits for tokens in batches]
    both = threading.Barrier(2, timeout=60)

    def wait(*_: object) -> None:
        both.wait()

    for layer in model.model.layers:
        layer.register_forward_hook(wait)  # each block of both passes before the next one of either
    with ThreadPoolExecutor(2) as threads:
        together = threads.map(lambda tokens: model(tokens).logits, batches)
    assert all(map(torch.equal, together, alone))


FINE_TUNED = {name: (COLA | OWN)[name] for name in ("preset 7b", "lax, tensor")}


@pytest.mark.parametrize("reentrant", [False, True])
@by_name(FINE_TUNED)
def test_gradient_checkpointing_gives_the_same_gradients(exported: Exported, changes: dict, reentrant: bool) -> None:
    plain, checkpointed = (loaded(exported(changes)).train() for _ in range(2))
    checkpointed.activation_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    for model in (plain, checkpointed):
        model(TOKENS[None], labels=TOKENS[None]).loss.backward()
    expected = dict(plain.named_parameters())
    assert all(torch.equal(weight.grad, expected[name].grad) for name, weight in checkpointed.named_parameters())


@pytest.mark.full
@pytest.mark.parametrize(("target", "adapted"), [(["q_proj", "down_proj"], 2 * 3), ("all-linear", 7 * 3)], ids=str)
@by_name(FINE_TUNED)
def test_lora_adapts_projections(
    exported: Exported, tmp_path: Path, changes: dict, target: str | list[str], adapted: int
) -> None:
    model = get_peft_model(loaded(exported(changes)), LoraConfig(r=2, target_modules=target, init_lora_weights=False))
    model.activation_checkpointing_enable()
    model(input_ids=TOKENS[None], labels=TOKENS[None]).loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.requires_grad]
    assert len(gradients) == 2 * adapted
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(loaded(exported(changes)), tmp_path)
    with torch.no_grad():
        before, after = (each.eval()(input_ids=TOKENS[None]).logits for each in (model, again))
        with again.disable_adapter():
            unadapted = again(input_ids=TOKENS[None]).logits
        assert torch.equal(unadapted, loaded(exported(changes))(TOKENS[None]).logits)
    assert torch.equal(before, after) and not torch.equal(before, unadapted)
    with pytest.raises(RuntimeError):  # rather than lost: an activation is between the factors
        model.merge_and_unload()


def test_lora_of_factors_is_merged(exported: Exported, tmp_path: Path) -> None:
    factors = LoraConfig(r=2, target_parameters=["cola_a", "cola_b"], target_modules=[], init_lora_weights=False)
    model = get_peft_model(loaded(exported(OWN["lax, tensor"])), factors).eval()
    with torch.no_grad():
        adapted = model(input_ids=TOKENS[None]).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS[None]).logits, adapted)
    merged.save_pretrained(tmp_path)
    assert described(ModelFolder(tmp_path).model) == described(model_with(OWN["lax, tensor"]))


TEXTS = ["The quick brown fox", "a", "pack my box"]


@by_name(FINE_TUNED | {"dense": DENSE["dense"]})
def test_padded_prompts_are_continued_as_each_alone(exported: Exported, changes: dict) -> None:
    model, tokenizer = loaded(exported(changes)), AutoTokenizer.from_pretrained(exported(changes))

    def continued(texts: list[str]) -> torch.Tensor:
        prompts = tokenizer(texts, return_tensors="pt", padding=True)
        return model.generate(**prompts, max_new_tokens=8, do_sample=False, eos_token_id=None)[:, -8:]

    assert torch.equal(continued(TEXTS), torch.cat([continued([text]) for text in TEXTS]))


@by_name(FINE_TUNED)
def test_a_classifier_reads_the_last_token_before_the_padding(
    exported: Exported, tmp_path: Path, changes: dict
) -> None:
    folder = exported(changes)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, trust_remote_code=True)
    headless = AutoModel.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        scores = classifier(**tokenizer(TEXTS, return_tensors="pt", padding=True)).logits
        for text, score in zip(TEXTS, scores, strict=True):
            last = headless(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
            torch.testing.assert_close(score, classifier.score(last), rtol=0, atol=1e-5)
    classifier.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path, trust_remote_code=True)
    assert all(torch.equal(weight, again.get_parameter(name)) for name, weight in classifier.named_parameters())


def test_latents_cross_between_blocks_that_are_offloaded(exported: Exported, tmp_path: Path) -> None:
    folder = exported(OWN["lax, tensor"])
    modules = ("model.embed_tokens", "model.layers.0", "model.layers.2", "model.norm", "model.rotary_emb", "lm_head")
    places = dict.fromkeys(modules, "cpu") | {"model.layers.1": "disk"}
    offloaded = loaded(folder, device_map=places, offload_folder=tmp_path)
    with torch.no_grad():
        assert torch.equal(offloaded(TOKENS[None]).logits, loaded(folder)(TOKENS[None]).logits)


@by_name({name: (DENSE | COLA | OWN)[name] for name in ("dense", "preset 7b", "lax, tensor")})
def test_an_export_says_how_it_was_trained(exported: Exported, changes: dict) -> None:
    config = json.loads((exported(changes) / "config.json").read_text())
    names = ("max_position_embeddings", "bos_token_id", "eos_token_id")
    assert [config[name] for name in names] == [48, None, 0]
    if changes["family"] == "dense":
        theirs = AutoConfig.from_pretrained(exported(changes))
        assert [getattr(theirs, name) for name in names] == [48, None, 0]


def test_a_crossing_is_beside_the_projection_that_it_crosses_into(exported: Exported) -> None:
    model = model_with(OWN["lax, dense"])
    tensors = load_file(exported(OWN["lax, dense"]) / "model.safetensors")
    value = "model.layers.2.self_attn.v_proj.crossing"
    gates = weights_of(model)["blocks.2.query_key_value.crossing.gate_matrix"]
    assert torch.equal(tensors[f"{value}.gate_matrix"], gates[2])
    assert tensors[f"{value}.norm_shift"].shape == (8,)
    assert not [name for name in tensors if name.startswith("model.layers.0.") and "crossing" in name]
