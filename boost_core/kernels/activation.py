"""The activations of latents and of the MLP's gate, in torch and in Triton.

::

    linear   f(x) = x
    silu     f(x) = x σ(x)      f'(x) = σ(x) (1 + x (1 − σ(x)))

One more is a member of ``Activation`` and a branch in each of these functions.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from boost_core.config.model import Activation
from boost_core.kernels.launch import jit, tl


def activation_reference(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """f(x), differentiated by autograd."""
    return silu(x) if activation is Activation.SILU else x


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """f(x); ``ACTIVATION`` is the value of an ``Activation``, as in all kernels."""
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    return x


@jit
def activation_gradient(dy, x, ACTIVATION: tl.constexpr):
    """``dy · f'(x)``."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(x)
        dy *= sigmoid * (1.0 + x * (1.0 - sigmoid))
    return dy
