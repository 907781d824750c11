"""What queries have of the stages' attention so far, and what gradients there are so far.

Parts are combined by their log-sum-exps: with (o₁, l₁) and (o₂, l₂) of the same queries,

    l = log(e^l₁ + e^l₂),   o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂,

in at least fp32 and in a fixed order, so that runs on CPU are bit-identical; on a GPU, flash attention adds up its
gradient of queries in any order.

Shape suffixes: T tokens of queries, h heads, e head size; n tokens of a stage, m queries of a piece; s = 2, keys and
values.
"""

from dataclasses import dataclass

import torch

from boost_core.parallel.context.pieces import Attended, StageAttention
from boost_core.parallel.context.stage import Came


@dataclass
class AttentionSum:
    """Queries, and their attention so far.

    Attributes:
        query: The queries.
        out: The output so far, in fp32 at least.
        lse: Its log-sum-exps.
    """

    query: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def begin(cls, query_The: torch.Tensor) -> "AttentionSum":
        """Of no keys yet."""
        out_The = torch.zeros_like(query_The, dtype=torch.promote_types(query_The.dtype, torch.float32))
        return cls(query_The, out_The, out_The.new_full(out_The.shape[:2], -torch.inf))

    def attend(self, attention: StageAttention, came: Came) -> None:
        """Attend to the keys of a stage."""
        for part in attention.forward(self.query, *came.keys.unbind(1)):
            _merge(self.out, self.lse, part)


@dataclass
class GradientSum:
    """Queries, their attention, and its gradients.

    Attributes:
        query: The queries.
        dout: The gradient of the output.
        out: The output.
        lse: Its log-sum-exps.
        dquery: The gradient of the queries so far, in fp32 at least.
    """

    query: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dquery: torch.Tensor

    @classmethod
    def begin(
        cls, query_The: torch.Tensor, dout_The: torch.Tensor, out_The: torch.Tensor, lse_Th: torch.Tensor
    ) -> "GradientSum":
        """Zeros."""
        return cls(query_The, dout_The, out_The, lse_Th, torch.zeros_like(query_The, dtype=lse_Th.dtype))

    def add(self, attention: StageAttention, came: Came, dkeys_nsje: torch.Tensor) -> None:
        """Add a stage's gradients, of queries as well as keys and values."""
        inputs = self.dout, self.query, *came.keys.unbind(1), self.out, self.lse
        for piece, dquery_mhe, dkey_nje, dvalue_nje in attention.backward(*inputs):
            self.dquery[slice(*piece.queries)] += dquery_mhe
            dkeys_nsje[slice(*piece.keys), 0] += dkey_nje
            dkeys_nsje[slice(*piece.keys), 1] += dvalue_nje


def _merge(out_The: torch.Tensor, lse_Th: torch.Tensor, part: Attended) -> None:
    """Combine the attention of a piece's queries to its keys with their attention so far."""
    piece, part_mhe, part_lse_mh = part
    rows = slice(*piece.queries)
    whole_mh = torch.logaddexp(lse_Th[rows], part_lse_mh)
    out_The[rows] *= (lse_Th[rows] - whole_mh).exp().unsqueeze(-1)
    out_The[rows] += part_mhe * (part_lse_mh - whole_mh).exp().unsqueeze(-1)
    lse_Th[rows] = whole_mh
