"""State in the memory of ranks: halted, lost, moved to other layouts, and the same to the bit."""

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from boost_core.checkpoint import saver
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.peer_memory import Snapshot, SnapshotStore, StateLost, load_from_memory
from boost_core.checkpoint.shards import Chunk
from boost_core.config import JobSpec
from boost_core.messages import Report, Steer, StepReport
from boost_core.plan.snapshots import (
    MemoryState,
    Region,
    SnapshotIndex,
    SnapshotKey,
    TensorSlice,
    copy_owners,
    newest_whole_state,
)
from boost_core.train import Membership, Outcome, StepTimes, checkpoint_manager, train
from boost_core.train.state import TrainState
from service.gang.assignment import Message
from service.gang.worker.rank_metrics import SupervisorReporter
from tests.distributed.recording import Recorder, losses, train_and_record
from tests.distributed.whole import Whole, whole_tensors
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

CPU = torch.device("cpu")
Layout = tuple[int, int, int, int]  # tensor, pipeline and data parallel ranks, ZeRO stage


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def job(
    corpus: Path, folder: Path, layout: Layout, kind: str = "cola", every: int | None = 4, **changes: Any
) -> JobSpec:
    tensor, pipeline, data, zero = layout
    return tiny_job(
        corpus, folder,
        model={"num_hidden_layers": 4, "family": "svd" if kind == "loro" else "cola"},
        parallelism={
            "tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "data_parallel_size": data,
            "zero_stage": zero,
        },
        training={"global_batch_size": 12, "sequence_length": 16},
        optimizer={"kind": "loro", "loro": {"exact_every_steps": 3}} if kind == "loro" else {},
        fault_tolerance={"memory_copy_every_steps": every},
        **{"checkpoint": {"every_steps": 2}} | changes,
    )  # fmt: skip


# What processes have on their stores, as it travels between them: tensors go by value.
Stores = dict[int, list[Snapshot]]


def taken(snapshots: SnapshotStore) -> list[Snapshot]:
    """A copy of all that is on a snapshots."""
    return [
        Snapshot(index, tuple(part.clone() for part in snapshots.read(index.key, whole_boxes(index))))
        for index in snapshots.indexes()
    ]


def whole_boxes(index: SnapshotIndex) -> list[Region]:
    return [Region(box.name, box.offsets, (0,) * len(box.sizes), box.sizes) for box in index.boxes]


def without(stores: Stores, *lost: int) -> Stores:
    return {process: snapshots for process, snapshots in stores.items() if process not in lost}


def found(stores: Stores) -> MemoryState[int] | None:
    return newest_whole_state((process, [each.index for each in snapshots]) for process, snapshots in stores.items())


def fetch_from(stores: Stores) -> Callable[[int, SnapshotKey, Sequence[Region]], list[torch.Tensor]]:
    living = {process: SnapshotStore() for process in stores}
    for process, snapshots in stores.items():
        for snapshot in snapshots:
            living[process].put(snapshot)
    return lambda owner, key, regions: living[owner].read(key, regions)


@dataclass(frozen=True)
class Told:
    """What the ranks of a gang are told.

    Attributes:
        nodes: The node of each; empty to have no copies made.
        halt: Which rank is asked to halt, and after which step.
        store: Whether it is asked for a checkpoint, too.
        stores: Pickled stores to recover from.
        refuse: Whether the store refuses what is written after that step.
        generation: Number of the gang.
        steers: Changes of values, each with the step after which each rank gets it; 0: before the first.
    """

    nodes: str = ""
    halt: tuple[int, int] | None = None
    store: bool = False
    stores: bytes | None = None
    refuse: bool = False
    generation: int = 1
    steers: tuple[tuple[Steer, tuple[int, ...]], ...] = ()


