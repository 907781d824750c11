"""The loss on validation text."""

import torch

from boost_core.data.corpus import Corpus
from boost_core.data.sampler import validation_batches
from boost_core.train.state import TrainState
from boost_core.train.step import losses


@torch.no_grad()
def evaluate(state: TrainState, corpus: Corpus) -> tuple[float, int]:
    """Mean cross entropy over the evaluation set in nats a token, and the tokens it is over.

    The sum over tokens is divided by the number of tokens, so that a smaller last batch weighs what it is.
    """
    training, groups = state.spec.training, state.process_groups
    sums = torch.zeros(2, dtype=torch.float64, device=state.mesh.device)
    for sequences in validation_batches(
        corpus, training.sequence_length, training.evaluate_sequences, training.micro_batch_size,
        part=groups.data.rank, parts=groups.data.size,
    ):  # fmt: skip
        losses_T, counts_T = losses(state, sequences)
        if losses_T is not None:
            sums += torch.stack([(losses_T * counts_T).double().sum(), counts_T.double().sum()])
    for along in (groups.pipeline, groups.data):
        along.all_reduce_(sums, "evaluation")
    loss_sum, tokens = sums.tolist()
    return loss_sum / tokens, int(tokens)
