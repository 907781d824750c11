"""Training with a sequence's tokens on several ranks: what one rank computes, whichever tokens each of them has."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from boost_core.config import JobSpec, Layout
from boost_core.config.parallelism import chunk_tokens
from boost_core.context.attention import ContextAttention
from boost_core.context.plan import AttentionLayer, ContextPlan
from boost_core.context.selection import STAGES, ContextPlanner, attention_layer, sent_between_nodes
from boost_core.data.corpus import EvaluationSet, Sequences, TokenStream
from boost_core.hardware import LINKS
from boost_core.messages import Report, StepReport
from boost_core.model.attention import begins
from boost_core.optim.build import COMPUTE_TYPES
from boost_core.parallel.communicator import Communicator, Entry, StepClock
from boost_core.plan.machine import Cluster, Level, Machine, machine_for
from boost_core.plan.throughput import block_work
from boost_core.train.batch import Batch, LocalTokens, Partitioner, document_lengths
from boost_core.train.loop import evaluate, train
from boost_core.train.state import Membership, Outcome, StepTimes, TrainState
from boost_core.train.step import continued, training_step
from tests.jobs import tiny_job, write_corpus
from tests.pairwise import pairwise
from tests.ranks import Ranks
from tests.sent import sent_by

CPU, LENGTH, VOCABULARY, END, BATCH = torch.device("cpu"), 64, 320, 0, 4
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense", "rank": None},
    "svd": {"family": "svd", "tie_embeddings": True},
    "cola": {"family": "cola", "num_key_value_heads": 2, "sliding_window": 11},
    "lax": {"family": "lax", "lax": {"gate": "tensor"}, "qk_norm": True},
    "vanilla": {"family": "cola"},
    "grouped": {"family": "cola", "num_key_value_heads": 1, "qk_norm": True},
}
STEPPED = ("dense", "svd", "cola", "lax", "vanilla")
ONE = Layout(1, 1, 1)
LAYOUTS = [Layout(1, 1, 1, cp=2), Layout(1, 1, 1, cp=4), Layout(2, 1, 1, cp=2), Layout(1, 1, 2, cp=2)]


@dataclass(frozen=True)
class Case:
    """What is trained, and how; some documents to a sequence are apart, none see each other."""

    family: str
    layout: Layout
    documents: int
    recompute: str
    micro_batch: int
    zero_stage: int = 0
    optimizer: str = "adamw"
    exchange: str = "keys"
    schedule: str = "1f1b"
    pool: str = "none"
    split: bool = False

    @property
    def dealt_at_a_time(self) -> int:
        """Sequences."""
        return self.micro_batch // 2 if self.split else self.micro_batch

    @property
    def blocks(self) -> int:
        """One for each stage, or two."""
        return 2 if self.schedule == "1f1b" else 4

    def spec(self, layout: Layout) -> JobSpec:
        shape = {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": self.blocks,
            "num_attention_heads": 4, "rank": 8,
        }  # fmt: skip
        how: dict[str, Any] = {"zero_stage": self.zero_stage, "recompute": self.recompute}
        how["context"] = {"exchange": self.exchange, "pool": self.pool}
        how["split_micro_batch"] = self.split and layout.cp > 1
        if layout.pp > 1:
            how["pipeline_schedule"] = self.schedule
        if self.family == "vanilla":
            how["strategy"] = "vanilla"
        return JobSpec.model_validate(
            {
                "name": "long",
                "model": shape | FAMILIES[self.family],
                "parallelism": layout.sizes | how,
                "optimizer": {"kind": self.optimizer},
                "data": {"documents_apart": self.documents > 0},
                "training": {
                    "steps": 3, "sequence_length": LENGTH, "global_batch_size": BATCH, "seed": 5,
                    "micro_batch_size": self.micro_batch,
                },
            }
        )  # fmt: skip


CASES = pairwise(
    [
        Case(family, layout, documents, recompute, micro_batch, exchange=exchange)
        for family in STEPPED
        for layout in LAYOUTS
        for documents in (0, 1, 6)
        for recompute in ("none", "latent", "shared", "full")
        for micro_batch in (1, 2)
        for exchange in ("keys", "latents")
        if family not in ("dense", "vanilla") or (recompute in ("none", "full") and exchange == "keys")
    ],
    lambda case: (case.family, case.layout, case.documents, case.recompute, case.micro_batch, case.exchange),
)


class Drawn:
    """Sequences of random tokens with ends of documents among them."""

    def __init__(self, documents: int) -> None:
        draw = np.random.default_rng(documents)
        self.tokens = draw.integers(1, VOCABULARY, (3 * BATCH, LENGTH + 1))
        for row in self.tokens[:, : LENGTH * (documents > 0)]:
            row[draw.choice(LENGTH, documents, replace=False)] = END

    def sequences(self, first: int, count: int) -> Sequences:
        return self.tokens[first : first + count]


@dataclass(frozen=True)
class Found:
    """A rank's step: loss, norm, its part of each gradient and how weights are split; validation, text, bytes sent.

    And how uneven attention is by its plans.
    """

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    axes: dict[str, int | None]
    validation: float
    continued: list[list[int]]
    sent: dict[Entry, tuple[int, int]]
    imbalance: float | None


def stepped(cases: list[Case], alone: bool) -> list[Found]:
    with patch.dict(COMPUTE_TYPES, {"fp32": torch.float64}):
        return [_step(case, case.spec(ONE if alone else case.layout)) for case in cases]


def _step(case: Case, spec: JobSpec) -> Found:
    state, drawn = TrainState.initial(spec, CPU, end_of_document=END), Drawn(case.documents)
    result = training_step(state, drawn)  # type: ignore[arg-type]
    sent = {entry: (line.calls, line.bytes) for entry, line in state.ledger.totals().items() if entry.group == "cp"}
    gradients = {} if case.zero_stage else {
        name: each.clone() for group in state.optimizer.groups for name, each in group.summed_gradients().items()
    }  # fmt: skip
    imbalance = state.partitioner.load.imbalance
    kept = EvaluationSet.of([(TokenStream([drawn.tokens.flatten().astype(np.uint16)]), 1.0)], LENGTH, 5)
    validation = evaluate(state, kept).loss
    texts = list(continued(state, [[3, 4, 5], [6]], 3, END))
    return Found(result.loss, result.gradient_norm, gradients, state.axes, validation, texts, sent, imbalance)


def by_layout() -> list[tuple[Layout, list[Case]]]:
    return [(layout, [case for case in CASES if case.layout == layout]) for layout in LAYOUTS]


def for_all(layout: Layout) -> Any:
    return pytest.mark.nightly if layout.dp == layout.tp == 1 else pytest.mark.full if layout.dp == 1 else ()


@pytest.mark.parametrize(
    ("layout", "cases"), [pytest.param(*each, marks=for_all(each[0]), id=str(each[0])) for each in by_layout()]
)
def test_a_step_is_that_of_one_rank(ranks: Ranks, layout: Layout, cases: list[Case]) -> None:
    """In fp64, to 1e-10: loss, norm and all gradients; so is validation, and what is written."""
    (expected,) = ranks.run(1, stepped, cases, True)
    of_ranks = ranks.run(layout.world_size, stepped, cases, False)
    for case, its, *found in zip(cases, expected, *of_ranks, strict=True):
        expect_same(case, its, found)


def expect_same(case: Case, its: Found, found: Sequence[Found]) -> None:
    for one in found:
        for mine, true in ((one.loss, its.loss), (one.norm, its.norm), (one.validation, its.validation)):
            assert mine == pytest.approx(true, rel=1e-10), case
        assert one.continued == its.continued
    for name, true_gradient in its.gradients.items():
        axis, parts = found[0].axes[name], [each.gradients[name] for each in found]
        whole = parts[0] if axis is None else torch.cat(parts[: case.layout.tp], axis)
        assert (whole - true_gradient).norm() <= 1e-10 * true_gradient.norm(), (case, name)
        for number, part in enumerate(parts):
            assert torch.equal(part, parts[number % case.layout.tp]), (case, name)


def most_moved(_: ContextPlanner, plan: ContextPlan) -> SimpleNamespace:
    """Figures by which the plan that moves most tasks is the fastest."""
    return SimpleNamespace(seconds=-len(plan.queries))


def rounded(cases: list[Case], alone: bool) -> list[Found]:
    """In bf16, with as many offloaded tasks as there may be."""
    specs = [case.spec(ONE if alone else case.layout) for case in cases]
    in_bf16 = [
        spec.model_copy(update={"training": spec.training.model_copy(update={"precision": "bf16"})}) for spec in specs
    ]
    with patch.object(ContextPlanner, "figures", most_moved):
        return [_step(case, spec) for case, spec in zip(cases, in_bf16, strict=True)]


@pytest.mark.nightly
def test_in_bf16_ranks_that_share_sequences_are_hardly_further_off_than_one(ranks: Ranks) -> None:
    """At most 1.5 times as far from fp64, which is the project's rule."""
    layout = Layout(1, 1, 1, cp=4)
    cases = [Case("cola", layout, 2, "none", 1, exchange=each) for each in ("keys", "latents")]
    cases += [replace(case, pool="tasks") for case in cases]
    (exact,), (alone,) = ranks.run(1, stepped, cases, True), ranks.run(1, rounded, cases, True)
    shared, *_ = ranks.run(layout.world_size, rounded, cases, False)
    for case, true, one, several in zip(cases, exact, alone, shared, strict=True):
        errors = [
            torch.cat([(each.gradients[name].double() - true.gradients[name]).flatten() for name in true.gradients])
            for each in (one, several)
        ]
        off, further = (float(error.norm()) for error in errors)
        assert 0 < further <= 1.5 * off, (case, further / off)


