"""Sends the keys that ranks see of each other's under the lines of all heads, and no others; returns their gradients.

A key and value of one head is sent to a rank if a query of the rank's blocks sees it with one of the heads that share
it. Every rank knows the lines of all heads and who has which tokens, so each knows by itself what to send and receive.
The counts are read from the device for each head and document in a pass.

Shape suffixes: T tokens of the rank; m tokens of a document, n blocks of 64 of them, t those that the rank has; N
tokens of all documents' blocks; c ranks; i of a group's heads of keys, j all, e head size; r keys that come; s = 2,
keys and values.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from boost_core.config.attention import BLOCK
from boost_core.nn.sparse.index import Lines
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.long_document import LongDocument
from boost_core.plan.context.dealt import head_groups


class ActiveKeys:
    """Which of a layer's keys go and come.

    Args:
        documents: The documents, as the rank has them.
        lines: What each head's queries see of each document.
        key_heads: Number of heads of keys and values.
        communicator: The context parallel group.
    """

    def __init__(
        self, documents: Sequence[LongDocument], lines: Sequence[Sequence[Lines]], key_heads: int,
        communicator: Communicator,
    ) -> None:  # fmt: skip
        self._communicator = communicator
        self._tokens = sum(document.blocks for document in documents) * BLOCK
        self._own_T = torch.cat([_range(document.rows, document.place_t.device) for document in documents])
        self._own_N = torch.cat([document.begin + document.place_t for document in documents])
        asked = [_asked(*each, key_heads, communicator.rank) for each in zip(documents, lines, strict=True)]
        goes_cjt = torch.cat([goes for goes, _ in asked], dim=2)
        from_jN = torch.cat([pad(comes, (0, -comes.shape[1] % BLOCK), value=-1) for _, comes in asked], dim=1)
        self._groups = [_Group.of(goes_cjt, from_jN, heads, self._own_T) for heads in head_groups(key_heads)]
        ranks = torch.arange(communicator.size, device=from_jN.device)
        counts = [
            torch.stack([goes_cjt[:, heads].sum(dim=(1, 2)), (from_jN[heads].flatten() == ranks[:, None]).sum(dim=1)])
            for heads in map(_slice, head_groups(key_heads))
        ]
        self._counts: Sequence[Sequence[list[int]]] = torch.stack(counts).tolist()

    def start(self, keys_Tsje: torch.Tensor, group: int) -> Callable[[], torch.Tensor]:
        """Start to send and receive the keys of a group of heads.

        The returned function waits, and returns the documents' keys and values in blocks, ``[i, N, s, e]``: zeros where
        none of this rank's queries sees a key.
        """
        its = self._groups[group]
        payload_rse = keys_Tsje[its.sent_token, :, its.sent_head]
        goes, comes = self._counts[group]
        received_rse = payload_rse.new_empty((sum(comes), *payload_rse.shape[1:]))
        pending = self._communicator.start_uneven_all_to_all(received_rse, payload_rse, (comes, goes), "keys")

        def wait() -> torch.Tensor:
            own_Tsie = keys_Tsje[self._own_T][:, :, _slice(its.heads)]
            keys_iNse = keys_Tsje.new_zeros(len(its.heads), self._tokens, *keys_Tsje[0, :, 0].shape)
            keys_iNse[:, self._own_N] = own_Tsie.permute(2, 0, 1, 3)
            pending.wait()
            keys_iNse.flatten(0, 1).index_copy_(0, its.came, received_rse)
            return keys_iNse

        return wait

    def start_back(self, dkeys_iNse: torch.Tensor, group: int, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
        """Start to return gradients; the returned function waits, and adds this rank's own up in a fixed order."""
        its, (goes, comes) = self._groups[group], self._counts[group]
        payload_rse = dkeys_iNse.flatten(0, 1)[its.came].to(dtype)
        received_rse = payload_rse.new_empty((sum(goes), *payload_rse.shape[1:]))
        pending = self._communicator.start_uneven_all_to_all(received_rse, payload_rse, (goes, comes), "key gradients")
        own_Tsie = dkeys_iNse[:, self._own_N].permute(1, 2, 0, 3)

        def add_to(dkeys_Tsje: torch.Tensor) -> None:
            for number, head in enumerate(its.heads):
                dkeys_Tsje[:, :, head].index_add_(0, self._own_T, own_Tsie[:, :, number])
            pending.wait()
            sent = (torch.split(x, goes) for x in (its.sent_token, its.sent_head, received_rse))
            # A rank's part has each key once, so sums are always made in the order of ranks.
            for token, head, part_rse in zip(*sent, strict=True):
                dkeys_Tsje[token, :, head] += part_rse

        return add_to


