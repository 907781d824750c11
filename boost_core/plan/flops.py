"""How much arithmetic a model needs."""

from boost_core.config.model import ModelConfig
from boost_core.plan.parameters import block_matrix_parameters


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one token's forward and backward pass, without recomputation.

    Two for each matrix parameter forward and four backward, and the attention scores counted in full
    (12·L·d·s), as in the PaLM paper's appendix B (arXiv 2204.02311). The embedding look-up is free.
    """
    return model.num_hidden_layers * block_flops_per_token(model, sequence_length) + head_flops_per_token(model)


def block_flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Those of one block."""
    return 6 * block_matrix_parameters(model) + 12 * model.hidden_size * sequence_length


def head_flops_per_token(model: ModelConfig) -> int:
    """Those of the language-model head."""
    return 6 * model.vocab_size * model.hidden_size
