"""Any layout trains as one process does: tensor, pipeline and data parallel ranks, schedules, ZeRO, accumulation."""

import functools
import gc
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from boost_core.architecture import parameter_count
from boost_core.config import JobSpec
from boost_core.config.parallelism import Layout as Shape
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.optim import zero
from boost_core.optim.build import COMPUTE_TYPES
from boost_core.parallel.activation_offload import HostCopy
from boost_core.plan.memory import Activations, pipeline_rank_memory
from boost_core.train.state import StepInputs, TrainState
from boost_core.train.step import training_step
from tests.distributed.whole import Whole, whole_tensors
from tests.jobs import tiny_job, write_corpus
from tests.numerics.storages import Made
from tests.ranks import Ranks

CPU = torch.device("cpu")
STEPS = 5
FEW_STEPS = 2  # enough to see a bit that differs: it is in the second loss, in the weights and in the moments
SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"family": "dense", "rank": None},
    "svd": {"family": "svd"},
    "cola": {"family": "cola", "num_key_value_heads": 2},
    "lax": {"family": "lax", "lax": {"gate": "tensor"}},
    "lax in chains": {"family": "lax", "lax": {"gate": "dense", "chain_length": 2}},
    "loro": {"family": "svd"},
    "muon": {"family": "cola"},
    "qk norm": {"family": "dense", "rank": None, "qk_norm": True, "num_key_value_heads": 2},
    "tied": {"family": "cola", "tie_embeddings": True},
}
OPTIMIZERS = {"loro": {"kind": "loro", "loro": {"exact_every_steps": 3}}, "muon": {"kind": "muon"}}
Layout = dict[str, Any]


def layouts() -> list[tuple[str, int, Layout]]:
    """All families, micro-batches and layouts of up to eight ranks that are legal."""
    found = []
    for (tp, pp, dp), schedule, stage, family, micro in itertools.product(
        itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)), SCHEDULES, (0, 1, 2), FAMILIES, (1, 2)
    ):
        layout = {
            "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp,
            "pipeline_schedule": schedule, "zero_stage": stage,
        }  # fmt: skip
        stages = pp * (1 if schedule == "1f1b" else 2)
        idle = (pp == 1 and schedule != "1f1b") or (dp == 1 and stage != 1)
        fits = tp * pp * dp <= 8 and stages <= 4 and 8 // dp // micro >= pp
        dense, grouped = family in ("dense", "qk norm"), family in ("cola", "qk norm")
        illegal = (dense and schedule == "zero_bubble") or (grouped and tp == 4)
        pointless = tp * pp * dp == 1 or (family == "tied" and pp == 1)
        if fits and not (idle or illegal or pointless):
            found.append((family, micro, layout))
    return found


def world_size(layout: Layout) -> int:
    axes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return math.prod(layout[axis] for axis in axes)


def sample(seed: int, most_ranks: int) -> list[tuple[str, int, Layout]]:
    """A layout of each family, the same in every run."""
    chooser, found = random.Random(seed), [each for each in layouts() if world_size(each[2]) <= most_ranks]
    return [chooser.choice([each for each in found if each[0] == family]) for family in FAMILIES]


# Seeds with which the two together have everything, and all three axes at once.
SMALL, ANY = sample(seed=40, most_ranks=4), sample(seed=1, most_ranks=8)
SAMPLE = SMALL + ANY
SOME = ("dense", "cola", "lax", "muon")  # for every run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def job(corpus: Path, family: str, micro: int, layout: Layout, **training: Any) -> JobSpec:
    return tiny_job(
        corpus, "unused",
        model={"num_hidden_layers": 4, **FAMILIES[family]},
        parallelism={"tensor_parallel_size": 1, **layout},
        training={"global_batch_size": 8, "micro_batch_size": micro, "sequence_length": 16, **training},
        optimizer=OPTIMIZERS.get(family, {}),
    )  # fmt: skip


