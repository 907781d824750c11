"""Whole models through Triton's kernels, forward and backward, give what they give through the references."""

import pytest
import torch

from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.kernels.launch import Implementation, always
from boost_core.parallel.communicator import Communicator
from tests.numerics.sharded import HOST, Outcome, ThroughTheHost, relative_error, run_sharded
from tests.ranks import Ranks

SHAPE = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "rank": 6,
    "vocab_size": 32,
}  # fmt: skip
SEQUENCES, LENGTH = 2, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMMUNICATOR = ThroughTheHost if torch.cuda.is_available() else Communicator
MODELS = [
    {"family": "svd"},
    {"family": "cola"},
    {"family": "cola", "gate_activation": True, "num_attention_heads": 4, "num_key_value_heads": 2},
    {"family": "lax", "lax": {"base": "cola", "gate": "identity"}},
    {"family": "lax", "lax": {"base": "svd", "gate": "tensor"}, "tie_embeddings": True},
    {"family": "dense", "rank": None},
]
CHOICES = [
    {},
    {"group_projections": False},
    {"norm": "online_paper", "recompute": "full"},
    {"norm": "sync"},
    {"recompute": "latent", "split_micro_batch": True},
    {"split_micro_batch": True},
    {"strategy": "vanilla"},
]
SVD, _, GATED_COLA, _, TIED_LAX, _ = MODELS
FP32, BF16 = torch.float32, torch.bfloat16
# Each model by default; and each choice with SiLU and without, with latents that cross blocks and without, of which one
# is in bf16 and the other in fp32: each kernel is tested in both on its own.
CELLS = [
    *((2, model, {}, (FP32, BF16)) for model in MODELS),
    *((1, model, {}, (FP32, BF16)) for model in (GATED_COLA, TIED_LAX)),
    *((2, GATED_COLA, choice, (BF16,)) for choice in CHOICES[1:]),
    *((2, TIED_LAX, choice, (FP32,)) for choice in CHOICES[1:-1]),
    (2, SVD, CHOICES[-1], (FP32,)),
]
SOME = [
    (2, GATED_COLA, {}, (FP32, BF16)), (2, TIED_LAX, {}, (FP32, BF16)),
    (2, GATED_COLA, {"split_micro_batch": True}, (BF16,)),
]  # fmt: skip
PARAMETERS = [pytest.param(*cell, marks=() if cell in SOME else pytest.mark.nightly, id=str(cell)) for cell in CELLS]
# Of a few hundred numbers rounded differently, errors differ by a factor of a few; a fault's by orders of magnitude.
FACTOR = 4


def run(
    implementation: Implementation, model: ModelConfig, parallelism: ParallelismConfig, dtype: torch.dtype
) -> Outcome:
    with always(implementation):
        return run_sharded(model, parallelism, SEQUENCES, LENGTH, dtype, DEVICE, COMMUNICATOR)


def error(outcome: Outcome, truth: Outcome) -> float:
    """Relative error of all losses and gradients together."""
    values, exact = (
        torch.cat([each.loss.double(), *(gradient.double().flatten() for gradient in each.gradients.values())])
        for each in (outcome, truth)
    )
    return relative_error(values, exact)


@pytest.mark.full
@pytest.mark.parametrize(("size", "shape", "choice", "dtypes"), PARAMETERS)
def test_triton_is_as_accurate_as_the_reference(
    interpreting_ranks: Ranks, size: int, shape: dict, choice: dict, dtypes: tuple[torch.dtype, ...]
) -> None:
    model, parallelism = ModelConfig.model_validate(SHAPE | shape), ParallelismConfig.model_validate(choice)

    def outcome(count: int, implementation: Implementation, dtype: torch.dtype) -> Outcome:
        found: Outcome = interpreting_ranks.run(count, run, implementation, model, parallelism, dtype)[0]
        return found

    truths = {count: outcome(count, "naive", torch.float64) for count in {1, size}}
    for dtype in dtypes:
        # Sharded or not, the reference sums in another order: the larger of its errors says more of what rounding does.
        limit = FACTOR * max(error(outcome(count, "naive", dtype), truth) for count, truth in truths.items())
        assert 0 < error(outcome(size, "triton", dtype), truths[size]) < limit


def test_collectives_through_the_host_are_those_of_the_group(interpreting_ranks: Ranks) -> None:
    model, parallelism = ModelConfig.model_validate(SHAPE | TIED_LAX), ParallelismConfig.model_validate({})
    arguments = model, parallelism, SEQUENCES, LENGTH, torch.float64, HOST
    direct, copied = (
        interpreting_ranks.run(2, run_sharded, *arguments, each)[0] for each in (Communicator, ThroughTheHost)
    )
    assert torch.equal(copied.loss, direct.loss)
    assert copied.gradients.keys() == direct.gradients.keys()
    assert all(torch.equal(copied.gradients[name], gradient) for name, gradient in direct.gradients.items())
