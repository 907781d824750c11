"""A step that is captured and replayed, on CPU by a stand-in: it is the same step, and nothing in it hinders that."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from boost_core.config import JobSpec
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.parallel.communicator import StepClock
from boost_core.train import state as state_module
from boost_core.train import step_graph
from boost_core.train.state import TrainState
from boost_core.train.step import Requests, StepResult, _reduced, training_step
from tests.distributed.recording import train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.numerics.lengths_on_device import lengths_on_device
from tests.numerics.recorded_graph import RecordedGraph, Refused
from tests.numerics.storages import Made
from tests.ranks import Ranks

CPU = torch.device("cpu")
STEPS = 6
CROWDED_STEP = 5
PLACES = 16  # for documents of a sequence
LOW_LIMIT = 5  # the step of this number is told of a limit that every loss is above
JOBS: dict[str, dict[str, Any]] = {
    "cola": {},
    "documents apart": {"data": {"documents_apart": True}},
    "a window": {"model": {"sliding_window": 5}},
    "documents in splits": {
        "data": {"documents_apart": True}, "parallelism": {"split_micro_batch": True},
        "training": {"precision": "bf16"},
    },
    "bf16, tied": {"model": {"tie_embeddings": True}, "training": {"precision": "bf16"}},
    "lax": {"model": {"family": "lax", "lax": {"gate": "tensor"}}, "parallelism": {"recompute": "full"}},
    "dense": {"model": {"family": "dense", "rank": None}},
    "svd loro": {
        "model": {"family": "svd"}, "optimizer": {"kind": "loro", "loro": {"exact_every_steps": 3}},
        "parallelism": {"recompute": "latent"},
    },
    "split": {
        "parallelism": {
            "split_micro_batch": True, "norm": "online_paper", "group_projections": False, "recompute": "shared",
        },
    },
}  # fmt: skip
SOME = ["documents apart", "lax"]
ALL = [
    pytest.param(changes, marks=() if name in SOME else pytest.mark.nightly, id=name) for name, changes in JOBS.items()
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 dp2 zero1": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "dp2 zero2, offload": {
        "tensor_parallel_size": 1,
        "data_parallel_size": 2,
        "zero_stage": 2,
        "optimizer_offload": 0.5,
    },
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with lengths_on_device():
        yield


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job(corpus: Path, changes: dict[str, Any]) -> JobSpec:
    return tiny_job(
        corpus, "unused", **changes | {"parallelism": {"tensor_parallel_size": 1} | changes.get("parallelism", {})}
    )


def sampler_of(spec: JobSpec) -> Sampler:
    length = spec.training.sequence_length
    return Sampler(load_corpus(spec.data, length), length, spec.training.seed)


def replayed_state(spec: JobSpec, graph: type[RecordedGraph] = RecordedGraph) -> TrainState:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "obstacle", lambda *_: None)
        patch.setattr(step_graph, "CudaGraph", graph)
        return TrainState.initial(spec, CPU)


def train(state: TrainState) -> list[Any]:
    """What some steps give, what their collectives were, and the weights in the end."""
    sampler, found = sampler_of(state.spec), []
    for step in range(1, STEPS + 1):
        state.ledger.clear()
        limits = {"loss_limit": 0.5} if step == LOW_LIMIT else {}
        # Of ranks that do not agree, each is to hear of the other.
        asked = Requests(halt=step == LOW_LIMIT, store=step == STEPS and dist.get_rank() == 0)
        found.append(training_step(state, sampler, **limits, requests=asked))
        counts = {entry: (each.calls, each.elements) for entry, each in state.ledger.totals().items()}
        found.append({entry: count for entry, count in counts.items() if entry.purpose != "capture"})
    return [*found, *(weight.detach().clone() for weight in state.model.parameters())]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def differences(spec: JobSpec) -> tuple[list[bool], list[StepResult], int]:
    """Whether each thing is the same where steps are replayed; their results; and how many were."""
    expected = train(TrainState.initial(spec, CPU))
    state = replayed_state(spec)
    found = train(state)
    graph: Any = state.graph._graph
    return (
        [same(*pair) for pair in zip(found, expected, strict=True)],
        [each for each in found if isinstance(each, StepResult)],
        graph.replays,
    )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", ALL)
def test_replayed_steps_are_the_steps_to_the_last_bit(corpus: Path, changes: dict[str, Any]) -> None:
    spec = job(corpus, changes)
    found, results, replays = differences(spec)
    assert all(found)
    # Of the first batch's documents no rank has told the others yet.
    assert replays == STEPS - step_graph.WARM_STEPS - spec.data.documents_apart
    assert [result.diverged for result in results] == [step == LOW_LIMIT for step in range(1, STEPS + 1)]
    assert [result.requests.halt for result in results] == [step == LOW_LIMIT for step in range(1, STEPS + 1)]


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_batches_that_grow_are_captured_once_they_have_grown(corpus: Path) -> None:
    warmup = [{"until_step": 2, "global_batch_size": 2}]
    found, _, replays = differences(job(corpus, {"training": {"batch_size_warmup": warmup}}))
    assert all(found)
    assert replays == STEPS - 2 - step_graph.WARM_STEPS


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_another_learning_rate_needs_no_other_capture(corpus: Path) -> None:
    spec = job(corpus, {})
    colder = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"learning_rate": 1e-4})})
    found, results, replays = differences(spec.steered_after(3, colder.steering, "", None))
    assert all(found)
    assert replays == STEPS - step_graph.WARM_STEPS
    _, steady, _ = differences(spec)
    rates = [now.learning_rate / before.learning_rate for now, before in zip(results, steady, strict=True)]
    assert rates == pytest.approx([1] * 3 + [0.01] * 3)
    assert [now.loss == before.loss for now, before in zip(results, steady, strict=True)] == [True] * 4 + [False] * 2


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_so_they_are_on_several_ranks(ranks: Ranks, corpus: Path, layout: dict[str, Any]) -> None:
    spec = job(corpus, {"parallelism": layout})
    for found, results, replays in ranks.run(spec.parallelism.world_size, differences, spec):
        assert all(found)
        assert replays == STEPS - step_graph.WARM_STEPS
        assert results[-1].requests.store  # which rank 0 alone has asked for


class Crowding(Sampler):
    """As a job's, but for one sequence of the last rank's in one step, which is all ends of documents."""

    def sequences(self, first_sample: int, count: int) -> Any:
        found = super().sequences(first_sample, count).copy()
        if first_sample + count == CROWDED_STEP * 4:
            found[-1] = 0
        return found


class CapturedAgain(RecordedGraph):
    """Counts the replays of each capture."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[int] = []

    def reset(self) -> None:
        self.forgotten.append(self.replays)
        self.replays = 0
        super().reset()


