"""The dense baseline: a LLaMA block with full-rank projections. Shape suffixes: T tokens, d hidden, f MLP."""

import torch
from torch import nn
from torch.nn.functional import silu

from boost_core.config import ModelConfig
from boost_core.nn.attention import Rotation, causal_attention
from boost_core.nn.dense import DenseIn, DenseOut
from boost_core.nn.strategy import DenseStrategy


class DenseBlock(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(silu(G(norm(x))) ∘ U(norm(x)))."""

    def __init__(self, model: ModelConfig, strategy: DenseStrategy) -> None:
        super().__init__()
        hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
        self.head_size, self.gated_by_silu = model.head_size, model.gated_by_silu
        self.query_key_value = DenseIn(hidden, (hidden, key_value, key_value), model.norm_epsilon, strategy)
        self.output = DenseOut(hidden, hidden, strategy)
        self.gate_up = DenseIn(hidden, (mlp, mlp), model.norm_epsilon, strategy)
        self.down = DenseOut(mlp, hidden, strategy)

    def forward(self, x_Td: torch.Tensor, rotation: Rotation, carried: None) -> tuple[torch.Tensor, None]:
        """The block's ``[T, d]`` to ``[T, d]``; nothing is carried."""
        query_Td, key_Td, value_Td = self.query_key_value(x_Td)
        x_Td = x_Td + self.output(causal_attention(query_Td, key_Td, value_Td, rotation, self.head_size))
        gate_Tf, up_Tf = self.gate_up(x_Td)
        gate_Tf = silu(gate_Tf) if self.gated_by_silu else gate_Tf
        return x_Td + self.down(gate_Tf * up_Tf), carried
