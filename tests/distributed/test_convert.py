"""Models out of checkpoints and into them again, and cut to low rank no worse than can be."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.shards import _SummedStream
from boost_core.config import JobSpec, ModelConfig
from boost_core.convert.__main__ import main, start
from boost_core.convert.model_folder import (
    Factored,
    InMemory,
    ModelFolder,
    empty_weights,
    published_slots,
    read_weights,
    to_published,
    truncated_svd,
)
from tests.distributed.recording import losses, train_and_record
from tests.exports import write_published
from tests.jobs import tiny_job, write_corpus
from tests.numerics import reference
from tests.numerics.sharded import batch, full_weights
from tests.ranks import Ranks

SHAPE = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rope_theta": 5000.0, "norm_epsilon": 1e-5,
}  # fmt: skip


def model(**changes) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | changes)


# What exports of these compute is in tests/numerics/test_exports.py.
FAMILIES = [
    {"family": "dense"},
    {"family": "dense", "num_key_value_heads": None, "tie_embeddings": True},
    {"family": "svd", "rank": 8},
    {"family": "cola", "rank": 8},
    {"family": "cola", "rank": 8, "gate_activation": True},
    {"family": "lax", "rank": 8},
    {"family": "lax", "rank": 8, "lax": {"gate": "dense"}},
    {"family": "lax", "rank": 8, "lax": {"gate": "tensor"}},
]


def test_cola_has_its_published_names_and_shapes() -> None:
    config = model(family="cola", rank=8)
    weights = full_weights(config, torch.float32)
    tensors = to_published(config, weights)
    of_block = {
        name.removeprefix("model.layers.1."): list(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    assert of_block == {
        "input_layernorm.weight": [32],
        "post_attention_layernorm.weight": [32],
        "self_attn.q_proj.cola_a": [32, 8], "self_attn.q_proj.cola_b": [8, 32],
        "self_attn.k_proj.cola_a": [32, 8], "self_attn.k_proj.cola_b": [8, 16],
        "self_attn.v_proj.cola_a": [32, 8], "self_attn.v_proj.cola_b": [8, 16],
        "self_attn.o_proj.cola_a": [32, 8], "self_attn.o_proj.cola_b": [8, 32],
        "mlp.gate_proj.cola_a": [32, 8], "mlp.gate_proj.cola_b": [8, 48],
        "mlp.up_proj.cola_a": [32, 8], "mlp.up_proj.cola_b": [8, 48],
        "mlp.down_proj.cola_a": [48, 8], "mlp.down_proj.cola_b": [8, 32],
    }  # fmt: skip
    value = "model.layers.1.self_attn.v_proj"
    assert torch.equal(tensors[f"{value}.cola_a"], weights["blocks.1.query_key_value.down"][:, 2])
    assert torch.equal(tensors[f"{value}.cola_b"], weights["blocks.1.query_key_value.up_1"][1])


def test_every_weight_of_the_trainer_is_published_once() -> None:
    for changes in FAMILIES:
        config = model(**changes)
        weights = {name: torch.zeros_like(weight) for name, weight in empty_weights(config).items()}
        for slot in published_slots(config).values():
            slot.of(weights).add_(1)
        assert all(bool((weight == 1).all()) for weight in weights.values())


def test_cut_at_full_rank_a_dense_model_is_the_same_svd_model() -> None:
    dense, low_rank = model(family="dense"), model(family="svd", rank=32)
    weights = full_weights(dense)
    cut = {name: torch.zeros_like(weight).double() for name, weight in empty_weights(low_rank).items()}
    factored = Factored(InMemory(to_published(dense, weights)), 32)
    for name, slot in published_slots(low_rank).items():
        slot.of(cut).copy_(factored.read(name))
    expected, got = (
        reference.token_losses(config, values, *batch(dense, 2, 10))
        for config, values in ((dense, weights), (low_rank, cut))
    )
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_published_llama_in_shards_becomes_a_start_and_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    shape = {name: value for name, value in SHAPE.items() if name not in ("rope_theta", "norm_epsilon")}
    given = LlamaConfig(**shape, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, rms_norm_eps=1e-5)
    llama = LlamaForCausalLM(given).to(dtype)
    llama.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    assert len(list((tmp_path / "llama").glob("*.safetensors"))) > 3
    low_rank = model(family="svd", rank=32).model_dump()  # as wide as the model: nothing is cut off
    job = {"name": "job", "model": low_rank, "training": {"steps": 1}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert main(["start", *(str(tmp_path / each) for each in ("llama", "job.json", "start"))]) == 0
    assert main(["export", str(tmp_path / "start"), str(tmp_path / "back"), "--merge"]) == 0
    tokens = batch(model(family="dense"), 2, 10)[0]
    with torch.no_grad():
        back = LlamaForCausalLM.from_pretrained(tmp_path / "back")(tokens).logits
        logits = llama.float()(tokens).logits
    # Each factor is rounded to fp32: two roundings of 6e-8 a weight, and those of the sums in two blocks.
    torch.testing.assert_close(back, logits, rtol=1e-4, atol=1e-5)


def test_a_cut_is_the_best_of_its_rank() -> None:
    weights = to_published(model(family="dense"), full_weights(model(family="dense")))
    cut = Factored(InMemory(weights), 5)
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            projection = name.removesuffix(".weight")
            error = (cut.read(f"{projection}.cola_a") @ cut.read(f"{projection}.cola_b") - weight.T).square().sum()
            torch.testing.assert_close(error, torch.linalg.svdvals(weight)[5:].square().sum())


def test_latents_beyond_a_narrow_projections_width_learn() -> None:
    w_df, x_bd = torch.randn(32, 16), torch.randn(8, 32)
    a_dr, b_rf = (factor.requires_grad_() for factor in truncated_svd(w_df, 24))
    torch.testing.assert_close(a_dr @ b_rf, w_df, rtol=1e-4, atol=1e-5)  # fp32 factors, whose padding adds nothing
    (torch.nn.functional.silu(x_bd @ a_dr) @ b_rf).square().sum().backward()
    assert b_rf.grad is not None
    assert (b_rf.grad[16:].abs().amax(dim=1) > 0).all()


def dense_job(corpus: Path, checkpoints: Path, **changes) -> JobSpec:
    return tiny_job(corpus, checkpoints, model={"family": "dense", "rank": None}, **changes)


@pytest.mark.nightly
def test_a_dense_job_goes_on_as_a_low_rank_one(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    ranks.run(2, train_and_record, dense_job(corpus, tmp_path / "dense", training={"steps": 60}))
    assert main(["export", str(tmp_path / "dense"), str(tmp_path / "model")]) == 0
    cut = {"continue_from": str(tmp_path / "cut")}
    job = tiny_job(corpus, tmp_path / "svd", model={"family": "svd", "rank": 24}, checkpoint=cut)
    (tmp_path / "job.json").write_text(job.model_dump_json())
    start(tmp_path / "model", tmp_path / "job.json", str(tmp_path / "cut"))
    reports = ranks.run(2, train_and_record, job)[0]
    assert reports[0].step == 0
    assert reports[0].resumed_from.endswith("cut/step-00000000")
    scratch = tiny_job(corpus, tmp_path / "scratch", model={"family": "svd", "rank": 24})
    assert losses(reports)[1] < 0.6 * losses(ranks.run(2, train_and_record, scratch)[0])[1]


@pytest.mark.full
def test_an_export_has_the_weights_of_its_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(2, train_and_record, dense_job(write_corpus(tmp_path / "corpus"), tmp_path / "dense"))
    assert main(["export", str(tmp_path / "dense"), str(tmp_path / "model"), "--step", "3"]) == 0
    config, weights = read_weights(CheckpointFolder(str(tmp_path / "dense")), 3)
    published = ModelFolder(tmp_path / "model")
    assert all(torch.equal(published.read(name), slot.of(weights)) for name, slot in published_slots(config).items())
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert [written[name] for name in ("max_position_embeddings", "bos_token_id", "eos_token_id")] == [32, None, 0]


REFUSED = [
    (["export", "nowhere", "out"], "nowhere holds no checkpoint"),
    (["start", "empty", "job.json", "out"], "empty holds no config.json with safetensors beside it"),
    (["export", "c", "out", "--nanotron", "0"], "--nanotron 0 is not a number of ranks"),
    (["export", "c", "s3://models/mine", "--nanotron", "1"], "writes to a local folder"),
    (["export", "c", "model", "--nanotron", "1"], "model is not empty"),
    (["export", "c", "out", "--nanotron", "1", "--push", "team/mine"], "leave out --merge, --push"),
    (["export", "c", "out", "--nanotron", "1", "--dtype", "bf16"], "--nanotron writes fp32 into a folder"),
    (["start", "model", "job.json", "out"], "hidden_size is 32 there and 64 in the job"),
]


@pytest.mark.parametrize(("arguments", "line"), REFUSED, ids=[line for _, line in REFUSED])
def test_what_cannot_be_converted_is_said_in_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    line: str,
) -> None:
    config = model(family="cola", rank=8)
    write_published(tmp_path / "model", config, to_published(config, full_weights(config, torch.float32)))
    job = {"name": "job", "model": SHAPE | {"hidden_size": 64, "rank": 8}, "training": {"steps": 1}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1


def test_a_model_that_computes_something_else_is_no_start(tmp_path: Path) -> None:
    config = model(family="cola", rank=8)
    write_published(tmp_path / "model", config, to_published(config, full_weights(config, torch.float32)))
    job = tiny_job(tmp_path, tmp_path, model=SHAPE | {"family": "cola", "rank": 8, "rope_theta": 10_000.0})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    with pytest.raises(ValueError, match=r"rope_theta .* is 5000\.0 there and 10000\.0 in the job"):
        start(tmp_path / "model", tmp_path / "job.json", str(tmp_path / "start"))
    assert not (tmp_path / "start").exists()


def test_what_published_models_have_besides_is_passed_over(tmp_path: Path) -> None:
    config = model(family="dense")
    weights = to_published(config, full_weights(config, torch.float32))
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # as in Llama 2
    write_published(tmp_path, config, weights | frequencies)
    save_file({"layers.0.attention.wk.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors")  # as in Mistral
    assert ModelFolder(tmp_path).shapes.keys() == weights.keys()


def test_damaged_and_doubled_files_are_refused_by_name(tmp_path: Path) -> None:
    config = model(family="dense")
    write_published(tmp_path, config, to_published(config, full_weights(config, torch.float32)))
    tensors = tmp_path / "model.safetensors"
    (tmp_path / "other.safetensors").write_bytes(tensors.read_bytes())
    with pytest.raises(ValueError, match=r"lm_head\.weight is in .*other\.safetensors and in another file"):
        ModelFolder(tmp_path)
    (tmp_path / "other.safetensors").unlink()
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*; copy it again"):
        ModelFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        ModelFolder(tmp_path)


@pytest.mark.parametrize("family", ["dense", "svd"])
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    config = model(family="dense")
    published = to_published(config, full_weights(config, torch.float32))
    published["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    write_published(tmp_path / "model", config, published)
    job = tiny_job(tmp_path, tmp_path, model=SHAPE | {"family": family, "rank": None if family == "dense" else 8})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert main(["start", str(tmp_path / "model"), str(tmp_path / "job.json"), str(tmp_path / "start")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("model.layers.1.mlp.up_proj.weight in ")
    assert said.endswith("model.safetensors holds values that are not finite; give another model\n")
    assert CheckpointFolder(f"{tmp_path}/start").steps() == []


def test_a_store_that_accepts_no_start_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model(family="dense")
    write_published(tmp_path / "model", config, to_published(config, full_weights(config, torch.float32)))
    job = tiny_job(tmp_path, tmp_path, model=SHAPE | {"family": "dense", "rank": None})
    (tmp_path / "job.json").write_text(job.model_dump_json())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_SummedStream, "write", full)
    assert main(["start", str(tmp_path / "model"), str(tmp_path / "job.json"), str(tmp_path / "start")]) == 2
    said = capsys.readouterr().err
    assert "cannot be written: " in said and "No space left on device" in said
    assert len(said.splitlines()) == 1


def test_a_head_that_is_not_the_tied_one_is_refused(tmp_path: Path) -> None:
    config = model(family="dense", tie_embeddings=True)
    published = to_published(config, full_weights(config, torch.float32))
    head = published["model.embed_tokens.weight"].clone()
    write_published(tmp_path, config, published | {"lm_head.weight": head})
    assert "lm_head.weight" not in ModelFolder(tmp_path).shapes
    head[-1, -1] += 1
    write_published(tmp_path, config, published | {"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"tie_word_embeddings=true, but lm_head\.weight and .* differ; remove"):
        ModelFolder(tmp_path)
    del published["model.embed_tokens.weight"]
    write_published(tmp_path, config, published | {"lm_head.weight": head})
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & set(ModelFolder(tmp_path).shapes), "said when loaded"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_nobody_waits_at_a_pipe_in_a_models_folder(tmp_path: Path, name: str) -> None:
    config = model(family="dense")
    write_published(tmp_path, config, to_published(config, full_weights(config, torch.float32)))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="is not a regular file; check the path"):
        ModelFolder(tmp_path)


@pytest.mark.parametrize(("dtype", "named"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")], ids=str)
def test_quantized_weights_are_refused(tmp_path: Path, dtype: torch.dtype, named: str) -> None:
    config = model(family="dense")
    published = to_published(config, full_weights(config, torch.float32))
    name = "model.layers.0.mlp.up_proj.weight"
    write_published(tmp_path, config, published | {name: published[name].to(dtype)})
    with pytest.raises(ValueError, match=rf"{name} is quantized \({named}\)"):
        ModelFolder(tmp_path)
