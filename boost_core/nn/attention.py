"""Causal attention over the heads that are at hand, with rotary position embeddings.

Where positions see a sliding window alone (Longformer, arXiv 2004.05150), or documents that share a sequence are not to
see each other, a mask says who sees whom.

Shape suffixes: b sequences, s positions, h heads, e head size; g projections, T = b·s tokens, d = h·e.
"""

from copy import copy

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from boost_core.config.model import ModelConfig, RopeScalingConfig
from boost_core.kernels.rotary import rotary
from boost_core.nn.rope import rotary_frequencies


def causal_attention(parts: list[torch.Tensor], rotation: "Rotation", head_size: int) -> torch.Tensor:
    """Attention of each sequence to its own past.

    Args:
        parts: Queries, keys and values in this order, each a ``[g, T, d]`` of one or more of them, sequences one after
            the other; fewer heads in keys and values for grouped-query attention. Owned by this call.
        rotation: The rotary embedding; its length is the length of a sequence.
        head_size: Width of a head.

    Returns:
        ``[T, d]``.
    """
    turned = rotary(parts, *rotation.angles(parts[0].dtype))
    query_bhse, key_bhse, value_bhse = (
        x_Td.view(-1, rotation.sequence_length, x_Td.shape[-1] // head_size, head_size).transpose(1, 2)
        for x_Td in turned
    )
    sees = rotation.sees_b1ss
    out_bhse = scaled_dot_product_attention(
        query_bhse, key_bhse, value_bhse, attn_mask=sees, is_causal=sees is None, enable_gqa=True
    )
    return out_bhse.transpose(1, 2).flatten(2).flatten(0, 1)


def with_normed_heads(
    parts: list[torch.Tensor], query_scale_e: torch.Tensor, key_scale_e: torch.Tensor, epsilon: float
) -> list[torch.Tensor]:
    """Queries and keys with each head's normed (RMSNorm), and values as they are; ``parts`` as in ``causal_attention``.

    Scores then do not grow with the weights that queries and keys come from (arXiv 2302.05442).
    """
    query_Td, key_Td, value_Td = (member_Td for part_gTd in parts for member_Td in part_gTd)

    def normed(x_Td: torch.Tensor, scale_e: torch.Tensor) -> torch.Tensor:
        x_The = x_Td.reshape(len(x_Td), -1, len(scale_e))
        return rms_norm(x_The, (len(scale_e),), scale_e, epsilon).view(1, *x_Td.shape)

    return [normed(query_Td, query_scale_e), normed(key_Td, key_scale_e), value_Td.unsqueeze(0)]


class Rotation:
    """The angles of rotary position embeddings for positions 0 … s−1 (RoFormer, arXiv 2104.09864).

    Args:
        sequence_length: Number of positions s.
        head_size: Width of a head; even.
        theta: Base of the frequencies.
        device: Where the angles live.
        scaling: How the frequencies are scaled, if they are.
        window: How many positions each sees, itself included; ``None`` for all before it.

    Attributes:
        sees_b1ss: Which position sees which; b is 1 where all sequences share it. ``None``: each sees all before it.
    """

    def __init__(
        self,
        sequence_length: int,
        head_size: int,
        theta: float,
        device: torch.device,
        scaling: RopeScalingConfig | None = None,
        window: int | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        frequency_e = rotary_frequencies(head_size, theta, scaling, device)
        angle_se = torch.outer(torch.arange(sequence_length, dtype=torch.float64, device=device), frequency_e)
        growth = 1.0 if scaling is None else scaling.attention
        self._cosine_se, self._sine_se = growth * angle_se.cos(), growth * angle_se.sin()
        self.sees_b1ss: torch.Tensor | None = None
        if window is not None and window < sequence_length:
            sees_ss = torch.ones(sequence_length, sequence_length, dtype=torch.bool, device=device)
            self.sees_b1ss = sees_ss.tril().triu(1 - window)[None, None]
        self._cast: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    @classmethod
    def of(cls, model: ModelConfig, sequence_length: int, device: torch.device) -> "Rotation":
        """That of a model."""
        return cls(sequence_length, model.head_size, model.rope_theta, device, model.rope_scaling, model.sliding_window)

    def with_document_mask(self, document_T: torch.Tensor | None) -> "Rotation":
        """The same for tokens that see none but those of their own document, by its number; ``None``: all see all.

        Positions go on across documents: rotary embeddings see differences of positions alone.
        """
        if document_T is None:
            return self
        document_bs = document_T.view(-1, self.sequence_length)
        among = copy(self)
        own_b1ss = (document_bs.unsqueeze(1) == document_bs.unsqueeze(2)).tril().unsqueeze(1)
        among.sees_b1ss = own_b1ss if self.sees_b1ss is None else own_b1ss & self.sees_b1ss
        return among

    def splits(self, count: int) -> list["Rotation"]:
        """The same for each of equal splits of the sequences."""
        if self.sees_b1ss is None or len(self.sees_b1ss) == 1:
            return [self] * count
        splits = [copy(self) for _ in range(count)]
        for split, sees_b1ss in zip(splits, self.sees_b1ss.chunk(count), strict=True):
            split.sees_b1ss = sees_b1ss
        return splits

    def angles(self, compute_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, ``[s, e/2]``, in at least fp32."""
        dtype = torch.promote_types(compute_type, torch.float32)
        if dtype not in self._cast:
            self._cast[dtype] = (self._cosine_se.to(dtype), self._sine_se.to(dtype))
        return self._cast[dtype]
