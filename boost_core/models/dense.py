"""The dense baseline: a LLaMA block with full-rank projections. Shape suffixes: T tokens, d hidden, f MLP."""

from torch import nn

from boost_core.config import ModelConfig
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.residual_add import Residual
from boost_core.nn.attention import Rotation, causal_attention
from boost_core.nn.dense import DenseIn, DenseOut
from boost_core.nn.strategy import DenseStrategy


class DenseBlock(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(silu(G(norm(x))) ∘ U(norm(x)))."""

    def __init__(self, model: ModelConfig, strategy: DenseStrategy) -> None:
        super().__init__()
        hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
        self.strategy, self.head_size, self.gated_by_silu = strategy, model.head_size, model.gated_by_silu
        self.query_key_value = DenseIn(hidden, (hidden, key_value, key_value), model.norm_epsilon, strategy)
        self.output = DenseOut(hidden, hidden, strategy)
        self.gate_up = DenseIn(hidden, (mlp, mlp), model.norm_epsilon, strategy)
        self.down = DenseOut(mlp, hidden, strategy)

    def forward(self, residual: Residual, rotation: Rotation, carried: None) -> tuple[Residual, None]:
        """The residual stream through the block; nothing is carried."""
        attended_Td = causal_attention(self.query_key_value(residual.inputs), rotation, self.head_size)
        residual = self.strategy.add(residual.stream, self.output(attended_Td))
        gated_Tf = gated_product(self.gate_up(residual.inputs), self.gated_by_silu)
        return self.strategy.add(residual.stream, self.down(gated_Tf)), carried