def as_member(spec: JobSpec, told: Told) -> tuple[Outcome, int, list[Report], bytes]:
    """Train as a rank; how it ended, after which step, what it reported, and its snapshots."""
    recorder, seen = Recorder(), [0]
    stores = pickle.loads(told.stores) if told.stores else {}
    membership = Membership(
        generation=told.generation,
        owner_of=copy_owners(told.nodes),
        recovery=found(stores),
        fetch=fetch_from(stores),
    )

    def take_steers(step: int) -> None:
        taken = {steer.number: steer for steer, after in told.steers if after[dist.get_rank()] == step}
        membership.steers.update(taken)

    def after_step(times: StepTimes) -> None:
        seen[0] = times.step
        take_steers(times.step)
        if told.halt == (dist.get_rank(), times.step):
            if told.store:
                membership.store.set()
            membership.halt.set()

    def before_save() -> None:
        if told.refuse and told.halt and seen[0] > told.halt[1]:
            raise OSError("the store is full")

    take_steers(0)
    membership.after_step, membership.before_save = after_step, before_save
    with patch.object(saver, "RETRY_SECONDS", (0.01,)), patch.object(checkpoint_manager, "HALT_SECONDS", 0.1):
        outcome = train(spec, recorder, membership)
    return outcome, seen[0], recorder.reports, pickle.dumps(taken(membership.snapshots))


@dataclass(frozen=True)
class Ended:
    """What a gang came to."""

    outcomes: set[Outcome]
    steps: set[int]
    losses: dict[int, float]
    stores: Stores
    reports: list[Report]


def run(ranks: Ranks, spec: JobSpec, told: Told) -> Ended:
    ends = ranks.run(spec.parallelism.world_size, as_member, spec, told)
    outcomes, steps, reports, stores = zip(*ends, strict=True)
    return Ended(
        set(outcomes),
        set(steps),
        losses(reports[0]),
        {rank: pickle.loads(snapshots) for rank, snapshots in enumerate(stores)},
        reports[0],
    )


def loaded_from_memory(spec: JobSpec, stores: bytes) -> tuple[Whole, int, int]:
    """What a gang gets from stores; its step and samples."""
    state, living = TrainState.initial(spec, CPU), pickle.loads(stores)
    memory = found(living)
    assert memory is not None
    state.load_from_memory(memory, fetch_from(living))
    return whole_tensors(state), state.step, state.samples


def loaded_from_store(spec: JobSpec, step: int) -> tuple[Whole, int, int]:
    """The same from a checkpoint."""
    state = TrainState.initial(spec, CPU)
    state.load(CheckpointFolder(spec.checkpoint.url), step)
    return whole_tensors(state), state.step, state.samples


def assert_equal(of_ranks: Iterable[tuple[Whole, int, int]], expected: tuple[Whole, int, int]) -> None:
    for whole, step, samples in of_ranks:
        assert (step, samples) == expected[1:]
        assert whole.keys() == expected[0].keys()
        assert all(torch.equal(whole[name], tensor) for name, tensor in expected[0].items())


@dataclass(frozen=True)
class Halted:
    """A gang that halted after step 5, its state on stores and in the store, and the losses of one that did not."""

    folder: Path
    ended: Ended
    uninterrupted: dict[int, float]


LAYOUT: Layout = (2, 1, 2, 1)


