"""A spare copy of ranks' snapshots: whole and of one step, whatever the ranks do meanwhile."""

import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from boost_core.checkpoint import peer_memory
from boost_core.checkpoint.peer_memory import Snapshot, SnapshotStore
from boost_core.checkpoint.saver import HostCopies
from boost_core.checkpoint.shards import Chunk
from boost_core.plan.snapshots import Region, SnapshotIndex, SnapshotKey, newest_whole_state
from service.gang.worker import spare_copy
from service.gang.worker.spare_copy import Array, NoRoom, SpareCopy

RANKS, ROWS = 3, 64
PLENTY = 2**40


class TrainingRank:
    """A rank as the trainer has it: its state, two places for copies of it, and its snapshots.

    Args:
        rank: Its number.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.store = SnapshotStore()
        tensors = [torch.zeros(ROWS, 8), torch.zeros(8, dtype=torch.float64), torch.zeros(())]
        self._chunks = [
            Chunk(f"tensor {number}", tuple(tensor.shape), (0,) * tensor.dim(), tensor)
            for number, tensor in enumerate(tensors)
        ]
        self._copies = HostCopies(2, self.store.is_held)

    def step(self, step: int) -> None:
        """Do a step and keep a snapshot; the one before is kept until ``forget``."""
        for chunk in self._chunks:
            chunk.tensor.fill_(step)
        copies = self._copies.take(self._chunks, lasting=True)
        self.store.put(Snapshot.of(SnapshotKey(1, step, self._rank), RANKS, 7 * step, copies))

    def forget(self, step: int) -> None:
        """Forget all snapshots but those of a step."""
        self.store.keep_only(1, step)

    def hold(self) -> SnapshotIndex | None:
        return self.store.hold(1, self._rank)

    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> list[Array]:
        return [part.numpy().copy() for part in self.store.read(key, regions)]

    def release(self) -> None:
        self.store.release()


def steps_of(copy: SpareCopy) -> set[tuple[int, float]]:
    """The step of each snapshot that is there, with each number in it."""
    found = set()
    for index in copy.indexes():
        for box in index.boxes:
            (part,) = copy.read(index.key, [Region(box.name, box.offsets, (0,) * len(box.sizes), box.sizes)])
            found |= {(index.key.step, value) for value in np.unique(part).tolist()}
    return found


def after(*steps: int) -> list[TrainingRank]:
    """Ranks that have done so many steps each."""
    ranks = [TrainingRank(rank) for rank in range(len(steps))]
    for rank, step in zip(ranks, steps, strict=True):
        rank.step(step)
    return ranks


def test_a_copy_has_every_part_of_the_state_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_copy, "PORTION_BYTES", 100)  # three rows at a time
    ranks = [TrainingRank(rank) for rank in range(RANKS)]
    values = torch.randn(ROWS, 8)
    for rank in ranks:
        rank.step(4)
        (key,) = (index.key for index in rank.store.indexes())
        rank.store.read(key, [Region("tensor 0", (0, 0), (0, 0), (ROWS, 8))])[0].copy_(values + key.rank)
    copy = SpareCopy(lambda: PLENTY)
    assert copy.copy(ranks) == (1, 4)
    state = newest_whole_state([(9, copy.indexes())])
    assert state is not None
    assert (state.step, state.samples, set(state.owners.values())) == (4, 28, {9})
    for index in state.parts:
        part, scalar = copy.read(
            index.key, [Region("tensor 0", (0, 0), (3, 2), (60, 5)), Region("tensor 2", (), (), ())]
        )
        assert torch.equal(torch.from_numpy(part.copy()), (values + index.key.rank)[3:63, 2:7])
        assert scalar == 4


def live(ranks: list[TrainingRank], copy: SpareCopy, copies: int) -> set[tuple[int, float]]:
    """Train as fast as possible while so many copies are made; what was in them."""
    done, step = threading.Event(), 0

    def train() -> None:
        nonlocal step
        while not done.is_set():
            step += 1
            for rank in ranks:
                rank.step(step)
            for rank in ranks:  # once all have theirs
                rank.forget(step)

    thread = threading.Thread(target=train)
    thread.start()
    found: set[tuple[int, float]] = set()
    try:
        made = 0
        while made < copies:
            made += copy.copy(ranks) is not None
            found |= steps_of(copy)
    finally:
        done.set()
        thread.join()
    return found


@pytest.fixture
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_copy, "PORTION_BYTES", 64)
    monkeypatch.setattr(spare_copy, "TRY_SECONDS", 0.0)
    monkeypatch.setattr(spare_copy, "TRIES", 10_000)


@pytest.mark.usefixtures("small_portions")
def test_a_copy_is_of_one_step_while_the_ranks_go_on() -> None:
    ranks = [TrainingRank(rank) for rank in range(RANKS)]
    found = live(ranks, SpareCopy(lambda: PLENTY), copies=20)
    assert len({step for step, _ in found}) > 5, "the ranks have gone on meanwhile"
    assert all(step == value for step, value in found)


def test_the_copy_before_is_kept_until_the_next_is_whole() -> None:
    ranks = after(4, 4)
    copy = SpareCopy(lambda: PLENTY)
    copy.copy(ranks)
    for rank in ranks:
        rank.step(5)

    def gone(*_: object) -> list[Array]:
        raise ConnectionError("the rank is gone")

    ranks[1].read = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        copy.copy(ranks)
    assert steps_of(copy) == {(4, 4.0)}
    assert not any(rank.store.is_held(torch.empty(())) or rank.store._held for rank in ranks), "nothing stays held"


def test_ranks_that_never_have_the_same_step_are_left_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_copy, "TRY_SECONDS", 0.0)
    copy = SpareCopy(lambda: PLENTY)
    assert copy.copy(after(4, 5)) is None
    assert copy.copy([*after(4), TrainingRank(1)]) is None, "one has no snapshot yet"
    assert copy.indexes() == []


def test_what_a_copy_takes_must_be_there_with_as_much_for_a_worker() -> None:
    ranks = after(1, 1)
    each = 2 * (4 * ROWS * 8 + 8 * 8 + 4)
    for copies, free, enough in ((0, 3 * each, True), (0, 3 * each - 1, False), (1, 2 * each, True), (1, each, False)):
        room = PLENTY
        copy = SpareCopy(lambda: room)  # noqa: B023
        for _ in range(copies):
            copy.copy(ranks)
        room = free
        if enough:
            assert copy.copy(ranks) == (1, 1)
        else:
            with pytest.raises(NoRoom, match="of the node's memory may be used"):
                copy.copy(ranks)


def test_a_snapshot_that_nobody_reads_any_more_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    (rank,) = after(1)
    assert rank.hold() is not None
    held = rank.store._held
    assert held is not None
    assert rank.store.is_held(held.tensors[0])
    monkeypatch.setattr(peer_memory, "HOLD_SECONDS", -1.0)
    rank.read(held.index.key, [])
    assert not rank.store.is_held(held.tensors[0])
