"""Sends queries whose attention other ranks compute, and returns their outputs.

A moved task has all keys of its queries, so what comes back is final and takes its place among the rank's own outputs.
Nothing is kept where it was computed: in the backward pass the queries go again, with the output, its log-sum-exps and
its gradient, and the gradient of the queries comes back. Those of keys go to their owners like any others.

Shape suffixes: T tokens of the rank, n that go, m that come; x any values of a token.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch

from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.exchange import start_rows
from boost_core.parallel.context.pieces import integers
from boost_core.plan.context.pieces import Traffic


class MovedQueries:
    """The exchange of moved queries of one plan.

    Args:
        traffic: What goes where; what comes stays in its order of arrival.
        chunk_tokens: Tokens of a chunk.
        communicator: The context parallel group.
        device: Where the tokens are.
    """

    def __init__(self, traffic: Traffic, chunk_tokens: int, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._goes = [len(chunks) * chunk_tokens for chunks in traffic.sends]
        self._comes = [count * chunk_tokens for count in traffic.receives]
        first_n = integers([chunk for chunks in traffic.sends for chunk in chunks], torch.int64, device) * chunk_tokens
        self._places_n = (first_n.unsqueeze(1) + torch.arange(chunk_tokens, device=device)).flatten()

    def start(self, purpose: str, *own_Tx: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to send values of moved tokens; the returned function waits, and returns those of tokens that come.

        Args:
            purpose: The purpose, for the ledger.
            own_Tx: Values of this rank's tokens, of any types; they are sent as the first one's type.
        """
        payload = _packed([x.index_select(0, self._places_n) for x in own_Tx])
        wait = start_rows(self._communicator, payload, self._goes, self._comes, purpose)
        return lambda: _unpacked(wait(), own_Tx)

    def give_back(self, purpose: str, came_mx: Sequence[torch.Tensor], own_Tx: Sequence[torch.Tensor]) -> None:
        """Return what was computed for others, and put what comes back where its tokens are.

        Args:
            purpose: The purpose, for the ledger.
            came_mx: Results for the tokens that have come.
            own_Tx: Where results for this rank's tokens are put, of the same types.
        """
        received = start_rows(self._communicator, _packed(came_mx), self._comes, self._goes, purpose)()
        for own, part_nx in zip(own_Tx, _unpacked(received, own_Tx), strict=True):
            own.index_copy_(0, self._places_n, part_nx)


def _packed(parts_nx: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row per token, viewed as the first one's type, bit for bit."""
    return torch.cat([x.reshape(len(x), prod(x.shape[1:])).view(parts_nx[0].dtype) for x in parts_nx], dim=1)


def _unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    widths = [prod(x.shape[1:]) * x.element_size() // rows.element_size() for x in like]
    parts = zip(rows.split_with_sizes(widths, dim=1), like, strict=True)
    return [part.contiguous().view(x.dtype).view(len(rows), *x.shape[1:]) for part, x in parts]
