"""Sparse attention over context parallel ranks: one rank's choice, its attention, and no keys that none sees."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from boost_core.config.model import BLOCK, SparseAttentionConfig
from boost_core.context import sparse
from boost_core.context.attention import ContextAttention
from boost_core.context.placement import Window, local_tasks, place
from boost_core.context.plan import ContextPlan
from boost_core.context.sparse import Lines, SparseAttention, Tally, find_lines
from boost_core.context.sparse_parallel import SparseContextAttention, SparseIndex
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Entry, Pending
from tests.numerics.attended import attended
from tests.placements import placed
from tests.ranks import Ranks

CPU, HEAD = torch.device("cpu"), 16
HOW = {"kind": "vertical_slash", "budget": 0.3, "sink": 3, "window": 2, "from_length": 256}
ROUNDED = 1024 / (1 << 42)  # what softmax divides by is 1 or more, in fixed point, a term for each key
SENT, RETURNED = Entry("all_to_all", "cp", "keys"), Entry("all_to_all", "cp", "key gradients")


@dataclass(frozen=True)
class Case:
    """Documents, dealt in some way to some ranks, with heads of queries and of keys."""

    documents: tuple[int, ...]
    chunk: int
    ranks: int
    how: str
    heads: int = 4
    of_keys: int = 2
    budget: float = 0.3

    @property
    def config(self) -> SparseAttentionConfig:
        return SparseAttentionConfig.model_validate(HOW | {"budget": self.budget})

    @property
    def plan(self) -> ContextPlan:
        window = Window(self.documents, self.chunk, None, self.config.from_length, self.budget)
        placement = placed(window, self.ranks, self.how)
        return ContextPlan(window, self.ranks, placement, local_tasks(window, placement), 3)

    def drawn(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Queries, keys and values that lean to some keys, and a gradient."""
        generator = torch.Generator().manual_seed(self.chunk)
        tokens = sum(self.documents)
        shapes = [(tokens, heads, HEAD) for heads in (self.heads, self.of_keys, self.of_keys, self.heads)]
        query, key, value, gradient = (torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes)
        key[:: tokens // 9] *= 3
        return [x.to(dtype) for x in (query, key, value, gradient)]

    def own(self, x: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
        return x.unflatten(0, (-1, self.chunk))[list(chunks)].flatten(0, 1)


@dataclass(frozen=True)
class Found:
    """A rank's output and gradients, the lines of each document and head, recall and density, and what it sent."""

    tensors: list[torch.Tensor]
    lines: list[list[Lines]]
    kept: tuple[float | None, float | None]
    sent: dict[Entry, tuple[int, int]]


def on_this_rank(case: Case, dtype: torch.dtype) -> Found:
    ledger, tally = CommunicationLedger(), Tally()
    attention = SparseContextAttention(case.plan, case.config, Communicator(dist.group.WORLD, "cp", ledger), CPU, tally)
    *inputs, gradient = (case.own(x, attention.chunks) for x in case.drawn(dtype))
    inputs = [x.requires_grad_() for x in inputs]
    found = list[Sequence[Sequence[Lines]]]()
    find = SparseIndex.find

    def noted(self: SparseIndex, query: torch.Tensor, key: torch.Tensor, tally: Tally) -> Sequence[Sequence[Lines]]:
        found.append(find(self, query, key, tally))
        return found[-1]

    with patch.object(SparseIndex, "find", noted):
        out = attended(attention, *inputs)
        gradients = torch.autograd.grad(out, inputs, gradient)
    sent = {entry: (line.calls, line.bytes) for entry, line in ledger.totals().items()}
    (lines,) = found or [[]]
    return Found([out.detach(), *gradients], [list(each) for each in lines], (tally.recall, tally.density), sent)


def twice(case: Case, dtype: torch.dtype) -> tuple[Found, Found]:
    return on_this_rank(case, dtype), on_this_rank(case, dtype)


def on_one_rank(case: Case, dtype: torch.dtype) -> Found:
    tally = Tally()
    *inputs, gradient = case.drawn(dtype)
    lines, begin = list[list[Lines]](), 0
    for tokens in case.documents:
        if tokens >= case.config.from_length:
            lines.append(find_lines(*(x[begin : begin + tokens] for x in inputs[:2]), case.config))
        begin += tokens
    inputs = [x.requires_grad_() for x in inputs]
    out = SparseAttention(case.config, case.documents, CPU, tally).for_layer()(*inputs)
    return Found([out.detach(), *torch.autograd.grad(out, inputs, gradient)], lines, (tally.recall, tally.density), {})


def in_order(case: Case, of_ranks: Sequence[Found]) -> list[torch.Tensor]:
    placement = case.plan.placement
    back = torch.tensor(sorted(range(len(placement)), key=lambda chunk: placement[chunk])).argsort()
    of_all = zip(*(found.tensors for found in of_ranks), strict=True)
    return [torch.cat(parts).unflatten(0, (-1, case.chunk))[back].flatten(0, 1) for parts in of_all]


def planned_keys(case: Case, lines: list[list[Lines]]) -> torch.Tensor:
    """Keys of a head that each rank sends each other, by the mask itself."""
    rank_T = torch.tensor(case.plan.placement).repeat_interleave(case.chunk)
    found, begin, of_long = torch.zeros(case.ranks, case.ranks, dtype=torch.int64), 0, iter(lines)
    for tokens in case.documents:
        rank_m, begin = rank_T[begin : begin + tokens], begin + tokens
        if tokens < case.config.from_length:
            continue
        sees_hmm = torch.stack([of_head.sees(torch.arange(tokens)) for of_head in next(of_long)])
        sees_jmm = sees_hmm.unflatten(0, (case.of_keys, -1)).any(dim=1)
        for receiver in range(case.ranks):
            blocks = (torch.arange(tokens)[rank_m == receiver] // BLOCK).unique()
            rows = torch.isin(torch.arange(tokens) // BLOCK, blocks)
            needed_jm = sees_jmm[:, rows].any(dim=1)
            for sender in range(case.ranks):
                if sender != receiver:
                    found[sender, receiver] += needed_jm[:, rank_m == sender].sum()
    return found


CASES = [
    Case((1024,), 64, 2, "heap"), Case((1024,), 32, 4, "striped", 2, 1), Case((100, 500, 40, 384), 64, 4, "heap"),
    Case((700, 68), 48, 2, "contiguous", 6, 6), Case((512, 512, 1024), 256, 4, "contiguous", 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_that_of_one_rank(ranks: Ranks, case: Case) -> None:
    """In fp64, outputs to 1e-12 and gradients to 1e-10; repeats to the bit; and no key is sent that none sees."""
    expected = on_one_rank(case, torch.float64)
    once, again = zip(*ranks.run(case.ranks, twice, case, torch.float64), strict=True)
    for its, mine, repeated, limit in zip(
        expected.tensors, in_order(case, once), in_order(case, again), (1e-12, 1e-10, 1e-10, 1e-10), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=limit, atol=limit)
        assert torch.equal(mine, repeated)
    keys = planned_keys(case, expected.lines) * 2 * HEAD * 8
    for rank, found in enumerate(once):
        assert found.kept == pytest.approx(expected.kept, rel=ROUNDED)
        dense = sum(each.sender == rank for each in case.plan.keys) * case.chunk * case.of_keys * 2 * HEAD * 8
        back = sum(each.receiver == rank for each in case.plan.keys) * case.chunk * case.of_keys * 2 * HEAD * 8
        assert found.sent[SENT][1] == 2 * (int(keys[rank].sum()) + dense)
        assert found.sent[RETURNED][1] == int(keys[:, rank].sum()) + back


def traffic(case: Case) -> tuple[int, int, float | None]:
    """Bytes that this rank sends for a pass forward and backward, and for a dense one as trainers plan it; density."""
    window = Window(case.documents, case.chunk)
    placement = place(window, case.ranks, "near")
    plan, ledger = ContextPlan(window, case.ranks, placement, local_tasks(window, placement), 4), CommunicationLedger()
    dense = ContextAttention(plan, Communicator(dist.group.WORLD, "cp", ledger), CPU)
    *inputs, gradient = (case.own(x, dense.chunks) for x in case.drawn(torch.float32))
    attended(dense, *(x.requires_grad_() for x in inputs)).backward(gradient)
    found = on_this_rank(case, torch.float32)
    return sum(size for _, size in found.sent.values()), ledger.sum().bytes, found.kept[1]


@pytest.mark.full
def test_traffic_falls_with_what_is_seen(ranks: Ranks) -> None:
    """At 5 % of the pairs it is half of dense attention's or less, what choosing takes included."""
    case = Case((8192,), 256, 4, "heap", 2, 2, 0.05)
    sparse, dense, densities = zip(*ranks.run(4, traffic, case), strict=True)
    assert all(density is not None and density <= 0.05 for density in densities)
    assert sum(sparse) <= 0.5 * sum(dense)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_chosen_is_what_one_rank_chooses(ranks: Ranks, case: Case, dtype: torch.dtype) -> None:
    expected = on_one_rank(case, dtype).lines
    for found in ranks.run(case.ranks, on_this_rank, case, dtype):
        for mine, its in zip(found.lines, expected, strict=True):
            for of_head, alone in zip(mine, its, strict=True):
                assert torch.equal(of_head.slashes, alone.slashes) and torch.equal(of_head.verticals, alone.verticals)


def still_there(case: Case) -> list[bool]:
    """Whether what ranks send each other to choose lines is in memory still when recall is measured."""
    sent, left = list[weakref.ref[torch.Tensor]](), list[bool]()
    send, measure = Communicator.start_uneven_all_to_all, sparse.shares

    def sending(self: Communicator, received: torch.Tensor, payload: torch.Tensor, rows: Any, purpose: str) -> Pending:
        if purpose == "sums of keys":
            sent.extend([weakref.ref(received), weakref.ref(payload)])
        return send(self, received, payload, rows, purpose)

    def measuring(*arguments: torch.Tensor) -> torch.Tensor:
        left.extend(each() is not None for each in sent)
        return measure(*arguments)

    with (
        patch.object(Communicator, "start_uneven_all_to_all", sending),
        patch.object(sparse, "shares", measuring),
    ):
        on_this_rank(case, torch.float32)
    return left


def test_what_lines_are_chosen_by_is_gone_when_recall_is_measured(ranks: Ranks) -> None:
    for left in ranks.run(2, still_there, Case((512,), 64, 2, "striped")):
        assert left and not any(left)
