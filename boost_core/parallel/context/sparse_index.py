"""What the queries of long documents see, chosen by the ranks of a context parallel group together.

All ranks get the last queries of each document and score the keys that they have. Softmax's denominators are summed in
integers, so that each key's share is bit-identical to what one rank alone would find; the sums of each document and
head go to one rank, in turns, which chooses as a single rank would; and all are told what was chosen, one bit per line.
What is sent is 96 queries per document, two numbers for each of them and head, one or two numbers per token and head,
and a bit per token and head to all: little compared with the keys.

Shape suffixes: T tokens of the rank; d documents; h heads, j heads of keys, e head size; b blocks that the rank has of
a document, k = 64 of their tokens, t those that it has; p queries that choose, and by which recall is measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from boost_core.config.attention import LAST_QUERIES, SAMPLED_QUERIES, SparseAttentionConfig
from boost_core.nn.sparse.index import (
    Lines,
    choose_lines,
    last_blocks,
    mass_of_blocks,
    scores_of_blocks,
    shares,
    sums_of_blocks,
)
from boost_core.nn.sparse.recall import Tally
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.long_document import LongDocument

_LAST, _SAMPLED = slice(0, LAST_QUERIES), slice(LAST_QUERIES, LAST_QUERIES + SAMPLED_QUERIES)
_BITS = 8  # of a byte


@dataclass(frozen=True)
class SparseIndex:
    """Chooses what the queries of a plan's long documents see.

    Attributes:
        documents: The long documents, as the rank has them.
        how: What is always seen, and how much more may be.
        communicator: The context parallel group.
    """

    documents: Sequence[LongDocument]
    how: SparseAttentionConfig
    communicator: Communicator

    def find(self, query_The: torch.Tensor, key_Tje: torch.Tensor, tally: Tally) -> Sequence[Sequence[Lines]]:
        """What each head's queries see, for each document; all ranks call it, and find the same."""
        scores = _Scores(self.documents, self._asked(query_The), key_Tje)
        shape = len(self.documents), query_The.shape[1], LAST_QUERIES + SAMPLED_QUERIES
        most_dhp = torch.full(shape, -torch.inf, dtype=scores.dtype, device=query_The.device)
        for at, which, score_bkp in scores.of_all(_LAST, _SAMPLED):
            most_dhp[at][which] = score_bkp.amax(dim=(0, 1))
        self.communicator.all_reduce_(most_dhp, "largest scores", dist.ReduceOp.MAX)
        sum_dhp = torch.zeros(shape, dtype=torch.int64, device=query_The.device)
        for at, which, score_bkp in scores.of_all(_LAST, _SAMPLED):
            sum_dhp[at][which] = sums_of_blocks(score_bkp, most_dhp[at][which])
        self.communicator.all_reduce_(sum_dhp, "sums of scores")
        chosen = self._choose(scores, most_dhp, sum_dhp)
        self._measure(scores, most_dhp, sum_dhp, chosen, tally)
        return chosen

    def _asked(self, query_The: torch.Tensor) -> torch.Tensor:
        """The queries with which every rank scores its keys, ``[d, p, h, e]``."""
        asked_dphe = query_The.new_zeros(len(self.documents), LAST_QUERIES + SAMPLED_QUERIES, *query_The.shape[1:])
        for document, asked_phe in zip(self.documents, asked_dphe, strict=True):
            asked_phe[document.asked_q] = query_The[document.asked_row_q]
        return self.communicator.all_reduce_(asked_dphe, "last queries")

    def _choose(self, scores: "_Scores", most_dhp: torch.Tensor, sum_dhp: torch.Tensor) -> Sequence[Sequence[Lines]]:
        ranks, rank, heads = self.communicator.size, self.communicator.rank, most_dhp.shape[1]
        goes: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for (number, head), _, score_bkp in scores.of_all(_LAST):
            document = self.documents[number]
            most_p, sum_p = most_dhp[number, head, _LAST], sum_dhp[number, head, _LAST]
            mass_bt = mass_of_blocks(score_bkp, most_p, sum_p, document.tokens).flatten(1)[:, document.slot_t]
            goes[(number * heads + head) % ranks].append(mass_bt.flatten())
        mine = [each for each in range(len(self.documents) * heads) if each % ranks == rank]
        masses = self._exchanged(goes, [self.documents[each // heads] for each in mine], scores.dtype)
        bits = _Bits(self.documents, heads, most_dhp.device)
        for each, mass_bm in zip(mine, masses, strict=True):
            document = self.documents[each // heads]
            last_b = last_blocks(document.tokens, mass_bm.device)
            bits.put(each, choose_lines(mass_bm, last_b, document.tokens, self.how))
        self.communicator.all_reduce_(bits.packed, "lines")
        return bits.lines()

    def _exchanged(
        self, goes: Sequence[Sequence[torch.Tensor]], documents: Sequence[LongDocument], dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """All ranks' sums for the documents and heads this rank chooses for, ``[b, m]`` each; all ranks call it."""
        device, ranks = self.documents[0].place_t.device, range(self.communicator.size)
        rows = {id(each): len(last_blocks(each.tokens, torch.device("cpu"))) for each in documents}
        comes = [sum(rows[id(each)] * len(each.places[rank]) for each in documents) for rank in ranks]
        flat = [part for parts in goes for part in parts]
        payload = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        received = torch.empty(sum(comes), dtype=dtype, device=device)
        sizes = [sum(len(part) for part in parts) for parts in goes]
        self.communicator.start_uneven_all_to_all(received, payload, (comes, sizes), "sums of keys").wait()
        left, whole = list(torch.split(received, comes)), []
        for document in documents:
            mass_bm = received.new_empty(rows[id(document)], document.tokens)
            for rank in ranks:
                count = mass_bm.shape[0] * len(document.places[rank])
                mass_bm[:, document.places[rank]] = left[rank][:count].view(mass_bm.shape[0], -1)
                left[rank] = left[rank][count:]
            whole.append(mass_bm)
        return whole

    def _measure(
        self, scores: "_Scores", most_dhp: torch.Tensor, sum_dhp: torch.Tensor, chosen: Sequence[Sequence[Lines]],
        tally: Tally,
    ) -> None:  # fmt: skip
        kept_d = torch.zeros(len(self.documents), dtype=torch.float64, device=most_dhp.device)
        for (number, head), _, score_bkp in scores.of_all(_SAMPLED):
            document = self.documents[number]
            share_bkp = shares(score_bkp, most_dhp[number, head, _SAMPLED], sum_dhp[number, head, _SAMPLED])
            sees_pm = chosen[number][head].sees(document.row_p[_SAMPLED])
            kept_d[number] += (document.out_of_blocks(share_bkp).T * sees_pm[:, document.place_t]).sum()
        self.communicator.all_reduce_(kept_d, "kept attention")
        for document, kept, lines in zip(self.documents, kept_d, chosen, strict=True):
            tally.count(document.tokens, lines, kept)


class _Scores:
    """Scores of the choosing and measuring queries with this rank's keys.

    Args:
        documents: The documents.
        asked_dphe: Their queries.
        key_Tje: The rank's keys.
    """

    def __init__(self, documents: Sequence[LongDocument], asked_dphe: torch.Tensor, key_Tje: torch.Tensor) -> None:
        self.dtype = torch.promote_types(key_Tje.dtype, torch.float32)
        self._documents, self._asked_dphe, self._key_Tje = documents, asked_dphe, key_Tje
        self._share = asked_dphe.shape[2] // key_Tje.shape[1]

    def of_all(self, *parts: slice) -> Iterator[tuple[tuple[int, int], slice, torch.Tensor]]:
        """Scores of each document, head and part of the queries, ``[b, k, p]``; documents without keys are left out."""
        for number, document in enumerate(self._documents):
            if not len(document.place_t):
                continue
            place_bk = document.in_blocks(document.place_t, document.tokens)  # others' keys are in no one's past
            for key_head in range(self._key_Tje.shape[1]):
                key_bke = document.in_blocks(self._key_Tje[document.rows, key_head].to(self.dtype))
                for head in range(key_head * self._share, (key_head + 1) * self._share):
                    query_pe = self._asked_dphe[number, :, head].to(self.dtype)
                    for part in parts:
                        score_bkp = scores_of_blocks(query_pe[part], key_bke, place_bk, document.row_p[part])
                        yield (number, head), part, score_bkp


class _Bits:
    """The lines of all documents and heads, one bit per line."""

    def __init__(self, documents: Sequence[LongDocument], heads: int, device: torch.device) -> None:
        self._documents, self._heads = documents, heads
        self._sizes = [-(-(each.blocks + each.tokens) // _BITS) for each in documents for _ in range(heads)]
        self.packed = torch.zeros(sum(self._sizes), dtype=torch.uint8, device=device)
        self._parts = torch.split(self.packed, self._sizes)
        self._weight = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=device)

    def put(self, each: int, lines: Lines) -> None:
        """Set the lines of one document and head."""
        is_line = lines.slashes.new_zeros(self._sizes[each] * _BITS, dtype=torch.uint8)
        is_line[lines.slashes] = 1
        is_line[lines.blocks + lines.verticals] = 1
        self._parts[each].copy_((is_line.view(-1, _BITS) * self._weight).sum(dim=1))

    def lines(self) -> Sequence[Sequence[Lines]]:
        """All lines, by document and head."""
        return [
            [self._lines(document, self._parts[number * self._heads + head]) for head in range(self._heads)]
            for number, document in enumerate(self._documents)
        ]

    def _lines(self, document: LongDocument, packed: torch.Tensor) -> Lines:
        is_line = packed.unsqueeze(1).bitwise_and(self._weight).flatten() != 0
        slashes, verticals = (part.nonzero().flatten() for part in is_line.tensor_split([document.blocks]))
        return Lines(document.tokens, slashes, verticals)
