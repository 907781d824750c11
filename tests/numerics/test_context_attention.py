"""Attention over the ranks of a context parallel group: that of one rank, and what is sent is what the plan says."""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from boost_core.context.attention import ContextAttention
from boost_core.context.exchange import Attended, StageAttention
from boost_core.context.placement import PLACEMENTS, Window, local_tasks, moved_tasks
from boost_core.context.plan import AttentionLayer, ContextPlan
from boost_core.model.attention import one_by_one
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Entry
from tests.numerics.attended import attended
from tests.numerics.flash_on_cpu import flash_on_cpu
from tests.placements import OTHERS, placed
from tests.ranks import Ranks
from tests.sent import sent_by

HEAD = 8
CPU = torch.device("cpu")
SENT, RETURNED = Entry("all_to_all", "cp", "keys"), Entry("all_to_all", "cp", "key gradients")
MOVED = [  # there and back, forward and backward
    tuple(Entry("all_to_all", "cp", purpose) for purpose in both)
    for both in (("queries", "outputs"), ("queries and output gradients", "query gradients"))
]


@dataclass(frozen=True)
class Case:
    """Attention of a window's tokens on some ranks.

    Attributes:
        plan: Who has what.
        heads: Of queries.
        of_keys: Heads of keys and values.
    """

    plan: ContextPlan
    heads: int
    of_keys: int


def planned(window: Window, ranks: int, how: str | list[int], stages: int, moved: bool = False) -> ContextPlan:
    placement = placed(window, ranks, how) if isinstance(how, str) else how
    tasks = moved_tasks(window, placement, ranks) if moved else local_tasks(window, placement)
    return ContextPlan(window, ranks, placement, tasks, stages)


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    size, each = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    tokens = size * each * ranks
    ends = sorted(draw(st.sets(st.integers(1, tokens - 1), max_size=5)) | {tokens})
    lengths = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    window = Window(lengths, size, draw(st.none() | st.integers(1, tokens)))
    drawn = draw(st.permutations([rank for rank in range(ranks) for _ in range(each)]))
    how = draw(st.sampled_from([*PLACEMENTS, *OTHERS, drawn]))
    of_keys = draw(st.integers(1, 2))
    plan = planned(window, ranks, how, draw(st.integers(1, 4)), draw(st.booleans()))
    return Case(plan, of_keys * draw(st.integers(1, 2)), of_keys)


