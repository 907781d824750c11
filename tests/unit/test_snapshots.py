"""Who keeps whose copy, and which state can be recovered."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boost_core.plan.snapshots import SnapshotIndex, SnapshotKey, copy_owners, newest_whole_state, uncopied_ranks


@pytest.mark.parametrize(
    ("nodes", "owners"),
    [
        ([], []),
        (["a"], [0]),
        (["a", "a"], [1, 0]),
        (["a", "a", "b", "b"], [2, 3, 0, 1]),
        (["a", "b", "a", "b"], [1, 0, 3, 2]),
        (["a", "b", "c"], [1, 2, 0]),
        (["a", "a", "a", "b"], [3, 0, 1, 2]),
    ],
)
def test_copies_lie_on_other_nodes(nodes: list[str], owners: list[int]) -> None:
    assert copy_owners(nodes) == owners


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=16))
def test_each_rank_keeps_one_copy_on_another_node_where_possible(nodes: list[str]) -> None:
    owners = copy_owners(nodes)
    assert sorted(owners) == list(range(len(nodes)))
    assert len(nodes) == 1 or all(owner != rank for rank, owner in enumerate(owners))
    apart = sum(nodes[owner] != nodes[rank] for rank, owner in enumerate(owners))
    # A node with more than half of the ranks can give away no more than the others can take, and they to it.
    most = max(Counter(nodes).values())
    assert apart >= min(len(nodes), 2 * (len(nodes) - most))


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=16))
def test_with_a_spare_copy_of_the_uncopied_ranks_any_node_may_be_lost(nodes: list[str]) -> None:
    owners = copy_owners(nodes)
    spare = uncopied_ranks(nodes, owners)
    for lost in set(nodes):
        left = {rank for rank, node in enumerate(nodes) if node != lost or nodes[owners[rank]] != lost}
        assert left | set(spare) == set(range(len(nodes)))
    assert (spare == list(range(len(nodes)))) == (len(set(nodes)) == 1)


def test_ranks_that_make_no_copies_have_none_uncopied() -> None:
    assert uncopied_ranks(["a", "a"], []) == []


def snapshots(generation: int, step: int, ranks: int, *present: int) -> list[SnapshotIndex]:
    return [SnapshotIndex(SnapshotKey(generation, step, rank), ranks, 4 * step, ()) for rank in present]


def test_the_newest_state_is_put_together_from_all_holders() -> None:
    state = newest_whole_state(
        [
            ("x", snapshots(1, 5, 2, 0) + snapshots(1, 4, 2, 0, 1)),
            ("y", snapshots(1, 5, 2, 1) + snapshots(1, 4, 2, 0, 1)),
        ]
    )
    assert state is not None
    assert (state.step, state.samples) == (5, 20)
    assert state.parts == (*snapshots(1, 5, 2, 0), *snapshots(1, 5, 2, 1))
    assert state.owners == {SnapshotKey(1, 5, 0): "x", SnapshotKey(1, 5, 1): "y"}


def test_after_a_divergence_samples_are_not_read_again() -> None:
    old, (new,) = snapshots(1, 5, 2, 0), snapshots(1, 5, 2, 1)
    state = newest_whole_state([("x", old), ("y", [replace(new, samples=28)])])
    assert state is not None and state.samples == 28


def test_each_part_comes_from_one_holder() -> None:
    state = newest_whole_state([("x", snapshots(1, 5, 2, 0, 1)), ("y", snapshots(1, 5, 2, 0, 1))])
    assert state is not None
    assert state.owners == {SnapshotKey(1, 5, 0): "x", SnapshotKey(1, 5, 1): "x"}


FOUND: dict[str, tuple[list[list[SnapshotIndex]], tuple[int, int] | None]] = {  # stores; generation and step
    "nobody has anything": ([], None),
    "stores are empty": ([[], []], None),
    "a part is missing": ([snapshots(1, 5, 3, 0, 2), []], None),
    "an older one is whole": ([snapshots(1, 6, 2, 0), snapshots(1, 5, 2, 0), snapshots(1, 5, 2, 1)], (1, 5)),
    "gangs are not mixed": ([snapshots(1, 6, 2, 0), snapshots(2, 6, 2, 1)], None),
    "nor gangs of different sizes": ([snapshots(1, 6, 1, 0), snapshots(2, 7, 2, 0)], (1, 6)),
    "a later gang may have gone back": ([snapshots(1, 6, 1, 0), snapshots(2, 5, 1, 0)], (1, 6)),
    "of one step the later gang's is taken": ([snapshots(2, 6, 1, 0), snapshots(1, 6, 1, 0)], (2, 6)),
}


@pytest.mark.parametrize(("stores", "place"), FOUND.values(), ids=FOUND)
def test_the_newest_whole_state(stores: list[list[SnapshotIndex]], place: tuple[int, int] | None) -> None:
    state = newest_whole_state(enumerate(stores))
    assert (None if state is None else (state.parts[0].key.generation, state.step)) == place