PIPELINES = [
    Case(family, Layout(1, 2, 1, cp=2), documents, recompute, micro_batch, exchange=exchange, schedule=schedule)
    for family, documents, recompute, micro_batch, exchange, schedule in (
        ("cola", 6, "offload", 1, "latents", "1f1b"),
        ("lax", 0, "none", 2, "keys", "1f1b"),
        ("lax", 3, "latent", 1, "latents", "interleaved_1f1b"),
        ("cola", 0, "full", 2, "keys", "interleaved_1f1b"),
        ("svd", 6, "none", 1, "keys", "interleaved_1f1b"),
        ("lax", 3, "none", 1, "keys", "zero_bubble"),
        ("lax", 3, "none", 1, "latents", "zero_bubble"),
    )
]


@pytest.mark.full
def test_a_step_through_a_pipelines_stages_is_that_of_one_rank(ranks: Ranks) -> None:
    """Each of which has the same part of the tokens; as above."""
    (expected,) = ranks.run(1, stepped, PIPELINES, True)
    for case, its, *found in zip(PIPELINES, expected, *ranks.run(4, stepped, PIPELINES, False), strict=True):
        expect_same_of_stages(case, its, found)


def expect_same_of_stages(case: Case, its: Found, found: Sequence[Found]) -> None:
    """Each weight's gradient is that of one rank, on all that have its stage."""
    for one in found:
        for mine, true in ((one.loss, its.loss), (one.norm, its.norm), (one.validation, its.validation)):
            assert mine == pytest.approx(true, rel=1e-10), case
        assert one.continued == its.continued
    for name, true_gradient in its.gradients.items():
        parts = [each.gradients[name] for each in found if name in each.gradients]
        assert len(parts) >= case.layout.cp, (case, name)
        for part in parts:
            assert (part - true_gradient).norm() <= 1e-10 * true_gradient.norm(), (case, name)
            assert torch.equal(part, parts[0]), (case, name)


