"""Conjugate pairs of collectives, named after their forward operation; the backward pass runs the conjugate.

======================  =================  =================
pair                    forward            backward
======================  =================  =================
``reduce_from_tp``      all-reduce         identity
``copy_to_tp``          identity           all-reduce
``all_gather_from_tp``  all-gather         reduce-scatter
``all_to_all``          all-to-all         all-to-all
======================  =================  =================

In a group of one rank, each is the identity and nothing is counted. A latent's all-reduce, which other work can hide,
is in ``exchange``.
"""

from typing import Any

import torch

from boost_core.parallel.communicator import Communicator


class _ReduceFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
        ctx.mark_dirty(partial)
        return communicator.all_reduce_(partial, purpose)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None, None


class _CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
        ctx.communicator, ctx.purpose = communicator, purpose
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total = gradients[0].contiguous()
        return ctx.communicator.all_reduce_(total, f"{ctx.purpose} gradient"), None, None


class _AllGatherFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Tc: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
        ctx.communicator, ctx.purpose = communicator, purpose
        return communicator.all_gather(x_Tc, purpose)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.communicator.reduce_scatter(gradients[0], f"{ctx.purpose} gradient"), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Ac: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
        ctx.communicator, ctx.purpose = communicator, purpose
        parts_pac = x_Ac.reshape(communicator.size, -1, x_Ac.shape[1])
        return communicator.all_to_all(parts_pac, purpose).transpose(0, 1).flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts_pac = gradients[0].reshape(len(gradients[0]), ctx.communicator.size, -1).transpose(0, 1).contiguous()
        return ctx.communicator.all_to_all(parts_pac, f"{ctx.purpose} gradient").flatten(0, 1), None, None


def reduce_from_tp(partial: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """The sum of every rank's ``partial``, on all ranks; ``partial`` itself is overwritten."""
    if communicator.size == 1:
        return partial
    return _ReduceFromTp.apply(partial, communicator, purpose)  # type: ignore[no-any-return, no-untyped-call]


def copy_to_tp(replicated: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """A replicated tensor on its way into each rank's own shard; gradients of all ranks are summed.

    The sum overwrites the gradient that arrives, so later operations must hand over one of their own: a matrix product
    does; a sum, which passes the same gradient to both of its terms, does not.
    """
    if communicator.size == 1:
        return replicated
    return _CopyToTp.apply(replicated, communicator, purpose)  # type: ignore[no-any-return, no-untyped-call]


def all_gather_from_tp(x_Tc: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """``[T, c]`` shards to ``[p, T, c]`` on all ranks; gradients are summed and scattered back."""
    if communicator.size == 1:
        return x_Tc.unsqueeze(0)
    return _AllGatherFromTp.apply(x_Tc, communicator, purpose)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all(x_Ac: torch.Tensor, communicator: Communicator, purpose: str) -> torch.Tensor:
    """Turn a matrix split along its columns, ``[A, c/p]``, into the same one split along its rows, ``[A/p, c]``."""
    if communicator.size == 1:
        return x_Ac
    return _AllToAll.apply(x_Ac, communicator, purpose)  # type: ignore[no-any-return, no-untyped-call]
