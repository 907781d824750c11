"""The seven projections of a decoder block, in four groups of one input each; the same in all families."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from boost_core.config.model import ModelConfig


@dataclass(frozen=True)
class ProjectionGroup:
    """Projections of one input.

    Attributes:
        name: Of their module.
        published: Published name of each.
        wide_in: Input width.
        wide_outs: Output width of each; equal ones stand next to each other.
        norm: Published name of the RMSNorm in front of them, where their input is the residual; else ``None``.
    """

    name: str
    published: tuple[str, ...]
    wide_in: int
    wide_outs: tuple[int, ...]
    norm: str | None = None

    @property
    def runs(self) -> Sequence[range]:
        """The projections of each output width, which share a weight."""
        ends = accumulate((len(list(run)) for _, run in groupby(self.wide_outs)), initial=0)
        return [range(begin, end) for begin, end in pairwise(ends)]

    def products(self, grouped: bool) -> Sequence[range]:
        """The projections of each matrix product out of the input.

        Args:
            grouped: Whether projections share products.
        """
        return [range(len(self.wide_outs))] if grouped else self._single

    def pieces(self, grouped: bool) -> Sequence[range]:
        """The projections of each batched product of latents with their up-projections, which have one width."""
        return self.runs if grouped else self._single

    @property
    def _single(self) -> Sequence[range]:
        return [range(index, index + 1) for index in range(len(self.wide_outs))]


def projection_groups(model: ModelConfig) -> tuple[ProjectionGroup, ...]:
    """Those of a block, in the order in which it computes them."""
    hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        ProjectionGroup("query_key_value", attention, hidden, (hidden, key_value, key_value), "input_layernorm"),
        ProjectionGroup("output", ("self_attn.o_proj",), hidden, (hidden,)),
        ProjectionGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), hidden, (mlp, mlp), "post_attention_layernorm"),
        ProjectionGroup("down", ("mlp.down_proj",), mlp, (hidden,)),
    )