def trained(spec: JobSpec, compute_type: torch.dtype, steps: int = STEPS) -> tuple[list[float], Whole]:
    """Losses of some steps, and all state after them."""
    small_buckets = patch.object(zero, "BUCKET_ELEMENTS", 1 << 11)
    with patch.dict(COMPUTE_TYPES, {spec.training.precision: compute_type}), small_buckets:
        state = TrainState.initial(spec, CPU)
        sampler = Sampler(load_corpus(spec.data, 16), 16, spec.training.seed)
        return [training_step(state, sampler).loss for _ in range(steps)], whole_tensors(state)


Alone = Callable[[str], tuple[list[float], Whole]]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, corpus: Path) -> Alone:
    """What a family's job comes to in one process, trained once for all tests that ask for it."""

    @functools.cache
    def trained_alone(family: str) -> tuple[list[float], Whole]:
        return ranks.run(1, trained, job(corpus, family, 8, {}), torch.float64)[0]

    return trained_alone


def test_the_sample_has_everything() -> None:
    families, micros, chosen = zip(*SAMPLE, strict=True)
    assert set(families) == set(FAMILIES)
    assert set(micros) == {1, 2}
    for name, values in {
        "tensor_parallel_size": {1, 2, 4}, "pipeline_parallel_size": {1, 2, 4}, "data_parallel_size": {1, 2, 4},
        "pipeline_schedule": set(SCHEDULES), "zero_stage": {0, 1, 2},
    }.items():  # fmt: skip
        assert {layout[name] for layout in chosen} == values, name


@pytest.mark.parametrize(
    ("family", "micro", "layout"),
    [
        *(pytest.param(*each, marks=() if each[0] in SOME else pytest.mark.nightly) for each in SMALL),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in ANY),
        ("dense", 1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),  # stages send on parts of the tokens
    ],
)
def test_training_is_that_of_one_process(
    ranks: Ranks,
    corpus: Path,
    alone: Alone,
    family: str,
    micro: int,
    layout: Layout,
) -> None:
    spec = job(corpus, family, micro, layout)
    expected_losses, expected = alone(family)
    for losses, whole in ranks.run(spec.parallelism.world_size, trained, spec, torch.float64):
        # In float64 another order of sums moves a gradient by 1e-15 of itself. Adam divides by √v + 1e-8, which
        # makes of it, for gradients of this size, at most 1e-12 of a weight in a step; five steps amplify it by a few.
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        assert whole.keys() == expected.keys()
        for name, tensor in whole.items():
            error = (tensor - expected[name]).norm() / expected[name].norm()
            # Factors are unique but for their sign, and moments start anew, after an exact step.
            assert family == "loro" or error < 1e-9, name


def grown(small: JobSpec, large: JobSpec, steps: int) -> list[float]:
    """Losses of some steps of one job, and of the rest of another's that goes on from its state."""
    state = TrainState.initial(small, CPU)
    sampler = Sampler(load_corpus(small.data, 16), 16, small.training.seed)
    losses = [training_step(state, sampler).loss for _ in range(steps)]
    inputs = StepInputs(large.training.global_batch_size, large.training.sequence_length, CPU)
    state = replace(state, spec=large, inputs=inputs)
    return losses + [training_step(state, sampler).loss for _ in range(STEPS - steps)]


@pytest.mark.full
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_batch_that_grows_is_that_of_two_jobs(ranks: Ranks, corpus: Path, zero_stage: int) -> None:
    small, large = (job(corpus, "cola", 1, {}, global_batch_size=size) for size in (4, 8))
    (expected,) = ranks.run(1, grown, small, large, 2)
    warmup = [{"until_step": 2, "global_batch_size": 4}]
    layout = {"data_parallel_size": 2, "zero_stage": zero_stage}
    for losses, _ in ranks.run(2, trained, job(corpus, "cola", 1, layout, batch_size_warmup=warmup), torch.float32):
        # Sums in another order, in fp32, as in five steps of a resumed job.
        assert losses == pytest.approx(expected, rel=2e-6)


def kept_bytes(spec: JobSpec) -> int:
    """What is alive after two steps of all that was made for training, on this rank."""
    with Made() as made:
        state = TrainState.initial(spec, CPU)
        sampler = Sampler(load_corpus(spec.data, 16), 16, spec.training.seed)
        for _ in range(2):
            training_step(state, sampler)
        gc.collect()
        return made.alive_bytes()