def crowded_differences(spec: JobSpec) -> tuple[list[bool], list[int]]:
    """As ``differences``, where the documents of a step do not fit; and the replays of each capture."""
    with lengths_on_device(), patch(f"{__name__}.Sampler", Crowding):
        expected = train(TrainState.initial(spec, CPU))
        state = replayed_state(spec)
        with patch.object(step_graph, "CudaGraph", CapturedAgain):
            state.graph = type(state.graph)(
                None, True, state.clock, state.ledger, state.graph._all_agree, state.graph._abandon
            )
            found = train(state)
    graph: Any = state.graph._graph
    return [same(*pair) for pair in zip(found, expected, strict=True)], [*graph.forgotten, graph.replays]


@pytest.mark.full
def test_no_rank_replays_a_step_whose_documents_do_not_fit_on_another(ranks: Ranks, corpus: Path) -> None:
    layout = {"tensor_parallel_size": 1, "data_parallel_size": 2}
    spec = job(corpus, {"parallelism": layout, "data": {"documents_apart": True}})
    for found, replays in ranks.run(2, crowded_differences, spec):
        assert all(found)
        # One step goes before all ranks know that documents fit; and what was captured makes way for that which is not.
        assert replays == [CROWDED_STEP - 1 - step_graph.WARM_STEPS - 1, STEPS - CROWDED_STEP]


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("changes", ALL)
def test_two_steps_read_the_same_memory(corpus: Path, changes: dict[str, Any]) -> None:
    spec = job(corpus, changes)
    state, sampler, graphs = TrainState.initial(spec, CPU), sampler_of(spec), [RecordedGraph() for _ in range(2)]
    training_step(state, sampler)
    training_step(state, sampler)
    for graph in graphs:
        state.inputs.write(sampler.sequences(0, spec.training.global_batch_size), 1e9, (False,) * 5)
        graph.capture(partial(_reduced, state, spec.training.global_batch_size, PLACES))
    assert graphs[0].read == graphs[1].read
    addresses = {weight.untyped_storage().data_ptr() for weight in state.model.parameters()}
    assert addresses < graphs[0].read


