"""Levels, who is at which, and collectives over several."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boost_core.hardware import Link
from boost_core.plan.machine import Cluster, Level
from boost_core.plan.throughput import collective_seconds, group_seconds

INNER, OUTER = Link(1e-6, 1e-6, 1e11, "inside"), Link(1e-5, 1e-5, 1e10, "outside")
NODES = Cluster((Level("node", 8, INNER), Level("fabric", 16, OUTER)))
RACKS = Cluster((Level("node", 8, INNER), Level("rack", 4, OUTER), Level("spine", 4, OUTER)))


@pytest.mark.parametrize(
    ("cluster", "sizes", "rows"),
    [
        (NODES, (4, 4, 8), [(4, 1), (2, 2), (1, 8)]),
        (NODES, (8, 2, 8), [(8, 1), (1, 2), (1, 8)]),
        (NODES, (16, 1, 8), [(8, 2), (1, 1), (1, 8)]),
        (NODES, (1, 1, 6), [(1, 1), (1, 1), (6, 1)]),
        (NODES, (3, 1, 8), [(3, 1), (1, 1), (2, 4)]),
        (NODES, (4, 3, 4), [(4, 1), (1, 3), (1, 4)]),  # what a node has left is too little for a pipeline's third
        (RACKS, (4, 4, 8), [(4, 1, 1), (2, 2, 1), (1, 2, 4)]),
    ],
)
def test_groups_take_what_those_inside_them_leave(cluster: Cluster, sizes: tuple, rows: list) -> None:
    assert cluster.rows(sizes) == rows


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 8]), min_size=3, max_size=3))
def test_rows_make_up_the_sizes_and_no_level_has_more_than_it_joins(sizes: list[int]) -> None:
    if prod(sizes) > RACKS.size:
        with pytest.raises(ValueError, match=r"do not fit into 8 \(node\) × 4 \(rack\) × 4 \(spine\)"):
            RACKS.rows(sizes)
        return
    rows = RACKS.rows(sizes)
    assert [prod(row) for row in rows] == sizes
    for level, taken in list(zip(RACKS.levels, zip(*rows, strict=True), strict=True))[:-1]:
        assert prod(taken) <= level.fan_out


def test_neighbours_are_apart_where_their_ranks_are() -> None:
    assert [NODES.level_between((2, 2), place) for place in range(4)] == [0, 1, 0, 1]
    assert [RACKS.level_between((1, 2, 2), place) for place in range(4)] == [1, 2, 1, 2]
    assert NODES.level_between((1, 1), 0) == 0


def test_among_fewer_ranks_of_a_mesh_some_wires_carry_nothing() -> None:
    mesh, switch = Level("board", 4, INNER, meshed=True), Level("board", 4, INNER)
    assert [mesh.among(ranks).bytes_per_second for ranks in (2, 3, 4)] == pytest.approx([1e11 / 3, 2e11 / 3, 1e11])
    assert switch.among(2) == INNER


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_on_one_level_it_is_a_ring(kind: str) -> None:
    assert group_seconds(NODES, (8, 1), kind, 1e6) == collective_seconds(INNER, kind, 8, 1e6)
    assert group_seconds(NODES, (1, 4), kind, 1e6, 3) == collective_seconds(OUTER, kind, 4, 1e6, 3)
    assert group_seconds(NODES, (1, 1), kind, 1e6) == 0


@pytest.mark.parametrize("row", [(8, 16), (2, 4), (4, 2)])
def test_over_levels_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(row: tuple[int, int]) -> None:
    whole = 1e9  # so large that starts do not matter
    halves = group_seconds(NODES, row, "reduce_scatter", whole)
    halves += group_seconds(NODES, row, "all_gather", whole / prod(row))
    assert group_seconds(NODES, row, "all_reduce", whole) == pytest.approx(halves, rel=1e-3)


def test_only_an_eighth_of_a_large_payload_goes_between_nodes_of_eight() -> None:
    inside, outside = 2 * 7 / 8 * 1e9 / 1e11, 2 * 15 / 16 * (1e9 / 8) / 1e10
    assert group_seconds(NODES, (8, 16), "all_reduce", 1e9) == pytest.approx(inside + outside, rel=0.02)
    flat = collective_seconds(OUTER, "all_reduce", 128, 1e9)
    assert group_seconds(NODES, (8, 16), "all_reduce", 1e9) < flat / 4


@given(st.sampled_from([(2, 2), (8, 2), (4, 16)]), st.floats(1, 1e9), st.sampled_from(["all_reduce", "all_gather"]))
def test_no_worse_than_one_ring_and_no_better_than_its_parts(row: tuple[int, int], payload: float, kind: str) -> None:
    both = group_seconds(NODES, row, kind, payload)
    assert both <= collective_seconds(Link(1e-5, 1e-5, 1e10, ""), kind, prod(row), payload)
    assert both >= collective_seconds(INNER, kind, row[0], payload)


def test_a_collective_that_has_no_model() -> None:
    with pytest.raises(ValueError, match=r"'broadcast'.*all_reduce"):
        group_seconds(NODES, (2, 2), "broadcast", 1)
