"""Calls attention over context parallel ranks as a block does."""

import torch

from boost_core.context.attention import ContextAttention, LayerAttention
from boost_core.context.exchange import QueryLatents


def attended(attention: ContextAttention, *inputs: torch.Tensor) -> torch.Tensor:
    """Attention of this rank's queries, keys and values, in one layer."""
    layer = attention.for_layer()
    return layer.finish(started(layer, *inputs))


def started(layer: LayerAttention, *inputs: torch.Tensor, of_queries: QueryLatents | None = None) -> torch.Tensor:
    """Start to exchange keys; returns the queries for ``finish``."""
    maker, latents = (of_queries.maker, [of_queries.of_queries]) if of_queries else (None, [])
    query, keys = layer.save(*inputs, None, maker, *latents)
    with torch.no_grad():
        layer.in_flight = layer.attention.send(query, keys, backward=False)
    return query
