"""Low-rank bottleneck projections, z = act(norm(x) A), y = z B, on the matrices and exchanges of a strategy.

Shape suffixes: T tokens, d input width, r rank, g projections of a common input, c = g·r, f output width.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from boost_core.architecture import ProjectionGroup, WeightSpec, crossing_weights, group_weights
from boost_core.config.model import Activation, ModelConfig
from boost_core.kernels.fp8_product import PrecomputedRows
from boost_core.kernels.latent_epilogue import Epilogue, latent_epilogue
from boost_core.kernels.launch import Part
from boost_core.kernels.lax_crossing import lax_crossing
from boost_core.parallel.baselines import FullRankTensorParallel, VanillaTensorParallel
from boost_core.parallel.btp import BottleneckTensorParallel, Exchanged, NormWeights, PartialLatents

LowRankStrategy = BottleneckTensorParallel | VanillaTensorParallel
Strategy = LowRankStrategy | FullRankTensorParallel

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
    weighted = [(path, module) for path, module in model.named_modules() if isinstance(module, WeightedModule)]
    return {f"{path}.{name}": spec for path, module in weighted for name, spec in module.weight_specs.items()}


# LaX's latent crossing: h ← LN_r(h + G(z of the previous block)); z = act(h) (arXiv 2505.21732).
#
# Each projection crosses to the same projection of the next block. Shape suffixes: T tokens, g projections of a common
# input, r rank, c = g·r; a·b = r for the tensor gate.


class LaxCrossing(WeightedModule):
    """The crossing into projections of a common input.

    Args:
        weights: The norm's, and the gate's: none, an r × r matrix, or two, a × a and b × b.
    """

    def forward(self, carried_gTr: torch.Tensor, projections: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Pass latents carried over from the previous block through the gate.

        Args:
            carried_gTr: The latents of the previous block.
            projections: Which of this crossing's projections they belong to.

        Returns:
            The result, ``[g, T, r]``, and ``[g, r]`` each, scale and shift of the norm of its sum with this block's
            latents (``lax_crossing``).
        """
        if "gate_matrix" in self.weight_specs:
            crossed_gTr = carried_gTr @ self.declared("gate_matrix")[projections]
        elif "gate_a" in self.weight_specs:
            left, right = self.declared("gate_a")[projections], self.declared("gate_b")[projections]
            z_gTab = carried_gTr.reshape(*carried_gTr.shape[:-1], left.shape[-1], right.shape[-1])
            crossed_gTr = torch.einsum("gax,gTab,gby->gTxy", left, z_gTab, right).flatten(-2)
        else:
            crossed_gTr = carried_gTr
        return crossed_gTr, self.declared("norm_scale")[projections], self.declared("norm_shift")[projections]


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
        self.activation, self.norm_epsilon = model.bottleneck_activation, model.norm_epsilon
        self.crossing = LaxCrossing(crossing_weights(model, group)) if crosses else None
        self.pieces = group.pieces(grouped)
        # For each piece, the weight that holds its B, and where in it if it holds others, too.
        self._ups = [
            (f"up_{index}", None if piece == run else slice(piece.start - run.start, piece.stop - run.start))
            for index, run in enumerate(group.runs)
            for piece in self.pieces
            if piece.start in run
        ]

    def down_project(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None, quantised: PrecomputedRows | None = None,
        part: Part | None = None,
    ) -> list[PartialLatents]:  # fmt: skip
        """Project ``[T, d_in]`` to this rank's part of the latents, one for each exchange.

        Args:
            x_Td: The input.
            squares_T: Its rows' sums of squares, if a norm precedes the projections and the residual has them.
            quantised: Its rows in 8 bits, if the kernel that wrote it has left them.
            part: The part of the tokens that they are, if there are others.
        """
        down_dgr, norm = self.declared("down"), None
        if self.group.norm is not None:
            norm = NormWeights(self.declared("scale"), self.group.wide_in, self.norm_epsilon)
        products = [down_dgr] if self.grouped else torch.split(down_dgr, 1, dim=1)
        project = self.strategy.partial_latents
        return [project(x_Td, squares_T, down_dgr, norm, quantised, part) for down_dgr in products]

    def start(self, partials: list[PartialLatents]) -> Callable[[], list[Exchanged]]:
        """Start the exchanges; call the result to wait for the whole latents.

        Args:
            partials: The result of ``down_project``; emptied, as each has its input until its product is computed.
        """
        started = []
        # What follows has more to do than the epilogue, or leaves its result in 8 bits, too.
        computes_alone = self.crossing is not None or self.strategy.fp8
        while partials:
            partial, fused = partials.pop(0), None
            statistic = partial.squares is not None
            if not computes_alone and partial.part is None and (statistic or self.activation is not Activation.LINEAR):
                count = len(self.group.wide_outs) if self.grouped else 1
                shape = self.group.wide_in, self.norm_epsilon, self.activation
                fused = Epilogue(partial.tokens, count, statistic, *shape)
            started.append((self.strategy.start(partial, fused), fused))
        return lambda: [(wait(), fused) for wait, fused in started]

    def up_project(
        self, exchanged: list[Exchanged], carried: list[torch.Tensor] | None, part: Part | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[PrecomputedRows]]:
        """Project latents to the outputs.

        Args:
            exchanged: The results of the exchanges.
            carried: Latents of the same projections in the previous block; ``None`` in the first block.
            part: The part of the tokens that they are, if there are others.

        Returns:
            The outputs, ``[g, T, d_out]`` for the g projected together, their latents ``[g, T, r]``, and under fp8
            where a kernel may leave the rows of each output's gradient in 8 bits.
        """
        width, epsilon, fp8 = self.group.wide_in, self.norm_epsilon, self.strategy.fp8
        each_piece = [(latents, None if fused is None else fused.take()) for latents, fused in exchanged]
        if len(exchanged) < len(self.pieces):  # one exchange of all
            (((h_Tc, squares_T), fused_gTr),) = each_piece
            rank = h_Tc.shape[1] // len(self.group.wide_outs)  # a strategy may have left this rank only a slice of it
            columns = torch.split(h_Tc, [len(piece) * rank for piece in self.pieces], dim=1)
            each_piece = [
                ((part_Tc, squares_T), None if fused_gTr is None else fused_gTr[piece.start : piece.stop])
                for part_Tc, piece in zip(columns, self.pieces, strict=True)
            ]
        z = list[torch.Tensor]()
        quantised = [PrecomputedRows() if fp8 else None for _ in self.pieces]
        of_pieces = zip(self.pieces, each_piece, quantised, strict=True)
        for index, (piece, (latents, fused_gTr), rows) in enumerate(of_pieces):
            if self.crossing is None or not carried:
                z.append(latent_epilogue(*latents, len(piece), width, epsilon, self.activation, rows, fused_gTr, part))
            else:
                crossed, scale, shift = self.crossing(carried[index], slice(piece.start, piece.stop))
                z.append(lax_crossing(*latents, width, epsilon, crossed, scale, shift, epsilon, self.activation, rows))
                del crossed  # which would be there during the products
        # Even indexing all of a weight would cost its gradient one pass that fills zeros and one that copies.
        ups = (self.declared(name) if members is None else self.declared(name)[members] for name, members in self._ups)
        of_gradients = [PrecomputedRows() if fp8 else None for _ in self.pieces]
        outputs = [self.strategy.up(*each, part) for each in zip(z, ups, quantised, of_gradients, strict=True)]
        return outputs, z, [each for each in of_gradients if each is not None]

    def up_of(self, projection: int) -> torch.Tensor:
        """Return B of one projection, ``[r, f]``: a part of a parameter."""
        index, run = next((index, run) for index, run in enumerate(self.group.runs) if projection in run)
        return self.declared(f"up_{index}")[projection - run.start]


