"""CoLA: every projection of a LLaMA block becomes z = silu(x A), y = z B (arXiv 2502.10940).

Shape suffixes: T tokens, d hidden, f MLP.
"""

import torch
from torch import nn
from torch.nn.functional import silu

from boost_core.config import ModelConfig
from boost_core.nn.attention import Rotation, causal_attention
from boost_core.nn.bottleneck import Bottleneck
from boost_core.nn.embedding import TokenEmbedding
from boost_core.nn.head import HeadAndLoss
from boost_core.nn.strategy import Strategy


class ColaBlock(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(G(norm(x)) ∘ U(norm(x)))."""

    def __init__(self, model: ModelConfig, strategy: Strategy) -> None:
        super().__init__()
        hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
        self.head_size, self.gate_activation = model.head_size, model.gate_activation

        def project(wide_in: int, *wide_outs: int, norm: bool) -> Bottleneck:
            epsilon = model.norm_epsilon if norm else None
            return Bottleneck(wide_in, wide_outs, model.rank, True, epsilon, strategy)

        self.query_key_value = project(hidden, hidden, key_value, key_value, norm=True)
        self.output = project(hidden, hidden, norm=False)
        self.gate_up = project(hidden, mlp, mlp, norm=True)
        self.down = project(mlp, hidden, norm=False)

    def forward(self, x_Td: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The block's ``[T, d]`` to ``[T, d]``."""
        query_Td, key_Td, value_Td = self.query_key_value(x_Td)
        (attended_Td,) = self.output(causal_attention(query_Td, key_Td, value_Td, rotation, self.head_size))
        x_Td = x_Td + attended_Td
        gate_Tf, up_Tf = self.gate_up(x_Td)
        gate_Tf = silu(gate_Tf) if self.gate_activation else gate_Tf
        (mlp_Td,) = self.down(gate_Tf * up_Tf)
        out_Td: torch.Tensor = x_Td + mlp_Td
        return out_Td


class ColaModel(nn.Module):
    """Embedding, blocks, head and loss."""

    def __init__(self, model: ModelConfig, strategy: Strategy) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(model.vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(ColaBlock(model, strategy) for _ in range(model.num_hidden_layers))
        self.head = HeadAndLoss(model.vocab_size, model.hidden_size, model.norm_epsilon, strategy)

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``; sequences of ``rotation.sequence_length`` one after the other."""
        x_Td = self.embedding(token_T)
        for block in self.blocks:
            x_Td = block(x_Td, rotation)
        loss_T: torch.Tensor = self.head(x_Td, target_T)
        return loss_T
