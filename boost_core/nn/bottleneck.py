"""Low-rank bottleneck projections: z = act(norm(x) A), y = z B.

Shape suffixes: T tokens, d input width, r rank, g projections of one input, c = g·r, f output width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from boost_core.kernels.latent_epilogue import latent_epilogue
from boost_core.nn.crossing import Crossing
from boost_core.nn.strategy import Latents, LowRankStrategy, NormWeights
from boost_core.nn.weights import Role, WeightedModule, equal_runs


def cola_std(rank: int, wide_in: int, wide_out: int) -> float:
    """CoLA's initial standard deviation of A and B, r^(-1/4) (d_in + d_out)^(-1/4) (arXiv 2502.10940)."""
    return float((rank * (wide_in + wide_out)) ** -0.25)


@dataclass(frozen=True)
class BottleneckConfig:
    """What all bottlenecks of a model have in common.

    Attributes:
        rank: Width r of each projection's latent.
        activation: Whether the latent passes a SiLU.
        grouped: Whether projections of one input share one matrix product and one exchange.
        strategy: Where latents are exchanged.
    """

    rank: int
    activation: bool
    grouped: bool
    strategy: LowRankStrategy


class Bottleneck(WeightedModule):
    """One or more bottleneck projections of one input: ``down_project``, ``start``, ``up_project``.

    All but the exchange that ``start`` starts is local to a rank.

    Args:
        config: What all bottlenecks have in common.
        wide_in: Input width d.
        wide_outs: Output width of each projection; equal ones stand next to each other.
        norm_epsilon: ε of the RMSNorm in front of the projections; ``None`` for no norm.
        crossing: LaX's latent crossing; ``None`` for none.
    """

    def __init__(
        self,
        config: BottleneckConfig,
        wide_in: int,
        wide_outs: tuple[int, ...],
        norm_epsilon: float | None,
        crossing: Crossing | None = None,
    ) -> None:
        super().__init__()
        self.config, self.wide_in, self.norm_epsilon, self.crossing = config, wide_in, norm_epsilon, crossing
        self.widths = equal_runs(wide_outs)
        self.pieces = _pieces(self.widths, config.grouped)
        rank, count = config.rank, len(wide_outs)
        self.count = count
        stds = [cola_std(rank, wide_in, wide_out) for wide_out in wide_outs]
        self.declare_normal("down", (wide_in, count, rank), Role.DOWN_PROJECTION, *stds, group_axis=1)
        for index, (width, members) in enumerate(self.widths):
            std = cola_std(rank, wide_in, width)
            self.declare_normal(f"up_{index}", (members, rank, width), Role.UP_PROJECTION, std)
        if norm_epsilon is not None:
            self.declare_constant("scale", (wide_in,), Role.NORM_SCALE, 1.0)

    def down_project(self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None) -> list[Latents]:
        """``[T, d_in]`` to this rank's part of the latents, one for each exchange.

        Args:
            x_Td: The input.
            squares_T: Its rows' sums of squares, where a norm precedes the projections and the residual has them.
        """
        down_dgr, norm = self.get_parameter("down"), self._norm()
        groups = [down_dgr] if self.config.grouped else torch.split(down_dgr, 1, dim=1)
        return [self.config.strategy.partial_latents(x_Td, squares_T, group_dgr, norm) for group_dgr in groups]

    def start(self, partials: list[Latents]) -> Callable[[], list[Latents]]:
        """Start the exchanges; the result waits for the whole latents."""
        norm = self._norm()
        started = [self.config.strategy.start(partial, norm) for partial in partials]
        return lambda: [wait() for wait in started]

    def up_project(
        self, whole: list[Latents], carried: list[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Latents to what the projections give.

        Args:
            whole: What the exchanges gave.
            carried: Latents of the same projections in the block before; ``None`` in the first block.

        Returns:
            The outputs, ``[g, T, d_out]`` for as many as are projected together, and their latents ``[g, T, r]``.
        """
        latents = [
            self._latents(piece, each, carried[index] if carried else None)
            for index, (piece, each) in enumerate(zip(self.pieces, self._split(whole), strict=True))
        ]
        outputs = [
            self.config.strategy.up(z_gTr, self.get_parameter(piece.up)[piece.members])
            for piece, z_gTr in zip(self.pieces, latents, strict=True)
        ]
        return outputs, latents

    def _norm(self) -> NormWeights | None:
        if self.norm_epsilon is None:
            return None
        return NormWeights(self.get_parameter("scale"), self.wide_in, self.norm_epsilon)

    def _split(self, whole: list[Latents]) -> list[Latents]:
        """What belongs to each piece of what the exchanges gave."""
        if len(whole) == len(self.pieces):
            return whole
        ((h_Tc, squares_T),) = whole
        rank = h_Tc.shape[1] // self.count  # a strategy may have left this rank a sliver of it
        columns = [piece.count * rank for piece in self.pieces]
        return [(part_Tc, squares_T) for part_Tc in torch.split(h_Tc, columns, dim=1)]

    def _latents(self, piece: "_Piece", latents: Latents, carried_gTr: torch.Tensor | None) -> torch.Tensor:
        epsilon, activation = self.norm_epsilon or 0.0, self.config.activation
        if self.crossing is None or carried_gTr is None:
            return latent_epilogue(*latents, piece.count, self.wide_in, epsilon, activation)
        z_gTr: torch.Tensor = self.crossing(latents, self.wide_in, epsilon, carried_gTr, piece.projections, activation)
        return z_gTr


@dataclass(frozen=True)
class _Piece:
    """Projections of one width whose up-projection is one batched product.

    Attributes:
        up: Name of the weight that holds their B.
        members: Which of it.
        projections: Which of all projections of the bottleneck.
    """

    up: str
    members: slice
    projections: slice

    @property
    def count(self) -> int:
        return len(range(self.projections.stop)[self.projections])


def _pieces(runs: list[tuple[int, int]], grouped: bool) -> list[_Piece]:
    pieces, begin = [], 0
    for index, (_, members) in enumerate(runs):
        size = members if grouped else 1
        for first in range(0, members, size):
            pieces.append(_Piece(f"up_{index}", slice(first, first + size), slice(begin, begin + size)))
            begin += size
    return pieces
