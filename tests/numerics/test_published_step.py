"""The baseline is the model that the published code has: ours, where norms of shards and of whole rows are the same."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.bench.rank import LoneCommunicator
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.model.attention import Rotation
from boost_core.model.decoder import build
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.parallel.shard import make_weights
from tests.gpu.published import PublishedRun

CPU, LENGTH = torch.device("cpu"), 12
MODEL = ModelConfig.model_validate(
    {
        "family": "cola", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "rank": 6, "vocab_size": 64, "tie_embeddings": True,
    }
)  # fmt: skip


def tokens(sequences: int) -> torch.Tensor:
    return torch.randint(0, MODEL.vocab_size, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def test_on_one_rank_it_is_our_model() -> None:
    alone = Communicator(None, "tp", CommunicationLedger())
    ours, axes = build(MODEL, ParallelismConfig(), alone)
    make_weights(ours, axes, 0, 1, 7, CPU, torch.float64)
    run = PublishedRun(MODEL, alone, LENGTH, torch.float64, CPU)
    named = dict(ours.named_parameters())
    pairs = {"embedding": "embedding.weight", "scale": "head.scale"}
    groups = (
        ("attention_scale", "qkv_down", "qkv_up", "query_key_value"),
        (None, "output_down", "output_up", "output"),
        ("mlp_scale", "gate_up_down", "gate_up_up", "gate_up"),
        (None, "down_down", "down_up", "down"),
    )
    for layer in range(MODEL.num_hidden_layers):
        for scale, down, up, group in groups:
            pairs[f"blocks.{layer}.{down}"] = f"blocks.{layer}.{group}.down"
            pairs[f"blocks.{layer}.{up}"] = f"blocks.{layer}.{group}.up_0"
            if scale is not None:
                pairs[f"blocks.{layer}.{scale}"] = f"blocks.{layer}.{group}.scale"
    theirs = dict(run.model.named_parameters())
    assert pairs.keys() == theirs.keys()
    assert set(pairs.values()) == named.keys()

    def as_theirs(name: str, ours: torch.Tensor) -> torch.Tensor:
        """``[d, g, r]`` to ``[g·r, d]``, ``[g, r, f]`` to ``[g, f, r]`` or ``[f, r]``."""
        if name.endswith("_down"):
            return ours.flatten(1).T
        return ours.mT.reshape(theirs[name].shape) if name.endswith("_up") else ours

    with torch.no_grad():
        for name, weight in theirs.items():
            weight.copy_(as_theirs(name, named[pairs[name]]))
    (token_t,) = tokens(1)
    mine_T = ours(token_t[:-1], token_t[1:], Rotation(LENGTH, MODEL.head_size, MODEL.rope_theta, CPU))
    their_T = run.model(token_t[:-1], token_t[1:])
    torch.testing.assert_close(their_T, mine_T, rtol=1e-10, atol=0)
    upstream_T = torch.linspace(0.5, 1.5, LENGTH, dtype=torch.float64)
    mine_T.backward(upstream_T)
    their_T.backward(upstream_T)
    for name, weight in theirs.items():
        error = (weight.grad - as_theirs(name, named[pairs[name]].grad)).norm() / weight.grad.norm()
        assert error < 1e-10, name


def test_steps_learn_and_accumulate() -> None:
    torch.manual_seed(0)
    alone = Communicator(None, "tp", CommunicationLedger())
    run = PublishedRun(MODEL, alone, LENGTH, torch.float32, CPU)
    token_bt = tokens(2)
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    losses = [run.step(token_bt) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(weight, before[name]) for name, weight in run.model.named_parameters())
    assert all(weight.grad is None for weight in run.model.parameters())


@pytest.mark.parametrize("sequences", [1, 4])
def test_what_it_sends_is_what_the_published_code_sends(sequences: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        ledger = CommunicationLedger()
        run = PublishedRun(MODEL, LoneCommunicator(dist.group.WORLD, "tp", ledger), LENGTH, torch.float32, CPU)
        run.step(tokens(sequences))
        count = MODEL.num_hidden_layers
        lines = {(entry.kind, entry.purpose): (line.calls, line.elements) for entry, line in ledger.totals().items()}
    finally:
        dist.destroy_process_group()
    rank, hidden = MODEL.bottleneck_rank, MODEL.hidden_size
    each = {
        ("all_reduce", "embedding"): (1, hidden * LENGTH),
        ("all_reduce", "embedding gradient"): (1, hidden * LENGTH),
        ("all_reduce", "latent"): (4 * count, 7 * rank * LENGTH * count),
        ("all_reduce", "latent gradient"): (4 * count, 7 * rank * LENGTH * count),
        ("all_gather", "hidden"): (1, hidden // 2 * LENGTH),
        ("all_reduce", "hidden gradient"): (1, hidden * LENGTH),
        **{("all_reduce", f"loss {what}"): (1, LENGTH) for what in ("maximum", "target", "sum")},
    }
    expected = {line: (calls * sequences, elements * sequences) for line, (calls, elements) in each.items()}
    assert lines == expected | {("all_reduce", "gradient norm"): (1, 1)}
