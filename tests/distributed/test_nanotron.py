"""Weights to and from nanotron's shards, by its own code on real ranks; and its layers as an independent baseline."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec, ModelConfig
from boost_core.convert.__main__ import main, start
from boost_core.convert.model_folder import InMemory, Tensors, empty_weights, read_weights, to_published, write_start
from boost_core.convert.nanotron import modules, read_nanotron, write_nanotron
from boost_core.convert.published_config import TrainedOn, described
from boost_core.model.attention import Rotation, causal_attention
from boost_core.parallel.baselines import FullRankTensorParallel
from boost_core.parallel.btp import NormWeights
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from tests.distributed.recording import train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.numerics.allocator import allocated
from tests.ranks import Ranks

SHAPE = {
    "family": "dense", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip
MODEL = ModelConfig.model_validate(SHAPE)
TRAINED_ON = TrainedOn(sequence_length=64, end_of_document=0)


def context(size: int):
    """nanotron's process groups over the present ranks, which on a CPU set no device."""
    modules()
    from nanotron.parallel import ParallelContext

    class Context(ParallelContext):
        def set_device(self) -> None:
            if torch.cuda.is_available():
                super().set_device()

    rank = str(dist.get_rank())
    with patch.dict(os.environ, WORLD_SIZE=str(size), RANK=rank, LOCAL_RANK=rank):
        return Context(tensor_parallel_size=size, pipeline_parallel_size=1, data_parallel_size=1)


def tensor_parallel_layers():
    modules()
    from nanotron.parallel.tensor_parallel import nn as layers

    return layers


def serialized_weights():
    """nanotron's module that saves and loads weights."""
    modules()
    from nanotron.serialize import weights

    return weights


