"""Bottleneck-aware tensor parallelism (BOOST, arXiv 2512.12131): shard the wide axes, exchange the narrow latents.

The residual stream is sharded along the hidden size from the embedding to the head. A is sharded along its
rows, so that each rank's product is a partial sum of the latent; B along its columns, so that each rank gets
its own shard of the wide output. A block exchanges nothing but one all-reduce per latent; with it goes the statistic of
the norm before the projection (the paper's online RMSNorm).

Each exchange hides a part of the backward pass. The backward pass of a matrix product is two others: its input's
gradient, which the ranks wait for, and its weight's, which no rank waits for. The second is deferred; code that has
started a collective calls ``flush`` before waiting. Weight gradients go straight to the code that accumulates them
(``GradientSinks``).

Shape suffixes: T tokens, d hidden (this rank's shard), g projections of one input, r rank, f wide (shard).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import embedding

from boost_core.architecture import BTP, Sharding
from boost_core.config.model import Activation
from boost_core.kernels.fp8_product import PrecomputedRows, QuantisedRows, fp8_product, quantise_columns, quantise_rows
from boost_core.kernels.latent_epilogue import Epilogue, latent_epilogue, with_room
from boost_core.kernels.launch import Part, precise
from boost_core.kernels.residual_add import Residual, residual_add
from boost_core.parallel.activation_offload import HostMemory
from boost_core.parallel.communicator import (
    Communicator,
    Conjugate,
    Pending,
    all_gather_from_tp,
    all_to_all,
    copy_to_tp,
    reduce_from_tp,
)

# What a model and a strategy exchange. A suffix names the tensor as an unsharded model has it; under a strategy an axis
# may be this rank's shard.

# Latents [T, g·r], and the row sums of squares [T] by which they are still to be scaled, if any.
Latents = tuple[torch.Tensor, torch.Tensor | None]


class PartialLatents(NamedTuple):
    """This rank's part of the latents of one exchange.

    Attributes:
        compute: Returns it in memory of its own; called once, when the exchange starts. What is recomputed in the
            backward pass has ended before that.
        squares: The row sums of squares, if the exchange is to sum them, too.
        tokens: Number of rows.
        part: The part of the tokens that they are, if there are others.
        ahead: Called in the backward pass while their gradient is under way, for what the product's needs by then.
    """

    compute: Callable[[], torch.Tensor]
    squares: torch.Tensor | None
    tokens: int
    part: Part | None = None
    ahead: Callable[[], None] | None = None


# The result of one exchange, and where its epilogue may be.
Exchanged = tuple[Latents, Epilogue | None]


class NormWeights(NamedTuple):
    """An RMSNorm in front of a projection.

    Attributes:
        scale_d: γ.
        width: The full hidden size d.
        epsilon: ε, added to the mean square.
    """

    scale_d: torch.Tensor
    width: int
    epsilon: float


# Weight gradients, deferred and handed on.


class WeightPart(NamedTuple):
    """A part of a dense weight.

    Attributes:
        shape: Its shape.
        stride: Its strides in the weight.
        offset: Number of the weight's elements before it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, like_weight: torch.Tensor) -> torch.Tensor:
        """The same part of a dense tensor of the weight's shape."""
        return like_weight.as_strided(self.shape, self.stride, like_weight.storage_offset() + self.offset)


# Takes the gradient of a weight or of a part of it, in any shape.
Sink = Callable[[torch.Tensor, WeightPart | None], None]


# Adds xᵀ dy to the gradient of a weight or a part of it, or returns False if it cannot. Where a parameter scales the
# weight's rows, xᵀ dy is the gradient of both together.
ProductSink = Callable[[torch.Tensor, torch.Tensor, WeightPart | None, torch.Tensor | None], bool]


