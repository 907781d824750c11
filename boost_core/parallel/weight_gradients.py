"""Deferred weight gradients, computed while a collective is in flight so as to hide it.

The backward pass of a matrix product is two others: its input's gradient, which the ranks wait for, and its weight's,
which no rank waits for. The second is deferred; code that has started a collective calls ``flush`` before waiting.
Weight gradients go straight to the code that accumulates them (``GradientSinks``).
Shape suffixes as in ``btp``.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from boost_core.kernels.fp8_product import (
    fp8_product,
    quantise_columns,
    quantise_rows,
    quantised,
    take_quantised,
)
from boost_core.kernels.launch import precise


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


class GradientSinks:
    """Where weight gradients that are computed outside of autograd go, by parameter; autograd's own go their usual way.

    A nested backward pass would cost the host more than the addition costs the GPU, and for a part of a weight it would
    fill the rest with zeros.

    Parameters are told apart by their ``id``: a model's sinks live as long as its parameters.

    Attributes:
        gradients: Take gradients. Those of parameters that are not among them go through autograd.
        products: Take the factors of gradients, where the sum can be computed from these.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, Sink] = {}
        self.products: dict[int, ProductSink] = {}

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
        if scale is None:
            self.add(weight, gradient)
            return
        self.add(weight, _scaled(gradient, scale.detach()))
        self.add(scale, (precise(gradient) * weight.detach()).sum(dim=-1).to(scale.dtype))


def _part(weight: torch.Tensor, parameter: torch.Tensor) -> WeightPart | None:
    """The position of a view in its parameter; ``None`` if it covers all of it, in any shape."""
    if weight.numel() == parameter.numel() and weight.is_contiguous():
        return None
    return WeightPart(weight.shape, weight.stride(), int(weight.storage_offset()) - int(parameter.storage_offset()))


class DeferredWeightGradients:
    """Products whose weight gradients are deferred, and the gradients still to be computed.

    Args:
        alone: Whether there are no collectives to hide. Weight gradients are then computed at once unless ``keep`` was
            called: deferred to the end of the backward pass, they would hold the inputs of all products.
        fp8: Whether products and their inputs' gradients use ``kernels.fp8_product``.
        sinks: Where weight gradients go; ``None`` for autograd.
    """

    def __init__(self, alone: bool = False, fp8: bool = False, sinks: GradientSinks | None = None) -> None:
        self.fp8, self.sinks = fp8, sinks or GradientSinks()
        self._deferred: deque[Callable[[], None]] = deque()
        self._alone, self._is_put_off = alone, False

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, scale_d: torch.Tensor | None = None, room: bool = False
    ) -> torch.Tensor:
        """``x (W∘scale)``; the gradients of ``weight`` and ``scale`` are added to theirs at the next ``flush``.

        Args:
            x: ``[T, d]`` or ``[g, T, d]``; requires a gradient itself when the weights do.
            weight: ``[d, c]`` or ``[g, d, c]``: a parameter or a view of one.
            scale_d: Scales the rows of the weight: a parameter.
            room: Whether to leave room behind the result for one more element per token.
        """
        return _Multiply.apply(x, _Factor(self, x, weight, scale_d, room), None)  # type: ignore[no-any-return, no-untyped-call]

    def product_of_saved(
        self, x: torch.Tensor, weight: torch.Tensor, scale_d: torch.Tensor | None = None, room: bool = False
    ) -> Callable[[], torch.Tensor]:
        """``product`` in two steps: ``x`` is saved for the backward pass now, and the returned function multiplies.

        So a segment may end between the two: what is recomputed is then the input of the product, and not the product.
        """
        factor = _Factor(self, x, weight, scale_d, room)
        saved = _Save.apply(x, factor).grad_fn  # type: ignore[no-untyped-call]
        return lambda: _Multiply.apply(x, factor, saved)  # type: ignore[no-untyped-call]

    def defer(self, gradient: Callable[[], None]) -> None:
        """Defer a gradient's computation."""
        self._deferred.append(gradient)
        if self._alone:
            self.flush()

    def flush(self) -> None:
        """Compute all deferred gradients in order, unless they are kept."""
        while self._deferred and not self._is_put_off:
            self._deferred.popleft()()

    def abandon(self) -> None:
        """Drop all deferred gradients."""
        self._deferred.clear()

    def keep(self) -> Callable[[], Callable[[], None]]:
        """From now on, compute nothing unasked; the returned function takes all gradients deferred so far."""
        self._is_put_off = True

        def take() -> Callable[[], None]:
            deferred, self._deferred = self._deferred, deque()

            @torch.no_grad()  # which the backward pass sets by itself, and this runs after it
            def compute() -> None:
                while deferred:
                    deferred.popleft()()

            return compute

        return take

    def flush_before(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` itself; in the backward pass, all deferred gradients are computed before its gradient goes on."""
        return _FlushBefore.apply(x, self)  # type: ignore[no-any-return, no-untyped-call]


class _Factor:
    """The right factor of one product, and how it is multiplied; arguments as for ``product``.

    Views and parameters have no memory of their own, and are not saved for the backward pass: recomputation would
    detach them.
    """

    def __init__(
        self, deferred: DeferredWeightGradients, x: torch.Tensor, weight: torch.Tensor, scale_d: torch.Tensor | None,
        room: bool,
    ) -> None:  # fmt: skip
        self.deferred, self.weight, self.scale_d, self.room = deferred, weight, scale_d, room
        self.rows_of_x = take_quantised(x) if deferred.fp8 else None

    def save(self, ctx: Any, x: torch.Tensor) -> None:
        """Save both factors for the backward pass."""
        ctx.save_for_backward(x, self.weight.detach(), None if self.scale_d is None else self.scale_d.detach())


class _Save(torch.autograd.Function):
    """A node that saves a product's factors for its backward pass, before it is computed; gradients pass it by."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: _Factor) -> torch.Tensor:
        factor.save(ctx, x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise AssertionError("nothing is computed from its output")


class _Multiply(torch.autograd.Function):
    """A product; ``saved`` is the node that has saved its factors, if another one has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: _Factor, saved: Any) -> torch.Tensor:
        if saved is None:
            factor.save(ctx, x)
        ctx.factor, ctx.saved = factor, saved
        weight, scale_d = factor.weight, factor.scale_d
        if factor.deferred.fp8:
            rows = quantise_rows(x) if factor.rows_of_x is None else factor.rows_of_x
            factor.rows_of_x = None
            product = _memory(x, weight, factor.room)
            return fp8_product(rows, quantise_columns(weight, scale_d), product, fast_accumulation=True)
        if not factor.room:
            return x @ _scaled(weight, scale_d)
        return torch.mm(x, _scaled(weight, scale_d), out=_memory(x, weight, factor.room))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale_d = (ctx if ctx.saved is None else ctx.saved).saved_tensors
        (dy,), factor, deferred = gradients, ctx.factor, ctx.factor.deferred
        ctx.saved = None  # lets go of what it has
        deferred.defer(partial(deferred.sinks.add_product, x, dy, factor.weight, factor.scale_d))
        if deferred.fp8:
            dx = fp8_product(quantised(dy), quantise_rows(weight, scale_d), x.new_empty(x.shape))
        else:
            dx = dy @ _scaled(weight, scale_d).mT
        return dx, None, None


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
