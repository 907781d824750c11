"""Which nodes are asked for, and what is done when they are refused."""

from unittest.mock import patch

import pytest

from boost_core.config import ElasticityConfig
from boost_core.messages import ShapeReport
from service.gang.status import Bundle
from service.jobs.model import JobRecord
from service.scheduler import cluster_snapshot
from service.scheduler.autoscaling import (
    ASIDE_SECONDS,
    MOST_AT_ONCE,
    REPEAT_SECONDS,
    VERDICT_SECONDS,
    Autoscaling,
    requested_nodes,
)
from service.scheduler.cluster_snapshot import SchedulerMemory
from service.scheduler.demand import Demand
from service.scheduler.quotas import Limits
from tests.scheduling import STARTING, WAITING, job, running


def trained_at(data: int, record: JobRecord) -> JobRecord:
    shape = ShapeReport(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=data, nodes=[])
    return record.model_copy(update={"shape": shape})


def limited_to(cpus: float) -> Limits:
    return Limits(tenants={"default": {"CPU": cpus}})


def requested(jobs: list[JobRecord], limits: Limits) -> tuple[tuple[Bundle, ...], list[tuple[Bundle, ...]]]:
    allocated, waiting = requested_nodes(jobs, limits, SchedulerMemory().demand)
    return allocated, list(waiting)


@pytest.mark.parametrize(
    ("jobs", "limits", "held", "waiting"),
    [
        ([], Limits(), 0, []),
        ([job("j", 2)], Limits(), 0, [2]),
        ([job("j", 2, *WAITING)], Limits(), 0, [2]),
        ([job("j", 2, *STARTING)], Limits(), 2, []),
        ([running("j", 2), job("k", 1)], Limits(), 2, [1]),
        # In the order of the queue.
        ([job("j", 1), job("k", 2, priority=1)], Limits(), 0, [2, 1]),
        # An elastic job asks for its own shape, and goes on doing so when it runs with less; more it keeps.
        ([job("j", 2, up_to=4)], Limits(), 0, [2]),
        ([trained_at(1, running("j", 2, up_to=4))], Limits(), 2, []),
        ([trained_at(4, running("j", 2, up_to=4))], Limits(), 4, []),
        # Within quotas, and smaller where that helps.
        ([job("j", 3), job("k", 2), job("l", 1)], limited_to(4), 0, [3, 1]),
        ([running("j", 3), job("k", 2), job("l", 1)], limited_to(4), 3, [1]),
        ([job("j", 9)], limited_to(4), 0, []),
        # Nobody asks who is not to run.
        ([job("j", 1).model_copy(update={"pause_requested": True})], Limits(), 0, []),
        ([job("j", 1).model_copy(update={"cancel_requested": True})], Limits(), 0, []),
    ],
)
def test_who_asks_for_how_much(jobs: list[JobRecord], limits: Limits, held: int, waiting: list[int]) -> None:
    have, requests = requested(jobs, limits)
    assert have == (Bundle({"CPU": 1}),) * held
    assert [len(needed) for needed in requests] == waiting


def test_a_job_that_may_be_smaller_than_its_own_shape_is_where_its_quota_is_small() -> None:
    elastic = job("j", 1, up_to=4)
    own = elastic.spec.parallelism.model_copy(update={"data_parallel_size": 4})
    elastic = elastic.model_copy(update={"spec": elastic.spec.model_copy(update={"parallelism": own})})
    assert [len(needed) for needed in requested([elastic], Limits())[1]] == [4]
    assert [len(needed) for needed in requested([elastic], limited_to(3))[1]] == [1]


def test_a_job_that_leaves_its_layouts_to_the_service_asks_for_the_fastest() -> None:
    left = job("j", 1)
    layouts = {"layouts": "auto", "gpus": {"min": 1, "max": 4}, "resolved": [[1, 1, 1], [1, 1, 4]]}
    elasticity = ElasticityConfig.model_validate(layouts)
    left = left.model_copy(update={"spec": left.spec.model_copy(update={"elasticity": elasticity})})
    with patch.object(Demand, "seconds", lambda _, layout: 1 / layout.world_size):
        assert [len(needed) for needed in requested([left], Limits())[1]] == [4]
        assert [len(needed) for needed in requested([left], limited_to(3))[1]] == [1]


