"""The head and the loss with a split vocabulary, the same under every strategy.

Logits are computed for a few tokens at a time, forward and again backward, so that all T × V never exist at once.
Shape suffixes: T tokens, d hidden, V this rank's part of the vocabulary, c tokens of a chunk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from boost_core.kernels.cross_entropy import logits_gradient, row_statistics
from boost_core.kernels.launch import precise
from boost_core.parallel.btp import GradientSinks
from boost_core.parallel.communicator import Communicator

# Logits of a chunk are about this many elements: 256 MiB in fp32.
CHUNK_ELEMENTS = 1 << 26


class _HeadLoss(torch.autograd.Function):
    """Loss of token t: m − x_t·w_target with m = log Σ_v exp(x_t·w_v). Of the logits only m is saved.

    The gradient is that of loss + ζ m²; the z-loss, ζ m², keeps logits from drifting (PaLM, arXiv 2204.02311).
    """

    @staticmethod
    def forward(
        ctx: Any, x_Td: torch.Tensor, head_dV: torch.Tensor, target_T: torch.Tensor, communicator: Communicator,
        chunk: int, z_loss: float, add_product: Callable[[torch.Tensor, torch.Tensor], None] | None,
    ) -> torch.Tensor:  # fmt: skip
        local_T = target_T - communicator.rank * head_dV.shape[1]
        pieces = zip(torch.split(x_Td, chunk), torch.split(local_T, chunk), strict=True)
        statistics = [row_statistics(x_cd @ head_dV, local_c) for x_cd, local_c in pieces]
        local_sum_T, local_logit_T = (torch.cat(parts) for parts in zip(*statistics, strict=True))
        maximum_T = communicator.all_reduce_(local_sum_T.clone(), "loss maximum", dist.ReduceOp.MAX)
        sums_2T = torch.stack([(local_sum_T - maximum_T).exp(), local_logit_T])
        sum_T, target_logit_T = communicator.all_reduce_(sums_2T, "loss sums")
        log_sum_T = maximum_T + sum_T.log()
        ctx.save_for_backward(x_Td, head_dV, local_T, log_sum_T)
        ctx.chunk, ctx.z_loss, ctx.add_product = chunk, z_loss, add_product
        loss_T: torch.Tensor = log_sum_T - target_logit_T
        return loss_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_Td, head_dV, local_T, log_sum_T = ctx.saved_tensors
        dloss_T = gradients[0]
        dlog_sum_T = dloss_T * (1 + 2 * ctx.z_loss * log_sum_T)
        dx_Td, dhead_dV = torch.empty_like(x_Td), None
        for begin in range(0, len(x_Td), ctx.chunk):
            at = slice(begin, begin + ctx.chunk)
            x_cd = x_Td[at]
            dlogits_cV = logits_gradient(x_cd @ head_dV, local_T[at], log_sum_T[at], dloss_T[at], dlog_sum_T[at])
            torch.mm(dlogits_cV, head_dV.T, out=dx_Td[at])
            if ctx.add_product is not None:
                ctx.add_product(x_cd, dlogits_cV)
            elif dhead_dV is None:
                dhead_dV = precise(x_cd.T @ dlogits_cV)
            else:
                dhead_dV += x_cd.T @ dlogits_cV
        return dx_Td, None if dhead_dV is None else dhead_dV.to(head_dV.dtype), None, None, None, None, None


def token_losses(
    communicator: Communicator, x_Td: torch.Tensor, head_dV: torch.Tensor, target_T: torch.Tensor, z_loss: float,
    sinks: GradientSinks | None = None,
) -> torch.Tensor:  # fmt: skip
    """Cross entropy of each token, ``[T]`` in nats and at least fp32, the same on all ranks.

    The z-loss affects only the gradient, so that losses are comparable whatever the z-loss is.

    Args:
        communicator: The tensor parallel group, over which the vocabulary is split.
        x_Td: Whole normed hidden vectors; their gradient is this rank's part of it.
        head_dV: This rank's columns of the head.
        target_T: Token ids over the whole vocabulary.
        z_loss: ζ, the weight of the z-loss.
        sinks: Where the head's gradient goes if it is a parameter; ``None``: to autograd.
    """
    chunk, add_product = max(1, CHUNK_ELEMENTS // head_dV.shape[1]), None
    if sinks is not None:  # autograd, which would wait for a gradient of its own, does not see the head
        add_product = partial(sinks.add_product, weight=head_dV, scale=None)
        head_dV = head_dV.detach()
    return _HeadLoss.apply(x_Td, head_dV, target_T, communicator, chunk, z_loss, add_product)  # type: ignore[no-any-return, no-untyped-call]


def likeliest_tokens(communicator: Communicator, x_Td: torch.Tensor, head_dV: torch.Tensor) -> torch.Tensor:
    """The most likely token after each, ``[T]``, the same on all ranks; among equal logits, the first.

    Args:
        communicator: The tensor parallel group, over which the vocabulary is split.
        x_Td: Whole normed hidden vectors.
        head_dV: This rank's columns of the head.
    """
    columns = head_dV.shape[1]
    largest = [(x_cd @ head_dV).max(dim=1) for x_cd in torch.split(x_Td, max(1, CHUNK_ELEMENTS // columns))]
    logit_T = torch.cat([values for values, _ in largest]).float()
    token_T = torch.cat([places for _, places in largest]) + communicator.rank * columns
    maximum_T = communicator.all_reduce_(logit_T.clone(), "likeliest logit", dist.ReduceOp.MAX)
    token_T = token_T.where(logit_T == maximum_T, communicator.size * columns)
    communicator.all_reduce_(token_T, "likeliest token", dist.ReduceOp.MIN)
    return token_T.clamp_(max=communicator.size * columns - 1)  # where no logit is a number, none is the largest