def plans_of(case: Case) -> Iterator[ContextPlan]:
    """The plan of each micro-batch of a step, or of each half."""
    for begin in range(0, BATCH, case.dealt_at_a_time):
        rows = Drawn(case.documents).tokens[begin : begin + case.dealt_at_a_time, :-1]
        lengths = tuple(length for row in rows for length in _lengths(row, case.documents > 0))
        yield ContextPlanner.of(case.spec(case.layout), two_nodes(case)).plan(lengths)


# What is sent, and the ranks of a node: of one layout each.
SENT = {"keys": 1, "latents": 1, "auto": 2}


@pytest.mark.full
@pytest.mark.parametrize(
    "exchange", [*(pytest.param(each, marks=pytest.mark.nightly) for each in ("keys", "latents")), "auto"]
)
def test_what_is_sent_is_as_planned_and_repeats_are_alike_to_the_bit(ranks: Ranks, exchange: str) -> None:
    """Keys and values, or latents; or latents between two nodes and keys within them."""
    layout = Layout(1, 1, 1, cp=4) if exchange == "auto" else Layout(2, 1, 1, cp=2)
    cases = [
        Case("svd", layout, 3, "latent", 1, exchange=exchange), Case("lax", layout, 0, "none", 1, exchange=exchange),
    ]  # fmt: skip
    once, again = (ranks.run(layout.world_size, on_two_nodes, cases, False) for _ in range(2))
    for number, case in enumerate(cases):
        model = case.spec(layout).model
        assert 4 * model.bottleneck_rank == model.hidden_size == model.key_value_size
        layer = AttentionLayer(model.hidden_size, model.key_value_size, 4, model.rank, layout.tp, element_bytes=8)
        near = far = most = area = 0
        for plan in plans_of(case):
            what = "keys" if exchange == "keys" else "latents"
            found = sent_by(plan, layer, what, SENT[exchange])  # type: ignore[arg-type]
            near, far = near + found.node_bytes, far + found.fabric_bytes
            most, area = most + max(plan.loads), area + plan.window.area
            if what == "latents":
                assert 4 * found.fabric_bytes == sent_by(plan, layer, "keys", SENT[exchange]).fabric_bytes
        planned = {"keys": near + far} if exchange == "keys" else {"keys": near, "key latents": far}
        assert (near > 0) == (exchange == "auto")
        assert [rank[number].imbalance for rank in once] == [pytest.approx(most * layout.cp / area)] * layout.world_size
        for what, size in planned.items():
            # By each tensor parallel rank, in both layers; forward and backward.
            lines = (Entry("all_to_all", "cp", each) for each in (what, f"{what.removesuffix('s')} gradients"))
            sent = [sum(rank[number].sent.get(line, (0, 0))[1] for rank in once) for line in lines]
            assert sent == [layout.tp * 2 * 2 * size, layout.tp * 2 * size], (what, case)
    for first, second in zip(once, again, strict=True):
        for one, other in zip(first, second, strict=True):
            assert one.loss == other.loss
            assert all(torch.equal(one.gradients[name], other.gradients[name]) for name in one.gradients)


