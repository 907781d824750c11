"""How many parameters a model has."""

import math

from boost_core.config.model import ModelConfig


def projections(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The seven projections of a block: (input width, output width) of each dense equivalent."""
    hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
    return {
        "query": (hidden, hidden),
        "key": (hidden, key_value),
        "value": (hidden, key_value),
        "output": (hidden, hidden),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }


def block_matrix_parameters(model: ModelConfig) -> int:
    """Parameters in the matrices of one block: d_in · d_out dense, r (d_in + d_out) for a low-rank pair."""
    if model.family == "dense":
        return sum(wide_in * wide_out for wide_in, wide_out in projections(model).values())
    return sum(model.bottleneck_rank * (wide_in + wide_out) for wide_in, wide_out in projections(model).values())


def crossing_parameters(model: ModelConfig) -> int:
    """Parameters of LaX's seven crossings into one block: gate, and the norm's scale and shift."""
    if model.lax is None:
        return 0
    rank = model.bottleneck_rank
    shorter, longer = balanced_factors(rank)
    gate = {"identity": 0, "dense": rank**2, "tensor": shorter**2 + longer**2}[model.lax.gate]
    return len(projections(model)) * (gate + 2 * rank)


def parameter_count(model: ModelConfig) -> int:
    """All trainable parameters: blocks with their two norms, crossings, embedding, head, final norm."""
    blocks = model.num_hidden_layers * (block_matrix_parameters(model) + 2 * model.hidden_size)
    crossings = sum(map(model.crosses_into, range(model.num_hidden_layers))) * crossing_parameters(model)
    ends = (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size + model.hidden_size
    return blocks + crossings + ends


def balanced_factors(rank: int) -> tuple[int, int]:
    """The sides a ≤ b of LaX's tensor gate: a·b = rank, as near to each other as possible."""
    shorter = next(width for width in range(math.isqrt(rank), 0, -1) if rank % width == 0)
    return shorter, rank // shorter