@pytest.mark.nightly
def test_each_stage_of_zero_keeps_less(ranks: Ranks, corpus: Path) -> None:
    none, state, gradients = (
        ranks.run(2, kept_bytes, job(corpus, "cola", 2, {"data_parallel_size": 2, "zero_stage": stage}))[0]
        for stage in (0, 1, 2)
    )
    weights = 4 * parameter_count(job(corpus, "cola", 2, {}).model)
    # In fp32 stage 1 halves two moments, and has half the masters and half the reduced gradients beside all weights and
    # gradients; stage 2 has no sum of all gradients. Padding is a few percent of so small a model.
    assert none - state == pytest.approx(0, abs=0.05 * weights)
    assert state - gradients == pytest.approx(weights, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "zero_bubble"},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"data_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.nightly),
        {"tensor_parallel_size": 2, "split_micro_batch": True, "recompute": "latent"},
    ],
)
def test_documents_are_apart_under_any_layout(ranks: Ranks, tmp_path: Path, layout: Layout) -> None:
    corpus = tmp_path / "short"
    corpus.mkdir()
    for number in range(120):
        (corpus / f"{number:03}.txt").write_text(f"{number} words"[: 3 + number % 6])

    def of(layout: Layout) -> JobSpec:
        spec = job(corpus, "cola", 2, layout)
        return spec.model_copy(update={"data": spec.data.model_copy(update={"documents_apart": True})})

    ((expected_losses, expected),) = ranks.run(1, trained, of({}), torch.float64)
    for losses, whole in ranks.run(of(layout).parallelism.world_size, trained, of(layout), torch.float64):
        assert losses == pytest.approx(expected_losses, rel=1e-10)
        assert all((tensor - expected[name]).norm() < 1e-9 * expected[name].norm() for name, tensor in whole.items())


@pytest.mark.full
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
def test_cutting_into_stages_changes_no_bit(ranks: Ranks, corpus: Path, precision: str) -> None:
    """Without clipping, whose norm is summed in another order, the arithmetic is the same one by one."""
    compute_type = COMPUTE_TYPES[precision]
    one, even, uneven = (
        job(corpus, "cola", 2, layout, precision=precision).model_copy(deep=True)
        for layout in (
            {},
            {"pipeline_parallel_size": 2},
            {"pipeline_parallel_size": 2, "pipeline_layers_per_stage": [1, 3]},
        )
    )
    (expected,) = ranks.run(1, trained, _unclipped(one), compute_type, FEW_STEPS)
    in_two = (
        result for spec in (even, uneven) for result in ranks.run(2, trained, _unclipped(spec), compute_type, FEW_STEPS)
    )
    for losses, whole in in_two:
        assert losses == expected[0]
        assert all(torch.equal(whole[name], tensor) for name, tensor in expected[1].items())


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        pytest.param("fp32", {"tensor_parallel_size": 2}, marks=pytest.mark.nightly),
        ("bf16", {"tensor_parallel_size": 2}),
        pytest.param(
            "bf16",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_schedule": "zero_bubble"},
            marks=pytest.mark.nightly,
        ),
    ],
    ids=str,
)
def test_recomputing_changes_no_bit(ranks: Ranks, corpus: Path, precision: str, layout: Layout) -> None:
    """So a gang may come to recompute more or less as it changes its layout."""
    by_block = [{"full": 1, "shared": 1, "latent": 1, "none": 1}]
    if "pipeline_schedule" in layout:
        by_block = [{"shared": 1}, {"full": 1}, {"offload": 1}, {"shared": 1}]
    jobs = [
        job(corpus, "lax", 2, layout | {"recompute": way}, precision=precision)
        for way in ("none", "latent", "shared", "full", "offload", by_block)
    ]
    (expected, whole), *other_ways = (
        ranks.run(spec.parallelism.world_size, trained, spec, COMPUTE_TYPES[precision], FEW_STEPS)[0] for spec in jobs
    )
    for losses, others in other_ways:
        assert losses == expected
        assert all(torch.equal(others[name], tensor) for name, tensor in whole.items())


