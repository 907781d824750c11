"""Low-rank bottleneck projections: z = act(norm(x) A), y = z B.

Shape suffixes: T tokens, d input width, r rank, g projections of a common input, c = g·r, f output width.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from boost_core.architecture import ProjectionGroup, WeightSpec, crossing_weights, group_weights, reads_input
from boost_core.config.model import Activation, ModelConfig
from boost_core.kernels.latent_crossing import latent_crossing
from boost_core.kernels.latent_epilogue import latent_epilogue, made_of
from boost_core.kernels.symmetric_sum import Epilogue
from boost_core.model.strategy import DenseStrategy, Latents, LowRankStrategy, NormWeights, SharedLatents

# Modules declare their weights by full shape and role; a strategy decides which part of them a rank holds.


class WeightedModule(nn.Module):
    """A module that declares its weights; they are on the meta device until a strategy creates them."""

    def __init__(self, weights: Mapping[str, WeightSpec]) -> None:
        super().__init__()
        self.weight_specs = weights
        for name, spec in weights.items():
            self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, device="meta")))

    def declared(self, name: str) -> nn.Parameter:
        """Return one of its weights; ``get_parameter`` would first look for a module on the way to it."""
        weight = self._parameters[name]
        if weight is None:
            raise AssertionError(f"{name} has been taken away")
        return weight


def weight_specs(model: nn.Module) -> dict[str, WeightSpec]:
    """Return every declared weight of a model by its full name."""
    return {
        f"{path}.{name}": spec
        for path, module in model.named_modules()
        if isinstance(module, WeightedModule)
        for name, spec in module.weight_specs.items()
    }


# LaX's latent crossing: h ← LN_r(h + G(z of the previous block)); z = act(h) (arXiv 2505.21732).
#
# Each projection crosses to the same projection of the next block. Shape suffixes: T tokens, g projections of a common
# input, r rank, c = g·r; a·b = r for the tensor gate.


class Crossing(WeightedModule):
    """The crossing into projections of a common input.

    Args:
        weights: The norm's, and the gate's: none, an r × r matrix, or two, a × a and b × b.
        epsilon: ε of the norm.
    """

    def __init__(self, weights: Mapping[str, WeightSpec], epsilon: float) -> None:
        super().__init__(weights)
        self.epsilon = epsilon

    def forward(
        self,
        latents: Latents,
        width: int,
        epsilon: float,
        carried_gTr: torch.Tensor,
        projections: slice,
        activation: Activation,
        fp8: bool,
    ) -> torch.Tensor:
        """Pass latents, plus those carried over from the previous block, through norm and activation, ``[g, T, r]``.

        Args:
            latents: As returned by the exchange, still to be scaled by the norm in front of the projection, if any.
            width: Width of that norm.
            epsilon: ε of that norm.
            carried_gTr: The latents of the previous block.
            projections: Which of this crossing's projections they belong to.
            activation: The bottleneck's.
            fp8: Whether the kernel also leaves their rows quantised.
        """
        crossed_gTr = self._gate(carried_gTr, projections)
        scale_gr, shift_gr = (
            self.declared("norm_scale")[projections],
            self.declared("norm_shift")[projections],
        )
        return latent_crossing(*latents, width, epsilon, crossed_gTr, scale_gr, shift_gr, self.epsilon, activation, fp8)

    def _gate(self, z_gTr: torch.Tensor, projections: slice) -> torch.Tensor:
        if "gate_matrix" in self.weight_specs:
            return z_gTr @ self.declared("gate_matrix")[projections]
        if "gate_a" not in self.weight_specs:
            return z_gTr
        left, right = self.declared("gate_a")[projections], self.declared("gate_b")[projections]
        z_gTab = z_gTr.reshape(*z_gTr.shape[:-1], left.shape[-1], right.shape[-1])
        return torch.einsum("gax,gTab,gby->gTxy", left, z_gTab, right).flatten(-2)


class Bottleneck(WeightedModule):
    """One or more bottleneck projections of a common input: ``down_project``, ``start``, ``up_project``.

    Everything except the exchange that ``start`` starts is local to a rank.

    Args:
        model: The model's shape.
        group: The projections.
        strategy: Where latents are exchanged.
        grouped: Whether the projections share one matrix product and one exchange.
        crosses: Whether latents of the previous block cross into this one.
    """

    def __init__(
        self, model: ModelConfig, group: ProjectionGroup, strategy: LowRankStrategy, grouped: bool, crosses: bool
    ) -> None:
        super().__init__(group_weights(model, group))
        self.group, self.strategy, self.grouped = group, strategy, grouped
        self.reads_input = reads_input(model, group)
        self.activation, self.norm_epsilon = model.bottleneck_activation, model.norm_epsilon
        self.crossing = Crossing(crossing_weights(model, group), model.norm_epsilon) if crosses else None
        self.pieces = group.pieces(grouped)
        # For each piece, the weight that holds its B, and where in it if it holds others, too.
        self._ups = [
            (f"up_{index}", None if piece == run else slice(piece.start - run.start, piece.stop - run.start))
            for index, run in enumerate(group.runs)
            for piece in self.pieces
            if piece.start in run
        ]

    def down_project(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None
    ) -> tuple[list[Latents], list[torch.Tensor]]:
        """Project ``[T, d_in]`` to this rank's part of the latents.

        Args:
            x_Td: The input.
            squares_T: Its rows' sums of squares, if a norm precedes the projections and the residual has them.

        Returns:
            The latents, one part per exchange, and what ``up_project`` reads besides: the input, or nothing.
        """
        down_dgr, norm = self.declared("down"), self._norm()
        products = [down_dgr] if self.grouped else torch.split(down_dgr, 1, dim=1)
        partials = [self.strategy.partial_latents(x_Td, squares_T, product_dgr, norm) for product_dgr in products]
        return partials, [x_Td] if self.reads_input else []

    def start(self, partials: list[Latents], shared: SharedLatents | None = None) -> Callable[[], list[Latents]]:
        """Start the exchanges; call the result to wait for the whole latents.

        Args:
            partials: The latents of ``down_project``.
            shared: Keeps the latents for the backward pass, if no rank is to keep them whole.
        """
        norm = self._norm()
        started = [self.strategy.start(partial, norm, self._epilogue(partial), shared) for partial in partials]
        return lambda: [wait() for wait in started]

    def up_project(
        self,
        whole: list[Latents],
        carried: list[torch.Tensor] | None,
        *beside: torch.Tensor,  # noqa: ARG002
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Project latents to the outputs.

        Args:
            whole: The results of the exchanges.
            carried: Latents of the same projections in the previous block; ``None`` in the first block.
            beside: What ``down_project`` has returned beside latents.

        Returns:
            The outputs, ``[g, T, d_out]`` for the g projected together, and their latents ``[g, T, r]``.
        """
        latents = [
            self._latents(piece, each, made_gTr, carried[index] if carried else None)
            for index, (piece, (each, made_gTr)) in enumerate(zip(self.pieces, self._split(whole), strict=True))
        ]
        outputs = [
            self.strategy.up(z_gTr, self._up(name, members))
            for (name, members), z_gTr in zip(self._ups, latents, strict=True)
        ]
        return outputs, latents

    def up_of(self, projection: int) -> torch.Tensor:
        """Return B of one projection, ``[r, f]``: a part of a parameter."""
        index, run = next((index, run) for index, run in enumerate(self.group.runs) if projection in run)
        return self.declared(f"up_{index}")[projection - run.start]

    def _up(self, name: str, members: slice | None) -> torch.Tensor:
        # Even indexing all of a weight would cost its gradient one pass that fills zeros and one that copies.
        weight_grf = self.declared(name)
        return weight_grf if members is None else weight_grf[members]

    def _norm(self) -> NormWeights | None:
        if self.group.norm is None:
            return None
        return NormWeights(self.declared("scale"), self.group.wide_in, self.norm_epsilon, self.reads_input)

    def _epilogue(self, partial: Latents) -> Epilogue | None:
        """Return what will be computed from an exchange's latents, if the exchange may do it."""
        tokens, statistic = len(partial[0]), partial[1] is not None
        if (
            self.crossing is not None
            or self.strategy.fp8
            or not (statistic or self.activation is not Activation.LINEAR)
        ):
            return None
        count = len(self.group.wide_outs) if self.grouped else 1
        return Epilogue(tokens, count, statistic, self.group.wide_in, self.norm_epsilon, self.activation)

    def _split(self, whole: list[Latents]) -> list[tuple[Latents, torch.Tensor | None]]:
        """Return each piece's part of the exchanges' results, and of what they have already computed from those."""
        if len(whole) == len(self.pieces):
            return [(latents, made_of(latents[0])) for latents in whole]
        ((h_Tc, squares_T),) = whole
        made_gTr = made_of(h_Tc)
        rank = h_Tc.shape[1] // len(self.group.wide_outs)  # a strategy may have left this rank only a slice of it
        columns = [len(piece) * rank for piece in self.pieces]
        return [
            ((part_Tc, squares_T), None if made_gTr is None else made_gTr[piece.start : piece.stop])
            for part_Tc, piece in zip(torch.split(h_Tc, columns, dim=1), self.pieces, strict=True)
        ]

    def _latents(
        self, piece: range, latents: Latents, made_gTr: torch.Tensor | None, carried_gTr: torch.Tensor | None
    ) -> torch.Tensor:
        width, epsilon = self.group.wide_in, self.norm_epsilon
        if self.crossing is None or carried_gTr is None:
            return latent_epilogue(*latents, len(piece), width, epsilon, self.activation, self.strategy.fp8, made_gTr)
        projections = slice(piece.start, piece.stop)
        z_gTr: torch.Tensor = self.crossing(
            latents, width, epsilon, carried_gTr, projections, self.activation, self.strategy.fp8
        )
        return z_gTr


