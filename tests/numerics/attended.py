"""Calls attention over context parallel ranks as a block does."""

from collections.abc import Sequence

import torch

from boost_core.context.attention import ContextAttention, LayerAttention
from boost_core.context.exchange import HeadMaker


def attended(attention: ContextAttention, *inputs: torch.Tensor) -> torch.Tensor:
    """Attention of this rank's queries, keys and values, in one layer."""
    layer = attention.for_layer()
    return layer.finish(started(layer, *inputs))


def started(
    layer: LayerAttention, *inputs: torch.Tensor, maker: HeadMaker | None = None, latents: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Start to exchange keys; returns the queries for ``finish``."""
    query, keys = layer.save(*inputs, None, maker, *latents)
    with torch.no_grad():
        layer.in_flight = layer.attention.send(keys, backward=False)
    return query