# Dense projections: y = norm(x) W out of the residual, y = x W back into it.
#
# Shape suffixes: T tokens, d input width, g projections of a common input, f output width.


class Dense(WeightedModule):
    """One or more dense projections of a common input, called like a ``Bottleneck``: the input is in latents' place.

    Args:
        model: The model's shape.
        group: The projections.
        strategy: How their matrices are split.
    """

    def __init__(self, model: ModelConfig, group: ProjectionGroup, strategy: FullRankTensorParallel) -> None:
        super().__init__(group_weights(model, group))
        self.group, self.strategy, self.norm_epsilon = group, strategy, model.norm_epsilon

    def down_project(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None, quantised: PrecomputedRows | None = None,
        part: Part | None = None,
    ) -> list[PartialLatents]:  # fmt: skip
        """Return the input."""
        return [PartialLatents(lambda: x_Td, None, len(x_Td))]

    def start(self, partials: list[PartialLatents]) -> Callable[[], list[Exchanged]]:
        """Exchange nothing: there are no two matrices."""
        x_Td = partials.pop().compute()
        return lambda: [((x_Td, None), None)]

    def up_project(
        self, exchanged: list[Exchanged], carried: list[torch.Tensor] | None, part: Part | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[PrecomputedRows]]:
        """Return one ``[g, T, f]`` for each run of equal widths, no latents, and no rows in 8 bits."""
        (((x_Td, _), _),) = exchanged
        if self.group.norm is None:
            return [self.strategy.dense_out(x_Td, self.declared("weight")).unsqueeze(0)], [], []
        norm = NormWeights(self.declared("scale"), self.group.wide_in, self.norm_epsilon)
        weights_dgf = [self.declared(f"weight_{index}") for index in range(len(self.group.runs))]
        return self.strategy.dense_in(x_Td, weights_dgf, norm), [], []
