"""All-reduces through symmetric memory, of files here, between real ranks."""

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost_core.bench.rank import draw_weights
from boost_core.config import JobSpec, ModelConfig, ParallelismConfig
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.kernels import symmetric_sum
from boost_core.kernels.launch import Implementation, always
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Entry, Totals
from boost_core.parallel.symmetric_memory import View, obstacle, part_of
from boost_core.train.state import Membership, TrainState
from boost_core.train.step import training_step
from tests.jobs import tiny_job, write_corpus
from tests.numerics.sharded import Outcome, run_sharded
from tests.ranks import Ranks
from tests.symmetric import Either, OneShot, TwoShots

TYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU Triton compiles, and its kernels cannot reach files"
)
COUNTS = (1, 5, 127, 128, 513, 2051, 30_000)  # elements; they grow, so that what is not written is not a number


def sent(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count)).to(dtype)


def types(implementation: Implementation) -> list[torch.dtype]:
    """Triton's interpreter cuts off what bf16 has no room for, where GPUs round."""
    return [dtype for dtype in TYPES if implementation == "naive" or dtype != torch.bfloat16]


def sums(communicator: type[OneShot], implementation: Implementation) -> tuple[list[torch.Tensor], dict[Entry, Totals]]:
    ledger = CommunicationLedger()
    group = communicator(dist.group.WORLD, "tp", ledger)
    with always(implementation):
        payloads = [sent(group.rank, count, dtype) for dtype in types(implementation) for count in COUNTS]
        return [group.all_reduce_(payload, "latent") for payload in payloads], ledger.totals()


@pytest.mark.full
@pytest.mark.parametrize("communicator", [OneShot, TwoShots])
@pytest.mark.parametrize(
    ("pool", "size", "implementation"),
    [
        ("ranks", 2, "naive"),
        ("ranks", 4, "naive"),
        pytest.param("interpreting_ranks", 2, "triton", marks=INTERPRETED),
    ],
)
def test_every_rank_has_the_sum_in_the_order_of_ranks(
    request: pytest.FixtureRequest, communicator: type[OneShot], pool: str, size: int, implementation: Implementation
) -> None:
    cases = [(count, dtype) for dtype in types(implementation) for count in COUNTS]
    expected = []
    for count, dtype in cases:
        total = torch.zeros(count)
        for rank in range(size):
            total = total + sent(rank, count, dtype).float()
        expected.append(total.to(dtype))
    for found, lines in request.getfixturevalue(pool).run(size, sums, communicator, implementation):
        assert all(torch.equal(mine, exact) for mine, exact in zip(found, expected, strict=True))
        (entry,), (totals,) = lines.keys(), lines.values()
        assert entry == Entry("symmetric_all_reduce", "tp", "latent")
        assert (totals.calls, totals.elements) == (len(cases), sum(count for count, _ in cases))
        assert totals.bytes == sum(count * dtype.itemsize for count, dtype in cases)


def other_reductions() -> set[str]:
    ledger = CommunicationLedger()
    group = Either(dist.group.WORLD, "tp", ledger)
    group.all_reduce_(torch.ones(4096), "too large")
    group.all_reduce_(torch.ones(4), "maximum", dist.ReduceOp.MAX)
    group.all_reduce_(torch.ones(4, dtype=torch.float64), "double")
    group.all_reduce_(torch.ones(4), "small")
    group.all_reduce_(torch.ones(40), "larger")
    return {entry.purpose for entry in ledger.totals() if entry.kind == "all_reduce"}


def test_what_is_larger_or_no_sum_is_left_to_the_group(ranks: Ranks) -> None:
    assert ranks.run(2, other_reductions) == [{"too large", "maximum", "double"}] * 2


SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "rank": 6,
         "vocab_size": 32}  # fmt: skip
GROUPED = {"family": "cola", "gate_activation": True, "num_key_value_heads": 2}
CELLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GROUPED, {}),
    (GROUPED, {"split_micro_batch": True, "recompute": "latent"}),
    ({"family": "svd"}, {"recompute": "full", "group_projections": False}),
    ({"family": "cola"}, {"norm": "online_paper", "recompute": "shared"}),
    ({"family": "cola"}, {"norm": "sync"}),
    ({"family": "lax", "lax": {"base": "cola", "gate": "identity"}}, {}),
    (GROUPED, {"strategy": "vanilla"}),
    ({"family": "dense", "rank": None}, {}),
]


