"""Attention in variants that LLaMA has not is that of the transformers classes that have them."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from boost_core.convert.model_folder import to_published
from tests.exports import SIZES, TOKENS, log_probabilities, model_with, weights_of


@pytest.mark.parametrize("window", [1, 3, 11, 12, 40])
def test_a_sliding_window_is_mistrals(window: int) -> None:
    model = model_with({"family": "dense", "num_key_value_heads": 2, "sliding_window": window})
    config = MistralConfig(
        **SIZES, num_key_value_heads=2, sliding_window=window, rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}, attn_implementation="eager",
    )  # fmt: skip
    mistral = MistralForCausalLM(config).double()
    mistral.load_state_dict(to_published(model, weights_of(model)))
    with torch.no_grad():
        theirs = mistral(TOKENS[None]).logits[0].log_softmax(-1)
    # As for LlamaForCausalLM in test_exports: norms, angles and softmax are in fp32 there.
    torch.testing.assert_close(theirs, log_probabilities(model), rtol=0, atol=2e-6)


def test_norms_of_queries_and_keys_are_qwens() -> None:
    model = model_with({"family": "dense", "num_key_value_heads": 2, "qk_norm": True})
    config = Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=model.head_size, rms_norm_eps=model.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}, tie_word_embeddings=False,
    )  # fmt: skip
    qwen = Qwen3ForCausalLM(config).double()
    qwen.load_state_dict(to_published(model, weights_of(model)))
    with torch.no_grad():
        theirs = qwen(TOKENS[None]).logits[0].log_softmax(-1)
    torch.testing.assert_close(theirs, log_probabilities(model), rtol=0, atol=2e-6)
