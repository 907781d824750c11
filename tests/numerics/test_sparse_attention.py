"""Sparse attention is dense attention under the mask that its index chose, and the index chooses what it says."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from boost_core.config.model import BLOCK, LAST_QUERIES, SparseAttentionConfig
from boost_core.context import sparse
from boost_core.context.sparse import Lines, SparseAttention, Tally, choose_lines, find_lines

CPU = torch.device("cpu")


def how(**changes: Any) -> SparseAttentionConfig:
    fields = {"kind": "vertical_slash", "budget": 0.4, "sink": 3, "window": 2, "from_length": 256}
    return SparseAttentionConfig.model_validate(fields | changes)


def drawn(tokens: int, heads: int, of_keys: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries, keys and values that lean to some keys and distances, and a gradient."""
    generator = torch.Generator().manual_seed(tokens + heads)
    shapes = [(tokens, count, 16) for count in (heads, of_keys, of_keys, heads)]
    query, key, value, gradient = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    key[:: tokens // 5] *= 3
    return [query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), gradient]


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sees_hmm: torch.Tensor) -> torch.Tensor:
    whole = (x_mhe.transpose(0, 1).unsqueeze(0) for x_mhe in (query, key, value))
    return scaled_dot_product_attention(*whole, attn_mask=sees_hmm, enable_gqa=True)[0].transpose(0, 1)


def compared(outs: list[torch.Tensor], inputs: list[torch.Tensor], gradient: torch.Tensor) -> None:
    found, expected = ((out, *torch.autograd.grad(out, inputs, gradient)) for out in outs)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("run_scores", [sparse.RUN_SCORES, 1], ids=["runs", "blocks one by one"])
@pytest.mark.parametrize(
    ("tokens", "heads", "of_keys", "changes"),
    [
        (700, 4, 2, {}),
        (1024, 2, 2, {"window": 130, "budget": 0.5}),
        (641, 2, 1, {"sink": 0, "budget": 0.2}),
        (300, 3, 3, {"budget": 0.01, "sink": 0}),  # its own blocks and those before
    ],
)
def test_it_is_dense_attention_under_its_mask(
    tokens: int, heads: int, of_keys: int, changes: dict[str, Any], run_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "RUN_SCORES", run_scores)
    query, key, value, gradient = drawn(tokens, heads, of_keys)
    lines = find_lines(query.detach(), key.detach(), how(**changes))
    sees_hmm = torch.stack([of_head.sees(torch.arange(tokens)) for of_head in lines])
    outs = [sparse.AttentionUnder.apply(query, key, value, lines), masked(query, key, value, sees_hmm)]
    compared(outs, [query, key, value], gradient)
    assert [int(of_head.pairs()) for of_head in lines] == sees_hmm.sum(dim=(1, 2)).tolist()


def test_single_verticals_and_far_slashes_are_exact_too() -> None:
    query, key, value, gradient = drawn(500, 1, 1)
    lines = [Lines(500, torch.tensor([0, 3, 7]), torch.tensor([0, 5, 63, 64, 200, 447, 499]))]
    sees_1mm = lines[0].sees(torch.arange(500)).unsqueeze(0)
    assert sees_1mm[0, 499, 63] and not sees_1mm[0, 499, 65] and sees_1mm[0, 250, 60]
    compared(
        [sparse.AttentionUnder.apply(query, key, value, lines), masked(query, key, value, sees_1mm)],
        [query, key, value],
        gradient,
    )
    assert int(lines[0].pairs()) == int(sees_1mm.sum())


