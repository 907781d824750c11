"""Sends latents between nodes instead of keys and values: with r = d/4, a quarter of the bytes.

All ranks of a tensor parallel group have the whole latents of their tokens, so each sends its share of the columns to
its counterpart on the other node, where the group gathers the rest over the node's own links. Each rank computes the
keys and values of its own heads from the whole latents. In the backward pass they are sent and computed again; the
resulting gradients of the latents are summed within the node, a share per rank, and go back over the fabric. The owner
adds them to its own part of that gradient, which the group sums in any case.

The gradients of the weights used are summed here over all stages, so that there is one per micro-batch even if nothing
has come: code that counts gradients finds the same number in each.

Shape suffixes: T tokens of the rank, n tokens that come; r latents, p tensor parallel ranks, c = 2r/p; j heads of keys
and values, e head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from boost_core.nn.attention import KeyMaker, Rotation
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.exchange import ChunkExchange
from boost_core.parallel.gradient_sinks import give_gradient


@dataclass(frozen=True)
class LatentRoute:
    """How latents travel.

    Attributes:
        nodes: The node of each context parallel rank, between which latents are sent and within which keys and values
            are; ``None`` if these are sent everywhere.
        moves: Whether the queries and outputs of moved tasks travel as latents.
        tensor: The tensor parallel group.
        at: Returns the rotation of the tokens of some chunks.
    """

    nodes: Sequence[int] | None
    moves: bool
    tensor: Communicator
    at: Callable[[Sequence[int]], Rotation]

    def columns(self, x_Tr: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a latent: a view."""
        return x_Tr.tensor_split(self.tensor.size, dim=1)[self.tensor.rank]

    def share(self, *latents_Tr: torch.Tensor) -> torch.Tensor:
        """This rank's columns of some latents, side by side, ``[T, c]``."""
        return torch.cat([self.columns(x_Tr) for x_Tr in latents_Tr], 1)

    def in_place(self, share_Tc: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Spread a share over ``count`` full-width tensors, ``[T, r]`` each, with zeros in other ranks' columns."""
        parts = share_Tc.chunk(count, dim=1)
        whole_Tr = [part.new_zeros(len(part), part.shape[1] * self.tensor.size) for part in parts]
        for whole, part in zip(whole_Tr, parts, strict=True):
            self.columns(whole).copy_(part)
        return whole_Tr

    def gathered(self, came_nc: torch.Tensor, count: int, purpose: str) -> Sequence[torch.Tensor]:
        """Gather ``count`` full-width tensors, ``[n, r]`` each, from the shares that all ranks have received."""
        if self.tensor.size == 1:
            return came_nc.chunk(count, dim=1)
        shares_pnc = self.tensor.all_gather(came_nc.contiguous(), purpose)
        return [part.transpose(0, 1).flatten(1) for part in shares_pnc.chunk(count, dim=2)]

    def scattered(self, parts_nr: Sequence[torch.Tensor], purpose: str) -> torch.Tensor:
        """This rank's share, ``[n, c]``, of the sums over every rank's heads: of latents, or of their gradients."""
        if self.tensor.size == 1:
            return torch.cat(list(parts_nr), dim=1)
        parts = zip(*(x_nr.chunk(self.tensor.size, dim=1) for x_nr in parts_nr), strict=True)
        return self.tensor.reduce_scatter(torch.stack([torch.cat(part, dim=1) for part in parts]), purpose)


class Made:
    """Keys and values computed from latents.

    Args:
        maker: Computes them, with which weights.
        came_nr: The latents.
        rotation: The rotation of their tokens.
        backward: Whether gradients will be asked for.
    """

    def __init__(self, maker: KeyMaker, came_nr: Sequence[torch.Tensor], rotation: Rotation, backward: bool) -> None:
        self._inputs = [x.detach().requires_grad_() for x in (*came_nr, *maker.weights)]
        with torch.set_grad_enabled(backward):
            self._made = maker.make(self._inputs[:2], self._inputs[2:], rotation)

    def keys(self) -> torch.Tensor:
        """``[n, 2, j, e]``."""
        return torch.stack([x_nje.detach() for x_nje in self._made], dim=1)

    def gradients(self, dkeys_nsje: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Gradients of both latents and of the weights; to be called once."""
        found = torch.autograd.grad(self._made, self._inputs, dkeys_nsje.unbind(1))
        return found[:2], found[2:]


@dataclass(frozen=True)
class LatentGradients:
    """Gradients of the latents and weights of a rank's keys and values, in at least fp32.

    Attributes:
        share: For this rank's share of its tokens' latents, ``[T, c]``, from other ranks' queries.
        weights: For the weights, from other ranks' tokens.
    """

    share: torch.Tensor
    weights: Sequence[torch.Tensor]

    @classmethod
    def none_yet(cls, share_Tc: torch.Tensor, maker: KeyMaker, dtype: torch.dtype) -> "LatentGradients":
        """Zeros."""
        zeros = [torch.zeros_like(x, dtype=dtype) for x in (share_Tc, *maker.weights)]
        return cls(zeros[0], zeros[1:])

    def give_weights(self, maker: KeyMaker) -> None:
        """Pass on the weights' gradients."""
        for weight, gradient in zip(maker.weights, self.weights, strict=True):
            give_gradient(weight, gradient)


class LatentExchange:
    """One stage's exchange of latents.

    Args:
        exchange: The exchange of shares.
        route: How latents travel.
        chunks: The chunks that come to this rank, in the order of arrival.
    """

    def __init__(self, exchange: ChunkExchange, route: LatentRoute, chunks: Sequence[int]) -> None:
        self.exchange, self._route = exchange, route
        self._rotation = route.at(chunks) if chunks else None

    def make(self, came_nc: torch.Tensor, maker: KeyMaker, backward: bool) -> Made | None:
        """Compute keys and values from what has come; ``None`` if nothing has."""
        if self._rotation is None:
            return None
        return Made(maker, self._route.gathered(came_nc, 2, "key latents"), self._rotation, backward)

    def start_back(
        self, made: Made | None, dkeys_nsje: torch.Tensor, gradients: LatentGradients
    ) -> Callable[[torch.Tensor], None]:
        """As in ``ChunkExchange``, for the latents' shares; the weights' gradients are added at once."""
        if made is None:
            return self.exchange.start_back(dkeys_nsje.new_empty(0, gradients.share.shape[1]))
        of_latents, of_weights = made.gradients(dkeys_nsje)
        for whole, part in zip(gradients.weights, of_weights, strict=True):
            whole += part
        return self.exchange.start_back(self._route.scattered(of_latents, "key latent gradients"))