def model_by(
    implementation: Implementation, shape: dict[str, Any], choice: dict[str, Any], dtype: torch.dtype,
    communicator: type[Communicator],
) -> Outcome:  # fmt: skip
    model, parallelism = ModelConfig.model_validate(SHAPE | shape), ParallelismConfig.model_validate(choice)
    with always(implementation):
        return run_sharded(model, parallelism, 2, 3, dtype, communicator=communicator)


def same(one: Outcome, other: Outcome) -> bool:
    pairs = [(one.loss, other.loss), *((one.gradients[name], other.gradients[name]) for name in one.gradients)]
    return all(torch.equal(*pair) for pair in pairs)


SOME = [CELLS[0], CELLS[1]]
PARAMETERS = [pytest.param(*cell, marks=() if cell in SOME else pytest.mark.nightly) for cell in CELLS]


@pytest.mark.full
@pytest.mark.parametrize("communicator", [OneShot, TwoShots])
@pytest.mark.parametrize(("shape", "choice"), PARAMETERS)
def test_of_two_ranks_a_model_has_the_same_bits_as_by_the_group(
    ranks: Ranks, shape: dict[str, Any], choice: dict[str, Any], communicator: type[OneShot]
) -> None:
    """Two numbers have one sum, in whatever order, and each type rounds it once."""
    for dtype in (torch.float32, torch.bfloat16):
        by_group, through_memory = (
            ranks.run(2, model_by, "naive", shape, choice, dtype, each)[0] for each in (Communicator, communicator)
        )
        assert same(through_memory, by_group)
        kinds = {entry.kind for entry in through_memory.forward}
        assert "symmetric_all_reduce" in kinds
        for line, symmetric_line in zip(sorted(_volumes(by_group)), sorted(_volumes(through_memory)), strict=True):
            assert line == symmetric_line


def _volumes(outcome: Outcome) -> list[tuple[str, int, int]]:
    lines = [*outcome.forward.items(), *outcome.backward.items()]
    return [(entry.purpose, totals.calls, totals.bytes) for entry, totals in lines]


@pytest.mark.full
def test_of_four_ranks_one_shot_and_two_have_the_same_bits_on_all(ranks: Ranks) -> None:
    arguments = "naive", {"family": "cola"}, {"recompute": "latent"}, torch.bfloat16
    one, two, mixed = (ranks.run(4, model_by, *arguments, each) for each in (OneShot, TwoShots, Either))
    assert all(torch.equal(outcome.loss, one[0].loss) for outcome in (*one, *two))
    assert same(one[0], two[0])
    assert any(entry.kind == "all_reduce" and entry.purpose == "latent" for entry in mixed[0].forward)


NIGHTLY = pytest.mark.nightly


@pytest.mark.full
@INTERPRETED
@pytest.mark.parametrize(
    ("cell", "communicator"),
    [
        (CELLS[0], OneShot),
        *(pytest.param(*each, marks=NIGHTLY) for each in ((CELLS[0], TwoShots), (CELLS[1], OneShot))),
    ],
)
def test_a_kernel_that_sums_and_goes_on_makes_what_two_kernels_do(
    interpreting_ranks: Ranks, cell: tuple[dict[str, Any], dict[str, Any]], communicator: type[OneShot]
) -> None:
    """Of two ranks gloo's sum has the same bits, so the epilogue reads the same latents, in one kernel or another."""
    for dtype in types("triton"):
        apart, together = (
            interpreting_ranks.run(2, model_by, "triton", *cell, dtype, each)[0]
            for each in (Communicator, communicator)
        )
        assert same(together, apart)


