"""Bottleneck-aware tensor parallelism (BOOST, arXiv 2512.12131): shard the wide axes, exchange the narrow latents.

The residual stream is sharded along the hidden size from the embedding to the head. A is sharded along its
rows, so that each rank's product is a partial sum of the latent; B along its columns, so that each rank gets
its own shard of the wide output. A block exchanges nothing but one all-reduce per latent.

Shape suffixes: T tokens, d hidden (this rank's shard), g projections of one input, r rank, f wide (shard).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn.functional import embedding

from boost_core.architecture import BTP, Sharding
from boost_core.kernels.fp8_product import take_quantised
from boost_core.kernels.latent_epilogue import statistic_gradient
from boost_core.kernels.launch import precise
from boost_core.kernels.residual_add import Residual, residual_add, residual_start
from boost_core.model.low_rank import EpilogueInExchange, Latents, NormWeights, PartialLatents, SavedLatents
from boost_core.parallel.communicator import (
    Communicator,
    Pending,
    all_gather_from_tp,
    all_to_all,
    copy_to_tp,
    reduce_from_tp,
)
from boost_core.parallel.offload import HostMemory
from boost_core.parallel.recompute import Lookahead, SlicedLatents
from boost_core.parallel.vocabulary import SplitHead
from boost_core.parallel.weight_gradients import DeferredWeightGradients, GradientSinks, with_room_behind

# A latent's asynchronous all-reduce, started and waited for separately so that other work can run in between.
#
# =========  ===============================  ================================
#            ``start``                        ``wait``
# =========  ===============================  ================================
# forward    the all-reduce of partial sums   it is waited for
#            starts
# backward   it is waited for                 the all-reduce of the gradient
#                                             starts
# =========  ===============================  ================================
#
# Each rank's computation from a replicated latent gives a partial gradient of it; the gradient's all-reduce completes
# it. The gradient of the norm's statistic S need not be sent: with y = h / √(S/d + ε),
#
#     ∂L/∂S = −(Σ_r dy ∘ y) / (2 d (S/d + ε)) = −(Σ_r dh ∘ h) / (2 (S + d ε)),
#
# which every rank computes from the whole dh. Where S scales the projections' input, too, its gradient is also sent, in
# an all-reduce of its own. All-reduces are in place: partial sums are overwritten, and so is the arriving gradient,
# which later operations must therefore hand over in memory of its own. Shape suffixes: T tokens, r latents.


class Exchange:
    """One exchange, forward and backward.

    Args:
        communicator: The tensor parallel group.
        deferred: Weight gradients to compute while the gradient is under way.
        norm: The norm whose statistic is exchanged with the latents, if any.
        statistic_apart: Whether the statistic has an all-reduce of its own instead of a column beside the latents.
        fused: What is computed from the latents next, if the exchange may do so in the same pass.
        saved: Saves the latents for the backward pass where no rank saves them whole.
    """

    def __init__(
        self,
        communicator: Communicator,
        deferred: DeferredWeightGradients,
        norm: NormWeights | None,
        statistic_apart: bool,
        fused: EpilogueInExchange | None = None,
        saved: SavedLatents | None = None,
    ) -> None:
        self.communicator, self.deferred = communicator, deferred
        self.norm, self.statistic_apart, self._fused = norm, statistic_apart, fused
        self.gathered = None if saved is None else saved.of_exchange()
        self._in_flight: list[Pending] = []

    def start_all_reduce(self, tensor: torch.Tensor, purpose: str) -> None:
        """Start the all-reduce of a tensor, in place."""
        self._in_flight.append(self.communicator.start_all_reduce_(tensor, purpose))

    def start_sum_of_latents(self, payload: torch.Tensor) -> None:
        """Start the in-place all-reduce of latents and what is sent with them."""
        if self._fused is None:
            self.start_all_reduce(payload, "latent")
            return
        pending, self._fused.result = self.communicator.start_sum_of_latents_(payload, "latent", self._fused.epilogue)
        self._in_flight.append(pending)

    def wait_for_all(self) -> None:
        """Wait for everything that was started."""
        while self._in_flight:
            self._in_flight.pop().wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_Tr: torch.Tensor, squares_T: torch.Tensor | None, exchange: Exchange) -> Latents:
        ctx.exchange = exchange
        h_Tr = partial_Tr.detach()
        if squares_T is None:
            exchange.start_sum_of_latents(h_Tr)
        elif exchange.statistic_apart:
            exchange.start_all_reduce(h_Tr, "latent")
            squares_T = squares_T.clone()
            exchange.start_all_reduce(squares_T, "statistic")
        else:
            payload, sent_T = with_room_behind(h_Tr)
            squares_T = sent_T.copy_(squares_T)
            exchange.start_sum_of_latents(payload)
        ctx.has_statistic = squares_T is not None
        if squares_T is not None and exchange.gathered is None:
            ctx.save_for_backward(h_Tr, squares_T)
        return h_Tr, squares_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh_Tr, norm, gathered = gradients[0], ctx.exchange.norm, ctx.exchange.gathered
        ctx.exchange.deferred.flush()
        ctx.exchange.wait_for_all()
        if not ctx.has_statistic:
            return dh_Tr, None, None
        h_Tr, squares_T = ctx.saved_tensors if gathered is None else gathered.take()
        if norm.scales_input:
            return dh_Tr, gradients[1], None
        return dh_Tr, statistic_gradient(dh_Tr, h_Tr, squares_T, norm.width, norm.epsilon), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_Tr: torch.Tensor, squares_T: torch.Tensor | None, exchange: Exchange) -> Latents:
        ctx.exchange = exchange
        exchange.wait_for_all()
        return h_Tr.view_as(h_Tr), None if squares_T is None else squares_T.view_as(squares_T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, dh_Tr = ctx.exchange, gradients[0].contiguous()
        exchange.start_all_reduce(dh_Tr, "latent gradient")
        if gradients[1] is None or not exchange.norm.scales_input:
            return dh_Tr, None, None
        ds_T = gradients[1].contiguous()
        exchange.start_all_reduce(ds_T, "statistic gradient")
        return dh_Tr, ds_T, None


def scale_rows(x_Td: torch.Tensor, squares_T: torch.Tensor, width: int, epsilon: float) -> torch.Tensor:
    """Divide each row by its root mean square, given its sum of squares over ``width``; in the type of ``x``.

    RMSNorm (arXiv 1910.07467) without its scale.
    """
    inverse_rms_T = torch.rsqrt(precise(squares_T) / width + epsilon)
    return (precise(x_Td) * inverse_rms_T.unsqueeze(-1)).to(x_Td.dtype)


class BottleneckTensorParallel(SplitHead):
    """The ``LowRankStrategy`` of BTP over one tensor parallel group; on a group of one it exchanges nothing.

    Args:
        communicator: The tensor parallel group.
        norm: How the RMSNorm of a sharded residual is computed: ``fused``, ``online_paper`` or ``sync``.
        fp8: Whether to use the products of ``kernels.fp8_product``.

    Attributes:
        sinks: Where weight gradients that are computed outside of autograd go.
    """

    SHARDING: ClassVar[Sharding] = BTP

    def __init__(self, communicator: Communicator, norm: str = "fused", fp8: bool = False) -> None:
        super().__init__(communicator)
        self._norm, self.fp8, self.sinks = norm, fp8, GradientSinks()
        self._deferred = DeferredWeightGradients(communicator.size == 1, fp8, self.sinks)
        self._host = HostMemory()

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Look up this rank's columns: the residual is sharded from the start, and nothing is sent."""
        return self.enter(embedding(token_T, weight_Vd))

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """This rank's shard; its sums of squares are recomputed rather than sent."""
        return residual_start(self._deferred.flush_before(x_Td), self.fp8 and self._norm == "fused")

    def width(self, hidden_size: int) -> int:
        """The width of a shard."""
        return hidden_size // self._communicator.size

    def defer_weight_gradients(self) -> Callable[[], Callable[[], None]]:
        """Defer weight gradients from now on; the returned function takes those deferred so far, to compute later."""
        return self._deferred.keep()

    def abandon(self) -> None:
        """Drop the deferred weight gradients."""
        self._deferred.abandon()

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor) -> Residual:
        """Add this rank's shards, and take the result's sums of squares for the next norm."""
        in_8_bits = self.fp8 and self._norm == "fused"  # a product then reads the residual itself
        return residual_add(stream_Td, y_Td, in_8_bits)

    def partial_latents(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None, down_dgr: torch.Tensor, norm: NormWeights | None
    ) -> PartialLatents:
        """One matrix product of this rank's rows for all g projections.

        ======================  =====================================================================================
        ``fused``               The raw residual times A∘γ; the latents are scaled afterwards, by a statistic that
                                travels with them: norm(x) A = (x (A∘γ)) / √(Σ x² / d + ε). In bf16 the statistic that
                                is sent is rounded like the latents.
        ``online_paper``        The published form: normalise each shard by its own statistic, correct after the
                                all-reduce. The shard's root mean square multiplies its latents before they are summed,
                                and a second all-reduce computes the whole sum of squares.
        ``sync``                The plain form: first an all-reduce of the statistic, then a normalising pass and the
                                latents' all-reduce. Each rank normalises its own shard, so the statistic's gradient is
                                a sum over ranks: a collective in the backward pass.
        ======================  =====================================================================================
        """
        down_dr, tokens = down_dgr.flatten(1), len(x_Td)
        if norm is None or squares_T is None:
            return PartialLatents(self._deferred.product_of_saved(x_Td, down_dr), None, tokens)
        if self._norm == "fused":
            room = self._communicator.size > 1
            compute = self._deferred.product_of_saved(x_Td, down_dr, norm.scale_d, room)
            return PartialLatents(compute, squares_T, tokens)
        if self._norm == "online_paper":
            rms_T1 = (squares_T / x_Td.shape[1] + norm.epsilon).sqrt().unsqueeze(-1)
            local_Td = (precise(x_Td) / rms_T1).to(x_Td.dtype) * norm.scale_d
            partial_Tr = (precise(self._deferred.product(local_Td, down_dr)) * rms_T1).to(x_Td.dtype)
            return PartialLatents(lambda: partial_Tr, squares_T, tokens)
        summed_T = reduce_from_tp(squares_T.clone(), self._communicator, "statistic")
        summed_T = copy_to_tp(summed_T, self._communicator, "statistic")
        normed_Td = scale_rows(x_Td, summed_T, norm.width, norm.epsilon) * norm.scale_d
        latent_Tr = self._deferred.product(normed_Td, down_dr)
        return PartialLatents(lambda: latent_Tr, None, tokens)

    def start(
        self, partial: PartialLatents, norm: NormWeights | None, epilogue: EpilogueInExchange | None = None,
        saved: SavedLatents | None = None,
    ) -> Callable[[], Latents]:  # fmt: skip
        """One all-reduce of all g latents; in the backward pass, one of their gradients."""
        latents = partial.compute(), partial.squares
        if self._communicator.size == 1:
            return lambda: latents
        apart = self._norm == "online_paper"
        epilogue = None if apart else epilogue
        exchange = Exchange(self._communicator, self._deferred, norm, apart, epilogue, saved)
        started: Latents = _Start.apply(*latents, exchange)  # type: ignore[no-untyped-call]
        return lambda: _Wait.apply(*started, exchange)  # type: ignore[no-untyped-call]

    def save_in_slices(self, lookahead: Lookahead, on_host: bool) -> SlicedLatents | None:
        """Return what saves one segment's latents in slices; ``None`` in a group of one, which saves them whole.

        Args:
            lookahead: The forward pass's.
            on_host: Whether to save all inputs of the segment in the host's memory, whole in a group of one.
        """
        if on_host:
            return SlicedLatents(self._communicator, lookahead, self._host)
        return SlicedLatents(self._communicator, lookahead) if self._communicator.size > 1 else None

    def up(self, z_gTr: torch.Tensor, up_grf: torch.Tensor) -> torch.Tensor:
        """One batched product; the output is this rank's shard, and nothing is sent."""
        return self._deferred.product(z_gTr, up_grf)

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """One all-gather; each rank's sum of squares travels as an extra column of its shard."""
        take_quantised(residual.inputs)  # which no product reads
        scaled_Td, squares_T = residual.inputs * norm.scale_d, residual.squares
        if squares_T is None:
            raise AssertionError("a sharded residual must come with its sums of squares")
        payload_Tc = torch.cat((scaled_Td, squares_T.to(scaled_Td.dtype).unsqueeze(-1)), dim=-1)
        payload_pTc = all_gather_from_tp(payload_Tc, self._communicator, "hidden")
        whole_Td = payload_pTc[:, :, :-1].transpose(0, 1).reshape(len(scaled_Td), -1)
        return scale_rows(whole_Td, precise(payload_pTc[:, :, -1]).sum(dim=0), norm.width, norm.epsilon)

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """Turn some columns of all rows into all columns of some rows: one all-to-all of the embedding's shard."""
        return all_to_all(embedding_Vd, self._communicator, "tied head").T
