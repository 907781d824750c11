"""Where a weight's gradient goes that is computed outside of autograd: straight to who sums gradients up.

A backward pass within a backward pass would cost the host more than the addition costs the GPU, and of a part of a
weight it would fill the rest with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class WeightPart:
    """Which part of a dense weight.

    Attributes:
        shape: Its shape.
        stride: Its strides in the weight.
        offset: Elements of the weight before it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, like_weight: torch.Tensor) -> torch.Tensor:
        """The same part of a dense tensor of the weight's shape."""
        return like_weight.as_strided(self.shape, self.stride, like_weight.storage_offset() + self.offset)


# Takes the gradient of a weight, in any shape, or that of a part of it.
Sink = Callable[[torch.Tensor, WeightPart | None], None]


def send_gradients_to(sink: Sink, weight: nn.Parameter) -> None:
    """From now on ``give_gradient`` hands gradients of a weight to ``sink``; autograd's own go their usual way."""
    weight.gradient_sink = sink  # type: ignore[attr-defined]


def give_gradient(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Hand on the gradient of a parameter or of a view of one; through autograd, if nobody has asked for it."""
    whole = weight if weight._base is None else weight._base
    sink: Sink | None = getattr(whole, "gradient_sink", None)
    if sink is None:
        torch.autograd.backward([weight], [gradient])
    elif weight.numel() == whole.numel() and weight.is_contiguous():
        sink(gradient, None)
    else:
        offset = int(weight.storage_offset()) - int(whole.storage_offset())
        sink(gradient, WeightPart(weight.shape, weight.stride(), offset))
