"""Offloaded tasks whose queries and outputs travel as latents: what one rank computes, with the planned bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from boost_core.context.attention import ContextAttention
from boost_core.context.exchange import HeadMaker, LatentRoute
from boost_core.context.plan import AttentionLayer
from boost_core.model.attention import Rotation, one_by_one
from boost_core.parallel.btp import GradientSinks
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Entry
from tests.numerics.attended import started
from tests.numerics.test_context_attention import CPU, HEAD, Case, cases, own, planned, tensors
from tests.ranks import Ranks
from tests.sent import sent_by

RANK = 6
WAYS = (("query latents", "asks"), ("output latents", "answers")), (
    ("output latent gradients", "asks"), ("query latent gradients", "answers"),
)  # fmt: skip


@st.composite
def moving(draw: st.DrawFn, ranks: int) -> Case:
    """As ``cases``, where tasks may move."""
    case = draw(cases(ranks))
    plan = case.plan
    moved = planned(plan.window, ranks, list(plan.placement), plan.stages, moved=True)
    return Case(moved, case.heads, case.of_keys)


@dataclass(frozen=True)
class Found:
    """The output's latents; gradients of the queries' latents, keys and values; and of both weights; and bytes."""

    of_tokens: list[torch.Tensor]
    of_weights: list[torch.Tensor]
    sent: dict[Entry, tuple[int, int]]


def inputs_of(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of all tokens: queries' latents, keys, values, the gradient of the output's latents; and both weights."""
    _, keys, values, _ = tensors(case)
    generator = torch.Generator().manual_seed(case.plan.window.tokens + 1)
    latents, gradient = (
        torch.randn(case.plan.window.tokens, RANK, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((RANK, case.heads * HEAD), (case.heads * HEAD, RANK))
    )
    return [latents, keys, values, gradient], [up, down]


def queries_of(latent_nr: torch.Tensor, weights: Sequence[torch.Tensor], rotation: Rotation) -> torch.Tensor:
    """Queries that depend on their tokens' positions."""
    turned_n1 = cast(Any, rotation).position_n.double().cos().unsqueeze(1)
    return (latent_nr @ weights[0] * turned_n1).view(len(latent_nr), -1, HEAD)


def heads_of(
    latents: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same queries, and no values."""
    (latent_nr,) = latents
    return queries_of(latent_nr, weights, rotation), latent_nr.new_empty(0)


def at(case: Case, chunks: Sequence[int]) -> Rotation:
    position_T = torch.arange(case.plan.window.tokens)
    return cast(Rotation, SimpleNamespace(position_n=own(case, position_T, chunks)))


def on_one_rank(case: Case) -> Found:
    (latents, keys, values, gradient), weights = inputs_of(case)
    leaves = [x.requires_grad_() for x in (latents, keys, values, *weights)]
    begin_n = torch.tensor([0, *case.plan.window.documents]).cumsum(0).to(torch.int32)
    query = queries_of(latents, weights, at(case, range(case.plan.window.chunks)))
    out = one_by_one(query, keys, values, begin_n, case.plan.window.sees).flatten(1) @ weights[1]
    dlatents, dkeys, dvalues, *of_weights = torch.autograd.grad(out, leaves, gradient)
    return Found([out.detach(), dlatents, dkeys, dvalues], list(of_weights), {})


def on_this_rank(each: list[Case]) -> list[Found]:
    return [_of_one(case) for case in each]


def _of_one(case: Case) -> Found:
    ledger = CommunicationLedger()
    alone = cast(Communicator, SimpleNamespace(size=1, rank=0))
    route = LatentRoute(None, moves=True, tensor=alone, at=lambda chunks: at(case, chunks))
    attention = ContextAttention(case.plan, Communicator(dist.group.WORLD, "cp", ledger), CPU, route)
    of_all, weights = inputs_of(case)
    up, down = (weight.requires_grad_() for weight in weights)
    *leaves, gradient = (own(case, x, attention.chunks) for x in of_all)
    latents, keys, values = (x.requires_grad_() for x in leaves)
    layer, maker = attention.for_layer(), HeadMaker([up, down], heads_of, GradientSinks())
    inputs = queries_of(latents, [up], at(case, attention.chunks)), keys, values
    query = started(layer, *inputs, maker=maker, latents=[latents])
    out = layer.with_returned(query, layer.finish(query).flatten(1) @ down)
    out.backward(gradient)
    gradients = [cast(torch.Tensor, x.grad) for x in (latents, keys, values, up, down)]
    sent = {entry: (line.calls, line.bytes) for entry, line in ledger.totals().items()}
    return Found([out.detach(), *gradients[:3]], gradients[3:], sent)


def twice(each: list[Case]) -> list[tuple[Found, Found]]:
    return list(zip(on_this_rank(each), on_this_rank(each), strict=True))


@settings(max_examples=6)
@given(each=st.integers(2, 4).flatmap(lambda count: st.lists(moving(count), min_size=1, max_size=6)))
def test_outputs_and_gradients_are_those_of_one_rank(ranks: Ranks, each: list[Case]) -> None:
    """To 1e-10; weights' gradients are summed over ranks; repeats are alike to the bit, and bytes as planned."""
    for case, of_ranks in zip(each, zip(*ranks.run(each[0].plan.ranks, twice, each), strict=True), strict=True):
        expected, (once, again) = on_one_rank(case), zip(*of_ranks, strict=True)
        places = [chunk for rank in range(case.plan.ranks) for chunk in range(case.plan.window.chunks)
                  if case.plan.placement[chunk] == rank]  # fmt: skip
        for number, its in enumerate(expected.of_tokens):
            mine = torch.cat([found.of_tokens[number] for found in once])
            torch.testing.assert_close(mine, own(case, its, places), rtol=1e-10, atol=1e-10)
        for number, its in enumerate(expected.of_weights):
            mine = sum((found.of_weights[number] for found in once), torch.zeros_like(its))
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)
        for one, other in zip(once, again, strict=True):
            for mine, repeated in zip(one.of_tokens + one.of_weights, other.of_tokens + other.of_weights, strict=True):
                assert torch.equal(mine, repeated)
            assert one.sent == other.sent
        expect_planned_bytes(case, [found.sent for found in once])


def expect_planned_bytes(case: Case, of_ranks: Sequence[dict[Entry, tuple[int, int]]]) -> None:
    """A latent goes and one comes back, forward and backward, for each moved query; and no others."""
    layer = AttentionLayer(case.heads * HEAD, case.of_keys * HEAD, case.heads, RANK, element_bytes=8)
    size, queries = case.plan.window.chunk_tokens, case.plan.queries
    counts = {
        way: Counter(getattr(each, side) for each in queries)
        for way, side in (("asks", "sender"), ("answers", "receiver"))
    }
    of_tasks = {purpose for both in WAYS for purpose, _ in both}
    for rank, lines in enumerate(of_ranks):
        expected = {
            Entry("all_to_all", "cp", purpose): (1, counts[way][rank] * size * layer.share_bytes)
            for both in (WAYS if queries else ())
            for purpose, way in both
        }
        assert {line: sent for line, sent in lines.items() if line.purpose in of_tasks} == expected
        assert {line.purpose for line in lines} <= of_tasks | {"keys", "key gradients"}
    forward = sum(
        lines.get(Entry("all_to_all", "cp", purpose), (0, 0))[1] for lines in of_ranks for purpose, _ in WAYS[0]
    )
    found = sent_by(case.plan, layer, moved="latents").fabric_bytes
    assert forward == found - size * layer.key_bytes * len(case.plan.keys)
