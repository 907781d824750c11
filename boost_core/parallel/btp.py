"""Bottleneck-aware tensor parallelism (BOOST, arXiv 2512.12131): shard the wide axes, exchange the narrow latents.

The residual stream is sharded along the hidden size from the embedding to the head. A is sharded along its
rows, so that each rank's product is a partial sum of the latent; B along its columns, so that each rank gets
its own shard of the wide output. One all-reduce a latent is all that a block exchanges.
"""

import torch

from boost_core.nn.weights import Role
from boost_core.parallel.collectives import Collectives, gather, share, sum_partials
from boost_core.parallel.cross_entropy import vocabulary_parallel_cross_entropy

# The axis along which a weight is split over the tensor parallel ranks.
SHARDED_AXIS = {
    Role.EMBEDDING: 1,
    Role.DOWN_PROJECTION: 0,
    Role.UP_PROJECTION: 1,
    Role.NORM_SCALE: 0,
    Role.HEAD: 1,
}


class BottleneckTensorParallel:
    """The ``Strategy`` of BTP over one tensor parallel group; on a group of one it exchanges nothing."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def reduce_latent(
        self, partial_Tr: torch.Tensor, squares_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One all-reduce; the sums of squares are one more column of its payload, in the latent's type.

        In bf16 that rounds the statistic, which costs less accuracy than normalising each shard would
        (``docs/concepts.md``), and saves the second, latency-bound all-reduce.
        """
        if squares_T is None:
            return sum_partials(partial_Tr, self._collectives, "latent"), None
        if self._collectives.size == 1:
            return partial_Tr, squares_T
        column_T1 = squares_T.to(partial_Tr.dtype).unsqueeze(-1)
        payload = sum_partials(torch.cat((partial_Tr, column_T1), dim=-1), self._collectives, "latent")
        return payload[:, :-1], payload[:, -1]

    def share_latent(self, z_Tr: torch.Tensor) -> torch.Tensor:
        """Nothing forward; backward, the all-reduce of the latent's gradient."""
        return share(z_Tr, self._collectives, "latent")

    def gather_hidden(self, x_Td: torch.Tensor, squares_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One all-gather; each rank's sum of squares is one more column of its shard."""
        if self._collectives.size == 1:
            return x_Td, squares_T
        column_T1 = squares_T.to(x_Td.dtype).unsqueeze(-1)
        payload_pTc = gather(torch.cat((x_Td, column_T1), dim=-1), self._collectives, "hidden")
        whole_Td = payload_pTc[:, :, :-1].transpose(0, 1).reshape(x_Td.shape[0], -1)
        return whole_Td, payload_pTc[:, :, -1].to(squares_T.dtype).sum(dim=0)

    def cross_entropy(self, logits_TV: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        """Cross entropy over the vocabulary's shards."""
        return vocabulary_parallel_cross_entropy(logits_TV, target_T, self._collectives)
