"""The reference: plain torch."""

import torch


def row_statistics(logits_cV: torch.Tensor, target_c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and target's logit; see the package for the arguments."""
    logits_cV = _precise(logits_cV)
    index_c1, is_here_c1 = _places(target_c, logits_cV.shape[1])
    target_logit_c1 = logits_cV.gather(-1, index_c1) * is_here_c1
    return logits_cV.logsumexp(dim=-1), target_logit_c1.squeeze(-1)


def logits_gradient(
    logits_cV: torch.Tensor,
    target_c: torch.Tensor,
    log_sum_c: torch.Tensor,
    dloss_c: torch.Tensor,
    dlog_sum_c: torch.Tensor,
) -> torch.Tensor:
    """Softmax times the log-sum-exp's gradient, minus the loss's at the target; see the package for the arguments."""
    gradient_cV = (_precise(logits_cV) - log_sum_c.unsqueeze(-1)).exp_().mul_(dlog_sum_c.unsqueeze(-1))
    index_c1, is_here_c1 = _places(target_c, logits_cV.shape[1])
    gradient_cV.scatter_add_(-1, index_c1, -(is_here_c1 * dloss_c.unsqueeze(-1)).to(gradient_cV.dtype))
    return gradient_cV.to(logits_cV.dtype)


def _places(target_c: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return targets as an index, those of other ranks clamped, and which ones are local."""
    is_here_c = (target_c >= 0) & (target_c < width)
    return target_c.clamp(0, width - 1).unsqueeze(-1), is_here_c.unsqueeze(-1)


def _precise(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