MOVED = [
    Case("cola", Layout(1, 1, 1, cp=4), 6, "latent", 2, exchange="latents", pool="tasks"),
    Case("lax", Layout(2, 1, 1, cp=2), 0, "shared", 1, exchange="latents", pool="tasks"),
    Case("lax", Layout(1, 2, 1, cp=2), 1, "none", 1, exchange="latents", schedule="zero_bubble", pool="tasks"),
    Case("cola", Layout(2, 1, 1, cp=2), 6, "offload", 2, exchange="latents", pool="tasks"),
]
MORE_MOVED = [
    Case("dense", Layout(1, 1, 1, cp=4), 6, "none", 1, pool="tasks"),
    Case("svd", Layout(2, 1, 1, cp=2), 0, "latent", 1, exchange="latents", pool="tasks"),
    Case("cola", Layout(2, 1, 1, cp=2), 1, "none", 1, pool="tasks"),
    Case("lax", Layout(1, 1, 1, cp=4), 0, "full", 1, exchange="latents", pool="tasks"),
    Case("lax", Layout(1, 1, 2, cp=2), 1, "none", 1, pool="tasks"),
    Case("vanilla", Layout(2, 1, 1, cp=2), 1, "none", 1, pool="tasks"),
    Case("cola", Layout(1, 2, 1, cp=2), 6, "latent", 2, pool="tasks"),
    Case("svd", Layout(1, 1, 1, cp=4), 1, "none", 1, optimizer="loro", exchange="latents", pool="tasks"),
    Case("lax", Layout(1, 1, 2, cp=2), 0, "latent", 1, exchange="latents", pool="tasks"),
]


def by_most_moved(cases: list[Case], alone: bool) -> list[Found]:
    """Of the plans that a job may have, by those that move most tasks, whatever they take."""
    with patch.object(ContextPlanner, "figures", most_moved):
        return stepped(cases, alone)


@pytest.mark.parametrize(
    "cases", [pytest.param(MOVED, id="some"), pytest.param(MORE_MOVED, marks=pytest.mark.nightly, id="all others")]
)
@pytest.mark.nightly
def test_a_step_with_moved_tasks_is_that_of_one_rank(ranks: Ranks, cases: list[Case]) -> None:
    """As above; and what is sent is as planned, and repeats are alike to the bit."""
    for case, sent in steps_with_moved_tasks(ranks, cases):
        assert sent.items() >= planned_of_moved(case).items(), case


def steps_with_moved_tasks(ranks: Ranks, cases: list[Case]) -> Iterator[tuple[Case, Counter[str]]]:
    """Compare steps with those of one rank, and the first two with repeats; bytes of all ranks by purpose."""
    (expected,) = ranks.run(1, stepped, cases, True)
    of_ranks = ranks.run(4, by_most_moved, [*cases, *cases[:2]], False)
    for one in of_ranks:
        for once, again in zip(one[:2], one[len(cases) :], strict=True):
            assert once.loss == again.loss
            assert all(torch.equal(once.gradients[name], again.gradients[name]) for name in once.gradients)
    for case, its, *found in zip(cases, expected, *(one[: len(cases)] for one in of_ranks), strict=True):
        (expect_same if case.layout.pp == 1 else expect_same_of_stages)(case, its, found)
        sent = Counter[str]()
        for rank in found:
            sent.update({entry.purpose: size for entry, (_, size) in rank.sent.items()})
        yield case, sent


SHORT = 35


def in_some_micro_batches(case: Case, layout: Layout) -> tuple[list[float], int]:
    """As ``after_steps``, where tasks move if the first document is short."""

    def figures(_: ContextPlanner, plan: ContextPlan) -> SimpleNamespace:
        return SimpleNamespace(seconds=len(plan.queries) * (-1 if plan.window.documents[0] < SHORT else 1))

    with patch.object(ContextPlanner, "figures", figures):
        return after_steps(case, layout)


