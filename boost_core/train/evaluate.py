"""The loss on held-out text."""

import torch

from boost_core.data.corpus import Tokens
from boost_core.data.sampler import held_out_batches
from boost_core.train.state import TrainState
from boost_core.train.step import losses


@torch.no_grad()
def evaluate(state: TrainState, held_out: Tokens) -> tuple[float, int]:
    """Mean cross entropy over the evaluation set in nats a token, and the tokens it is over.

    The sum over tokens is divided by the number of tokens, so that a smaller last batch weighs what it is.
    """
    training, ranks = state.spec.training, state.ranks
    sums = torch.zeros(2, dtype=torch.float64, device=state.mesh.device)
    for sequences in held_out_batches(
        held_out, training.sequence_length, training.evaluate_sequences, training.micro_batch_size,
        part=ranks.data.rank, parts=ranks.data.size,
    ):  # fmt: skip
        token_losses = losses(state, sequences)
        if token_losses is None:
            continue
        sums += torch.stack([token_losses.double().sum(), token_losses.new_tensor(token_losses.numel()).double()])
    for along in (ranks.pipeline, ranks.data):
        along.all_reduce_(sums, "evaluation")
    loss_sum, tokens = sums.tolist()
    return loss_sum / tokens, int(tokens)