def trained_with_buffers(spec: JobSpec) -> tuple[list[float], Whole, int, int]:
    """As ``trained``; and the bytes of the host that were ever used for what blocks keep, and of those planned."""
    state = TrainState.initial(spec, CPU)
    sampler = Sampler(load_corpus(spec.data, 16), 16, spec.training.seed)
    losses = [training_step(state, sampler).loss for _ in range(FEW_STEPS)]
    buffers = sum(size * len(free) for size, free in state.model.strategy.host.free.items())
    place = pipeline_rank_memory(spec, Shape.of(spec.parallelism), state.process_groups.pipeline.rank)
    return losses, whole_tensors(state), buffers, place.host


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        *(pytest.param(each, "1f1b", marks=pytest.mark.nightly) for each in ("svd", "lax in chains")),
        ("cola", "interleaved_1f1b"),
    ],
)
def test_what_micro_batches_in_hand_keep_on_the_host_changes_no_bit(
    ranks: Ranks, corpus: Path, family: str, schedule: str
) -> None:
    layout = {"pipeline_parallel_size": 2, "pipeline_schedule": schedule}
    latent, offload = (
        ranks.run(2, trained_with_buffers, _of_documents(job(corpus, family, 2, layout | {"recompute": mode})))
        for mode in ("latent", "offload")
    )
    for (losses, whole, buffers, planned), expected in zip(offload, latent, strict=True):
        assert losses == expected[0]
        assert all(torch.equal(whole[name], tensor) for name, tensor in expected[1].items())
        assert buffers == planned > 0


def most_fetched(spec: JobSpec) -> int:
    """The most bytes of the device at a time that are on their way to the host, or have come from it."""
    state = TrainState.initial(spec, CPU)
    sampler = Sampler(load_corpus(spec.data, 16), 16, spec.training.seed)
    sizes, copies, most = dict[StorageWeakRef, int](), list[HostCopy](), 0
    begin, fetch = HostCopy.__init__, HostCopy.fetch

    def look() -> None:
        nonlocal most, sizes, copies
        sizes = {storage: size for storage, size in sizes.items() if not storage.expired()}
        copies = [copy for copy in copies if copy.leaving is not None]
        leaving = sum(copy.leaving.nbytes for copy in copies if copy.leaving is not None)
        most = max(most, sum(sizes.values()) + leaving)

    def begun(self: HostCopy, *arguments: Any) -> None:
        begin(self, *arguments)
        copies.append(self)
        look()

    def fetched(self: HostCopy) -> torch.Tensor:
        comes = self._come is None and self.leaving is None
        come = fetch(self)
        if comes:
            sizes[StorageWeakRef(come.untyped_storage())] = come.nbytes
        look()
        return come

    with patch.object(HostCopy, "__init__", begun), patch.object(HostCopy, "fetch", fetched):
        training_step(state, sampler)
    return most


@pytest.mark.full
@pytest.mark.parametrize(
    ("tensor", "layers", "schedule"),
    [(1, 6, "1f1b"), (1, 12, "interleaved_1f1b"), pytest.param(2, 8, "1f1b", marks=pytest.mark.nightly)],
)
def test_what_comes_from_the_host_beside_what_goes_there_is_planned(
    ranks: Ranks, corpus: Path, tensor: int, layers: int, schedule: str
) -> None:
    """A rank that is not last has a block of the newest micro-batch on its way when another's backward pass begins."""
    layout = {"tensor_parallel_size": tensor, "pipeline_parallel_size": 2, "pipeline_schedule": schedule}
    spec = job(corpus, "cola", 2, layout | {"recompute": "offload"})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"num_hidden_layers": layers})})
    first, *_, last = ranks.run(2 * tensor, most_fetched, spec)
    tokens, each = 2 * 16, Activations(spec.model, spec.parallelism, 4, kernels=False)
    block, besides = each.on_host(False, False, "offload"), each.segment_fetched(False, "offload")
    planned = tokens * ((1 + each.blocks_ahead) * block + besides)
    assert first <= planned <= first + tokens * 4 * each.residual
    assert last <= (planned - tokens * besides if schedule == "1f1b" else planned)


def _of_documents(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"data": spec.data.model_copy(update={"documents_apart": True})})


def _unclipped(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"clip_norm": 1e6})})
