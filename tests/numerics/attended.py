"""Calls attention over context parallel ranks as a block does."""

import torch

from boost_core.context.attention import ContextAttention


def attended(attention: ContextAttention, *inputs: torch.Tensor) -> torch.Tensor:
    """Attention of this rank's queries, keys and values, in one layer."""
    layer = attention.for_layer()
    return layer.finish(layer.start(*inputs))
