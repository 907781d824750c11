"""Gangs on nodes that are near each other, by their labels."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from ray._private.label_utils import validate_label_selector

from boost_core.config import Layout
from boost_core.messages import Cause, ShapeReport
from service.gang.assignment import node_selector
from service.gang.status import GangPhase, GangStatus, Labels, NodeCapacity
from service.jobs.model import JobRecord
from service.scheduler.cluster_snapshot import Gang, Launch, Resize
from service.scheduler.decisions import decide
from service.scheduler.reconcile import GangMemory
from tests.scheduling import STARTING, job, nodes, running, trains

ZONE, RACK = "zone", "example.org/rack"
TOPOLOGY = (ZONE, RACK)
ZONE_A = ((ZONE, "a"),)
RACK_1, RACK_2, RACK_3 = (*ZONE_A, (RACK, "1")), (*ZONE_A, (RACK, "2")), ((ZONE, "b"), (RACK, "1"))


def racks(*free: float) -> list[NodeCapacity]:
    """Four nodes in three racks of two zones, two of which have one name, and one of which nothing is known."""
    places = (("a", "1"), ("a", "2"), ("a", "2"), ("b", "1"))
    labels = [dict(zip(TOPOLOGY, place, strict=True)) for place in places]
    capacities = nodes(*[8.0] * 5, free=list(free))
    return [replace(node, labels=labels) for node, labels in zip(capacities, [*labels, {}], strict=True)]


def started(found: Sequence[JobRecord], *free: float) -> list[Labels]:
    actions = decide(found, racks(*free), topology=TOPOLOGY)
    return [action.near for action in actions if isinstance(action, Launch)]


@pytest.mark.parametrize(
    ("workers", "free", "near"),
    [
        (4, (8, 4, 4, 8, 8), RACK_1),  # all racks have as much room
        (4, (8, 4, 3, 4, 8), RACK_3),  # the one of which least is left, so that larger gangs find room in others
        (7, (3, 4, 4, 6, 8), RACK_2),
        (9, (3, 4, 4, 6, 8), ZONE_A),
        (12, (3, 4, 4, 6, 8), ()),
        (8, (0, 0, 0, 0, 8), ()),
    ],
)
def test_a_gang_starts_in_the_smallest_part_that_has_room(workers: int, free: Sequence[float], near: Labels) -> None:
    assert started([job("a", workers)], *free) == [near]


def test_groups_that_share_a_node_count_as_such() -> None:
    assert started([job("a", 2, tensor=4)], 3, 7, 4, 8, 0) == [RACK_2]
    assert started([job("a", 2, tensor=4, placement="STRICT_PACK")], 3, 7, 3, 8, 0) == [RACK_3]


def test_who_asks_to_be_spread_is() -> None:
    assert started([job("a", 4, placement="SPREAD")], 8, 8, 8, 8, 8) == [()]


def test_room_is_taken_where_a_gang_starts() -> None:
    assert started([job("a", 6), job("b", 6), job("c", 6)], 0, 3, 3, 6, 6) == [RACK_2, RACK_3, ()]


def test_a_gang_grows_beside_itself() -> None:
    shape = ShapeReport(
        tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2, nodes=["node-1", "node-2"]
    )
    grows = running("a", 1, up_to=4).model_copy(update={"shape": shape})

    def grown(*free: float) -> list[Labels]:
        actions = decide([grows], racks(*free), {"a": trains(2)}, {"a": 5.0}, topology=TOPOLOGY)
        return [action.near for action in actions if isinstance(action, Resize)]

    assert grown(8, 1, 1, 8, 8) == [RACK_2]
    assert grown(8, 1, 0, 8, 8) == [ZONE_A]
    assert grown(0, 1, 0, 8, 8) == [()]


def test_a_gang_that_starts_has_its_room_before_the_nodes_show_it() -> None:
    starts = job("a", 6, *STARTING)
    gangs = {"a": Gang(None, Layout(1, 1, 6), near=RACK_2)}
    actions = decide([starts, job("b", 6)], racks(0, 4, 4, 8, 8), gangs, topology=TOPOLOGY)
    assert [action.near for action in actions if isinstance(action, Launch)] == [RACK_3]


@pytest.mark.parametrize(
    "value", ["", "row 3/rack 7", "-1", "r-", "r" * 64, "!in(r)", "!r", "räck", "r\n", "7", "r7", "R.7_a-b", "r" * 63]
)
def test_a_rack_is_one_if_ray_can_select_it(value: str) -> None:
    """As Ray's own check says, except for the empty value and operators, which Ray takes as expressions."""
    chosen = not validate_label_selector({RACK: value}) and value not in ("", "!in(r)", "!r")
    odd = [replace(node, labels={RACK: value}) for node in nodes(8)]
    (_, launch) = decide([job("a", 2)], odd, topology=TOPOLOGY)
    assert launch.near == (((RACK, value),) if chosen else ())


def test_others_may_have_been_faster_so_a_gang_takes_what_it_gets_after_a_while() -> None:
    now = 0.0
    memory, one = GangMemory(lambda: now), job("a", 2)
    assert memory.start(one, 1, Layout(1, 1, 2), near=RACK_2).near == RACK_2
    now = 50.0
    memory.saw(one, GangStatus(GangPhase.WAITING, "", []))
    now = 59.0
    assert memory.orders(one).near == RACK_2
    now = 60.0
    assert memory.orders(one).near == ()
    # To train in another layout it has to stop first, which may take longer than that.
    memory.order("a", Layout(2, 1, 1), Cause.NODE_JOINED, near=RACK_3)
    memory.saw(one, GangStatus(GangPhase.TRAINING, "", [], Layout(1, 1, 2)))
    now = 100.0
    assert memory.orders(one).near == RACK_3
    memory.saw(one, GangStatus(GangPhase.RECOVERING, "", [], Layout(1, 1, 2)))
    now = 110.0
    assert memory.orders(one).near == ()


def test_what_a_job_says_of_its_nodes_holds() -> None:
    assert node_selector(job("a", 1).spec, ["n"], (), RACK_2) == {
        ZONE: "a", RACK: "2", "ray.io/node-id": "!in(n)"
    }  # fmt: skip