def test_ranks_that_share_a_node_are_one_bundle_with_the_labels_of_their_job() -> None:
    labelled = job("j", 2, tensor=2, cpus=3, gpus=1, node_labels={"zone": "a"}, accelerator_type="H100")
    _, (needed,) = requested([labelled], Limits())
    labels = {"zone": "a", "ray.io/accelerator-type": "H100"}
    assert needed == (Bundle({"CPU": 6, "GPU": 2}, labels),) * 2


class Cluster:
    """Grants up to some CPUs; all of a request or nothing."""

    def __init__(self, cpus: float) -> None:
        self.cpus = cpus
        self.requests: list[tuple[Bundle, ...]] = []

    def request_nodes(self, bundles: tuple[Bundle, ...]) -> None:
        self.requests.append(bundles)

    def refused(self) -> bool:
        return sum(bundle.resources["CPU"] for bundle in self.requests[-1]) > self.cpus


class Office:
    def __init__(self, cpus: float) -> None:
        self.cluster, self.seconds = Cluster(cpus), 0.0
        self.autoscaling = Autoscaling(self.cluster, lambda: self.seconds)

    def passes(self, seconds: float, requests: list[tuple[Bundle, ...]], held: int = 0) -> set[float]:
        """Make passes; how many CPUs were granted meanwhile."""
        granted = set()
        for _ in range(int(seconds)):
            self.seconds += 1
            self.autoscaling.ask(cpus(held), requests)
            if not self.cluster.refused():
                granted.add(sum(bundle.resources["CPU"] for bundle in self.cluster.requests[-1]))
        return granted


def cpus(count: int) -> tuple[Bundle, ...]:
    return (Bundle({"CPU": 1}),) * count


def requests(*sizes: int) -> list[tuple[Bundle, ...]]:
    return [cpus(size) for size in sizes]


def test_a_request_is_sent_when_it_changes_and_now_and_then() -> None:
    office = Office(10)
    office.passes(20, requests(2), held=1)
    assert office.cluster.requests == [cpus(3)]
    office.passes(1, [], held=3)
    office.passes(1, [], held=0)
    assert office.cluster.requests[1:] == [()]
    office.passes(REPEAT_SECONDS + 1, [])
    assert office.cluster.requests[1:] == [(), ()]


@pytest.mark.parametrize("place", [0, 1, 5, 15])
def test_one_that_no_nodes_could_hold_keeps_nobody_from_theirs(place: int) -> None:
    office, sizes = Office(30), [1] * 16
    sizes[place] = 1000
    before = office.passes(10 * VERDICT_SECONDS, requests(*sizes))
    assert max(before) >= max(1, min(15, place // 2))
    if place == 0:  # it has been found out
        assert max(before) == 15


def test_those_that_need_as_much_are_set_aside_with_it_for_a_while() -> None:
    office = Office(4)
    office.passes(10 * VERDICT_SECONDS, requests(50, 50, 60, 40, 2))
    assert office.cluster.requests[-1] in (cpus(2), cpus(40), cpus(42))
    assert 2 in office.passes(6 * VERDICT_SECONDS, requests(50, 50, 60, 40, 2))
    office.cluster.cpus = 1000
    assert 202 in office.passes(ASIDE_SECONDS + 8 * VERDICT_SECONDS, requests(50, 50, 60, 40, 2))


def test_many_that_no_nodes_could_hold_keep_nobody_from_theirs() -> None:
    office = Office(10)
    bad = [(Bundle({"CPU": size}),) for size in range(100, 116)]  # no two alike
    assert 1 in office.passes(30 * VERDICT_SECONDS, [*bad, *requests(1)])


def test_not_more_are_asked_for_at_once_than_an_autoscaler_can_bear() -> None:
    office = Office(1000)
    assert office.passes(5, requests(*[1] * 10_000)) == {MOST_AT_ONCE}


def test_of_a_long_queue_only_those_whose_nodes_are_requested_are_looked_at() -> None:
    jobs, memory = [job(f"j-{number:03}", 1) for number in range(3 * MOST_AT_ONCE)], SchedulerMemory()
    memory.see(jobs)
    looked_at: set[str] = set()

    def demand(record: JobRecord) -> Demand:
        looked_at.add(record.id)
        return memory.demand(record)

    office = Office(1000)
    with patch.object(cluster_snapshot, "demand_of", side_effect=AssertionError("worked out anew")):
        office.autoscaling.ask(*requested_nodes(jobs, Limits(), demand))
    assert office.cluster.requests == [cpus(MOST_AT_ONCE)]
    assert looked_at == {each.id for each in jobs[:MOST_AT_ONCE]}