def oracle(query_me: np.ndarray, key_me: np.ndarray, of: SparseAttentionConfig) -> tuple[list[int], list[int]]:
    """The lines by their definition, pair by pair and line by line."""
    tokens = len(query_me)
    blocks, near = -(-tokens // BLOCK), of.near_blocks
    mass: dict[tuple[str, int], float] = {}
    kept = 0.0
    for row in range(tokens - LAST_QUERIES, tokens):
        score = key_me[: row + 1] @ query_me[row] / np.sqrt(query_me.shape[1])
        share = np.exp(score - score.max())
        share /= share.sum()
        for place, each in enumerate(share):
            distance = row // BLOCK - place // BLOCK
            if distance < near or place < of.sink:
                kept += each
                continue
            for line in (("slash", distance), ("vertical", place)):
                mass[line] = mass.get(line, 0.0) + each
    added = {
        (kind, at): BLOCK * (tokens - BLOCK * at) if kind == "slash" else tokens - BLOCK * (at // BLOCK + near)
        for kind, at in mass
    }
    order = sorted(mass, key=lambda line: (-mass[line] / (BLOCK if line[0] == "slash" else 1), line))
    room, taken = of.pairs(tokens) - of.always_pairs(tokens), set[tuple[str, int]]()
    for kinds in (("slash", "vertical"), ("vertical",)):
        for line in (line for line in order if line not in taken and line[0] in kinds):
            if kept >= of.mass * LAST_QUERIES or added[line] > room:
                break
            taken.add(line)
            kept, room = kept + mass[line], room - added[line]
    slashes = [*range(min(near, blocks)), *sorted(at for kind, at in taken if kind == "slash")]
    return slashes, [*range(of.sink), *sorted(at for kind, at in taken if kind == "vertical")]


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [(700, {}), (640, {"budget": 0.3, "window": 100}), (333, {"mass": 0.7}), (900, {"sink": 0, "budget": 0.5})],
)
def test_the_index_is_that_of_an_oracle(tokens: int, changes: dict[str, Any]) -> None:
    query, key, _, _ = (x.detach() for x in drawn(tokens, 2, 1))
    for head, lines in enumerate(find_lines(query, key, how(**changes))):
        slashes, verticals = oracle(query[:, head].numpy(), key[:, 0].numpy(), how(**changes))
        assert (lines.slashes.tolist(), lines.verticals.tolist()) == (slashes, verticals)


def test_equal_lines_are_taken_by_distance_and_then_by_place() -> None:
    tokens, of = 1024, how(budget=0.3, sink=0)
    mass_bm, block_b = torch.full((1, tokens), 1 / 16), torch.tensor([15])
    lines = choose_lines(mass_bm, block_b, tokens, of)
    assert lines.slashes.tolist() == list(range(len(lines.slashes)))
    assert lines.verticals.tolist() == list(range(len(lines.verticals)))
    assert len(lines.slashes) > of.near_blocks and len(lines.verticals) > 0
    assert int(lines.pairs()) <= of.pairs(tokens)


@pytest.mark.parametrize("budget", [0.1, 0.2, 0.4])
def test_no_more_is_seen_than_the_budget_allows(budget: float) -> None:
    query, key, _, _ = (x.detach() for x in drawn(4096, 4, 2))
    of = how(budget=budget, mass=1.0)
    pairs = [int(lines.pairs()) for lines in find_lines(query, key, of)]
    assert all(0.9 * of.pairs(4096) < count <= of.pairs(4096) for count in pairs)


def test_short_documents_are_dense_and_the_lines_of_the_first_call_stay() -> None:
    documents = [100, 300, 40, 255, 512]
    query, key, value, gradient = drawn(sum(documents), 2, 1)
    tally = Tally()
    attention = SparseAttention(how(), documents, CPU, tally).for_layer()
    out = attention(query, key, value)
    sees_hmm, begin = torch.zeros(2, sum(documents), sum(documents), dtype=torch.bool), 0
    for tokens in documents:
        here = slice(begin, begin := begin + tokens)
        sees = [torch.ones(tokens, tokens, dtype=torch.bool).tril()] * 2
        if tokens >= 256:
            found = find_lines(query[here].detach(), key[here].detach(), how())
            sees = [lines.sees(torch.arange(tokens)) for lines in found]
        sees_hmm[:, here, here] = torch.stack(sees)
    compared([out, masked(query, key, value, sees_hmm)], [query, key, value], gradient)
    other, other_key = query.detach().flip(0), key.detach().flip(0)
    again = attention(other, other_key, value)
    torch.testing.assert_close(again, masked(other, other_key, value, sees_hmm), rtol=1e-12, atol=1e-12)
    assert tally.rows == 2 * 2 * 32  # once


def test_recall_and_density_are_those_of_the_mask() -> None:
    tokens = 640
    query, key, _, _ = (x.detach() for x in drawn(tokens, 2, 1))
    lines, tally = find_lines(query, key, how(budget=0.3)), Tally()
    tally.add(query, key, lines)
    rows = torch.tensor([(2 * number + 1) * tokens // 64 for number in range(32)])
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    kept, pairs = 0.0, 0
    for head, of_head in enumerate(lines):
        score = (query[:, head] @ key[:, 0].T / 4).masked_fill(~causal, -torch.inf)
        sees = of_head.sees(torch.arange(tokens))
        kept += float((score.softmax(dim=1) * sees)[rows].sum())
        pairs += int(sees.sum())
    assert tally.recall == pytest.approx(kept / 64, abs=1e-12)
    assert tally.density == pairs / (2 * int(causal.sum()))
    assert 0.3 < tally.recall < 1
    assert Tally().recall is None


def test_arithmetic_is_that_of_what_is_seen() -> None:
    tokens, heads, size = 8192, 1, 16
    query, key, value, gradient = (x.float() for x in drawn(tokens, heads, 1))
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    with FlopCounterMode(display=False) as counted:
        out = SparseAttention(how(budget=0.05), [tokens], CPU, tally := Tally()).for_layer()(*inputs)
        out.backward(gradient)
    dense = (4 + 10) * size * heads * tokens * (tokens + 1) // 2
    assert tally.density and tally.density <= 0.05
    assert counted.get_total_flops() <= 0.1 * dense


def test_low_precision_is_not_worse_than_dense_attention_in_it() -> None:
    tokens = 300
    exact = drawn(tokens, 2, 1)
    query, key, value, gradient = (x.detach().bfloat16() for x in exact)
    inputs = [x.double().requires_grad_() for x in (query, key, value)]
    lines = find_lines(query, key, how())
    sees_hmm = torch.stack([of_head.sees(torch.arange(tokens)) for of_head in lines])
    out = masked(*inputs, sees_hmm)
    expected = [out.detach(), *torch.autograd.grad(out, inputs, gradient.double())]
    low = [x.clone().requires_grad_() for x in (query, key, value)]
    errors = []
    for attend in (
        lambda: sparse.AttentionUnder.apply(*low, lines),
        lambda: masked(*low, sees_hmm),
    ):
        out = attend()
        found = [out.detach(), *torch.autograd.grad(out, low, gradient)]
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)])
    assert all(ours <= 1.5 * theirs for ours, theirs in zip(*errors, strict=True))
