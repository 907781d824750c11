"""Low-rank bottleneck projections, z = act(norm(x) A), y = z B, and what they ask of a tensor parallel strategy.

Shape suffixes: T tokens, d input width, r rank, g projections of a common input, c = g·r, f output width, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from boost_core.architecture import ProjectionGroup, WeightSpec, crossing_weights, group_weights
from boost_core.config.model import Activation, ModelConfig
from boost_core.kernels.latent_crossing import latent_crossing
from boost_core.kernels.latent_epilogue import latent_epilogue
from boost_core.kernels.residual_add import Residual
from boost_core.kernels.symmetric_sum import Epilogue
from boost_core.parallel.weight_gradients import GradientSinks

# What a model asks of a tensor parallel strategy. A suffix names the tensor as an unsharded model has it; under a
# strategy an axis may be this rank's shard.

# Latents [T, g·r], and the row sums of squares [T] by which they are still to be scaled, if any.
Latents = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class PartialLatents:
    """This rank's part of the latents of one exchange.

    Attributes:
        compute: Returns it in memory of its own; called once, when the exchange starts. What is recomputed in the
            backward pass has ended before that.
        squares: The row sums of squares, if the exchange is to sum them, too.
        tokens: Number of rows.
    """

    compute: Callable[[], torch.Tensor]
    squares: torch.Tensor | None
    tokens: int


@dataclass
class EpilogueInExchange:
    """An epilogue that an exchange may compute in the same pass as its sum (``kernels.symmetric_sum``).

    Attributes:
        epilogue: What is to be computed.
        result: The result, if the exchange has computed it.
    """

    epilogue: Epilogue
    result: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        """Return the result once, so that its memory is freed after use: a recomputation computes its own."""
        result, self.result = self.result, None
        return result


# The result of one exchange, and where its epilogue may be.
Exchanged = tuple[Latents, EpilogueInExchange | None]


@dataclass
class GatheredLatents:
    """One exchange's latents as gathered for the backward pass.

    Attributes:
        latents: The latents and their statistics; ``None`` before they arrive, and after they were taken.
    """

    latents: Latents | None = None

    def take(self) -> Latents:
        """Return them once, so that their memory is freed after use."""
        if self.latents is None:
            raise AssertionError("the backward pass comes to a segment before the exchange in front of it")
        latents, self.latents = self.latents, None
        return latents


class SavedLatents(Protocol):
    """The inputs of a block's segment where no rank's device saves them whole for the backward pass."""

    def of_exchange(self) -> GatheredLatents:
        """Return where another exchange in front of the segment finds its latents in the backward pass."""


@dataclass(frozen=True)
class NormWeights:
    """An RMSNorm in front of a projection.

    Attributes:
        scale_d: γ.
        width: The full hidden size d.
        epsilon: ε, added to the mean square.
        scales_input: Whether more than latents is scaled by an exchanged statistic: the projections' input itself.
    """

    scale_d: torch.Tensor
    width: int
    epsilon: float
    scales_input: bool = False


class Strategy(Protocol):
    """The two ends of a model, which every family has.

    Attributes:
        fp8: Whether its products read their inputs' rows in 8 bits, which the preceding kernels then leave.
        sinks: Where weight gradients that are computed outside of autograd go.
    """

    fp8: bool
    sinks: GradientSinks

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Return the residual stream that enters the first block."""

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """Return the stream received from another pipeline stage."""

    def width(self, hidden_size: int) -> int:
        """Columns of the residual stream on each rank."""

    def abandon(self) -> None:
        """Discard what an unfinished backward pass has deferred."""

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor) -> Residual:
        """Return the stream after adding a block's output, ``[T, d]``."""

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """Return the normalised hidden vectors, whole on every rank, as input to this rank's part of the head."""

    def token_losses(
        self, x_Td: torch.Tensor, head_dV: torch.Tensor, target_T: torch.Tensor, z_loss: float
    ) -> torch.Tensor:
        """Cross entropy of each token in nats, ``[T]``, at least fp32; its gradient includes the z-loss's."""

    def likeliest_tokens(self, x_Td: torch.Tensor, head_dV: torch.Tensor) -> torch.Tensor:
        """The most likely token after each, ``[T]``, the same on all ranks."""

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """The embedding as a head, ``[d, V]``."""