@dataclass(eq=False)
class GradientSinks:
    """Where weight gradients that are computed outside of autograd go, by parameter; autograd's own go their usual way.

    A nested backward pass would cost the host more than the addition costs the GPU, and for a part of a weight it would
    fill the rest with zeros.

    Parameters are told apart by their ``id``: a model's sinks live as long as its parameters.

    Attributes:
        gradients: Take gradients. Those of parameters that are not among them go through autograd.
        products: Take the factors of gradients, where the sum can be computed from these.
        settle: Does what can be done with sums that are complete; called while the ranks wait.
    """

    gradients: dict[int, Sink] = field(default_factory=dict)
    products: dict[int, ProductSink] = field(default_factory=dict)
    settle: Callable[[], None] | None = None

    def add(self, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        """Pass on the gradient of a parameter or of a view of one."""
        parameter = weight if weight._base is None else weight._base
        sink = self.gradients.get(id(parameter))
        if sink is None:
            torch.autograd.backward([weight], [gradient.to(weight.dtype)])
        else:
            sink(gradient, _part(weight, parameter))

    def add_product(self, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Pass on xᵀ dy, the gradient of ``weight ∘ scale``, to both."""
        parameter = weight if weight._base is None else weight._base
        sink = self.products.get(id(parameter))
        if sink is not None and sink(x, dy, _part(weight, parameter), scale):
            return
        gradient = x.mT @ dy
        self.add(weight, gradient if scale is None else _scaled(gradient, scale.detach()))
        if scale is not None:
            self.add(scale, (precise(gradient) * weight.detach()).sum(dim=-1).to(scale.dtype))


def _part(weight: torch.Tensor, parameter: torch.Tensor) -> WeightPart | None:
    """The position of a view in its parameter; ``None`` if it covers all of it, in any shape."""
    if weight.numel() == parameter.numel() and weight.is_contiguous():
        return None
    return WeightPart(weight.shape, weight.stride(), int(weight.storage_offset()) - int(parameter.storage_offset()))


@dataclass(eq=False)
class DeferredWeightGradients:
    """Products whose weight gradients are deferred, and the gradients still to be computed.

    Attributes:
        alone: Whether there are no collectives to hide. Weight gradients are then computed at once unless ``put_off``
            is set: deferred to the end of the backward pass, they would hold the inputs of all products.
        fp8: Whether products and their inputs' gradients use ``kernels.fp8_product``.
        sinks: Where weight gradients go; by default to autograd.
        put_off: Set to compute nothing but what ``take`` returns.
        waiting: The gradients still to be computed, in order.
        most: The elements of the largest exchange so far that they were to hide.
    """

    alone: bool = False
    fp8: bool = False
    sinks: GradientSinks = field(default_factory=GradientSinks)
    put_off: bool = False
    waiting: deque[Callable[[], None]] = field(default_factory=deque)
    most: int = 1

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, scale_d: torch.Tensor | None = None, room: bool = False,
        quantised: PrecomputedRows | None = None, of_gradient: PrecomputedRows | None = None, part: Part | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """``x (W∘scale)``; the gradients of ``weight`` and ``scale`` are added to theirs at the next ``flush``.

        Args:
            x: ``[T, d]`` or ``[g, T, d]``; requires a gradient itself when the weights do.
            weight: ``[d, c]`` or ``[g, d, c]``: a parameter or a view of one.
            scale_d: Scales the rows of the weight: a parameter.
            room: Whether to leave room beside the result for one more element per token (``Part.result``).
            quantised: The rows of ``x`` in 8 bits, if the kernel that computes it leaves them.
            of_gradient: Likewise those of the result's gradient.
            part: The part of the tokens that ``x`` has, if there are others.
        """
        rows_of_x = None if quantised is None else quantised.take()
        factor = _Factor(self, weight, scale_d, room, rows_of_x, part, of_gradient)
        return _Multiply.apply(x, factor, None)  # type: ignore[no-any-return, no-untyped-call]

    def product_of_saved(
        self, x: torch.Tensor, weight: torch.Tensor, scale_d: torch.Tensor | None = None, room: bool = False,
        quantised: PrecomputedRows | None = None, part: Part | None = None,
    ) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:  # fmt: skip
        """``product`` in two steps: ``x`` is saved for the backward pass now, and the returned function multiplies.

        So a segment may end between the two: what is recomputed is then the input of the product, and not the product.
        The second returned function may be called in the backward pass before the product's gradient is there.
        """
        factor = _Factor(self, weight, scale_d, room, None if quantised is None else quantised.take(), part)
        # The tensor is kept, not only its node: torch 2.11 frees what a node has saved with the node's last output.
        saved = (_Save.apply(x, factor),)  # type: ignore[no-untyped-call]
        return lambda: _Multiply.apply(x, factor, saved), factor.scale_ahead  # type: ignore[no-untyped-call]

    def flush(self, exchanged: int = 0) -> None:
        """Compute all deferred gradients in order, unless they are put off.

        Args:
            exchanged: Elements of the exchange under way. The largest takes longer than they do (that of QKV's latents,
                which has the shortest of products to hide behind): what is complete is settled meanwhile.
        """
        while self.waiting and not self.put_off:
            self.waiting.popleft()()
        if exchanged >= self.most and self.sinks.settle is not None:
            self.most = exchanged
            self.sinks.settle()

    def take(self) -> Callable[[], None]:
        """Return what computes the gradients deferred so far, and defer no longer."""
        waiting, self.waiting = self.waiting, deque()

        @torch.no_grad()  # which the backward pass sets by itself, and this runs after it
        def compute() -> None:
            while waiting:
                waiting.popleft()()

        return compute


@dataclass(eq=False)
class _Factor:
    """The right factor of one product, and how it is multiplied; arguments as for ``product``.

    Views and parameters have no memory of their own, and are not saved for the backward pass: recomputation would
    detach them.
    """

    deferred: DeferredWeightGradients
    weight: torch.Tensor
    scale_d: torch.Tensor | None
    room: bool
    rows_of_x: QuantisedRows | None
    part: Part | None
    of_gradient: PrecomputedRows | None = None
    scaled_ahead: torch.Tensor | None = None

    def scale_ahead(self) -> None:
        """Compute ``W∘scale`` for the backward pass, unless it is computed in 8 bits."""
        if self.scale_d is not None and not self.deferred.fp8:
            self.scaled_ahead = _scaled(self.weight.detach(), self.scale_d.detach())


class _Save(torch.autograd.Function):
    """A node that saves a product's factors for its backward pass, before it is computed; gradients pass it by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: _Factor) -> torch.Tensor:
        scale_d = factor.scale_d
        ctx.save_for_backward(x, factor.weight.detach(), None if scale_d is None else scale_d.detach())
        return x.new_empty(0)


class _Multiply(torch.autograd.Function):
    """A product; ``saved`` has the output of the node that has saved its factors, if another one has.

    It is in a tuple, in which autograd does not take it for an input.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: _Factor, saved: tuple[torch.Tensor] | None) -> torch.Tensor:
        weight, scale_d, part, fp8 = factor.weight, factor.scale_d, factor.part, factor.deferred.fp8
        if saved is None:
            ctx.save_for_backward(x, weight.detach(), None if scale_d is None else scale_d.detach())
        ctx.factor, ctx.saved = factor, saved
        if part is None and not fp8 and not factor.room:
            return x @ _scaled(weight, scale_d)
        rows, factor.rows_of_x = factor.rows_of_x, None
        shape = (*x.shape[:-1], weight.shape[-1])
        if part is None:  # with room, one more element per token behind the product
            elements = math.prod(shape)
            product = x.new_empty(elements + (len(x) if factor.room else 0))[:elements].view(shape)
        else:
            product, computed = part.result(x, shape, factor.room)
            if computed:
                return product
        if not fp8:
            multiply = torch.mm if x.ndim == 2 else torch.bmm
            if part is not None and scale_d is not None and part.place == 1:
                scaled = part.halves.factors.popleft()  # the first of two halves of the tokens has scaled it for both
            else:
                scaled = _scaled(weight, scale_d)
                if part is not None and scale_d is not None:
                    part.halves.factors.append(scaled)
            return multiply(x, scaled, out=product)
        return fp8_product(rows or quantise_rows(x), quantise_columns(weight, scale_d), product, fast_accumulation=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale_d = (ctx if ctx.saved is None else ctx.saved[0].grad_fn).saved_tensors
        (dy,), factor, deferred = gradients, ctx.factor, ctx.factor.deferred
        ctx.saved = None  # lets go of what it has
        deferred.waiting.append(partial(deferred.sinks.add_product, x, dy, factor.weight, factor.scale_d))
        if deferred.alone:
            deferred.flush()
        if not deferred.fp8:
            scaled, factor.scaled_ahead = factor.scaled_ahead, None
            return dy @ (_scaled(weight, scale_d) if scaled is None else scaled).mT, None, None
        rows = None if factor.of_gradient is None else factor.of_gradient.take()
        dx = fp8_product(rows or quantise_rows(dy), quantise_rows(weight, scale_d), x.new_empty(x.shape))
        return dx, None, None


def with_room_beside(product_Tr: torch.Tensor, part: Part | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """All memory of a product computed with ``room``, flat, and the room itself, ``[T]``, to be sent together."""
    tokens, columns = product_Tr.shape
    before = tokens if part is not None and part.place == 0 else 0
    memory = product_Tr.as_strided((tokens * (columns + 1),), (1,), int(product_Tr.storage_offset()) - before)
    return memory, memory[:tokens] if before else memory[tokens * columns :]


def _scaled(weight: torch.Tensor, scale_d: torch.Tensor | None) -> torch.Tensor:
    return weight if scale_d is None else weight * scale_d.unsqueeze(-1)


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
# Each rank's computation from a replicated latent gives a partial gradient of it, and of the norm's statistic that came
# with it; the all-reduce of both together completes them. All-reduces are in place: partial sums are overwritten, and
# so is the arriving gradient, which later operations must therefore hand over in memory of its own. Shape suffixes: T
# tokens, r latents.


@dataclass
class Exchange:
    """One exchange, forward and backward.

    Attributes:
        communicator: The tensor parallel group.
        deferred: Weight gradients to compute while the gradient is under way.
        statistic_apart: Whether the statistic has an all-reduce of its own instead of a column beside the latents.
        fused: What is computed from the latents next, if the exchange may do so in the same pass.
        part: The part of the tokens, if there are others.
        ahead: As in ``PartialLatents``.
        of_statistic: The statistic's gradient, ``[T]``, from when it is sent until it is whole.
        in_flight: The all-reduces that were started, all of them in place.
    """

    communicator: Communicator
    deferred: DeferredWeightGradients
    statistic_apart: bool
    fused: Epilogue | None = None
    part: Part | None = None
    ahead: Callable[[], None] | None = None
    of_statistic: torch.Tensor | None = None
    in_flight: list[Pending] = field(default_factory=list)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_Tr: torch.Tensor, squares_T: torch.Tensor | None, exchange: Exchange) -> Latents:
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        payload = h_Tr = partial_Tr.detach()
        part = exchange.part
        if part is not None and part.place is None:  # the halves have exchanged them
            exchanged = [of_half.popleft() for of_half in part.halves.exchanged]
            if exchanged[0][0].data_ptr() != h_Tr.data_ptr():  # in memory that was not for all tokens
                h_Tr = torch.cat([h_tr for h_tr, _ in exchanged])
            return h_Tr, None if squares_T is None else torch.cat([squares_t for _, squares_t in exchanged])
        if squares_T is not None and not exchange.statistic_apart:
            payload, sent_T = with_room_beside(h_Tr, part)
            squares_T = sent_T.copy_(squares_T)
        start, in_flight = exchange.communicator.start_all_reduce_, exchange.in_flight
        in_flight.append(start(payload, "latent", epilogue=exchange.fused))
        if squares_T is not None and exchange.statistic_apart:
            squares_T = squares_T.clone()
            in_flight.append(start(squares_T, "statistic"))
        if part is not None and part.place is not None:
            part.halves.exchanged[part.place].append((h_Tr, squares_T))
        return h_Tr, squares_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange = ctx.exchange
        exchange.deferred.flush(gradients[0].numel())
        if exchange.ahead is not None:
            exchange.ahead()
        while exchange.in_flight:
            exchange.in_flight.pop().wait()
        of_statistic, exchange.of_statistic = exchange.of_statistic, None
        return gradients[0], of_statistic, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_Tr: torch.Tensor, squares_T: torch.Tensor | None, exchange: Exchange) -> Latents:
        ctx.exchange = exchange
        while exchange.in_flight:
            exchange.in_flight.pop().wait()
        return h_Tr.view_as(h_Tr), None if squares_T is None else squares_T.view_as(squares_T)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange, dh_Tr, ds_T = ctx.exchange, gradients[0].contiguous(), gradients[1]
        start = exchange.communicator.start_all_reduce_
        if ds_T is None:
            exchange.in_flight.append(start(dh_Tr, "latent gradient"))
            return dh_Tr, None, None
        sent_T = ds_T
        one_memory = ds_T.untyped_storage().data_ptr() == dh_Tr.untyped_storage().data_ptr()
        if not one_memory or ds_T.data_ptr() != dh_Tr.data_ptr() + dh_Tr.nbytes:  # where ``latent_epilogue`` leaves it
            rows_Tr, room_T = with_room(dh_Tr)
            dh_Tr, sent_T = rows_Tr.copy_(dh_Tr), room_T.copy_(ds_T)
        exchange.in_flight.append(start(with_room_beside(dh_Tr)[0], "latent gradient"))
        exchange.of_statistic = sent_T  # not returned yet: if it has another type, autograd would convert it at once
        return dh_Tr, ds_T, None


class BottleneckTensorParallel:
    """The low-rank strategy of BTP over one tensor parallel group; on a group of one it exchanges nothing.

    Args:
        communicator: The tensor parallel group.
        norm: How the RMSNorm of a sharded residual is computed: ``fused``, ``online_paper`` or ``sync``.
        fp8: Whether to use the products of ``kernels.fp8_product``.

    Attributes:
        communicator: As given.
        fp8: As given; the kernels in front of products then leave their rows in 8 bits.
        deferred: Its products, and the weight gradients that they defer.
        host: The host's memory for what blocks save there.
    """

    SHARDING: ClassVar[Sharding] = BTP

    def __init__(self, communicator: Communicator, norm: str = "fused", fp8: bool = False) -> None:
        self.communicator = communicator
        self._norm, self.fp8, self.host = norm, fp8, HostMemory()
        self._sends_rounded = norm == "fused" and communicator.size > 1  # sums of squares, beside the latents
        self.deferred = DeferredWeightGradients(communicator.size == 1, fp8)

    def part(self, tokens: int, width: int) -> tuple[int, int]:
        """Shape of this rank's part of a residual stream: some columns of each row."""
        return tokens, width // self.communicator.size

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Look up this rank's columns: the residual is sharded from the start, and nothing is sent."""
        return self.enter(embedding(token_T, weight_Vd))

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """The stream received from another pipeline stage: a shard. Its sums of squares are recomputed, not sent.

        In the backward pass, all deferred gradients are computed before its gradient goes on.
        """

        def flush(dx_Td: torch.Tensor) -> torch.Tensor:
            self.deferred.flush()
            return dx_Td

        return self.add(Conjugate.apply(x_Td, lambda x_Td: x_Td.view_as(x_Td), flush), None)  # type: ignore[no-untyped-call]

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor | None, part: Part | None = None) -> Residual:
        """Add a block's output, ``[T, d]``, and take the result's sums of squares for the next norm."""
        # A product reads the residual itself only where the norm is applied afterwards.
        quantised = PrecomputedRows() if self.fp8 and self._norm == "fused" else None
        return residual_add(stream_Td, y_Td, quantised, part, self._sends_rounded)

    def partial_latents(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None, down_dgr: torch.Tensor, norm: NormWeights | None,
        quantised: PrecomputedRows | None = None, part: Part | None = None,
    ) -> PartialLatents:  # fmt: skip
        """This rank's part of ``norm(x) A`` for g projections: one matrix product of its rows.

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

        Args:
            x_Td: The residual's values, or any other input if there is no norm.
            squares_T: The residual's sums of squares, if it has them.
            down_dgr: A.
            norm: The norm; ``None`` for none.
            quantised: The rows of ``x`` in 8 bits, if the kernel that wrote it has left them.
            part: The part of the tokens that they are, if there are others.
        """
        down_dr, tokens = down_dgr.flatten(1), len(x_Td)
        if norm is None or squares_T is None:
            compute, _ = self.deferred.product_of_saved(x_Td, down_dr, quantised=quantised, part=part)
            return PartialLatents(compute, None, tokens, part)
        if self._norm == "fused":
            room = self.communicator.size > 1
            compute, ahead = self.deferred.product_of_saved(x_Td, down_dr, norm.scale_d, room, quantised, part)
            return PartialLatents(compute, squares_T, tokens, part, ahead)
        if self._norm == "online_paper":
            rms_T1 = (squares_T / x_Td.shape[1] + norm.epsilon).sqrt().unsqueeze(-1)
            local_Td = (precise(x_Td) / rms_T1).to(x_Td.dtype) * norm.scale_d
            partial_Tr = (precise(self.deferred.product(local_Td, down_dr, part=part)) * rms_T1).to(x_Td.dtype)
            return PartialLatents(lambda: partial_Tr, squares_T, tokens, part)
        latent_Tr = self.deferred.product(self._normed(x_Td, squares_T, norm, "statistic"), down_dr)
        return PartialLatents(lambda: latent_Tr, None, tokens)

    def start(self, partial: PartialLatents, epilogue: Epilogue | None = None) -> Callable[[], Latents]:
        """Start one all-reduce of all g latents; in the backward pass, one of their gradients.

        Args:
            partial: The result of ``partial_latents``.
            epilogue: What will be computed from them; has the result once they are whole if the exchange computes it.

        Returns:
            A function that waits for the whole latents.
        """
        latents = partial.compute(), partial.squares
        if self.communicator.size == 1:
            return lambda: latents
        apart = self._norm == "online_paper"
        fused = None if apart else epilogue
        exchange = Exchange(self.communicator, self.deferred, apart, fused, partial.part, partial.ahead)
        if partial.part is not None and partial.part.place is None:  # recorded when the halves have waited
            return lambda: _Wait.apply(*_Start.apply(*latents, exchange), exchange)  # type: ignore[no-untyped-call]
        started: Latents = _Start.apply(*latents, exchange)  # type: ignore[no-untyped-call]
        return lambda: _Wait.apply(*started, exchange)  # type: ignore[no-untyped-call]

    def up(
        self, z_gTr: torch.Tensor, up_grf: torch.Tensor, quantised: PrecomputedRows | None = None,
        of_gradient: PrecomputedRows | None = None, part: Part | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """``z B``, ``[g, T, f]``: one batched product, whose output is this rank's shard; nothing is sent.

        Args:
            z_gTr: The latents.
            up_grf: B.
            quantised: The rows of ``z`` in 8 bits, if the kernel that wrote it has left them.
            of_gradient: Likewise those of the output's gradient.
            part: The part of the tokens that they are, if there are others.
        """
        return self.deferred.product(z_gTr, up_grf, quantised=quantised, of_gradient=of_gradient, part=part)

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """The normalised hidden vectors, whole on every rank, as input to this rank's part of the head.

        Each rank normalises its shard, so one all-reduce of a statistic precedes the all-gather; of its transpose, so
        that the shards arrive side by side.
        """
        if residual.quantised is not None:
            residual.quantised.take()  # which no product reads
        if residual.squares is None:
            raise AssertionError("a sharded residual must come with its sums of squares")
        normed_Td = self._normed(residual.inputs, residual.squares, norm, "hidden")
        return all_gather_from_tp(normed_Td.T.contiguous(), self.communicator, "hidden").flatten(0, 1).T

    def _normed(self, x_Td: torch.Tensor, squares_T: torch.Tensor, norm: NormWeights, purpose: str) -> torch.Tensor:
        """The norm of this rank's shard: an all-reduce of the statistic, and backward one of its gradient."""
        dtype = torch.promote_types(squares_T.dtype, torch.float32)
        summed_T = reduce_from_tp(squares_T.to(dtype, copy=True), self.communicator, purpose)
        summed_T = copy_to_tp(summed_T, self.communicator, purpose)
        normed_1Td = latent_epilogue(x_Td, summed_T, 1, norm.width, norm.epsilon, Activation.LINEAR)
        return normed_1Td.squeeze(0) * norm.scale_d

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """The embedding as a head, ``[d, V]``: some columns of all rows become all columns of some rows.

        One all-to-all of the embedding's shard.
        """
        return all_to_all(embedding_Vd, self.communicator, "tied head").T
