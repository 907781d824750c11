"""The Triton kernels: one program per token for the sums, blocks of a row for the gradient, fp32 arithmetic."""

import torch
import triton
import triton.language as tl

from boost_core.kernels.launch import block_of, rows, warps_of

LARGEST_ROW_BLOCK = 8192
LARGEST_BLOCK = 2048


@triton.jit
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


@triton.jit
def _logits_gradient(
    logits_ptr, target_ptr, log_sum_ptr, dloss_ptr, dlog_sum_ptr, stride, columns, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logits = tl.load(logits_ptr + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    probability = tl.exp(logits - tl.load(log_sum_ptr + row))
    of_target = tl.where(column == tl.load(target_ptr + row), tl.load(dloss_ptr + row), 0.0)
    gradient = probability * tl.load(dlog_sum_ptr + row) - of_target
    tl.store(logits_ptr + row * stride + column, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


def row_statistics(logits_cV: torch.Tensor, target_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same function as :func:`naive.row_statistics`; see the package for the arguments."""
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
    logits_cV: torch.Tensor,
    target_c: torch.Tensor,
    log_sum_c: torch.Tensor,
    dloss_c: torch.Tensor,
    dlog_sum_c: torch.Tensor,
) -> torch.Tensor:
    """The same function as :func:`naive.logits_gradient`, in place; see the package for the arguments."""
    logits_cV = rows(logits_cV)
    tokens, columns = logits_cV.shape
    block = min(block_of(columns), LARGEST_BLOCK)
    _logits_gradient[(tokens, triton.cdiv(columns, block))](
        logits_cV, target_c, log_sum_c.float(), dloss_c.float().contiguous(), dlog_sum_c.float().contiguous(),
        logits_cV.stride(0), columns, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return logits_cV
