"""The seven projections of a decoder block, in four groups that each share an input; the same in all families."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from boost_core.config.model import ModelConfig


@dataclass(frozen=True)
class ProjectionGroup:
    """Projections of the same input.

    Attributes:
        name: Name of their module.
        published: Published name of each projection.
        wide_in: Input width.
        wide_outs: Output width of each projection; equal widths are adjacent.
        norm: Published name of the RMSNorm before them if they read the residual, otherwise ``None``.
    """

    name: str
    published: tuple[str, ...]
    wide_in: int
    wide_outs: tuple[int, ...]
    norm: str | None = None

    @property
    def runs(self) -> Sequence[range]:
        """The projections with each output width, which share a weight."""
        ends = accumulate((len(list(run)) for _, run in groupby(self.wide_outs)), initial=0)
        return [range(begin, end) for begin, end in pairwise(ends)]

    def products(self, grouped: bool) -> Sequence[range]:
        """The projections that each matrix product of the input computes.

        Args:
            grouped: Whether the projections share one product.
        """
        return [range(len(self.wide_outs))] if grouped else self._single

    def pieces(self, grouped: bool) -> Sequence[range]:
        """The projections, of equal width, in each batched product of latents with their up-projections."""
        return self.runs if grouped else self._single

    @property
    def _single(self) -> Sequence[range]:
        return [range(index, index + 1) for index in range(len(self.wide_outs))]


def projection_groups(model: ModelConfig) -> tuple[ProjectionGroup, ...]:
    """The projection groups of a block, in the order in which it computes them."""
    hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        ProjectionGroup("query_key_value", attention, hidden, (hidden, key_value, key_value), "input_layernorm"),
        ProjectionGroup("output", ("self_attn.o_proj",), hidden, (hidden,)),
        ProjectionGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), hidden, (mlp, mlp), "post_attention_layernorm"),
        ProjectionGroup("down", ("mlp.down_proj",), mlp, (hidden,)),
    )