class LowRankStrategy(Strategy, Protocol):
    """How a bottleneck's two matrices are applied. Ranks wait for each other only in an exchange."""

    def partial_latents(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None, down_dgr: torch.Tensor, norm: NormWeights | None
    ) -> PartialLatents:
        """Return this rank's part of ``norm(x) A`` for g projections.

        Args:
            x_Td: The residual's values, or any other input if there is no norm.
            squares_T: The residual's sums of squares, if it has them.
            down_dgr: A.
            norm: The norm; ``None`` for none.
        """

    def start(
        self, partial: PartialLatents, norm: NormWeights | None, epilogue: EpilogueInExchange | None = None,
        saved: SavedLatents | None = None,
    ) -> Callable[[], Latents]:  # fmt: skip
        """Start the exchange that makes latents whole.

        Args:
            partial: The result of ``partial_latents``.
            norm: As given to ``partial_latents``.
            epilogue: What will be computed from them; has the result once they are whole if the exchange computes it.
            saved: Saves the latents for the backward pass, if no rank is to save them whole.

        Returns:
            A function that waits for the whole latents.
        """

    def up(self, z_gTr: torch.Tensor, up_grf: torch.Tensor) -> torch.Tensor:
        """``z B``, ``[g, T, f]``, in memory of its own."""


