"""On which node a spare copy of a gang's state is kept, and when: the controller's decisions on plain values."""

import math

import pytest

from boost_core.config import Layout
from boost_core.messages import Cause, LogLine, SpareReport
from service.gang.assignment import End, RankEnd, node_selector, selects
from service.gang.control import port
from service.gang.control.policy import AVOID_SECONDS, BUSY_SECONDS, LOOK_SECONDS
from service.gang.status import Orders
from tests.unit.fake_gang import START_SECONDS, FakeGang
from tests.unit.test_controller import a_gang, formed, job, orders

START, END = port.StartSpare, port.EndSpare


def spares(gang: FakeGang) -> list[port.Decision]:
    return [decision for decision in gang.decisions if isinstance(decision, START | END)]


def reports(gang: FakeGang) -> list[tuple[int | None, str | None]]:
    found = [each.report for each in gang.record.status(0).reports]
    return [(report.step, report.node) for report in found if isinstance(report, SpareReport)]


def log(gang: FakeGang) -> list[str]:
    return [each.report.message for each in gang.record.status(0).reports if isinstance(each.report, LogLine)]


def a_gang_with_a_spare(nodes: str = "ab", spare: str = "b") -> FakeGang:
    gang = a_gang(data=1, nodes=nodes)
    gang.train(5)
    assert spares(gang) == [START(spare)]
    assert gang.spare is not None
    assert gang.spare.snapshots[0].key.step == gang.step
    return gang


def test_a_lost_node_costs_no_more_than_the_steps_since_the_spare_copy() -> None:
    gang = a_gang_with_a_spare()
    gang.lose_node("a")
    gang.wait(START_SECONDS + 1)
    assert formed(gang) == [("aa", None), ("bb", 8)]
    assert gang.causes == [Cause.NODE_LOST]
    gang.train(1)
    assert spares(gang)[1:] == [END()], "once the gang has the state, on the same node"
    assert reports(gang) == [(4, "b"), (None, None)]
    gang.nodes.add("c")
    gang.train(2 + int(LOOK_SECONDS + START_SECONDS))
    assert spares(gang)[2:] == [START("c")]
    gang.lose_node("b")
    gang.wait(START_SECONDS + 1)
    assert formed(gang)[2] == ("cc", gang.step)


def test_no_other_node_means_no_spare() -> None:
    gang = a_gang(data=1, nodes="a")
    gang.train(20)
    assert spares(gang) == []
    assert 2 <= len(gang.of(port.FindIdleNodes)) <= 23 / LOOK_SECONDS + 1, "it looks now and then"
    gang.nodes.add("b")
    gang.train(1 + int(LOOK_SECONDS))
    assert spares(gang) == [START("b")]


def test_a_gang_whose_ranks_keep_copies_on_other_nodes_has_none() -> None:
    gang = a_gang(data=2, nodes="abc")
    gang.train(10)
    assert gang.of(port.FindIdleNodes) == []


def test_a_gang_that_keeps_no_copies_in_memory_has_none() -> None:
    gang = a_gang(data=1, nodes="ab", fault_tolerance={"memory_copy_every_steps": None})
    gang.train(10)
    assert gang.of(port.FindIdleNodes) == []


def test_it_asks_for_a_node_for_the_ranks_of_a_replica_that_is_not_the_gangs_own() -> None:
    gang = a_gang(data=1, nodes="ab")
    (looked, *_) = gang.of(port.FindIdleNodes)
    assert looked == port.FindIdleNodes({"CPU": 2.0}, {"ray.io/node-id": "!in(a)"})


def test_it_ends_when_the_ranks_keep_copies_on_other_nodes() -> None:
    gang = a_gang_with_a_spare("abc")
    gang.tell(orders(2))
    gang.train(4)
    gang.end(RankEnd(End.HALTED))
    gang.wait(0.5)
    gang.train(3)
    assert formed(gang)[1:] == [("aabb", 12)], "and was in nobody's way"
    assert spares(gang)[1:] == [END()]
    assert log(gang)[-1] == (
        "the spare copy of the state on node b is gone: the ranks keep their copies on other nodes now"
    )


def test_a_lost_spare_is_replaced_by_another() -> None:
    gang = a_gang_with_a_spare("abc")
    gang.nodes.remove("b")
    gang.spare_failure = "The node died"
    gang.wait(0.5)
    assert spares(gang)[1:] == [END()]
    gang.train(1 + int(LOOK_SECONDS + START_SECONDS))
    assert spares(gang)[2:] == [START("c")]
    gang.lose_node("a")
    gang.wait(START_SECONDS + 1)
    assert formed(gang)[1] == ("cc", gang.step)