@pytest.fixture(scope="module")
def halted(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Halted:
    folder = tmp_path_factory.mktemp("halted")
    ended = run(ranks, job(corpus, folder, LAYOUT), Told(nodes="aabb", halt=(2, 4), store=True))
    whole, *_ = ranks.run(4, train_and_record, job(corpus, tmp_path_factory.mktemp("whole"), LAYOUT))
    return Halted(folder, ended, losses(whole))


@pytest.mark.full
def test_asked_on_one_rank_all_halt_after_the_same_step(halted: Halted) -> None:
    assert halted.ended.outcomes == {Outcome.STORED}
    assert halted.ended.steps == {5}
    assert CheckpointFolder(str(halted.folder)).steps() == [2, 4, 5]


@pytest.mark.full
def test_state_in_the_hosts_memory_is_copied_and_recovered_as_any_other(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path, (1, 1, 2, 1))
    offloading = spec.model_copy(update={"parallelism": spec.parallelism.model_copy(update={"optimizer_offload": 0.6})})
    ended = run(ranks, offloading, Told(nodes="ab", halt=(1, 4), store=True))
    store, *_ = ranks.run(2, loaded_from_store, spec, 4)  # of which the lost rank's peer has a copy
    for reader in (spec, offloading):
        assert_equal(ranks.run(2, loaded_from_memory, reader, pickle.dumps(without(ended.stores, 0))), store)


def keys(snapshots: Iterable[Snapshot]) -> set[SnapshotKey]:
    return {snapshot.index.key for snapshot in snapshots}


@pytest.mark.full
def test_shelves_hold_the_state_and_the_last_copies(halted: Halted) -> None:
    of_peer = {0: 2, 1: 3, 2: 0, 3: 1}
    for rank, snapshots in halted.ended.stores.items():
        assert keys(snapshots) == {SnapshotKey(1, 5, rank), SnapshotKey(1, 4, rank), SnapshotKey(1, 4, of_peer[rank])}


NIGHTLY = pytest.mark.nightly


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        (2, 1, 1, 0),
        (1, 1, 2, 0),
        (1, 1, 2, 2),
        pytest.param((2, 1, 3, 1), marks=NIGHTLY),
        pytest.param((2, 2, 1, 0), marks=NIGHTLY),
    ],
    ids=str,
)
def test_memory_loads_bit_equal_to_the_store_at_any_layout(
    ranks: Ranks, corpus: Path, halted: Halted, layout: Layout
) -> None:
    spec = job(corpus, halted.folder, layout)
    memory = ranks.run(spec.parallelism.world_size, loaded_from_memory, spec, pickle.dumps(halted.ended.stores))
    store, *_ = ranks.run(spec.parallelism.world_size, loaded_from_store, spec, 5)
    assert store[1:] == (5, 60)
    assert_equal(memory, store)


@pytest.mark.full
@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (3,), (0, 1), (2, 3)], ids=str)
def test_with_any_rank_or_node_lost_the_copies_make_a_whole_state(
    ranks: Ranks, corpus: Path, halted: Halted, lost: tuple[int, ...]
) -> None:
    left = without(halted.ended.stores, *lost)
    spec = job(corpus, halted.folder, (2, 1, 1, 0))
    memory = ranks.run(2, loaded_from_memory, spec, pickle.dumps(left))
    store, *_ = ranks.run(2, loaded_from_store, spec, 4)
    assert store[1:] == (4, 48)
    assert_equal(memory, store)


@pytest.mark.full
def test_with_both_places_of_a_part_lost_there_is_no_state(halted: Halted) -> None:
    assert found(without(halted.ended.stores, 0, 2)) is None


def test_halted_and_resumed_from_memory_the_curve_is_the_uninterrupted_runs(
    ranks: Ranks, corpus: Path, halted: Halted, tmp_path: Path
) -> None:
    stores = pickle.dumps(halted.ended.stores)
    resumed = run(ranks, job(corpus, tmp_path, LAYOUT), Told(nodes="abab", stores=stores, generation=2))
    assert resumed.outcomes == {Outcome.FINISHED}
    assert resumed.losses == {step: loss for step, loss in halted.uninterrupted.items() if step > 5}
    assert halted.ended.losses | resumed.losses == halted.uninterrupted


@pytest.mark.full
def test_what_was_loaded_is_in_two_places_again(ranks: Ranks, corpus: Path, halted: Halted, tmp_path: Path) -> None:
    told = Told(nodes="aab", stores=pickle.dumps(halted.ended.stores), halt=(0, 6), generation=2)
    ended = run(ranks, job(corpus, tmp_path, (1, 1, 3, 1), every=100), told)
    assert ended.steps == {7}
    assert keys(ended.stores[0]) == {SnapshotKey(2, 7, 0), SnapshotKey(2, 5, 0), SnapshotKey(2, 5, 1)}
    for lost in range(3):
        state = found(without(ended.stores, lost))
        assert state is not None
        assert {part.key for part in state.parts} == {SnapshotKey(2, 5, rank) for rank in range(3)}


