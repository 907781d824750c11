"""Parameter counts of a model."""

import math
from collections.abc import Mapping
from functools import lru_cache

from boost_core.architecture.families import block_weights, embedding_weights, head_weights
from boost_core.architecture.roles import MATRICES, WeightSpec
from boost_core.config.model import ModelConfig


def block_matrix_parameters(model: ModelConfig) -> int:
    """Return the parameters in the matrices of one block: d_in · d_out dense, r (d_in + d_out) for a low-rank pair."""
    weights = block_weights(model, crossed=False).values()
    return sum(math.prod(spec.shape) for spec in weights if spec.role in MATRICES)


@lru_cache(64)  # a search asks for the same
def block_parameters(model: ModelConfig, crossed: bool) -> int:
    """Return all parameters of one block, with or without latents crossing into it."""
    return _parameters(block_weights(model, crossed))


def parameter_count(model: ModelConfig) -> int:
    """Return all trainable parameters: blocks with their two norms, crossings, embedding, head, final norm."""
    crossed = sum(map(model.crosses_into, range(model.num_hidden_layers)))
    blocks = (model.num_hidden_layers - crossed) * block_parameters(model, crossed=False)
    blocks += crossed * block_parameters(model, crossed=True)
    return blocks + _parameters(embedding_weights(model)) + _parameters(head_weights(model))


def _parameters(weights: Mapping[str, WeightSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in weights.values())