@pytest.mark.usefixtures("alone")
def test_a_replayed_step_takes_no_memory(corpus: Path) -> None:
    spec = job(corpus, {"data": {"documents_apart": True}})
    state, sampler = replayed_state(spec), sampler_of(spec)
    for _ in range(step_graph.WARM_STEPS + 3):
        training_step(state, sampler)
    replayed: Any = state.graph._untimed
    # The stand-in's replays take memory, and so does the update on CPU, which is not the kernel that a GPU has.
    with patch.object(replayed.graph, "replay"), patch.object(state.optimizer, "step"), Made() as made:
        training_step(state, sampler)
    assert sum(made.sizes.values()) == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x + torch.tensor([1.0]),
        lambda x: x.masked_select(x > 0),
        lambda x: torch.unique(x),
    ],
)
def test_the_stand_in_refuses_what_waits(wait: Any) -> None:
    with pytest.raises(Refused):
        RecordedGraph().capture(lambda: wait(torch.ones(2)))


class Breaking(RecordedGraph):
    """Breaks at some operation of what it captures, as a graph does whose memory runs out."""

    at = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if len(self.operations) == type(self).at:
            raise RuntimeError("CUDA out of memory.\nSome lines on how much there was")
        return super().__torch_dispatch__(function, types, arguments, keywords)

    def capture(self, work: Any) -> torch.Tensor:
        try:
            return super().capture(work)
        except RuntimeError as error:
            raise RuntimeError("the capture was invalidated") from error


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("share", [pytest.param(0.2, marks=pytest.mark.nightly), 0.6, 0.99])
def test_steps_go_on_where_a_capture_has_broken(
    corpus: Path, share: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec, whole = job(corpus, {}), RecordedGraph()
    plain = TrainState.initial(spec, CPU)
    expected = train(plain)
    whole.capture(partial(_reduced, plain, spec.training.global_batch_size, PLACES))
    monkeypatch.setattr(Breaking, "at", int(share * len(whole.operations)))
    state = replayed_state(spec, Breaking)
    with caplog.at_level(logging.WARNING):
        assert all(same(*pair) for pair in zip(train(state), expected, strict=True))
    told = "steps are not captured as a CUDA graph: CUDA out of memory."
    assert [record.getMessage() for record in caplog.records if record.name.startswith("boost_core")] == [told]
    assert (state.graph.failure(), state.graph.failure()) == (told, None)


class AloneInMemory(RecordedGraph):
    """Has room for no other graph beside it."""

    def beside(self) -> RecordedGraph:
        return Breaking()


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("graph", "timed"), [(RecordedGraph, [True, False, False, True]), (AloneInMemory, [True] * 4)])
def test_only_some_replays_are_timed(
    corpus: Path, graph: type[RecordedGraph], timed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_graph, "TIMED_EVERY", 3)
    monkeypatch.setattr(Breaking, "at", 100)
    spec, seen = job(corpus, {}), list[bool]()
    expected, state = train(TrainState.initial(spec, CPU)), replayed_state(spec, graph)
    replay = StepClock.replay

    def note(self: StepClock, parts: Any, timed: bool) -> None:
        seen.append(timed)
        replay(self, parts, timed)

    monkeypatch.setattr(StepClock, "replay", note)
    assert all(same(*pair) for pair in zip(train(state), expected, strict=True))
    assert seen == timed and state.graph.failure() is None and state.graph.obstacle is None