MOVES: dict[str, tuple[str, Layout, str, Layout]] = {  # kind, layout and nodes of the first gang, layout of the second
    "a pipeline": ("cola", (1, 2, 2, 1), "abab", (2, 1, 1, 0)),
    "into a pipeline": ("cola", (2, 1, 1, 0), "aa", (1, 2, 2, 1)),
    "LORO": ("loro", (2, 1, 2, 1), "aabb", (1, 1, 3, 1)),
    "split gradients": ("cola", (1, 1, 3, 2), "abc", (1, 1, 1, 0)),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "first", "nodes", "second"),
    [pytest.param(*move, marks=() if name == "LORO" else NIGHTLY, id=name) for name, move in MOVES.items()],
)
def test_other_kinds_of_state_move_bit_equal(
    ranks: Ranks, corpus: Path, tmp_path: Path, kind: str, first: Layout, nodes: str, second: Layout
) -> None:
    ended = run(ranks, job(corpus, tmp_path, first, kind), Told(nodes=nodes, halt=(0, 4), store=True))
    spec = job(corpus, tmp_path, second, kind)
    memory = ranks.run(spec.parallelism.world_size, loaded_from_memory, spec, pickle.dumps(ended.stores))
    store, *_ = ranks.run(spec.parallelism.world_size, loaded_from_store, spec, 5)
    assert_equal(memory, store)


def try_to_recover(spec: JobSpec, stores: bytes, failing_rank: int) -> tuple[str, str]:
    """Train from stores of which one does not answer one rank."""
    living = pickle.loads(stores)
    fetch = fetch_from(living)

    def fetch_or_fail(owner: int, key: SnapshotKey, regions: Sequence[Region]) -> list[torch.Tensor]:
        if dist.get_rank() == failing_rank and owner == 1:
            raise ConnectionError("process 1 is gone")
        return fetch(owner, key, regions)

    with pytest.raises(StateLost) as failure:
        train(spec, Recorder(), Membership(recovery=found(living), fetch=fetch_or_fail))
    return str(failure.value), str(failure.value.__cause__)


def test_when_a_holder_fails_one_rank_all_know_that_the_state_is_lost(
    ranks: Ranks, corpus: Path, halted: Halted
) -> None:
    spec = job(corpus, halted.folder, (2, 1, 1, 0))
    ended = ranks.run(2, try_to_recover, spec, pickle.dumps(halted.ended.stores), 1)
    for message, _ in ended:
        assert message.startswith("the state of step 5 is no longer in memory: rank 1: ")
        assert "process 1 is gone" in message
    assert [cause for _, cause in ended] == ["None", "process 1 is gone"]


def load_what_one_rank_cannot_read() -> str:
    """Load a state of which rank 1 does not know a type, as of another version's torch."""
    dtype = "float32" if dist.get_rank() == 0 else "float7"
    index = SnapshotIndex(SnapshotKey(1, 5, 0), 1, 40, (TensorSlice("x", (2,), (0,), (2,), dtype),))
    state, x = MemoryState(5, 40, (index,), {index.key: 0}), torch.zeros(2)
    with pytest.raises(StateLost) as failure:
        load_from_memory(state, lambda *_: [torch.ones(2)], [Chunk.whole("x", x)])
    return str(failure.value)


def test_a_state_that_one_rank_cannot_read_is_lost_to_all(ranks: Ranks) -> None:
    for message in ranks.run(2, load_what_one_rank_cannot_read):
        assert message.startswith("the state of step 5 is no longer in memory: rank 1: ") and "float7" in message


def snapshots_while_training(
    spec: JobSpec, nodes: str, after: int
) -> tuple[list[Snapshot], list[Snapshot], set[SnapshotKey]]:
    """Own snapshots as they were found ``after`` a step and at the end of the one two later, and all that was there."""
    membership = Membership(owner_of=copy_owners(nodes))
    kept: dict[int, list[Snapshot]] = {}

    def after_step(times: StepTimes) -> None:
        if times.step in (after, after + 2):
            deadline = time.monotonic() + 30
            while len(membership.snapshots.indexes()) < 2:  # the copies are made behind the loop
                assert time.monotonic() < deadline
                time.sleep(0.01)
            kept[times.step] = taken(membership.snapshots)

    membership.after_step = after_step
    train(spec, Recorder(), membership)
    return kept[after], kept[after + 2], {snapshot.index.key for snapshot in kept[after + 2]}