def tensors(case: Case, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of what they give, of all tokens."""
    generator = torch.Generator().manual_seed(case.plan.window.tokens)
    heads = (case.heads, case.of_keys, case.of_keys, case.heads)
    shapes = [(case.plan.window.tokens, count, HEAD) for count in heads]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def on_one_rank(case: Case, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values."""
    *inputs, gradient = tensors(case, dtype)
    begin_n = torch.tensor([0, *case.plan.window.documents]).cumsum(0).to(torch.int32)
    inputs = [x.requires_grad_() for x in inputs]
    out = one_by_one(*inputs, begin_n, case.plan.window.sees)
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


@dataclass(frozen=True)
class Found:
    """What a rank has of a case.

    Attributes:
        tensors: Its tokens' output, and the gradients of their queries, keys and values.
        sent: Calls and bytes of what it sent for them.
    """

    tensors: list[torch.Tensor]
    sent: dict[Entry, tuple[int, int]]


def on_this_rank(each: list[Case], dtype: torch.dtype = torch.float64, by_flash: bool = False) -> list[Found]:
    """What this rank has of each case."""
    with flash_on_cpu() if by_flash else nullcontext():
        return [_of_one(case, dtype) for case in each]


def _of_one(case: Case, dtype: torch.dtype) -> Found:
    ledger = CommunicationLedger()
    attention = ContextAttention(case.plan, Communicator(dist.group.WORLD, "cp", ledger), CPU)
    *inputs, gradient = (own(case, x, attention.chunks) for x in tensors(case, dtype))
    inputs = [x.requires_grad_() for x in inputs]
    out = attended(attention, *inputs)
    found = [out.detach(), *torch.autograd.grad(out, inputs, gradient)]
    return Found(found, {entry: (line.calls, line.bytes) for entry, line in ledger.totals().items()})


def own(case: Case, x: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
    return x.unflatten(0, (case.plan.window.chunks, -1))[list(chunks)].flatten(0, 1)


def in_order(case: Case, of_ranks: Sequence[Found]) -> list[torch.Tensor]:
    """What the ranks have, as tensors of all tokens."""
    places = sorted(range(case.plan.window.chunks), key=lambda chunk: case.plan.placement[chunk])
    back = torch.tensor(places).argsort()
    of_all = zip(*(found.tensors for found in of_ranks), strict=True)
    chunks = (torch.cat(parts).unflatten(0, (len(places), -1)) for parts in of_all)
    return [parts[back].flatten(0, 1) for parts in chunks]


def on_ranks(each: list[Case]) -> list[tuple[list[Found], ...]]:
    """What this rank has of each case, has again, and has by flash attention."""
    return list(zip(on_this_rank(each), on_this_rank(each), on_this_rank(each, by_flash=True), strict=True))


# Several at a time, as to form a process group takes longer than they do.
@pytest.mark.full
@settings(max_examples=6)
@given(each=st.integers(2, 4).flatmap(lambda count: st.lists(cases(count), min_size=1, max_size=6)))
def test_outputs_and_gradients_are_those_of_one_rank(ranks: Ranks, each: list[Case]) -> None:
    for case, of_ranks in zip(each, zip(*ranks.run(each[0].plan.ranks, on_ranks, each), strict=True), strict=True):
        expected = on_one_rank(case)
        once, again, by_flash = (in_order(case, found) for found in zip(*of_ranks, strict=True))
        for its, mine, repeated, flashed in zip(expected, once, again, by_flash, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(flashed, its, rtol=1e-10, atol=1e-10)
            assert torch.equal(mine, repeated)
        for found in zip(*of_ranks, strict=True):
            expect_planned_bytes(case, [rank.sent for rank in found])


def expect_planned_bytes(case: Case, of_ranks: Sequence[dict[Entry, tuple[int, int]]]) -> None:
    """Keys go out forward and backward, and their gradients come back; moved queries there and back: as planned."""
    layer = AttentionLayer(case.heads * HEAD, case.of_keys * HEAD, case.heads, element_bytes=8)
    planned = sent_by(case.plan, layer)
    size, stages = case.plan.window.chunk_tokens, sum(1 for stage in case.plan.key_stages if stage)
    sends, comes = (Counter(getattr(each, side) for each in case.plan.keys) for side in ("sender", "receiver"))
    asks, answers = (Counter(getattr(each, side) for each in case.plan.queries) for side in ("sender", "receiver"))
    for rank, lines in enumerate(of_ranks):
        expected = {}
        if stages:
            expected[SENT] = 2 * stages, 2 * sends[rank] * size * layer.key_bytes
            expected[RETURNED] = stages, comes[rank] * size * layer.key_bytes
        for backward, (there, back) in enumerate(MOVED if case.plan.queries else ()):
            expected[there] = 1, asks[rank] * size * layer.moved_bytes(bool(backward))[0]
            expected[back] = 1, answers[rank] * size * layer.moved_bytes(bool(backward))[1]
        assert lines == expected
    forward = sum(
        lines.get(entry, (0, 0))[1] // (2 if entry == SENT else 1) for lines in of_ranks for entry in (SENT, *MOVED[0])
    )
    assert forward == planned.node_bytes + planned.fabric_bytes


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("window", "how", "moved"),
    [
        (Window((200, 56), 16), "striped", False),
        (Window((1600,), 100, sees=700), "contiguous", False),
        (Window((200, 56), 16), "contiguous", True),
    ],
)
def test_errors_are_those_of_one_rank(ranks: Ranks, window: Window, how: str, moved: bool, dtype: torch.dtype) -> None:
    """Against fp64, 1.5 times those of the same type on one rank at most; the second takes masked parts of any size."""
    case = Case(planned(window, 2, how, 2, moved), 4, 2)
    assert bool(case.plan.queries) == moved
    exact, alone = on_one_rank(case), on_one_rank(case, dtype)
    found = in_order(case, [each[0] for each in ranks.run(2, on_this_rank, [case], dtype)])
    for mine, its, true in zip(found, alone, exact, strict=True):
        assert mine.dtype == dtype
        assert (mine - true).norm() <= 1.5 * (its - true).norm()


def stages_under_way(case: Case) -> list[int]:
    """Exchanges that had been started when each stage's attention was computed, forward."""
    ledger, found, forward = CommunicationLedger(), list[int](), StageAttention.forward

    def noted(self: StageAttention, *inputs: torch.Tensor) -> Iterator[Attended]:
        found.append(sum(line.calls for line in ledger.totals().values()))
        return forward(self, *inputs)

    attention = ContextAttention(case.plan, Communicator(dist.group.WORLD, "cp", ledger), CPU)
    with patch.object(StageAttention, "forward", noted):
        attended(attention, *(own(case, x, attention.chunks) for x in tensors(case)[:3]))
    return found


def test_the_next_stages_keys_are_under_way_while_a_stage_is_computed(ranks: Ranks) -> None:
    case = Case(planned(Window((64,), 8), 2, "striped", 3), 2, 2)
    assert [bool(stage) for stage in case.plan.key_stages] == [True, True, False]
    assert ranks.run(2, stages_under_way, case) == [[1, 2, 2]] * 2


@pytest.mark.parametrize(("dtype", "head_size"), [(torch.float32, 64), (torch.bfloat16, 20)])
def test_a_gpu_takes_what_flash_attention_takes(dtype: torch.dtype, head_size: int) -> None:
    query = SimpleNamespace(shape=(3, 2, head_size), dtype=dtype, is_cuda=True)
    attention = StageAttention([], None, CPU)
    with pytest.raises(ValueError, match=f"does not support {dtype} with heads of {head_size}; use bf16"):
        list(attention.forward(cast(torch.Tensor, query), torch.empty(0), torch.empty(0)))


def left_behind(case: Case) -> tuple[str, bool] | None:
    """How attention fails whose other rank has left, and whether something still has the inputs."""
    if dist.get_rank():
        return None
    attention = ContextAttention(case.plan, Communicator(dist.group.WORLD, "cp", CommunicationLedger()), CPU)
    inputs = [own(case, x, attention.chunks).requires_grad_() for x in tensors(case)[:3]]
    kept = [weakref.ref(x) for x in inputs]
    try:
        attended(attention, *inputs)
    except RuntimeError as error:
        said = str(error)
    del inputs
    return said, any(each() is not None for each in kept)


def test_what_fails_leaves_nothing_behind(ranks: Ranks) -> None:
    case = Case(planned(Window((64,), 8), 2, "striped", 3), 2, 2)
    result, _ = ranks.run(2, left_behind, case)
    said, kept = result
    assert "Connection" in said
    assert not kept


def refused(call: str) -> str:
    plan = planned(Window((16,), 4), 2, "striped", 2)
    communicator = Communicator(dist.group.WORLD, "cp", CommunicationLedger())
    inputs = [torch.zeros(6, 2, HEAD) for _ in range(3)]
    try:
        if call == "tokens":
            attended(ContextAttention(plan, communicator, CPU), *inputs)
        ContextAttention(planned(Window((16,), 4), 4, "striped", 2), communicator, CPU)
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("tokens", "6 tokens are not the 8 that the plan has here"),
        ("ranks", "the plan deals tokens to 4 ranks and the group has 2; plan for the group"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(ranks: Ranks, call: str, says: str) -> None:
    assert ranks.run(2, refused, call) == [says] * 2