def test_a_node_without_memory_for_it_is_left_alone_for_a_while() -> None:
    gang = a_gang_with_a_spare()
    gang.spare_failure = "1.0 GiB of the node's memory may be used, but copies of 1.0 GiB need 3.0 GiB"
    gang.train(int(AVOID_SECONDS) - 1)
    assert spares(gang)[1:] == [END()]
    assert log(gang)[-1].endswith("copies of 1.0 GiB need 3.0 GiB")
    gang.train(2 + int(LOOK_SECONDS))
    assert spares(gang)[2:] == [START("b")]


def test_a_spare_on_a_node_that_goes_away_moves() -> None:
    gang = a_gang_with_a_spare("abc")
    gang.leaving["b"] = None
    gang.train(1 + int(LOOK_SECONDS + START_SECONDS))
    assert spares(gang)[1:] == [END(), START("c")]


def test_a_node_lost_in_the_middle_of_a_copy_costs_the_steps_since_the_one_before() -> None:
    gang = a_gang_with_a_spare()
    gang.copies_to_spare = False
    gang.train(5)
    assert len(gang.of(port.CopyToSpare)) == 6, "one at a time"
    gang.lose_node("a")
    gang.wait(START_SECONDS + 1)
    assert formed(gang)[1] == ("bb", 8)


def test_a_node_lost_with_the_first_copy_unfinished_costs_what_the_store_does_not_have() -> None:
    gang = a_gang(data=1)
    gang.copies_to_spare = False
    gang.train(5)
    assert spares(gang) == [START("b")]
    gang.lose_node("a")
    gang.wait(START_SECONDS + 1)
    assert formed(gang)[1] == ("bb", None)


def test_a_copy_that_never_ends_is_given_up() -> None:
    gang = a_gang_with_a_spare()
    gang.copies_to_spare = False
    gang.train(int(BUSY_SECONDS))
    assert spares(gang)[1:] == []
    gang.train(3)
    assert spares(gang)[1:] == [END()]


def test_a_spare_that_does_not_start_is_given_up() -> None:
    gang = a_gang(data=1)
    assert gang.spare is not None
    gang.spare.up_at = math.inf
    gang.train(int(BUSY_SECONDS) + 3)
    assert spares(gang)[:2] == [START("b"), END()]
    assert gang.of(port.CopyToSpare) == []


def test_both_nodes_lost_at_once_cost_the_steps_since_the_checkpoint() -> None:
    gang = a_gang_with_a_spare("abc")
    gang.nodes.remove("b")
    gang.lose_node("a")
    (asked,) = gang.of(port.Probe)
    assert asked.nodes == {"a", "b"}, "the spare's node is looked at, too"
    gang.wait(START_SECONDS + 1)
    assert formed(gang)[1] == ("cc", None)
    assert gang.of(port.Prepare)[-1].owners == tuple(gang.training.workers), "nobody waits for an answer from there"


def test_it_ends_with_the_gang() -> None:
    gang = a_gang_with_a_spare()
    gang.end(RankEnd(End.FINISHED))
    assert gang.spare is None
    assert reports(gang)[-1] == (None, None)


@pytest.mark.parametrize(("nodes", "copies"), [("ab", True), ("a", False)])
def test_a_gang_of_one_rank_keeps_copies_only_where_there_is_a_node_for_another(nodes: str, copies: bool) -> None:
    one = Orders(Layout(1, 1, 1), (Layout(1, 1, 1),), Cause.LIMITS_CHANGED)
    spec = job(parallelism={"tensor_parallel_size": 1}, elasticity=None)
    gang = FakeGang(spec, one, nodes)
    gang.wait(START_SECONDS + 1)
    assert gang.training is not None
    assert gang.training.assignments[0].owner_of == ((0,) if copies else ())
    gang.train(6)
    assert spares(gang) == ([START("b")] if copies else [])
    gang.lose_node("a")
    gang.nodes.add("c")
    gang.wait(START_SECONDS + 1)
    assert formed(gang)[1] == (("b", 6) if copies else ("c", None))


@pytest.mark.parametrize(
    ("selector", "labels", "expected"),
    [
        ({}, {}, True),
        ({"rack": "1"}, {"rack": "1", "row": "2"}, True),
        ({"rack": "1"}, {"rack": "2"}, False),
        ({"rack": "1"}, {}, False),
        (node_selector(job(), ["a", "b"]), {"ray.io/node-id": "b"}, False),
        (node_selector(job(), ["a", "b"]), {"ray.io/node-id": "c"}, True),
        (node_selector(job(), [], ["T4"]), {"ray.io/accelerator-type": "T4"}, False),
        (node_selector(job(), [], ["T4"]), {}, True),
    ],
)
def test_a_selector_says_which_nodes_fit(selector: dict[str, str], labels: dict[str, str], expected: bool) -> None:
    assert selects(selector, labels) is expected