class _Group:
    """What goes and comes for some heads of keys.

    Attributes:
        heads: The heads.
        sent_token: The token of each key that goes, rank by rank and head by head.
        sent_head: The head of each.
        came: The place among the heads' tokens of each key that comes, in the same order.
    """

    def __init__(self, heads: range, sent_token: torch.Tensor, sent_head: torch.Tensor, came: torch.Tensor) -> None:
        self.heads, self.sent_token, self.sent_head, self.came = heads, sent_token, sent_head, came

    @classmethod
    def of(cls, goes_cjt: torch.Tensor, from_jN: torch.Tensor, heads: range, own_T: torch.Tensor) -> "_Group":
        """What goes and comes for ``heads``.

        Args:
            goes_cjt: Whether each rank sees each of this rank's keys.
            from_jN: The rank that each key comes from; −1 for keys that this rank has or does not see.
            heads: The heads.
            own_T: Which of the rank's tokens ``t`` are.
        """
        _, sent_head, sent = goes_cjt[:, _slice(heads)].nonzero().unbind(1)
        from_iN = from_jN[_slice(heads)].flatten()
        came = (from_iN >= 0).nonzero().flatten()
        return cls(heads, own_T[sent], sent_head + heads.start, came[from_iN[came].argsort(stable=True)])


def _asked(
    document: LongDocument, lines: Sequence[Lines], key_heads: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each rank sees each of this rank's keys, ``[c, j, t]``, and which rank sends it each key, ``[j, m]``."""
    ranks, blocks = document.has_cn.shape
    share, device = len(lines) // key_heads, document.rank_m.device
    has_cn = pad(document.has_cn, (0, blocks))  # a slash can reach past the end
    number_n, place_m = torch.arange(blocks, device=device), torch.arange(document.tokens, device=device)
    last_c = (document.has_cn * (number_n + 1)).amax(dim=1) - 1
    goes_cjt = torch.zeros(ranks, key_heads, len(document.place_t), dtype=torch.bool, device=device)
    comes_jm = torch.zeros(key_heads, document.tokens, dtype=torch.bool, device=device)
    own_b = document.slot_t // BLOCK
    for head, of_head in enumerate(lines):
        is_vertical_m = torch.zeros_like(place_m, dtype=torch.bool).index_fill_(0, of_head.verticals, True)
        by_slash_cb = has_cn[:, document.block_b.unsqueeze(1) + of_head.slashes].any(dim=2)
        vertical_ct = is_vertical_m[document.place_t] & (document.place_t // BLOCK <= last_c.unsqueeze(1))
        goes_cjt[:, head // share] |= by_slash_cb[:, own_b] | vertical_ct
        by_slash_n = has_cn[rank, number_n.unsqueeze(1) + of_head.slashes].any(dim=1)
        vertical_m = is_vertical_m & (place_m // BLOCK <= last_c[rank])
        comes_jm[head // share] |= by_slash_n[place_m // BLOCK] | vertical_m
    goes_cjt[rank] = False
    return goes_cjt, document.rank_m.masked_fill(~comes_jm | (document.rank_m == rank), -1)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _range(rows: slice, device: torch.device) -> torch.Tensor:
    return torch.arange(rows.start, rows.stop, device=device)