@pytest.mark.full
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_gradients_are_sent_when_all_are_there_whether_or_not_tasks_move(ranks: Ranks, zero_stage: int) -> None:
    """From the second step on, as soon as the last has come: a weight has as many in each micro-batch."""
    case = Case("lax", Layout(1, 1, 1, cp=2), 1, "none", 1, zero_stage, exchange="latents", pool="tasks")
    rows = Drawn(case.documents).tokens[:, :-1].reshape(3, BATCH, LENGTH)
    assert [sum(_lengths(row, True)[0] < SHORT for row in of_step) for of_step in rows] == [3, 1, 2]
    (expected, _), *_ = ranks.run(1, after_steps, case, ONE)
    for losses, _ in ranks.run(2, in_some_micro_batches, case, case.layout):
        assert losses == pytest.approx(expected, rel=1e-8)


HALVES = [
    Case("cola", Layout(1, 1, 1, cp=4), 6, "latent", 4, exchange="latents", pool="tasks", split=True),
    Case("lax", Layout(2, 1, 1, cp=2), 6, "shared", 4, exchange="latents", split=True),
    Case("cola", Layout(2, 1, 1, cp=2), 0, "offload", 2, split=True),
]
MORE_HALVES = [
    Case("svd", Layout(2, 1, 1, cp=2), 1, "none", 2, pool="tasks", split=True),
    Case("lax", Layout(1, 1, 2, cp=2), 0, "none", 2, exchange="latents", split=True),
    Case("lax", Layout(2, 1, 1, cp=2), 0, "latent", 2, exchange="latents", pool="tasks", split=True),
    Case("svd", Layout(1, 1, 1, cp=4), 1, "shared", 2, split=True),
]


@pytest.mark.full
@pytest.mark.parametrize(
    "cases", [pytest.param(HALVES, id="some"), pytest.param(MORE_HALVES, marks=pytest.mark.nightly, id="all others")]
)
def test_a_step_of_halves_that_take_turns_is_that_of_one_rank(ranks: Ranks, cases: list[Case]) -> None:
    """As above; each half has its own plan."""
    for case, sent in steps_with_moved_tasks(ranks, cases):
        layer = replace(attention_layer(case.spec(case.layout)), element_bytes=8)
        with patch.object(ContextPlanner, "figures", most_moved):
            tokens = sum(len(plan.keys) * plan.window.chunk_tokens for plan in plans_of(case))
        what = "keys" if case.exchange == "keys" else "key latents"
        size = tokens * case.layout.tp * case.blocks * layer.sent_bytes(case.exchange)  # type: ignore[arg-type]
        expected = {what: 2 * size, f"{what.removesuffix('s')} gradients": size}
        if case.pool == "tasks":
            expected |= planned_of_moved(case)
        assert sent.items() >= expected.items(), case


LETTERS = {"keys": "k", "key gradients": "g"}  # as they leave; capitals as they are waited for


