"""Sends chunks of rows to the ranks that compute with them, and their gradients back.

Shape suffixes: T tokens of a rank, n tokens that come, in the order of the ranks that they come from or, for a stage,
all of them in the stage's order; x any rows; c columns sent of a token.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.pieces import integers
from boost_core.plan.context.pieces import Traffic


class ChunkExchange:
    """One stage's exchange of keys, or of latents.

    Args:
        traffic: What goes where.
        chunk_tokens: Tokens of a chunk.
        communicator: The context parallel group.
        what: What is sent, for the ledger.
        device: Where the tokens are.
    """

    def __init__(
        self, traffic: Traffic, chunk_tokens: int, communicator: Communicator, what: str, device: torch.device
    ) -> None:
        self._tokens, self._communicator, self._what = chunk_tokens, communicator, what
        self._goes, self._comes = [len(chunks) for chunks in traffic.sends], list(traffic.receives)
        self._sent = integers([chunk for chunks in traffic.sends for chunk in chunks], torch.int64, device)
        self._sent_to = self._sent.tensor_split(list(accumulate(self._goes))[:-1])
        self._places = integers(list(traffic.places), torch.int64, device)

    def start(self, own_Tc: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send and receive; the returned function waits, and returns ``[n, c]``."""
        wait = start_rows(
            self._communicator, self._chunks(own_Tc).index_select(0, self._sent), self._goes, self._comes, self._what
        )
        return lambda: wait().view(-1, own_Tc.shape[1])

    def start_back(self, gradient_nc: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Start to return gradients of what came; the returned function waits, and adds up those of this rank's own."""
        payload = self._chunks(gradient_nc)
        purpose = f"{self._what.removesuffix('s')} gradients"
        wait = start_rows(self._communicator, payload, self._comes, self._goes, purpose)

        def add_to(own_Tc: torch.Tensor) -> None:
            own, parts = self._chunks(own_Tc), wait()
            # A rank's part has each chunk once, so sums are always made in the order of ranks.
            for chunks, part in zip(self._sent_to, parts.split_with_sizes(self._goes), strict=True):
                own.index_add_(0, chunks, part.to(own.dtype))

        return add_to

    def put(self, came_nc: torch.Tensor, stage_nc: torch.Tensor) -> None:
        """Put what came where it belongs among all tokens of a stage."""
        self._chunks(stage_nc).index_copy_(0, self._places, self._chunks(came_nc))

    def take(self, stage_nc: torch.Tensor) -> torch.Tensor:
        """The inverse of ``put``, ``[n, c]``."""
        return self._chunks(stage_nc).index_select(0, self._places).view(-1, stage_nc.shape[1])

    def _chunks(self, x_Tc: torch.Tensor) -> torch.Tensor:
        """One row per chunk."""
        return x_Tc.view(len(x_Tc) // self._tokens, self._tokens * x_Tc.shape[1])


def start_rows(
    communicator: Communicator, payload_xc: torch.Tensor, goes: Sequence[int], comes: Sequence[int], purpose: str
) -> Callable[[], torch.Tensor]:
    """Start to exchange rows; the returned function waits, and returns those that come, rank after rank.

    Args:
        communicator: The ranks.
        payload_xc: The rows to send, rank after rank.
        goes: Number of rows for each rank.
        comes: Number of rows from each rank.
        purpose: The purpose, for the ledger.
    """
    received = payload_xc.new_empty((sum(comes), payload_xc.shape[1]))
    pending = communicator.start_uneven_all_to_all(received, payload_xc, (comes, goes), purpose)

    def wait() -> torch.Tensor:
        pending.wait()
        return received

    return wait
