import pytest

from boost_core.config import ModelConfig
from boost_core.plan.communication import block_backward, block_forward, block_forward_latent_bytes
from boost_core.plan.flops import model_flops_per_token
from boost_core.plan.parameters import parameter_count


@pytest.mark.parametrize(
    ("preset", "millions"), [("60m", 42.8), ("130m", 94.0), ("350m", 185.2), ("1b", 609.3), ("7b", 2821)]
)
def test_parameters_are_those_of_the_cola_paper(preset: str, millions: float) -> None:
    model = ModelConfig.model_validate({"preset": preset, "vocab_size": 32_000})
    assert parameter_count(model) / 1e6 == pytest.approx(millions, abs=0.5 if millions > 1000 else 0.05)


def test_a_7b_block_sends_224_mib_forward() -> None:
    """Table of the BOOST paper: micro-batch 4, sequence 4096, bf16."""
    model = ModelConfig.model_validate({"preset": "7b"})
    assert block_forward_latent_bytes(model, tokens=4 * 4096, bytes_per_element=2) == 224 * 2**20


def test_the_backward_sends_no_statistic() -> None:
    model = ModelConfig.model_validate({"preset": "tiny"})
    assert (block_forward(model).statistic_elements, block_backward(model).statistic_elements) == (2, 0)
    assert block_forward(model).latent_elements == block_backward(model).latent_elements == 7 * 32


def test_model_flops_count_matrices_six_times_and_attention_in_full() -> None:
    model = ModelConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, rank=2, vocab_size=256
    )
    matrices = 2 * (4 * (8 + 8) + 3 * (8 + 16)) + 256 * 8
    assert model_flops_per_token(model, 10) == 6 * matrices + 12 * 8 * 10
