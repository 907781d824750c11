"""Weight gradients computed outside of autograd go straight to the code that accumulates gradients.

A nested backward pass would cost the host more than the addition costs the GPU, and for a part of a weight it would
fill the rest with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


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