def steps_by(spec: JobSpec, communicator: type[Communicator]) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, and the weights after them."""
    state = TrainState.initial(spec, torch.device("cpu"), draw_weights, communicator=communicator)
    training = spec.training
    sampler = Sampler(load_corpus(spec.data, training.sequence_length), training.sequence_length, training.seed)
    losses = [training_step(state, sampler).loss for _ in range(3)]
    return losses, [group.master.clone() for group in state.optimizer.groups]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_of_training_have_the_same_bits_as_by_the_group(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    spec = tiny_job(write_corpus(tmp_path / "corpus"), "unused", training={"precision": precision})
    by_group, one, two, mixed = (
        ranks.run(2, steps_by, spec, each)[0] for each in (Communicator, OneShot, TwoShots, Either)
    )
    for losses, masters in (one, two, mixed):
        assert losses == by_group[0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(masters, by_group[1], strict=True))


def two_exchanges(seconds: float) -> list[torch.Tensor]:
    """Rank 1 reads the first message late: once rank 0 has come to the meeting that follows its own reading."""
    group = OneShot(dist.group.WORLD, "tp", CommunicationLedger(), seconds)
    signals, summed = group.symmetric._signals.memory[group.rank], symmetric_sum.symmetric_sum_reference

    def late(memory: list[torch.Tensor], out_n: torch.Tensor) -> None:
        by = time.monotonic() + seconds
        while signals[0] < 2:
            assert time.monotonic() < by
        summed(memory, out_n)
        symmetric_sum.symmetric_sum_reference = summed

    if group.rank == 1:
        symmetric_sum.symmetric_sum_reference = late
    return [group.all_reduce_(torch.full((8,), value), "latent") for value in (1.0, 10.0)]


def test_nobody_writes_the_next_message_before_all_have_read_this_one(ranks: Ranks) -> None:
    for first, second in ranks.run(2, two_exchanges, 60.0):
        assert torch.equal(first, torch.full((8,), 2.0))
        assert torch.equal(second, torch.full((8,), 20.0))


def one_leaves(seconds: float) -> str:
    group = OneShot(dist.group.WORLD, "tp", CommunicationLedger(), seconds)
    if group.rank == 1:
        return ""
    with pytest.raises(dist.DistError) as raised:
        group.all_reduce_(torch.ones(8), "latent")
    return str(raised.value)


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(ranks: Ranks) -> None:
    said, _ = ranks.run(2, one_leaves, 0.5)
    assert said == "rank 0 has waited 0.5 s in a collective for ranks [1] of its group"


def aborted(implementation: Implementation) -> str:
    group, membership = OneShot(dist.group.WORLD, "tp", CommunicationLedger()), Membership()
    if group.rank == 1:
        return ""
    threading.Timer(0.1, membership.abort).start()
    with always(implementation):
        group.all_reduce_(torch.ones(8), "latent")
    with pytest.raises(dist.DistError) as raised:
        membership.refuse_aborted()
    return str(raised.value)


@pytest.mark.parametrize("implementation", ["naive", pytest.param("triton", marks=INTERPRETED)])
def test_a_rank_that_waits_goes_on_when_it_is_aborted(
    interpreting_ranks: Ranks, implementation: Implementation
) -> None:
    said, _ = interpreting_ranks.run(2, aborted, implementation)
    assert "aborted" in said


def test_parts_are_all_of_it_and_begin_where_accesses_do() -> None:
    for size in (1, 127, 128, 129, 1000, 4096):
        for count in (1, 2, 3, 8):
            parts = [part_of(size, rank, count) for rank in range(count)]
            assert parts[0][0] == 0
            assert parts[-1][1] == size
            assert all(end == begin for (_, end), (begin, _) in pairwise(parts))
            assert all(begin % 128 == 0 for begin, _ in parts if begin < size)


GPUS = ("GPU-a", "GPU-b")
SEEN = [View("host", GPUS, 0, (1,), 0), View("host", GPUS, 1, (0,), 0)]


def test_ranks_that_see_the_same_gpus_and_reach_them_have_it() -> None:
    assert obstacle(SEEN) is None


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (View("elsewhere", GPUS, 1, (0,), 0), "on several hosts"),
        (View("host", GPUS[::-1], 0, (1,), 0), "see different GPUs"),
        (View("host", GPUS[1:], 0, (), 0), "see different GPUs"),
        (View("host", GPUS, 0, (1,), 0), "share a GPU"),
        (View("host", GPUS, 1, (), 0), "cannot reach"),
        (View("host", GPUS, 1, (0,), 3), "was replaced"),
    ],
)
def test_what_is_in_the_way_is_told(other: View, why: str) -> None:
    assert why in (obstacle([SEEN[0], other]) or "")