def turns(case: Case) -> str:
    """In what order a step's keys and their gradients leave and are waited for; f, b: attention begins."""
    events, start = list[str](), Communicator.start_uneven_all_to_all

    def started(self: Communicator, *arguments: Any) -> SimpleNamespace:
        pending, letter = start(self, *arguments), LETTERS[arguments[-1]]
        events.append(letter)

        def wait() -> None:
            events.append(letter.upper())
            pending.wait()

        return SimpleNamespace(wait=wait)

    def noted(letter: str, attend: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any) -> Any:
            events.append(letter)
            return attend(*arguments)

        return noting

    with (
        patch.object(Communicator, "start_uneven_all_to_all", started),
        patch.object(ContextAttention, "forward", noted("f", ContextAttention.forward)),
        patch.object(ContextAttention, "backward", noted("b", ContextAttention.backward)),
    ):
        training_step(TrainState.initial(case.spec(case.layout), CPU), Drawn(0))  # type: ignore[arg-type]
    return "".join(events)


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "latent"])
def test_one_halfs_exchange_is_under_way_while_the_other_computes(ranks: Ranks, recompute: str) -> None:
    """In each layer keys leave before the other half's turn and are waited for after it; backward, their gradients.

    Backward, keys leave at the start of the turn that ends with their attention.
    """
    leave, come = "k" * STAGES, "K" * STAGES
    back = "bKg" + "KGg" * (STAGES - 1)  # the last stage's gradients are under way when it ends
    forward = 2 * leave + 2 * ("f" + come + leave) + 2 * ("f" + come)
    backward = 2 * (leave + back) + 2 * ("G" + leave + back) + 2 * "G"
    case = Case("svd", Layout(1, 1, 1, cp=2), 0, recompute, 2, split=True)
    assert ranks.run(2, turns, case) == [(BATCH // case.micro_batch) * (forward + backward)] * 2


def planned_of_moved(case: Case) -> dict[str, int]:
    """Bytes of all ranks for offloaded tasks; by each tensor parallel rank, in all layers."""
    layer, moved = replace(attention_layer(case.spec(case.layout)), element_bytes=8), 0
    with patch.object(ContextPlanner, "figures", most_moved):
        for plan in plans_of(case):
            moved += len(plan.queries) * plan.window.chunk_tokens * case.layout.tp * case.blocks
    assert moved
    forward = moved * (2 if case.recompute == "full" else 1)
    if case.exchange == "latents":
        ways = {"query latents": forward, "output latents": forward}
        ways |= {"output latent gradients": moved, "query latent gradients": moved}
        return {purpose: tokens * layer.share_bytes for purpose, tokens in ways.items()}
    return {
        "queries": forward * layer.moved_bytes(backward=False)[0],
        "outputs": forward * layer.moved_bytes(backward=False)[1],
        "queries and output gradients": moved * layer.moved_bytes(backward=True)[0],
        "query gradients": moved * layer.moved_bytes(backward=True)[1],
    }


@pytest.mark.nightly
def test_latents_go_between_nodes_and_keys_within(ranks: Ranks) -> None:
    """What one rank computes, where nodes have two context parallel ranks each."""
    layout = Layout(2, 1, 1, cp=4)
    cases = [Case(family, layout, 2, "latent", 1, exchange="auto") for family in ("cola", "lax")]
    (expected,) = ranks.run(1, stepped, cases, True)
    for case, its, *found in zip(cases, expected, *ranks.run(8, on_two_nodes, cases, False), strict=True):
        for one in found:
            assert {line.purpose for line in one.sent} >= {"keys", "key latents"}
        expect_same(case, its, found)


def most_moved_on_two_nodes(cases: list[Case], alone: bool) -> list[Found]:
    """As both say."""
    with patch.object(ContextPlanner, "figures", most_moved):
        return on_two_nodes(cases, alone)


@pytest.mark.full
def test_tasks_move_as_latents_where_keys_are_no_wider_than_latents(ranks: Ranks) -> None:
    """With a head of keys to four of queries, of 8 each: a latent, too, has 8."""
    case = Case("grouped", Layout(1, 1, 1, cp=4), 0, "latent", 1, exchange="auto", pool="tasks")
    ((expected,),) = ranks.run(1, stepped, [case], True)
    found = [one for (one,) in ranks.run(4, most_moved_on_two_nodes, [case], False)]
    expect_same(case, expected, found)
    sent = {line.purpose for one in found for line in one.sent}
    assert sent == {"keys", "key gradients", "nodes", *planned_of_moved(replace(case, exchange="latents"))}


def on_two_nodes(cases: list[Case], alone: bool) -> list[Found]:
    """As though the first half of the ranks were on one node, the others on another, and latents sent between such."""
    with (
        patch("socket.gethostname", return_value=f"node-{dist.get_rank() * 2 // dist.get_world_size()}"),
        patch("boost_core.train.batch.machine_for", return_value=two_nodes(cases[0])),
    ):
        return stepped(cases, alone)


def two_nodes(case: Case) -> Machine:
    planned = Cluster((Level("node", 4, LINKS["nvlink-a100"]), Level("fabric", 2, LINKS["fabric-200g"])))
    return Machine(machine_for(case.spec(ONE).resources, "fp32").profile, planned)


def let_go(case: Case) -> bool:
    """Whether nothing holds a state whose step has ended before its backward pass."""
    state = TrainState.initial(case.spec(case.layout), CPU, end_of_document=END)
    sequences = Drawn(case.documents).sequences(0, 1)
    batch = Batch.of(sequences, END, CPU)
    own = state.partitioner.partition(batch, sequences)
    loss_T = state.model(own.of(batch.tokens), own.of(batch.targets), own.rotation)
    left = weakref.ref(state.gradients), weakref.ref(state.process_groups)
    del state, own, loss_T
    gc.collect()
    return all(reference() is None for reference in left)


def test_attention_that_is_kept_holds_nothing_when_a_step_breaks(ranks: Ranks) -> None:
    case = Case("cola", Layout(1, 1, 1, cp=2), 2, "latent", 1, exchange="latents")
    assert ranks.run(2, let_go, case) == [True] * 2


def planned_ahead(case: Case) -> tuple[list[str], list[bool]]:
    """When plans are made in three steps, and whether they are those of lengths that the device has."""
    state, drawn, order, alike = TrainState.initial(case.spec(case.layout), CPU, end_of_document=END), Drawn(3), [], []
    plan, values, deal = ContextPlanner.plan, StepClock.values, Partitioner.partition

    def planned(dealing: ContextPlanner, documents: Sequence[int], densely: bool) -> ContextPlan:
        order.append("plan")
        return plan(dealing, documents, densely)

    def waited(clock: StepClock, tensor: torch.Tensor) -> list[float]:
        order.append("wait")
        return values(clock, tensor)

    def dealt(partitioner: Partitioner, batch: Batch, sequences: Sequences) -> LocalTokens:
        assert batch.starts is not None
        lengths = begins(batch.starts, LENGTH).diff()
        alike.append(document_lengths(sequences, END) == tuple(lengths[lengths > 0].tolist()))
        return deal(partitioner, replace(batch, starts=batch.starts.to("meta")), sequences)  # what nobody can read

    with (
        patch.object(ContextPlanner, "plan", planned), patch.object(StepClock, "values", waited),
        patch.object(Partitioner, "partition", dealt),
    ):  # fmt: skip
        for _ in range(3):
            training_step(state, drawn)  # type: ignore[arg-type]
    return order, alike


def test_plans_wait_for_no_device_and_a_steps_first_is_made_before_the_step_before_ends(ranks: Ranks) -> None:
    case = Case("cola", Layout(1, 1, 1, cp=2), 3, "none", 2)
    for order, alike in ranks.run(2, planned_ahead, case):
        assert order == ["plan", "plan", "plan", "wait", "plan", "plan", "wait", "plan", "wait"]
        assert alike == [True] * 6


def test_kept_attention_is_not_planned_again() -> None:
    kept, none = (
        block_work(Case("cola", Layout(1, 1, 1, cp=2), 0, how, 1).spec(ONE).at(Layout(1, 1, 1, cp=2)), how)
        for how in ("latent", "none")
    )
    assert kept.backward.attention_flops == none.backward.attention_flops > 0


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, "latents"),
        ({"model": {"num_key_value_heads": 8}}, "keys"),  # a quarter of the query heads: as wide as a latent
        ({"model": {"family": "dense", "rank": None}}, "keys"),
        ({"training": {"precision": "fp8"}}, "keys"),
        ({"parallelism": {"strategy": "vanilla"}}, "keys"),
        ({"parallelism": {"context": {"exchange": "keys"}}}, "keys"),
        ({"resources": {"gpus_per_worker": 0}}, "keys"),
    ],
)
def test_latents_are_sent_where_they_are_less(changes: dict[str, Any], sent: str) -> None:
    spec: dict[str, Any] = {
        "name": "long",
        "model": {"preset": "7b", "family": "cola"},
        "parallelism": {"tensor_parallel_size": 4, "context_parallel_size": 4},
        "resources": {"gpus_per_worker": 1, "accelerator_type": "H100"},
        "training": {
            "steps": 3,
            "sequence_length": 131072,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "precision": "bf16",
        },
    }
    for section, fields in changes.items():
        spec[section] = spec[section] | fields
    job = JobSpec.model_validate(spec)
    assert sent_between_nodes(job, machine_for(job.resources, job.training.precision).cluster) == sent


