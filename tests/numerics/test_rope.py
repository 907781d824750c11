"""Scaled rotary frequencies are those of transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from boost_core.config.model import RopeScalingConfig
from boost_core.model.attention import Rotation, rotary_frequencies

LLAMA_3_1 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
CASES: list[tuple[float, int, dict[str, Any]]] = [  # the base, the size of a head, and the scaling
    (500_000.0, 128, LLAMA_3_1),
    (10_000.0, 64, LLAMA_3_1 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0}),
    (10_000.0, 128, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}),
    (1e6, 64, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768, "attention_factor": 1.5,
               "beta_fast": 20.0, "beta_slow": 2.0}),
    (10_000.0, 8, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 6}),  # no ramp
    (10_000.0, 64, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}),  # its ends cross
]  # fmt: skip


@pytest.mark.parametrize(("theta", "head_size", "given"), CASES, ids=str)
def test_scaled_frequencies_are_those_of_transformers(theta: float, head_size: int, given: dict[str, Any]) -> None:
    scaling = RopeScalingConfig.model_validate(given)
    theirs_to_find = {"attention_factor"} - given.keys()
    config = LlamaConfig(
        hidden_size=4 * head_size, num_attention_heads=4, max_position_embeddings=1 << 20,
        rope_parameters={"rope_theta": theta} | scaling.model_dump(exclude_none=True, exclude=theirs_to_find),
    )  # fmt: skip
    theirs, attention_factor = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"))
    ours = rotary_frequencies(head_size, theta, scaling, torch.device("cpu"))
    # They are in fp32 there, by way of powers up to 1e6, whose logarithm has 14 of the 24 bits' relative precision.
    torch.testing.assert_close(ours, theirs.double(), rtol=2e-6, atol=0)
    cosine_se, sine_se = Rotation(9, head_size, theta, torch.device("cpu"), scaling).angles(torch.float64)
    lengths = (cosine_se.square() + sine_se.square()).sqrt()
    torch.testing.assert_close(lengths, torch.full_like(lengths, attention_factor), rtol=1e-12, atol=0)
