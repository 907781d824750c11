"""Deferred weight gradients, computed while a collective is in flight so as to hide it.

The backward pass of a matrix product is two others: its input's gradient, which the ranks wait for, and its weight's,
which no rank waits for. The second is deferred; code that has started a collective calls ``flush`` before waiting.
Shape suffixes as in ``btp``.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from boost_core.kernels.fp8_product import drop_quantised, fp8_product, quantise_columns, quantise_rows, quantised
from boost_core.model.norm import precise
from boost_core.parallel.recompute import in_recompute

# Weight gradients computed outside of autograd go straight to the code that accumulates gradients.
#
# A nested backward pass would cost the host more than the addition costs the GPU, and for a part of a weight it would
# fill the rest with zeros.


@dataclass(frozen=True)
class WeightPart:
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


def send_gradients_to(sink: Sink, weight: nn.Parameter) -> None:
    """Have ``give_gradient`` pass a weight's gradients to ``sink``; autograd's own gradients go their usual way."""
    weight.gradient_sink = sink  # type: ignore[attr-defined]


def send_products_to(sink: ProductSink, weight: nn.Parameter) -> None:
    """Have ``give_product`` offer the factors of a weight's gradient to ``sink``."""
    weight.product_sink = sink  # type: ignore[attr-defined]


def give_product(x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Pass on xᵀ dy, the gradient of ``weight ∘ scale``, as factors; return whether a sink has taken them."""
    whole = weight if weight._base is None else weight._base
    sink: ProductSink | None = getattr(whole, "product_sink", None)
    return sink is not None and sink(x, dy, _part(weight, whole), scale)


def give_gradient(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Pass on the gradient of a parameter or of a view of one, through autograd if it has no sink."""
    whole = weight if weight._base is None else weight._base
    sink: Sink | None = getattr(whole, "gradient_sink", None)
    if sink is None:
        torch.autograd.backward([weight], [gradient.to(weight.dtype)])
    else:
        sink(gradient, _part(weight, whole))


def _part(weight: torch.Tensor, whole: torch.Tensor) -> WeightPart | None:
    """The position of a view in its parameter; ``None`` if it covers all of it, in any shape."""
    if weight.numel() == whole.numel() and weight.is_contiguous():
        return None
    return WeightPart(weight.shape, weight.stride(), int(weight.storage_offset()) - int(whole.storage_offset()))


class DeferredWeightGradients:
    """Products whose weight gradients are deferred, and the gradients still to be computed.

    Args:
        alone: Whether there are no collectives to hide. Weight gradients are then computed at once unless ``keep`` was
            called: deferred to the end of the backward pass, they would hold the inputs of all products.
        fp8: Whether products and their inputs' gradients use ``kernels.fp8_product``.
    """

    def __init__(self, alone: bool = False, fp8: bool = False) -> None:
        self.fp8 = fp8
        self._deferred: deque[Callable[[], None]] = deque()
        self._alone, self._kept = alone, False

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, scale_d: torch.Tensor | None = None,
        sent: bool = False, room: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """``x (W∘scale)``; the gradients of ``weight`` and ``scale`` are added to theirs at the next ``flush``.

        Args:
            x: ``[T, d]`` or ``[g, T, d]``; requires a gradient itself when the weights do.
            weight: ``[d, c]`` or ``[g, d, c]``: a parameter or a view of one.
            scale_d: Scales the rows of the weight: a parameter.
            sent: Whether the result is exchanged and not read before.
            room: Whether to leave room behind the result for one more element per token.
        """
        return _Product.apply(x, weight.detach(), _detached(scale_d), (weight, scale_d), self, sent, room)  # type: ignore[no-any-return, no-untyped-call]

    def defer(self, gradient: Callable[[], None]) -> None:
        """Defer a gradient's computation."""
        self._deferred.append(gradient)
        if self._alone:
            self.flush()

    def flush(self) -> None:
        """Compute all deferred gradients in order, unless they are kept."""
        while self._deferred and not self._kept:
            self._deferred.popleft()()

    def abandon(self) -> None:
        """Drop all deferred gradients."""
        self._deferred.clear()

    def keep(self) -> Callable[[], Callable[[], None]]:
        """From now on, compute nothing unasked; the returned function takes all gradients deferred so far."""
        self._kept = True
        return self._take

    def _take(self) -> Callable[[], None]:
        taken, self._deferred = self._deferred, deque()

        @torch.no_grad()  # which the backward pass sets by itself, and this runs after it
        def compute() -> None:
            while taken:
                taken.popleft()()

        return compute

    def flush_before(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself; in the backward pass, all deferred gradients are computed before its gradient goes on."""
        return _FlushBefore.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale_d: torch.Tensor | None,
        owners: tuple[torch.Tensor, torch.Tensor | None],
        deferred: DeferredWeightGradients,
        sent: bool,
        room: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, scale_d)
        # Views and parameters have no memory of their own, and are not saved: recomputation would detach them.
        ctx.owners, ctx.deferred = owners, deferred
        if sent and in_recompute():
            drop_quantised(x)
            return x.new_empty(len(x), weight.shape[1])
        if deferred.fp8:
            made = quantise_columns(weight, scale_d)
            return fp8_product(quantised(x), made, _memory(x, weight, room), fast_accumulation=True)
        if not room:
            return x @ _scaled(weight, scale_d)
        return torch.mm(x, _scaled(weight, scale_d), out=_memory(x, weight, room))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale_d = ctx.saved_tensors
        (dy,), owners = gradients, ctx.owners
        ctx.deferred.defer(lambda: _give_gradients(x, dy, weight, scale_d, owners))
        if ctx.deferred.fp8:
            dx = fp8_product(quantised(dy), quantise_rows(weight, scale_d), x.new_empty(x.shape))
        else:
            dx = dy @ _scaled(weight, scale_d).mT
        return dx, None, None, None, None, None, None


class _FlushBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, deferred: DeferredWeightGradients) -> torch.Tensor:
        ctx.deferred = deferred
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.deferred.flush()
        return gradients[0], None


def _memory(x: torch.Tensor, weight: torch.Tensor, room: bool) -> torch.Tensor:
    """Memory for ``x @ weight``; with ``room``, one more element per token behind it."""
    shape = (*x.shape[:-1], weight.shape[-1])
    elements = math.prod(shape)
    return x.new_empty(elements + (len(x) if room else 0))[:elements].view(shape)


def with_room_behind(product_Tr: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All memory of a product computed with ``room``, flat, and the room itself, ``[T]``, to be sent together."""
    tokens, columns = product_Tr.shape
    memory = product_Tr.as_strided((tokens * (columns + 1),), (1,))
    return memory, memory[tokens * columns :]


def _scaled(weight: torch.Tensor, scale_d: torch.Tensor | None) -> torch.Tensor:
    return weight if scale_d is None else weight * scale_d.unsqueeze(-1)


def _give_gradients(
    x: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor,
    scale_d: torch.Tensor | None,
    owners: tuple[torch.Tensor, torch.Tensor | None],
) -> None:
    """Pass the gradient of ``weight ∘ scale`` on to both."""
    weight_owner, scale_owner = owners
    if give_product(x, dy, weight_owner, scale_owner):
        return
    gradient = x.mT @ dy
    give_gradient(weight_owner, _scaled(gradient, scale_d))
    if scale_owner is not None:
        give_gradient(scale_owner, (precise(gradient) * weight).sum(dim=-1).to(scale_owner.dtype))


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()