def _lengths(row: np.ndarray[Any, Any], apart: bool) -> list[int]:
    ends = (np.flatnonzero(row == END) + 1).tolist() if apart else []
    return [length for length in np.diff([0, *ends, len(row)]).tolist() if length]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "zero_stage", "optimizer"),
    [("cola", 1, "adamw"), ("cola", 2, "adamw"), ("svd", 1, "loro"), ("lax", 2, "muon")],
)
def test_masters_are_shared_over_replicas_and_context_parallel_ranks(
    ranks: Ranks, family: str, zero_stage: int, optimizer: str
) -> None:
    """But for LORO's and Muon's factors, which are whole on each."""
    exchange = "latents" if zero_stage == 2 else "keys"
    case = Case(family, Layout(1, 1, 2, cp=2), 6, "none", 1, zero_stage, optimizer, exchange)
    found = ranks.run(4, after_steps, case, case.layout)
    (expected, whole), *_ = ranks.run(1, after_steps, case, ONE)
    kept = sum(kept for _, kept in found)
    assert kept == pytest.approx(whole, rel=0.05) if optimizer == "adamw" else whole < kept < 4 * whole
    for losses, _ in found:
        assert losses == pytest.approx(expected, rel=1e-8)


def after_steps(case: Case, layout: Layout) -> tuple[list[float], int]:
    """Losses of three steps, and how many weights' masters this rank keeps."""
    with patch.dict(COMPUTE_TYPES, {"fp32": torch.float64}):
        state, drawn = TrainState.initial(case.spec(layout), CPU, end_of_document=END), Drawn(case.documents)
        losses = [training_step(state, drawn).loss for _ in range(3)]  # type: ignore[arg-type]
    return losses, sum(group.master.numel() for group in state.optimizer.groups)


@pytest.mark.parametrize(("length", "ranks_", "chunk"), [(64, 2, 8), (16384, 2, 2048), (524288, 8, 8192), (6, 3, 1)])
def test_chunks_are_some_to_a_rank_and_long_where_they_can_be(length: int, ranks_: int, chunk: int) -> None:
    assert chunk_tokens(length, ranks_) == chunk