@pytest.mark.usefixtures("alone")
def test_steps_that_have_to_be_captured_are_not_done_otherwise(corpus: Path) -> None:
    spec = job(corpus, {})
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"cuda_graphs": "on"})})
    with pytest.raises(
        ValueError, match=r"cuda_graphs is on, .* captured: CUDA out of memory\.; set it to auto or off"
    ):
        train(replayed_state(spec, Breaking))


class BreakingWithoutWords(RecordedGraph):
    def capture(self, _: Any) -> torch.Tensor:
        raise RuntimeError


@pytest.mark.usefixtures("alone")
def test_a_failure_without_words_is_this_ranks_own(corpus: Path) -> None:
    state = replayed_state(job(corpus, {}), BreakingWithoutWords)
    train(state)
    assert state.graph.failure() == "steps are not captured as a CUDA graph: RuntimeError"


class BreakingAtTheEnd(RecordedGraph):
    """The stand-in does collectives as it takes them down: the other rank would wait for those after a break."""

    def capture(self, work: Any) -> torch.Tensor:
        super().capture(work)
        raise RuntimeError("CUDA out of memory.")


def train_where_rank_1_breaks(spec: JobSpec) -> tuple[bool, str | None]:
    expected = train(TrainState.initial(spec, CPU))
    state = replayed_state(spec, BreakingAtTheEnd if dist.get_rank() == 1 else RecordedGraph)
    return all(same(*pair) for pair in zip(train(state), expected, strict=True)), state.graph.failure()


@pytest.mark.full
def test_no_rank_replays_what_another_could_not_capture(ranks: Ranks, corpus: Path) -> None:
    spec = job(corpus, {"parallelism": {"tensor_parallel_size": 1, "data_parallel_size": 2}})
    (well, why), (also_well, own) = ranks.run(2, train_where_rank_1_breaks, spec)
    assert well and also_well
    assert why is not None and why.endswith("another rank could not capture it")
    assert own is not None and own.endswith("CUDA out of memory.")


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RecordedGraph]]:
    """Jobs on CPU are captured; the graphs that they make."""
    made: list[RecordedGraph] = []

    def make() -> RecordedGraph:
        made.append(Breaking() if Breaking.at else RecordedGraph())
        return made[-1]

    monkeypatch.setattr(state_module, "obstacle", lambda *_: None)
    monkeypatch.setattr(step_graph, "CudaGraph", make)
    yield made


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_a_captured_job_reports_what_any_other_does(
    corpus: Path, tmp_path: Path, capturing: list[RecordedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = []
    for name, at in (("captured", 0), ("broken", 200)):
        monkeypatch.setattr(Breaking, "at", at)
        spec = tiny_job(corpus, tmp_path / name, parallelism={"tensor_parallel_size": 1})
        reports = train_and_record(spec)
        curves.append([report.loss for report in reports if report.kind in ("progress", "evaluation")])
        faults = [(report.what, report.step) for report in reports if report.kind == "fault"]
        assert faults == ([] if at == 0 else [("cuda_graphs", 3)])
    whole, broken = capturing
    assert whole.replays == spec.training.steps - step_graph.WARM_STEPS and broken.replays == 0
    assert curves[0] == curves[1]
    assert not whole._made  # let go of as training ended


@pytest.mark.usefixtures("alone")
def test_a_released_graph_lets_go_of_its_memory(corpus: Path) -> None:
    state = replayed_state(job(corpus, {}))
    before = train(state)
    graph: Any = state.graph._graph
    assert graph._made
    state.graph.release("training has ended")
    assert not graph._made and state.graph.obstacle == "training has ended"
    assert training_step(state, sampler_of(state.spec)).loss < before[0].loss  # goes on by operations


@pytest.mark.parametrize(
    ("changes", "device", "said"),
    [
        ({}, CPU, "the job trains on CPU"),
        ({"training": {"cuda_graphs": "off"}}, torch.device("cuda"), "training.cuda_graphs is off"),
        ({"parallelism": {"pipeline_parallel_size": 2}}, torch.device("cuda"), "the host takes part in a pipeline's"),
        ({}, torch.device("cuda"), None),
    ],
)
def test_obstacles(changes: dict[str, Any], device: torch.device, said: str | None) -> None:
    found = step_graph.obstacle(job(Path("corpus"), changes), device)
    assert found is None if said is None else found is not None and found.startswith(said)
