"""Causal attention over the heads that are at hand, with rotary position embeddings.

Shape suffixes: b sequences, s positions, h heads, e head size; T = b·s tokens.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(
    query_Td: torch.Tensor, key_Td: torch.Tensor, value_Td: torch.Tensor, rotation: "Rotation", head_size: int
) -> torch.Tensor:
    """Attention of each sequence to its own past.

    Args:
        query_Td: ``[T, heads · head_size]``, sequences one after the other.
        key_Td: ``[T, key_value_heads · head_size]``; fewer heads than queries for grouped-query attention.
        value_Td: Like ``key_Td``.
        rotation: The rotary embedding; its length is the length of a sequence.
        head_size: Width of a head.

    Returns:
        ``[T, heads · head_size]``.
    """
    query_bhse, key_bhse, value_bhse = (
        x_Td.view(-1, rotation.sequence_length, x_Td.shape[-1] // head_size, head_size).transpose(1, 2)
        for x_Td in (query_Td, key_Td, value_Td)
    )
    out_bhse = scaled_dot_product_attention(
        rotation(query_bhse), rotation(key_bhse), value_bhse, is_causal=True, enable_gqa=True
    )
    return out_bhse.transpose(1, 2).reshape(query_Td.shape)


class Rotation:
    """Rotary position embedding for positions 0 … s−1 (RoFormer, arXiv 2104.09864), half-split as in LLaMA.

    Args:
        sequence_length: Number of positions s.
        head_size: Width of a head; even.
        theta: Base of the frequencies.
        device: Where the angles live.
    """

    def __init__(self, sequence_length: int, head_size: int, theta: float, device: torch.device) -> None:
        self.sequence_length = sequence_length
        # In float64, so that the angles of far positions keep their bits whatever the compute type is.
        frequency_e = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size)
        angle_se = torch.outer(torch.arange(sequence_length, dtype=torch.float64, device=device), frequency_e)
        self._cosine_se = angle_se.cos().repeat(1, 2)
        self._sine_se = angle_se.sin().repeat(1, 2)
        self._cast: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x_bhse: torch.Tensor) -> torch.Tensor:
        """Turn each pair (i, i + e/2) of a head by its position's angle."""
        cosine_se, sine_se = self._angles(torch.promote_types(x_bhse.dtype, torch.float32))
        first, second = x_bhse.chunk(2, dim=-1)
        turned_bhse = torch.cat((-second, first), dim=-1)
        return (x_bhse * cosine_se + turned_bhse * sine_se).to(x_bhse.dtype)

    def _angles(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if dtype not in self._cast:
            self._cast[dtype] = (self._cosine_se.to(dtype), self._sine_se.to(dtype))
        return self._cast[dtype]