def trained_on(spec: JobSpec, steps: int) -> list[float]:
    """Losses of so many steps from where the checkpoint folder is; they are saved then."""
    membership, losses = Membership(), list[float]()

    class Losses:
        def report(self, report: Report) -> None:
            losses.extend([report.loss] if isinstance(report, StepReport) else [])

    left = iter(range(steps - 1, -1, -1))

    def after_step(_: StepTimes | None) -> None:
        if next(left, 0) == 1:  # it stops after the next one
            membership.store.set()
            membership.halt.set()

    membership.after_step = after_step
    assert train(spec, Losses(), membership) is Outcome.STORED
    return losses


@pytest.mark.full
def test_a_job_goes_on_with_other_context_parallel_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """With 1, 2 and 1 ranks to a sequence, through checkpoints: as with 1 all along; repeats are alike to the bit."""
    corpus = write_corpus(tmp_path / "corpus")

    def lived(name: str, sizes: Sequence[int]) -> list[float]:
        losses: list[float] = []
        for size in sizes:
            changes = {"tensor_parallel_size": 1, "context_parallel_size": size}
            checkpoint = {"every_steps": 10**6, "keep_last": 1}
            spec = tiny_job(corpus, tmp_path / name, parallelism=changes, checkpoint=checkpoint, training={"steps": 12})
            losses += ranks.run(size, trained_on, spec, 3)[0]
        return losses

    changed, again = lived("changed", [1, 2, 1]), lived("again", [1, 2, 1])
    assert changed == again
    assert changed == pytest.approx(lived("steady", [1, 1, 1]), rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": {"sequence_length": 33}}, "training.sequence_length=33 cannot be split equally among 2 ranks"),
        ({"training": {"sequence_length": 8006}}, "cut into 4,003 chunks for each of 2 ranks, .* such as 8192"),
        (
            {"parallelism": {"split_micro_batch": True}, "training": {"micro_batch_size": 1}},
            "a micro-batch of 1 sequence cannot be split over context parallel ranks; use 2 or more",
        ),
        ({"training": {"cuda_graphs": "on"}, "resources": {"gpus_per_worker": 1}}, "cannot be captured"),
        ({"resources": {"gpus_per_worker": 1}}, "does not support fp32 with heads of 8; use bf16"),
        (
            {"parallelism": {"context": {"exchange": "latents"}, "strategy": "vanilla"}},
            "only under strategy=btp do tensor parallel ranks have the whole latents; use auto or keys",
        ),
        (
            {"parallelism": {"context": {"pool": "tasks"}}, "training": {"attention": {"kind": "vertical_slash"}}},
            "sparse attention cannot choose keys before it has the queries, .*; use none",
        ),
        ({"elasticity": {"layouts": "auto", "gpus": {"max": 4}}}, "layouts without context parallelism"),
        ({"elasticity": {"data_parallel_size": {"max": 2}, "layouts": [[1, 1, 3]]}}, "cp 3 is legal with no number"),
    ],
)
def test_what_does_not_go_with_it_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny_job(
            Path("corpus"),
            "checkpoints",
            **(changes | {"parallelism": {"context_parallel_size": 2} | changes.get("parallelism", {})}),
        )


def test_replicas_come_and_go_with_all_their_context_parallel_ranks() -> None:
    changes = {"tensor_parallel_size": 1, "context_parallel_size": 2}
    elastic = {"data_parallel_size": {"max": 2}, "layouts": [[1, 1], [2, 1]]}
    spec = tiny_job(Path("corpus"), "checkpoints", parallelism=changes, elasticity=elastic)
    assert set(spec.layouts()) == {Layout(tp, 1, dp, cp=2) for tp in (1, 2) for dp in (1, 2)}
    assert [layout.units() for layout in (Layout(2, 1, 2, cp=2), Layout(1, 1, 1, cp=2))] == [(2, 4), (1, 2)]
    assert Layout(2, 1, 2, cp=2).units("STRICT_PACK") == (4, 2)
    assert str(Layout(2, 1, 3, cp=4)) == "tp 2 × pp 1 × cp 4 × dp 3"


def test_layouts_may_name_other_sizes_and_pairs_have_the_jobs_own() -> None:
    elastic = {"data_parallel_size": {"max": 2}, "layouts": [[1, 1, 4], [1, 1, 1], [1, 1], [1, 1, 2]]}
    changes = {"tensor_parallel_size": 1, "context_parallel_size": 2}
    spec = tiny_job(Path("corpus"), "checkpoints", parallelism=changes, elasticity=elastic)
    assert set(spec.layouts()) == {Layout(1, 1, dp, cp) for dp in (1, 2) for cp in (1, 2, 4)}
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec
