"""Cross entropy over logits that are sharded along the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist

from boost_core.parallel.collectives import Collectives


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    """Loss of token t: log Σ_v exp(logit_tv) − logit_t,target; gradient: softmax − one-hot, both local."""

    @staticmethod
    def forward(ctx: Any, logits_Tv: torch.Tensor, target_T: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        shard = logits_Tv.shape[-1]
        local_target_T = target_T - collectives.rank * shard
        is_local_T = (local_target_T >= 0) & (local_target_T < shard)
        local_target_T = local_target_T.clamp(0, shard - 1)

        maximum_T = collectives.all_reduce_(logits_Tv.amax(dim=-1), "loss maximum", dist.ReduceOp.MAX)
        shifted_Tv = logits_Tv - maximum_T.unsqueeze(-1)
        target_logit_T = shifted_Tv.gather(-1, local_target_T.unsqueeze(-1)).squeeze(-1) * is_local_T
        exponent_Tv = shifted_Tv.exp_()
        # The normaliser and the target's logit travel together.
        sums_2T = torch.stack([exponent_Tv.sum(dim=-1), target_logit_T])
        normaliser_T, target_logit_T = collectives.all_reduce_(sums_2T, "loss sums")

        probability_Tv = exponent_Tv.div_(normaliser_T.unsqueeze(-1))
        ctx.save_for_backward(probability_Tv, local_target_T, is_local_T)
        loss_T: torch.Tensor = normaliser_T.log() - target_logit_T
        return loss_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probability_Tv, local_target_T, is_local_T = ctx.saved_tensors
        gradient_Tv = probability_Tv.clone()
        one_hot_T = is_local_T.to(gradient_Tv.dtype).unsqueeze(-1)
        gradient_Tv.scatter_add_(-1, local_target_T.unsqueeze(-1), -one_hot_T)
        return gradient_Tv.mul_(gradients[0].unsqueeze(-1)), None, None


def vocabulary_parallel_cross_entropy(
    logits_Tv: torch.Tensor, target_T: torch.Tensor, collectives: Collectives
) -> torch.Tensor:
    """Cross entropy of each token, ``[T]`` in nats and at least fp32, the same on all ranks.

    Args:
        logits_Tv: This rank's columns of the logits, ``[T, V/p]``.
        target_T: Token ids over the whole vocabulary, ``[T]``.
        collectives: The tensor parallel group.
    """
    precise_Tv = logits_Tv.to(torch.promote_types(logits_Tv.dtype, torch.float32))
    return _VocabularyParallelCrossEntropy.apply(precise_Tv, target_T, collectives)  # type: ignore[no-any-return, no-untyped-call]
