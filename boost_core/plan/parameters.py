"""How many parameters a model has."""

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
    """Parameters in the matrices of one block: r (d_in + d_out) for each low-rank projection."""
    return sum(model.rank * (wide_in + wide_out) for wide_in, wide_out in projections(model).values())


def parameter_count(model: ModelConfig) -> int:
    """All trainable parameters: blocks with their two norms, embedding, untied head, final norm."""
    block = block_matrix_parameters(model) + 2 * model.hidden_size
    embedding_and_head = 2 * model.vocab_size * model.hidden_size
    return model.num_hidden_layers * block + embedding_and_head + model.hidden_size