def train_with_reports_that_wait(spec: JobSpec, nodes: str) -> tuple[bool, bool]:
    """Hold back the report of step 4 until the next; whether a copy of 4 is here before that, and after it arrives."""
    arrived, may_arrive, seen = set[int](), threading.Event(), []

    def push(message: Message) -> None:
        steps = {report.step for _, report in message.reports if isinstance(report, StepReport)}
        assert 4 not in steps or may_arrive.wait(60)
        arrived.update(steps)

    reporter = SupervisorReporter(push, 0)
    membership = Membership(owner_of=copy_owners(nodes), before_copy=lambda: reporter.flush(60))

    def of_step_4() -> bool:
        return any(index.key.step == 4 for index in membership.snapshots.indexes())

    def after_step(times: StepTimes) -> None:
        if times.step == 5:
            deadline = time.monotonic() + 2  # a copy takes some milliseconds
            while not of_step_4() and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(of_step_4())
            may_arrive.set()

    def after_copy(step: int) -> None:
        if step == 4:
            seen.append(of_step_4() and (dist.get_rank() > 0 or step in arrived))

    membership.after_step, membership.after_copy = after_step, after_copy
    train(spec, reporter, membership)
    return seen[0], seen[1]


@pytest.mark.full
def test_a_copy_counts_once_its_steps_are_reported(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    of_rank_0, _ = ranks.run(2, train_with_reports_that_wait, job(corpus, tmp_path, (1, 1, 2, 0)), "ab")
    assert of_rank_0 == (False, True)


@pytest.mark.nightly
def test_copies_stay_as_they_are_while_training_and_saving_go_on(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = job(corpus, tmp_path, (2, 1, 1, 0), checkpoint={"every_steps": 1})
    for rank, (early, late, there) in enumerate(ranks.run(2, snapshots_while_training, spec, "ab", 5)):
        assert there == {SnapshotKey(1, 4, 0), SnapshotKey(1, 4, 1)}, rank
        for before, now in zip(early, late, strict=True):
            assert before.index == now.index
            assert all(torch.equal(*pair) for pair in zip(before.tensors, now.tensors, strict=True))
    stores = pickle.dumps({0: early})
    memory = ranks.run(2, loaded_from_memory, spec, stores)
    store, *_ = ranks.run(2, loaded_from_store, spec, 4)
    assert_equal(memory, store)


@pytest.mark.full
@pytest.mark.parametrize(
    ("nodes", "every"),
    [
        pytest.param("ab", 4, id="copies"), pytest.param("ab", None, marks=NIGHTLY, id="null"),
        pytest.param("", 4, marks=NIGHTLY, id="no peers"),
    ],
)  # fmt: skip
def test_when_the_store_refuses_the_gang_halts_with_its_state_on_the_shelves(
    ranks: Ranks, corpus: Path, tmp_path: Path, nodes: str, every: int | None
) -> None:
    spec = job(corpus, tmp_path, (2, 1, 1, 0), every=every)
    ended = run(ranks, spec, Told(nodes=nodes, halt=(1, 4), store=True, refuse=True))
    assert ended.outcomes == {Outcome.HALTED}
    assert CheckpointFolder(str(tmp_path)).steps() == [2, 4]
    state = found(ended.stores)
    assert state is not None
    assert state.step == 5
    again = run(ranks, spec, Told(stores=pickle.dumps(ended.stores), halt=(1, 6), store=True, generation=2))
    assert again.outcomes == {Outcome.STORED}
    assert CheckpointFolder(str(tmp_path)).steps() == [2, 4, 6, 7]


@pytest.mark.nightly
def test_asked_to_halt_during_the_last_step_a_gang_finishes(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ended = run(ranks, job(corpus, tmp_path, (2, 1, 1, 0)), Told(halt=(0, 7), store=True))
    assert ended.outcomes == {Outcome.FINISHED}
    assert CheckpointFolder(str(tmp_path)).steps() == [2, 4, 6, 8]


def halt_again_and_again(spec: JobSpec, nodes: str) -> list[int]:
    """How many snapshots a process has after each of some gangs that halt after a step."""
    snapshots, many = SnapshotStore(), []
    for generation in range(1, 6):
        on_shelves: list[list[Snapshot]] = [[]] * dist.get_world_size()
        dist.all_gather_object(on_shelves, taken(snapshots))
        stores = dict(enumerate(on_shelves))
        membership = Membership(generation, snapshots, copy_owners(nodes), found(stores), fetch_from(stores))
        membership.halt.set()
        assert train(spec, Recorder(), membership) is Outcome.HALTED
        many.append(len(snapshots.indexes()))
    assert SnapshotKey(5, 5, dist.get_rank()) in keys(taken(snapshots))
    return many


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "most"), [("", 2), ("ab", 3)], ids=["no copies", "copies"])
def test_a_shelf_does_not_grow_from_gang_to_gang(
    ranks: Ranks, corpus: Path, tmp_path: Path, nodes: str, most: int
) -> None:
    """It has what is new and what was loaded, and the copy of what another has loaded."""
    for many in ranks.run(2, halt_again_and_again, job(corpus, tmp_path, (1, 1, 2, 0), every=100), nodes):
        assert many == [1, most, most, most, most]


@pytest.mark.nightly
def test_a_checkpoint_that_was_due_is_written_after_a_recovery(
    ranks: Ranks, corpus: Path, halted: Halted, tmp_path: Path
) -> None:
    """As when the ranks were lost before they had committed it."""
    stores = pickle.dumps(halted.ended.stores)
    told = Told(stores=stores, halt=(0, 6), generation=2)
    for nodes in ("", "ab"):
        spec = job(corpus, tmp_path / f"nodes {nodes}", (2, 1, 1, 0), checkpoint={"every_steps": 5})
        run(ranks, spec, replace(told, nodes=nodes))
        folder = CheckpointFolder(spec.checkpoint.url)
        assert folder.steps() == [5]
        written = folder.manifest(5)
        run(ranks, spec, replace(told, nodes=nodes))
        assert folder.manifest(5) == written, "once"


@pytest.mark.full
def test_a_gang_that_forms_at_the_last_step_writes_its_checkpoint(
    ranks: Ranks, corpus: Path, halted: Halted, tmp_path: Path
) -> None:
    spec = job(corpus, tmp_path, (2, 1, 1, 0))
    spec = spec.model_copy(update={"training": spec.training.model_copy(update={"steps": 5})})
    told = Told(stores=pickle.dumps(halted.ended.stores), generation=2)
    assert run(ranks, spec, told).outcomes == {Outcome.FINISHED}
    folder = CheckpointFolder(str(tmp_path))
    written = folder.manifest(5)
    assert run(ranks, spec, told).outcomes == {Outcome.FINISHED}
    assert folder.manifest(5) == written
    shard = tmp_path / "step-00000005" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run(ranks, spec, told).outcomes == {Outcome.FINISHED}
    assert folder.damage(5) == []


@pytest.mark.full
def test_a_rank_that_is_alone_keeps_copies_from_which_another_process_goes_on(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    alone, never = (1, 1, 1, 0), {"checkpoint": {"every_steps": 1000}}
    lost = run(ranks, job(corpus, tmp_path / "lost", alone, **never), Told(nodes="a", halt=(0, 5)))
    copies = [snapshot for snapshot in lost.stores[0] if snapshot.index.key.step == 4]
    stores = pickle.dumps({7: copies})
    resumed = run(ranks, job(corpus, tmp_path / "on", alone, **never), Told(nodes="a", stores=stores, generation=2))
    whole, *_ = ranks.run(1, train_and_record, job(corpus, tmp_path / "whole", alone, **never))
    assert resumed.losses == {step: loss for step, loss in losses(whole).items() if step > 4}
