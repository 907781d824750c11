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

from __future__ import annotations

import torch

from boost_core.kernels.launch import block_of, jit, precise, rows, runs_on_triton, tl, triton, warps_of

LARGEST_ROW_BLOCK = 8192
LARGEST_BLOCK = 2048


def row_statistics(logits_cV: torch.Tensor, target_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp of each row and the logit of its target, ``[c]`` each, at least fp32.

    Args:
        logits_cV: This rank's logits.
        target_c: Target ids relative to this rank's first; one outside ``0 … V − 1`` belongs to another rank, and its
            logit is 0.
    """
    if not runs_on_triton(logits_cV):  # the reference
        logits_cV, width = precise(logits_cV), logits_cV.shape[1]
        is_local_c1 = ((target_c >= 0) & (target_c < width)).unsqueeze(-1)
        target_logit_c1 = logits_cV.gather(-1, target_c.clamp(0, width - 1).unsqueeze(-1)) * is_local_c1
        return logits_cV.logsumexp(dim=-1), target_logit_c1.squeeze(-1)
    logits_cV = rows(logits_cV)
    tokens, columns = logits_cV.shape
    log_sum_c, target_logit_c = (torch.empty(tokens, dtype=torch.float32, device=logits_cV.device) for _ in range(2))
    block = min(block_of(columns), LARGEST_ROW_BLOCK)
    _row_statistics[(tokens,)](
        logits_cV, target_c, log_sum_c, target_logit_c, logits_cV.stride(0), columns, BLOCK=block,
        num_warps=warps_of(block),
    )  # fmt: skip
    return log_sum_c, target_logit_c


def logits_gradient(
    logits_cV: torch.Tensor, target_c: torch.Tensor, log_sum_c: torch.Tensor, dloss_c: torch.Tensor,
    dlog_sum_c: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the logits' gradient in their own type, possibly in their own memory.

    Args:
        logits_cV: This rank's logits.
        target_c: As in ``row_statistics``.
        log_sum_c: The log-sum-exp over all ranks.
        dloss_c: Gradient of each token's loss.
        dlog_sum_c: Gradient of each token's log-sum-exp.
    """
    if not runs_on_triton(logits_cV):  # the reference
        gradient_cV = (precise(logits_cV) - log_sum_c.unsqueeze(-1)).exp_().mul_(dlog_sum_c.unsqueeze(-1))
        width = logits_cV.shape[1]
        index_c1 = target_c.clamp(0, width - 1).unsqueeze(-1)  # those of other ranks change nothing
        is_local_c1 = ((target_c >= 0) & (target_c < width)).unsqueeze(-1)
        gradient_cV.scatter_add_(-1, index_c1, -(is_local_c1 * dloss_c.unsqueeze(-1)).to(gradient_cV.dtype))
        return gradient_cV.to(logits_cV.dtype)
    logits_cV = rows(logits_cV)
    tokens, columns = logits_cV.shape
    block = min(block_of(columns), LARGEST_BLOCK)
    _gradient[(tokens, triton.cdiv(columns, block))](
        logits_cV, target_c, log_sum_c.float(), dloss_c.float().contiguous(), dlog_sum_c.float().contiguous(),
        logits_cV.stride(0), columns, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return logits_cV


# The Triton kernels: one program per token for the sums, blocks of a row for the gradient, fp32 arithmetic.


@jit
def _row_statistics(logits_ptr, target_ptr, log_sum_ptr, target_logit_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.full([], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * stride + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        # One maximum for the whole block: one exponential per element.
        larger = tl.maximum(maximum, tl.max(logits, axis=0))
        sums = sums * tl.exp(maximum - larger) + tl.exp(logits - larger)
        maximum = larger
    tl.store(log_sum_ptr + row, maximum + tl.log(tl.sum(sums, axis=0)))
    target = tl.load(target_ptr + row)
    here = (target >= 0) & (target < columns)
    target_logit = tl.load(logits_ptr + row * stride + target, mask=here, other=0.0)
    tl.store(target_logit_ptr + row, target_logit.to(tl.float32))


@jit
def _gradient(logits_ptr, target_ptr, log_sum_ptr, dloss_ptr, dlog_sum_ptr, stride, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logits = tl.load(logits_ptr + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    probability = tl.exp(logits - tl.load(log_sum_ptr + row))
    of_target = tl.where(column == tl.load(target_ptr + row), tl.load(dloss_ptr + row), 0.0)
    gradient = probability * tl.load(dlog_sum_ptr + row) - of_target
    tl.store(logits_ptr + row * stride + column, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
