"""Cross entropy over a vocabulary of which this rank has a part, for a chunk of tokens at a time.

With ``l`` a chunk of logits and ``t`` the target::

    m = log Σ_v exp(l_v)  over this rank's part,     l_t  where this rank has it
    loss = log Σ_ranks exp(m) − l_t
    dl = exp(l − log Σ_v exp(l)) dlog_sum − [v = t] dloss

For the loss alone dlog_sum equals dloss; a term in the log-sum-exp itself, such as the z-loss, makes them differ.

Each pass reads the logits once, in the type that the matrix product returned; the second overwrites them with their
gradient, which the next two products read. (The chunks are those of Liger-Kernel's fused linear cross entropy, arXiv
2410.10989; the split over ranks is Megatron-LM's, arXiv 1909.08053.) Shape suffixes: c tokens of a chunk, V this rank's
part of the vocabulary.
"""

import torch

from boost_core.kernels.cross_entropy import naive
from boost_core.kernels.dispatch import runs_on_triton


def row_statistics(logits_cV: torch.Tensor, target_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each row and the logit of its target, ``[c]`` each, at least fp32.

    Args:
        logits_cV: This rank's logits.
        target_c: Target ids relative to this rank's first; one outside ``0 … V − 1`` belongs to another rank, and its
            logit is 0.
    """
    if runs_on_triton(logits_cV):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.cross_entropy import triton

        return triton.row_statistics(logits_cV, target_c)
    return naive.row_statistics(logits_cV, target_c)


def logits_gradient(
    logits_cV: torch.Tensor,
    target_c: torch.Tensor,
    log_sum_c: torch.Tensor,
    dloss_c: torch.Tensor,
    dlog_sum_c: torch.Tensor,
) -> torch.Tensor:
    """Return the logits' gradient in their own type, possibly in their own memory.

    Args:
        logits_cV: This rank's logits.
        target_c: As in ``row_statistics``.
        log_sum_c: The log-sum-exp over all ranks.
        dloss_c: Gradient of each token's loss.
        dlog_sum_c: Gradient of each token's log-sum-exp.
    """
    if runs_on_triton(logits_cV):
        from boost_core.kernels.cross_entropy import triton

        return triton.logits_gradient(logits_cV, target_c, log_sum_c, dloss_c, dlog_sum_c)
    return naive.logits_gradient(logits_cV, target_c, log_sum_c, dloss_c, dlog_sum_c)