class Theirs(nn.Module):
    """nanotron's LLaMA as far as its weights go, of its own layers; the model itself needs a GPU."""

    def __init__(self, model: ModelConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        layers = tensor_parallel_layers()
        mode, hidden = layers.TensorParallelLinearMode.ALL_REDUCE, model.hidden_size

        def column(wide: int, *chunks: int) -> nn.Module:
            return layers.TensorParallelColumnLinear(
                hidden, wide, group, mode, bias=False, contiguous_chunks=chunks or None
            )

        def row(wide: int) -> nn.Module:
            return layers.TensorParallelRowLinear(wide, hidden, group, mode, bias=False)

        def block(**parts: nn.Module) -> nn.Module:
            return nn.ModuleDict({"pp_block": nn.ModuleDict(parts)})

        key_value, mlp = model.key_value_size, model.intermediate_size
        embedding = layers.TensorParallelEmbedding(model.vocab_size, hidden, pg=group, mode=mode)
        self.model = nn.ModuleDict(
            {
                "token_position_embeddings": block(token_embedding=embedding),
                "decoder": nn.ModuleList(
                    block(
                        input_layernorm=norm(hidden),
                        attn=nn.ModuleDict(
                            {
                                "qkv_proj": column(hidden + 2 * key_value, hidden, key_value, key_value),
                                "o_proj": row(hidden),
                            }
                        ),
                        post_attention_layernorm=norm(hidden),
                        mlp=nn.ModuleDict({"gate_up_proj": column(2 * mlp, mlp, mlp), "down_proj": row(mlp)}),
                    )
                    for _ in range(model.num_hidden_layers)
                ),
                "final_layer_norm": nn.ModuleDict({"pp_block": norm(hidden)}),
                "lm_head": nn.ModuleDict({"pp_block": column(model.vocab_size)}),
            }
        )


def norm(width: int) -> nn.Module:
    modules()
    from nanotron.parallel.parameters import NanotronParameter

    module = nn.RMSNorm(width)
    module.weight = NanotronParameter(module.weight.detach())
    return module


def fill(model: nn.Module) -> None:
    """Every weight anew, each rank's part of it another."""
    for number, weight in enumerate(model.parameters()):
        weight.data.normal_(generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
    for name, weight in model.named_parameters():
        if "norm" in name:
            dist.broadcast(weight.data, src=0)


def theirs_saved(size: int, folder: Path) -> dict[str, torch.Tensor]:
    groups = context(size)
    model = Theirs(MODEL, groups.tp_pg)
    fill(model)
    serialized_weights().save_weights(model, groups, folder)
    dist.barrier()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def theirs_loaded(size: int, folder: Path) -> dict[str, torch.Tensor]:
    groups = context(size)
    model = Theirs(MODEL, groups.tp_pg)
    serialized_weights().load_weights(model, groups, folder)
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def write_config(folder: Path, **changes: object) -> None:
    """What nanotron leaves beside the weights: all fields of its own configuration."""
    modules()
    from nanotron.config import LlamaConfig

    sizes = {name: value for name, value in SHAPE.items() if name != "family"}
    (folder / "model_config.json").write_text(json.dumps(asdict(LlamaConfig(**sizes)) | changes))


def random_model() -> Tensors:
    weights = empty_weights(MODEL)
    for number, weight in enumerate(weights.values()):
        weight.normal_(generator=torch.Generator().manual_seed(number))
    return to_published(MODEL, weights)


@pytest.mark.parametrize("size", [1, 2])
def test_what_nanotron_has_saved_is_read(ranks: Ranks, tmp_path: Path, size: int) -> None:
    shards = ranks.run(size, theirs_saved, size, tmp_path)
    write_config(tmp_path)
    model, published = read_nanotron(tmp_path)
    assert described(model) == described(MODEL)
    first = "model.decoder.0.pp_block."
    down = torch.cat([shard[f"{first}mlp.down_proj.weight"] for shard in shards], dim=1)
    assert torch.equal(published["model.layers.0.mlp.down_proj.weight"], down)
    gate_up = [shard[f"{first}mlp.gate_up_proj.weight"].chunk(2) for shard in shards]
    assert torch.equal(published["model.layers.0.mlp.up_proj.weight"], torch.cat([up for _, up in gate_up]))
    values = [shard[f"{first}attn.qkv_proj.weight"][-8 // size :] for shard in shards]
    assert torch.equal(published["model.layers.0.self_attn.v_proj.weight"], torch.cat(values))
    assert torch.equal(published["model.norm.weight"], shards[0]["model.final_layer_norm.pp_block.weight"])


@pytest.mark.parametrize(("written", "read"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_nanotron_reads_what_is_written(ranks: Ranks, tmp_path: Path, written: int, read: int) -> None:
    published = random_model()
    write_nanotron(tmp_path, MODEL, published, TRAINED_ON, written)
    shards = ranks.run(read, theirs_loaded, read, tmp_path)
    head = torch.cat([shard["model.lm_head.pp_block.weight"] for shard in shards])
    assert torch.equal(head, published["lm_head.weight"])
    gates = [shard["model.decoder.1.pp_block.mlp.gate_up_proj.weight"].chunk(2)[0] for shard in shards]
    assert torch.equal(torch.cat(gates), published["model.layers.1.mlp.gate_proj.weight"])
    assert torch.equal(
        shards[0]["model.decoder.1.pp_block.input_layernorm.weight"], published["model.layers.1.input_layernorm.weight"]
    )
    back, again = read_nanotron(tmp_path)
    assert described(back) == described(MODEL)
    assert again.keys() == published.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in published.items())


def test_heads_that_turn_neighbours_attend_as_those_that_turn_halves(tmp_path: Path) -> None:
    """Attention with nanotron's rows under its rotation is ours with the rows that it is read as."""
    published = random_model()
    write_nanotron(tmp_path, MODEL, published, TRAINED_ON, 1)
    from safetensors.torch import load_file

    shard = next((tmp_path / "model/model/decoder/0/pp_block/attn/qkv_proj").glob("*.safetensors"))
    packed = load_file(shard)["data"].double()
    x_sd = torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    query, key, value = (x_sd @ packed.T).split([16, 8, 8], dim=1)

    def turned(heads: torch.Tensor) -> torch.Tensor:
        """Neighbours as complex numbers, turned by each position's angles: nanotron's rotary embedding."""
        pairs = torch.view_as_complex(heads.view(6, -1, 2, 2).contiguous())
        angles = torch.outer(torch.arange(6.0), 10_000.0 ** -(torch.arange(0, 4, 2) / 4)).double().unsqueeze(1)
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(2)

    scores = torch.einsum("qhe,khe->hqk", turned(query), turned(key).repeat_interleave(2, dim=1)) / 2
    weights = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf).softmax(dim=-1)
    expected = torch.einsum("hqk,khe->qhe", weights, value.view(6, 2, 4).repeat_interleave(2, dim=1)).flatten(1)

    names = (f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv")
    parts = [(x_sd @ published[name].double().T).unsqueeze(0) for name in names]
    ours = causal_attention(parts, Rotation(6, 4, 10_000.0, torch.device("cpu")), 4)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)  # its angles are taken in fp32


def test_a_job_goes_on_from_nanotrons_weights_and_back(ranks: Ranks, tmp_path: Path) -> None:
    published = random_model()
    write_nanotron(tmp_path / "theirs", MODEL, published, TRAINED_ON, 2)
    job = tiny_job(write_corpus(tmp_path / "corpus"), tmp_path / "run", model={**SHAPE, "rank": None})
    job = job.model_copy(
        update={"checkpoint": job.checkpoint.model_copy(update={"continue_from": f"{tmp_path}/start"})}
    )
    (tmp_path / "job.json").write_text(job.model_dump_json())
    start(tmp_path / "theirs", tmp_path / "job.json", f"{tmp_path}/start")
    _, weights = read_weights(CheckpointFolder(f"{tmp_path}/start"), 0)
    assert all(torch.equal(tensor, published[name]) for name, tensor in to_published(MODEL, weights).items())

    reports, _ = ranks.run(2, train_and_record, job)
    assert reports[0].resumed_from.startswith(f"{tmp_path}/start")
    assert main(["export", f"{tmp_path}/run", f"{tmp_path}/back", "--nanotron", "2"]) == 0
    _, trained = read_nanotron(tmp_path / "back")
    _, weights = read_weights(CheckpointFolder(f"{tmp_path}/run"), 8)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in to_published(MODEL, weights).items())


def test_the_model_is_in_memory_once(tmp_path: Path) -> None:
    """Beside it are one weight and its shards, of which the largest is a tenth of the model here."""
    shape = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "num_hidden_layers": 4}
    model = ModelConfig.model_validate(shape)
    weights = empty_weights(model)
    size, published = sum(weight.nbytes for weight in weights.values()), to_published(model, weights)
    job = JobSpec.model_validate({"name": "large", "model": model.model_dump(), "training": {"steps": 1}})
    write_start(CheckpointFolder(str(tmp_path / "job")), job, InMemory(published))
    modules()  # which allocates something, too
    command = ["export", str(tmp_path / "job"), str(tmp_path / "theirs"), "--nanotron", "2"]
    ended, _, peak = allocated(lambda: main(command))
    assert ended == 0 and peak < 1.4 * size
    _, left, peak = allocated(lambda: read_nanotron(tmp_path / "theirs"))
    assert left < 1.01 * size and peak < 1.4 * size


def test_what_is_no_whole_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no model_config\.json"):
        read_nanotron(tmp_path)
    (tmp_path / "model_config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"holds no model_config\.json .*RecursionError"):
        read_nanotron(tmp_path)
    write_nanotron(tmp_path, MODEL, random_model(), TRAINED_ON, 2)
    shard = next(tmp_path.glob("model/model/decoder/1/pp_block/mlp/down_proj/*tp-rank-1*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"tp-rank-1-of-2\.safetensors is damaged"):
        read_nanotron(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"shards of model\.decoder\.1\.pp_block\.mlp\.down_proj\.weight are missing"):
        read_nanotron(tmp_path)
    with pytest.raises(ValueError, match="dense, and the model is cola"):
        write_nanotron(tmp_path, ModelConfig.model_validate(SHAPE | {"family": "cola", "rank": 4}), {}, TRAINED_ON, 1)
    with pytest.raises(ValueError, match="3 ranks do not divide"):
        write_nanotron(tmp_path, MODEL, random_model(), TRAINED_ON, 3)


def test_what_its_configuration_says_of_the_function_is_carried(tmp_path: Path) -> None:
    changes = {"rope_theta": 500.0, "norm_epsilon": 1e-5, "gate_activation": False}
    model = ModelConfig.model_validate(SHAPE | changes)
    write_nanotron(tmp_path, model, random_model(), TRAINED_ON, 1)
    written = json.loads((tmp_path / "model_config.json").read_text())
    names = ("rope_theta", "rope_interleaved", "rms_norm_eps", "hidden_act", "max_position_embeddings", "eos_token_id")
    assert [written[name] for name in names] == [500.0, True, 1e-5, "linear", 64, 0]
    there, _ = read_nanotron(tmp_path)
    assert described(there) == described(model)


def test_rows_of_a_configuration_that_turns_halves_stay_in_their_order(tmp_path: Path) -> None:
    """As BOOST's fork and later versions have it by default (https://github.com/Arcana-2236/nanotron)."""
    published = random_model()
    write_nanotron(tmp_path, MODEL, published, TRAINED_ON, 1)
    write_config(tmp_path, rope_interleaved=False, rope_theta=500.0)
    model, halves = read_nanotron(tmp_path)
    assert model.rope_theta == 500.0
    write_config(tmp_path)
    model, neighbours = read_nanotron(tmp_path)
    assert model.rope_theta == 10_000.0
    query = "model.layers.0.self_attn.q_proj.weight"
    turned = neighbours[query].view(4, 2, 2, 16).transpose(1, 2).reshape(16, 16)
    assert torch.equal(halves[query], turned)
    assert torch.equal(neighbours[query], published[query])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is"),
        ({"cola_rank": 4}, "cola_rank is 4, which the trainer does not know"),
    ],
    ids=str,
)
def test_a_configuration_that_computes_something_else_is_refused(tmp_path: Path, changes: dict, says: str) -> None:
    write_nanotron(tmp_path, MODEL, random_model(), TRAINED_ON, 1)
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=rf"model_config\.json: {says}"):
        read_nanotron(tmp_path)


def both_layers(size: int) -> list[torch.Tensor]:
    """Differences between nanotron's column and row layers and ours: outputs, and gradients of input and weights."""
    groups = context(size)
    layers = tensor_parallel_layers()
    mode = layers.TensorParallelLinearMode.REDUCE_SCATTER
    draw = torch.Generator().manual_seed(11)
    x_Td, into, back = (
        torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((8, 8), (8, 12), (12, 8))
    )
    share = slice(dist.get_rank() * 12 // size, (dist.get_rank() + 1) * 12 // size)

    column = layers.TensorParallelColumnLinear(8, 12, groups.tp_pg, mode, bias=False, dtype=torch.float64)
    row = layers.TensorParallelRowLinear(12, 8, groups.tp_pg, mode, bias=False, dtype=torch.float64)
    column.weight.data.copy_(into[:, share].T)
    row.weight.data.copy_(back[share].T)
    x_td = x_Td[dist.get_rank() * 8 // size : (dist.get_rank() + 1) * 8 // size]  # this rank's tokens
    normed = torch.nn.functional.rms_norm(x_td, (8,), eps=1e-6).requires_grad_()
    theirs = row(column(normed).sin())
    (theirs * theirs.detach().cos()).sum().backward()

    ours_x = x_td.clone().requires_grad_()
    into_dgf, back_fd = into[:, None, share].clone().requires_grad_(), back[share].clone().requires_grad_()
    strategy = FullRankTensorParallel(Communicator(dist.group.WORLD, "tp", CommunicationLedger()))
    norm = NormWeights(torch.ones(8, dtype=torch.float64), 8, 1e-6)
    (wide_1Tf,) = strategy.dense_in(ours_x, [into_dgf], norm)
    ours = strategy.dense_out(wide_1Tf.squeeze(0).sin(), back_fd)
    (ours * ours.detach().cos()).sum().backward()

    their_x = x_td.clone().requires_grad_()
    torch.nn.functional.rms_norm(their_x, (8,), eps=1e-6).backward(normed.grad)
    return [
        (ours - theirs).detach(),
        ours_x.grad - their_x.grad,
        into_dgf.grad.squeeze(1) - column.weight.grad.T,
        back_fd.grad - row.weight.grad.T,
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_our_full_rank_layers_are_nanotrons(ranks: Ranks, size: int) -> None:
    for differences in ranks.run(size, both_layers, size):
        assert max(difference.abs().max().item() for difference in differences) < 1e-12
