"""Validation loss."""

import math
from collections.abc import Callable

import torch

from boost_core.data.sampler import EvaluationSet
from boost_core.messages.reports import ValidationLoss
from boost_core.train.state import TrainState
from boost_core.train.step import losses


@torch.no_grad()
def evaluate(state: TrainState, on: EvaluationSet, refuse_aborted: Callable[[], None] = lambda: None) -> ValidationLoss:
    """Compute the loss on a set. All ranks call it and get the same result.

    The sum over tokens is divided by the number of tokens, so that a smaller last batch has its proper weight.

    Args:
        state: The model.
        on: The set.
        refuse_aborted: Called once the sums are there, before they are used.
    """
    replicas = state.process_groups.replicas
    sums = torch.zeros(2, dtype=torch.float64, device=state.mesh.device)
    for sequences in on.batches(state.spec.training.micro_batch_size, replicas.rank, replicas.size):
        losses_T, counts_T = losses(state, sequences)
        if losses_T is not None:
            sums += torch.stack([(losses_T * counts_T).double().sum(), counts_T.double().sum()])
    for along in (state.process_groups.pipeline, replicas):
        along.all_reduce_(sums, "evaluation")
    loss_sum, tokens = sums.tolist()
    refuse_aborted()
    loss, each = loss_sum / tokens, on.bytes_per_token
    return ValidationLoss(
        loss=loss, tokens=int(tokens), bits_per_byte=None if each is None else loss / math.log(2) / each
    )
