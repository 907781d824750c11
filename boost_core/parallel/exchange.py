"""A latent's asynchronous all-reduce, started and waited for separately so that other work can run in between.

=========  ===============================  ================================
           ``start``                        ``wait``
=========  ===============================  ================================
forward    the all-reduce of partial sums   it is waited for
           starts
backward   it is waited for                 the all-reduce of the gradient
                                            starts
=========  ===============================  ================================

Each rank's computation from a replicated latent gives a partial gradient of it; the gradient's all-reduce completes it.
The gradient of the norm's statistic S need not be sent: with y = h / √(S/d + ε),

    ∂L/∂S = −(Σ_r dy ∘ y) / (2 d (S/d + ε)) = −(Σ_r dh ∘ h) / (2 (S + d ε)),

which every rank computes from the whole dh. Where S scales the projections' input, too, its gradient is also sent, in
an all-reduce of its own. All-reduces are in place: partial sums are overwritten, and so is the arriving gradient, which
later operations must therefore hand over in memory of its own. Shape suffixes: T tokens, r latents.
"""

from collections.abc import Callable
from typing import Any

import torch

from boost_core.kernels.latent_epilogue import leave_made, statistic_gradient
from boost_core.kernels.symmetric_sum.memory import Epilogue
from boost_core.nn.strategy import Latents, NormWeights, SharedLatents
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.deferred_wgrad import DeferredWeightGradients, with_room_behind
from boost_core.parallel.ledger import Pending


class Exchange:
    """One exchange, forward and backward.

    Args:
        communicator: The tensor parallel group.
        deferred: Weight gradients to compute while the gradient is under way.
        norm: The norm whose statistic is exchanged with the latents, if any.
        statistic_apart: Whether the statistic has an all-reduce of its own instead of a column beside the latents.
        epilogue: What is computed from the latents next, if the exchange may do so in the same pass.
        shared: Keeps the latents for the backward pass where no rank keeps them whole.
    """

    def __init__(
        self,
        communicator: Communicator,
        deferred: DeferredWeightGradients,
        norm: NormWeights | None,
        statistic_apart: bool,
        epilogue: Epilogue | None = None,
        shared: SharedLatents | None = None,
    ) -> None:
        self.communicator, self.deferred = communicator, deferred
        self.norm, self.statistic_apart, self._epilogue = norm, statistic_apart, epilogue
        self.gathered = None if shared is None else shared.of_exchange()
        self._in_flight: list[Pending] = []
        self._made_gTr: torch.Tensor | None = None

    def start(self, partial: Latents) -> Callable[[], Latents]:
        """Start the exchange of this rank's ``partial``, which is overwritten; the returned function waits for it."""
        started: Latents = _Start.apply(*partial, self)  # type: ignore[no-untyped-call]

        def wait() -> Latents:
            whole: Latents = _Wait.apply(*started, self)  # type: ignore[no-untyped-call]
            if self._made_gTr is not None:
                leave_made(whole[0], self._made_gTr)
                self._made_gTr = None
            return whole

        return wait

    def start_all_reduce(self, tensor: torch.Tensor, purpose: str) -> None:
        """Start the all-reduce of a tensor, in place."""
        self._in_flight.append(self.communicator.start_all_reduce_(tensor, purpose))

    def start_sum_of_latents(self, payload: torch.Tensor) -> None:
        """Start the in-place all-reduce of latents and what is sent with them."""
        if self._epilogue is None:
            self.start_all_reduce(payload, "latent")
            return
        pending, self._made_gTr = self.communicator.start_sum_of_latents_(payload, "latent", self._epilogue)
        self._in_flight.append(pending)

    def wait_for_all(self) -> None:
        """Wait for everything that was started."""
        while self._in_flight:
            self._in_flight.pop().wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_Tr: torch.Tensor, squares_T: torch.Tensor | None, exchange: Exchange) -> Latents:
        ctx.exchange = exchange
        h_Tr, squares_T = _start_forward(partial_Tr.detach(), squares_T, exchange)
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


def _start_forward(partial_Tr: torch.Tensor, squares_T: torch.Tensor | None, exchange: Exchange) -> Latents:
    if squares_T is None:
        exchange.start_sum_of_latents(partial_Tr)
        return partial_Tr, None
    if exchange.statistic_apart:
        exchange.start_all_reduce(partial_Tr, "latent")
        squares_T = squares_T.clone()
        exchange.start_all_reduce(squares_T, "statistic")
        return partial_Tr, squares_T
    payload, statistic_T = with_room_behind(partial_Tr)
    statistic_T.copy_(squares_T)
    exchange.start_sum_of_latents(payload)
    return partial_Tr, statistic_T


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
