"""Low-rank bottleneck projections: z = act(norm(x) A), y = z B.

Shape suffixes: T tokens, d input width, r rank, g projections of one input, f output width.
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
    """One or more bottleneck projections of one input: ``open``, ``send``, ``close``.

    All but the exchange that ``send`` starts is local to a rank.

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
        rank, count = config.rank, len(wide_outs)
        self.count = count
        stds = [cola_std(rank, wide_in, wide_out) for wide_out in wide_outs]
        self.declare_normal("down", (wide_in, count, rank), Role.DOWN_PROJECTION, *stds, group_axis=1)
        for index, (width, members) in enumerate(self.widths):
            std = cola_std(rank, wide_in, width)
            self.declare_normal(f"up_{index}", (members, rank, width), Role.UP_PROJECTION, std)
        if norm_epsilon is not None:
            self.declare_constant("scale", (wide_in,), Role.NORM_SCALE, 1.0)

    def open(self, x_Td: torch.Tensor) -> list[Latents]:
        """``[T, d_in]`` to this rank's part of the latents, one for each exchange."""
        down_dgr, norm = self.get_parameter("down"), self._norm()
        groups = [down_dgr] if self.config.grouped else torch.split(down_dgr, 1, dim=1)
        return [self.config.strategy.partial_latents(x_Td, group_dgr, norm) for group_dgr in groups]

    def send(self, partials: list[Latents]) -> Callable[[], list[Latents]]:
        """Start the exchanges; the result waits for the whole latents."""
        norm = self._norm()
        received = [self.config.strategy.send(partial, norm) for partial in partials]
        return lambda: [receive() for receive in received]

    def close(self, whole: list[Latents], carried_Tgr: torch.Tensor | None) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Latents to one ``[T, d_out]`` a projection, and the latents ``[T, g, r]`` for a crossing to carry.

        Args:
            whole: What the exchanges gave.
            carried_Tgr: Latents of the same projections in the block before; ``None`` in the first block.
        """
        z_Tgr = self._latents(whole, carried_Tgr)
        outputs: list[torch.Tensor] = []
        for index, (_, members) in enumerate(self.widths):
            begin = len(outputs)
            z_gTr = z_Tgr[:, begin : begin + members].transpose(0, 1)
            outputs.extend(self._up(z_gTr, self.get_parameter(f"up_{index}")))
        return outputs, z_Tgr

    def _norm(self) -> NormWeights | None:
        if self.norm_epsilon is None:
            return None
        return NormWeights(self.get_parameter("scale"), self.wide_in, self.norm_epsilon)

    def _latents(self, whole: list[Latents], carried_Tgr: torch.Tensor | None) -> torch.Tensor:
        # With a crossing, the activation waits until the other latent is there.
        activation = self.config.activation and self.crossing is None
        latents = [latent_epilogue(*each, self.wide_in, self.norm_epsilon or 0.0, activation) for each in whole]
        h_Tr = latents[0] if len(latents) == 1 else torch.cat(latents, dim=1)
        h_Tgr = h_Tr.view(len(h_Tr), self.count, -1)
        if self.crossing is None:
            return h_Tgr
        z_Tgr: torch.Tensor = self.crossing(h_Tgr, carried_Tgr, self.config.activation)
        return z_Tgr

    def _up(self, z_gTr: torch.Tensor, up_grf: torch.Tensor) -> list[torch.Tensor]:
        if self.config.grouped:
            return list(self.config.strategy.up(z_gTr, up_grf))
        pairs = zip(torch.split(z_gTr, 1), torch.split(up_grf, 1), strict=True)
        return [self.config.strategy.up(z_1Tr, up_1rf)[0] for z_1Tr, up_1rf in pairs]