class DenseStrategy(Strategy, Protocol):
    """How a dense block's matrices are applied."""

    def dense_in(
        self, x_Td: torch.Tensor, weights_dgf: Sequence[torch.Tensor], norm: NormWeights
    ) -> list[torch.Tensor]:
        """Return ``norm(x) W``, one ``[g, T, f]`` for each weight."""

    def dense_out(self, x_Tf: torch.Tensor, weight_fd: torch.Tensor) -> torch.Tensor:
        """Return ``x W``, back into the residual, ``[T, d]``."""


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
        if "gate_matrix" in self.weight_specs:
            crossed_gTr = carried_gTr @ self.declared("gate_matrix")[projections]
        elif "gate_a" in self.weight_specs:
            left, right = self.declared("gate_a")[projections], self.declared("gate_b")[projections]
            z_gTab = carried_gTr.reshape(*carried_gTr.shape[:-1], left.shape[-1], right.shape[-1])
            crossed_gTr = torch.einsum("gax,gTab,gby->gTxy", left, z_gTab, right).flatten(-2)
        else:
            crossed_gTr = carried_gTr
        scale_gr, shift_gr = self.declared("norm_scale")[projections], self.declared("norm_shift")[projections]
        return latent_crossing(*latents, width, epsilon, crossed_gTr, scale_gr, shift_gr, self.epsilon, activation, fp8)


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
        self.crossing = Crossing(crossing_weights(model, group), model.norm_epsilon) if crosses else None
        self.pieces = group.pieces(grouped)
        # For each piece, the weight that holds its B, and where in it if it holds others, too.
        self._ups = [
            (f"up_{index}", None if piece == run else slice(piece.start - run.start, piece.stop - run.start))
            for index, run in enumerate(group.runs)
            for piece in self.pieces
            if piece.start in run
        ]

    def down_project(self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None) -> list[PartialLatents]:
        """Project ``[T, d_in]`` to this rank's part of the latents, one for each exchange.

        Args:
            x_Td: The input.
            squares_T: Its rows' sums of squares, if a norm precedes the projections and the residual has them.
        """
        down_dgr, norm = self.declared("down"), self._norm()
        products = [down_dgr] if self.grouped else torch.split(down_dgr, 1, dim=1)
        return [self.strategy.partial_latents(x_Td, squares_T, product_dgr, norm) for product_dgr in products]

    def start(self, partials: list[PartialLatents], saved: SavedLatents | None = None) -> Callable[[], list[Exchanged]]:
        """Start the exchanges; call the result to wait for the whole latents.

        Args:
            partials: The result of ``down_project``; emptied, as each has its input until its product is computed.
            saved: Saves the latents for the backward pass, if no rank is to save them whole.
        """
        norm, started = self._norm(), []
        # What follows has more to do than the epilogue, or leaves its result in 8 bits, too.
        computes_alone = self.crossing is not None or self.strategy.fp8
        while partials:
            partial, fused = partials.pop(0), None
            statistic = partial.squares is not None
            if not computes_alone and (statistic or self.activation is not Activation.LINEAR):
                count = len(self.group.wide_outs) if self.grouped else 1
                shape = self.group.wide_in, self.norm_epsilon, self.activation
                fused = EpilogueInExchange(Epilogue(partial.tokens, count, statistic, *shape))
            started.append((self.strategy.start(partial, norm, fused, saved), fused))
        return lambda: [(wait(), fused) for wait, fused in started]

    def up_project(
        self, exchanged: list[Exchanged], carried: list[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Project latents to the outputs.

        Args:
            exchanged: The results of the exchanges.
            carried: Latents of the same projections in the previous block; ``None`` in the first block.

        Returns:
            The outputs, ``[g, T, d_out]`` for the g projected together, and their latents ``[g, T, r]``.
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
        for index, (piece, (latents, fused_gTr)) in enumerate(zip(self.pieces, each_piece, strict=True)):
            if self.crossing is None or not carried:
                z.append(latent_epilogue(*latents, len(piece), width, epsilon, self.activation, fp8, fused_gTr))
            else:
                members = slice(piece.start, piece.stop)
                z.append(self.crossing(latents, width, epsilon, carried[index], members, self.activation, fp8))
        # Even indexing all of a weight would cost its gradient one pass that fills zeros and one that copies.
        ups = (self.declared(name) if members is None else self.declared(name)[members] for name, members in self._ups)
        return [self.strategy.up(z_gTr, up_grf) for z_gTr, up_grf in zip(z, ups, strict=True)], z

    def up_of(self, projection: int) -> torch.Tensor:
        """Return B of one projection, ``[r, f]``: a part of a parameter."""
        index, run = next((index, run) for index, run in enumerate(self.group.runs) if projection in run)
        return self.declared(f"up_{index}")[projection - run.start]

    def _norm(self) -> NormWeights | None:
        if self.group.norm is None:
            return None
        return NormWeights(self.declared("scale"), self.group.wide_in, self.norm_epsilon)


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

    def __init__(self, model: ModelConfig, group: ProjectionGroup, strategy: DenseStrategy) -> None:
        super().__init__(group_weights(model, group))
        self.group, self.strategy, self.norm_epsilon = group, strategy, model.norm_epsilon

    def down_project(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None  # noqa: ARG002
    ) -> list[PartialLatents]:  # fmt: skip
        """Return the input."""
        return [PartialLatents(lambda: x_Td, None, len(x_Td))]

    def start(
        self, partials: list[PartialLatents], saved: SavedLatents | None = None  # noqa: ARG002
    ) -> Callable[[], list[Exchanged]]:  # fmt: skip
        """Exchange nothing: there are no two matrices."""
        x_Td = partials.pop().compute()
        return lambda: [((x_Td, None), None)]

    def up_project(
        self, exchanged: list[Exchanged], carried: list[torch.Tensor] | None  # noqa: ARG002
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
        """Return one ``[g, T, f]`` for each run of equal widths, and no latents."""
        (((x_Td, _), _),) = exchanged
        if self.group.norm is None:
            return [self.strategy.dense_out(x_Td, self.declared("weight")).unsqueeze(0)], []
        norm = NormWeights(self.declared("scale"), self.group.wide_in, self.norm_epsilon)
        weights_dgf = [self.declared(f"weight_{index}") for index in range(len(self.group.runs))]
        return self.strategy.dense_in(x_Td, weights_dgf, norm), []