# Dense projections: y = norm(x) W out of the residual, y = x W back into it.
#
# Shape suffixes: T tokens, d input width, g projections of a common input, f output width.


class Dense(WeightedModule):
    """One or more dense projections of a common input, called like a ``Bottleneck``, but without latents.

    Args:
        model: The model's shape.
        group: The projections.
        strategy: How their matrices are split.
    """

    def __init__(self, model: ModelConfig, group: ProjectionGroup, strategy: DenseStrategy) -> None:
        super().__init__(group_weights(model, group))
        self.group, self.strategy, self.norm_epsilon = group, strategy, model.norm_epsilon

    def down_project(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None  # noqa: ARG002
    ) -> tuple[list[Latents], list[torch.Tensor]]:  # fmt: skip
        """Return no latents, but the input."""
        return [], [x_Td]

    def start(
        self, partials: list[Latents], shared: SharedLatents | None = None  # noqa: ARG002
    ) -> Callable[[], list[Latents]]:  # fmt: skip
        """Exchange nothing: there are no two matrices."""
        return lambda: partials

    def up_project(
        self, whole: list[Latents], carried: list[torch.Tensor] | None, x_Td: torch.Tensor  # noqa: ARG002
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
        """Return one ``[g, T, f]`` for each run of equal widths, and no latents."""
        if self.group.norm is None:
            return [self.strategy.dense_out(x_Td, self.declared("weight")).unsqueeze(0)], []
        norm = NormWeights(self.declared("scale"), self.group.wide_in, self.norm_epsilon)
        weights_dgf = [self.declared(f"weight_{index}") for index in range(len(self.group.runs))]
        return self.strategy.dense_in(x_Td, weights_dgf, norm), []
