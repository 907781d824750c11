"""Latents of keys and values between nodes, in place of these: with r = d/4, a quarter of the bytes.

All ranks of a tensor parallel group have the whole latents of their tokens, so each sends its share of their columns to
its like on the other node, and there the group gathers the rest, over the links of its node. Of the whole latents each
makes the keys and values of its own heads. Backward they come and are made once more; what their gradients make of the
latents' is summed in the node, a share each, and goes back over the fabric. The owner adds it to its own part of that
gradient, which the group sums up in any case.

The gradients of the weights that made them are summed here over all stages, so that they come once a micro-batch, even
if nothing has come: who counts gradients finds as many of them in each.

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
    """How latents go.

    Attributes:
        nodes: The node of each context parallel rank. Within one keys and values go.
        tensor: The tensor parallel group.
        at: The rotation of the tokens of some chunks.
    """

    nodes: Sequence[int]
    tensor: Communicator
    at: Callable[[Sequence[int]], Rotation]

    def share(self, key_Tr: torch.Tensor, value_Tr: torch.Tensor) -> torch.Tensor:
        """This rank's columns of both latents, ``[T, c]``."""
        return torch.cat(
            [x_Tr.tensor_split(self.tensor.size, dim=1)[self.tensor.rank] for x_Tr in (key_Tr, value_Tr)], 1
        )

    def in_place(self, share_Tc: torch.Tensor) -> Sequence[torch.Tensor]:
        """A share's gradients as those of both latents, ``[T, r]`` each: zeros in the columns of other ranks."""
        whole_2Tr = [share_Tc.new_zeros(len(share_Tc), share_Tc.shape[1] // 2 * self.tensor.size) for _ in range(2)]
        for whole_Tr, part in zip(whole_2Tr, share_Tc.chunk(2, dim=1), strict=True):
            whole_Tr.tensor_split(self.tensor.size, dim=1)[self.tensor.rank].copy_(part)
        return whole_2Tr

    def gathered(self, came_nc: torch.Tensor) -> Sequence[torch.Tensor]:
        """Both latents whole, ``[n, r]`` each, of every rank's share of what has come."""
        if self.tensor.size == 1:
            return came_nc.chunk(2, dim=1)
        shares_pnc = self.tensor.all_gather(came_nc, "key latents")
        return [half.transpose(0, 1).flatten(1) for half in shares_pnc.chunk(2, dim=2)]

    def scattered(self, gradients_nr: Sequence[torch.Tensor]) -> torch.Tensor:
        """This rank's share, ``[n, c]``, of the sum of what every rank's heads make of the latents' gradients."""
        if self.tensor.size == 1:
            return torch.cat(list(gradients_nr), dim=1)
        parts = zip(*(x_nr.chunk(self.tensor.size, dim=1) for x_nr in gradients_nr), strict=True)
        return self.tensor.reduce_scatter(
            torch.stack([torch.cat(part, dim=1) for part in parts]), "key latent gradients"
        )


class Made:
    """Keys and values that were made of latents.

    Args:
        maker: How, and of which weights.
        came_nr: The latents.
        rotation: Of their tokens.
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
        """Those of both latents, and of the weights; to be asked once."""
        found = torch.autograd.grad(self._made, self._inputs, dkeys_nsje.unbind(1))
        return found[:2], found[2:]


@dataclass(frozen=True)
class LatentGradients:
    """Gradients of what a rank's keys and values are made of, in fp32 at least.

    Attributes:
        share: Of this rank's share of its tokens' latents, ``[T, c]``, by other ranks' queries.
        weights: Of the weights, by other ranks' tokens.
    """

    share: torch.Tensor
    weights: Sequence[torch.Tensor]

    @classmethod
    def none_yet(cls, share_Tc: torch.Tensor, maker: KeyMaker, dtype: torch.dtype) -> "LatentGradients":
        """Zeros."""
        zeros = [torch.zeros_like(x, dtype=dtype) for x in (share_Tc, *maker.weights)]
        return cls(zeros[0], zeros[1:])

    def give_weights(self, maker: KeyMaker) -> None:
        """Hand those of the weights on."""
        for weight, gradient in zip(maker.weights, self.weights, strict=True):
            give_gradient(weight, gradient)


class LatentExchange:
    """One stage's exchange of latents.

    Args:
        exchange: Of shares.
        route: How they go.
        chunks: Those of this rank that come, in the order that they come in.
    """

    def __init__(self, exchange: ChunkExchange, route: LatentRoute, chunks: Sequence[int]) -> None:
        self.exchange, self._route = exchange, route
        self._rotation = route.at(chunks) if chunks else None

    def make(self, came_nc: torch.Tensor, maker: KeyMaker, backward: bool) -> Made | None:
        """Keys and values of what has come; ``None`` if nothing has."""
        if self._rotation is None:
            return None
        return Made(maker, self._route.gathered(came_nc), self._rotation, backward)

    def start_back(
        self, made: Made | None, dkeys_nsje: torch.Tensor, gradients: LatentGradients
    ) -> Callable[[torch.Tensor], None]:
        """As of ``ChunkExchange``, of the latents' shares; the weights' gradients are added to theirs at once."""
        if made is None:
            return self.exchange.start_back(dkeys_nsje.new_empty(0, gradients.share.shape[1]))
        of_latents, of_weights = made.gradients(dkeys_nsje)
        for whole, part in zip(gradients.weights, of_weights, strict=True):
            whole += part
        return self.exchange.start_back(self._route.scattered(of_latents))
