"""Keys and values to the ranks that compute with them, a stage at a time, and their gradients back.

Shape suffixes: T tokens of a rank, n tokens that come in a stage, j heads of keys and values, e head size; s = 2, keys
and values.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.pieces import integers
from boost_core.plan.context.pieces import StageWork


class KeyExchange:
    """One stage's exchange.

    Args:
        work: What goes where.
        chunk_tokens: Tokens of a chunk.
        communicator: The context parallel group.
        device: Where the tokens are.
    """

    def __init__(self, work: StageWork, chunk_tokens: int, communicator: Communicator, device: torch.device) -> None:
        self._tokens, self._communicator = chunk_tokens, communicator
        self._goes, self._comes = [len(chunks) for chunks in work.sends], list(work.receives)
        place = {came: number for number, came in enumerate(work.order)}
        self._sent = integers([chunk for chunks in work.sends for chunk in chunks], torch.int64, device)
        self._sent_to = self._sent.tensor_split(list(accumulate(self._goes))[:-1])
        self._in_order = integers(list(work.order), torch.int64, device)
        self._as_came = integers([place[number] for number in range(len(place))], torch.int64, device)

    def start(self, own_Tsje: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send and receive; what it gives waits, and returns ``[n, s, j, e]`` in the order of the pieces."""
        payload = self._chunks(own_Tsje).index_select(0, self._sent)
        wait = self._start(payload, self._goes, self._comes, "keys")

        def in_order() -> torch.Tensor:
            keys = wait().index_select(0, self._in_order)
            return keys.view(len(keys) * self._tokens, *own_Tsje.shape[1:])

        return in_order

    def start_back(self, gradient_nsje: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Start to return gradients of what came; what it gives waits, and adds those of this rank's own to theirs."""
        payload = self._chunks(gradient_nsje).index_select(0, self._as_came)
        wait = self._start(payload, self._comes, self._goes, "key gradients")

        def add_to(own_Tsje: torch.Tensor) -> None:
            own, parts = self._chunks(own_Tsje), wait()
            # A rank's part has each chunk once, so that sums are made in one order only, that of ranks.
            for chunks, part in zip(self._sent_to, parts.split_with_sizes(self._goes), strict=True):
                own.index_add_(0, chunks, part.to(own.dtype))

        return add_to

    def _chunks(self, x_Tsje: torch.Tensor) -> torch.Tensor:
        """A row each chunk."""
        return x_Tsje.view(len(x_Tsje) // self._tokens, self._tokens * x_Tsje.shape[1:].numel())

    def _start(
        self, payload: torch.Tensor, goes: Sequence[int], comes: Sequence[int], purpose: str
    ) -> Callable[[], torch.Tensor]:
        received = payload.new_empty((sum(comes), payload.shape[1]))
        pending = self._communicator.start_uneven_all_to_all(received, payload, (comes, goes), purpose)

        def wait() -> torch.Tensor:
            pending.wait()
            return received

        return wait
