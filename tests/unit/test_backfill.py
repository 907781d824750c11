"""Who may go before a job that waits: as tables, and beside what trying everything says."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from boost_core.config import Layout
from boost_core.messages import Cause
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.scheduler.backfill import AllocatedUnits, Head
from service.scheduler.cluster_snapshot import ClusterSnapshot, Gang, ResizePolicy, SchedulerMemory
from service.scheduler.decisions import decide
from service.scheduler.quotas import Limits
from tests import brute_force
from tests.scheduling import WAITING, job, nodes, running, summary, trains


def gpus(*free: float, total: float = 8, cpus: float = 64, cpus_free: float = 64, **settings) -> list[NodeCapacity]:
    return [
        NodeCapacity(f"gpu-{number}", {"CPU": cpus, "GPU": total}, {"CPU": cpus_free, "GPU": left}, **settings)
        for number, left in enumerate(free)
    ]


@pytest.mark.parametrize(
    ("jobs", "gangs", "capacities", "expected"),
    [
        # What the head leaves whenever it starts is free for others, and no more than that.
        ([running("a", 8), job("h", 8), job("p", 4)], {"a": trains(8)}, nodes(12, free=[4]), "p"),
        ([running("a", 8), job("h", 8), job("p", 5)], {"a": trains(8)}, nodes(13, free=[5]), "p"),
        ([running("a", 8), job("h", 9), job("p", 4)], {"a": trains(8)}, nodes(12, free=[4]), ""),
        ([running("a", 8), job("h", 8), job("p", 2), job("q", 2), job("r", 1)], {"a": trains(8)},
         nodes(12, free=[4]), "pq"),
        # It may be one gang's end or another's.
        ([running("a", 4), running("c", 4), job("h", 6), job("p", 2)], {"a": trains(4), "c": trains(4)},
         nodes(12, free=[4]), "p"),
        ([running("a", 4), running("c", 2), job("h", 6), job("p", 2)], {"a": trains(4), "c": trains(2)},
         nodes(10, free=[4]), ""),
        # Of its layouts a job takes the best that delays nobody.
        ([running("a", 8), job("h", 9), job("p", 1, up_to=4)], {"a": trains(8)}, nodes(12, free=[4]), "p3"),
        # Whole nodes: one is free and two are waited for; only two others end together.
        ([running("a", 4, tensor=4), job("h", 2, tensor=4), job("p", 1, tensor=4)], {"a": trains(4, 4)},
         nodes(4, 4, 4, 4, 4, free=[4, 0, 0, 0, 0]), "p"),
        ([running("a", 1, tensor=4), running("c", 3, tensor=4), job("h", 2, tensor=4), job("p", 1, tensor=4)],
         {"a": trains(1, 4), "c": trains(3, 4)}, nodes(4, 4, 4, 4, 4, free=[4, 0, 0, 0, 0]), ""),
        # Jobs that take nothing scarce start beside: CPUs where GPUs are waited for, unless there are too few of them.
        ([running("a", 8, gpus=1), job("h", 16, gpus=1), job("p", 16)], {"a": trains(8)},
         gpus(0, 8, cpus_free=48), "p"),
        ([running("a", 8, gpus=1), job("h", 16, gpus=1), job("p", 16)], {"a": trains(8)},
         gpus(0, 8, cpus=24, cpus_free=16), ""),
        # A node without GPUs is none that could serve the head.
        ([running("a", 8, gpus=1, cpus=8), job("h", 16, gpus=1, cpus=8), job("p", 16, node_labels={"kind": "cpu"})],
         {"a": trains(8)},
         [*gpus(0, 8, cpus_free=0), NodeCapacity("c", {"CPU": 16}, {"CPU": 16}, {"kind": "cpu"})], "p"),
        # In doubt not: a gang may be elsewhere, nodes drain, or others hold some.
        ([running("a", 8), job("h", 8, node_labels={"zone": "z"}), job("p", 4)], {"a": trains(8)},
         [*nodes(12, free=[4], labels={"zone": "z"}), NodeCapacity("y", {"CPU": 8}, {"CPU": 0})], ""),
        ([running("a", 8), job("h", 8), job("p", 4)], {"a": trains(8)},
         [*nodes(12, free=[4]), NodeCapacity("y", {"CPU": 8}, {"CPU": 8}, draining=True)], ""),
        ([running("a", 8), job("h", 8), job("p", 4)], {"a": trains(8)}, nodes(14, free=[4]), ""),
        # On a node that cannot be used there is no room for the head.
        ([running("a", 4), job("h", 16), job("p", 4)], {"a": trains(4)},
         [*nodes(16, free=[12]), NodeCapacity("y", {"CPU": 8}, {"CPU": 8}, unusable="has no torch")], ""),
        # A gang of lower priority may have to shrink for the head, and one that lost workers may come back to them.
        ([running("a", 1, up_to=8), job("h", 8, priority=1), job("p", 4)], {"a": trains(8, target=Layout(1, 1, 6))},
         nodes(12, free=[4]), ""),
        ([running("a", 1, up_to=8), job("h", 9), job("p", 2)], {"a": trains(4, target=Layout(1, 1, 8))},
         nodes(12, free=[4]), ""),
    ],
)  # fmt: skip
def test_who_goes_before_the_head(jobs, gangs: Mapping[str, Gang], capacities, expected: str) -> None:
    started = [words for words in summary(decide(jobs, capacities, gangs)) if words.startswith("Launch")]
    if expected == "p3":
        assert started == ["Launch p 1x3"]
    else:
        assert [words.split()[1] for words in started] == list(expected)


def test_a_job_of_another_head_is_heeded_too() -> None:
    capacities = [
        NodeCapacity("x", {"CPU": 12}, {"CPU": 4}, {"zone": "x"}),
        NodeCapacity("y", {"CPU": 12}, {"CPU": 4}, {"zone": "y"}),
    ]
    x, y = {"node_labels": {"zone": "x"}}, {"node_labels": {"zone": "y"}}
    gangs = {"a": trains(8), "c": trains(8)}
    jobs = [running("a", 8, **x), running("c", 8, **y), job("h", 8, **x), job("i", 9, **y), job("p", 4)]
    assert "Launch p 1x4" not in summary(decide(jobs, capacities, gangs))  # it might be placed on y
    assert "Launch p 1x4" in summary(decide([*jobs[:4], job("p", 4, **x)], capacities, gangs))


def test_what_starts_meanwhile_and_what_shrinks_meanwhile_is_heeded() -> None:
    jobs = [running("a", 8), job("h", 6, *WAITING), job("p", 2), job("q", 2)]
    cluster = ClusterSnapshot(
        jobs, nodes(12, free=[4]), {"a": trains(8)}, {}, ResizePolicy(), Limits(), (), SchedulerMemory()
    )
    cluster.demands |= {each.id: cluster.alone(cluster.records[each.id]) for each in jobs[1:]}
    head = Head(cluster, jobs[1])
    assert not head.delayed_by(jobs[3], Layout(1, 1, 2))
    cluster.launch(jobs[2], Layout(1, 1, 2), "")
    assert not head.delayed_by(jobs[3], Layout(1, 1, 2))
    cluster.resize(jobs[0], Layout(1, 1, 6), Cause.PREEMPTED, "")
    assert head.delayed_by(jobs[3], Layout(1, 1, 2))


@pytest.mark.parametrize(("low", "high"), [(0, 0), (0, 3), (2, 2), (3, 5), (7, 20)])
def test_equal_gangs_together_take_what_they_take_one_by_one(low: int, high: int) -> None:
    for gangs in range(12):
        together, one_by_one = AllocatedUnits(100), AllocatedUnits(100)
        for units in (together, one_by_one):
            units.add(1, 4)
        together.add(low, high, gangs)
        for _ in range(gangs):
            one_by_one.add(low, high)
        assert together.sums == one_by_one.sums


class World:
    """A few nodes and gangs somewhere on them, a job that does not fit, and another one."""

    def __init__(self, seed: int, *, alike: bool) -> None:
        self.random, self.alike = random.Random(seed), alike
        self.nodes = [self.node(number) for number in range(1 if alike else self.random.randint(1, 3))]
        self.gangs: dict[str, Gang] = {}
        self.records: list[JobRecord] = []
        self.places: list[brute_force.Place] = []
        for number in range(self.random.randint(1, 5)):
            self.start(running(f"a{number}", **self.sizes()))
        self.head, self.other = job("h", **self.sizes()), job("i", **self.sizes())

    def node(self, number: int) -> NodeCapacity:
        if self.alike:
            total = {"CPU": float(self.random.randint(4, 16))}
        else:
            total = {"CPU": float(self.random.choice([4, 8, 16, 32])), "GPU": float(self.random.choice([0, 4, 6, 8]))}
        return NodeCapacity(f"n{number}", total, dict(total), {"zone": self.random.choice("xy")})

    def sizes(self) -> dict:
        workers = self.random.choice([1, 2, 3, 4, 6])
        if self.alike:
            return {"workers": workers}
        sizes = {
            "workers": self.random.choice([1, 1, 2, 3]), "tensor": self.random.choice([1, 1, 2, 4]),
            "cpus": self.random.choice([0.5, 1, 1, 2]), "gpus": self.random.choice([0, 1, 1]),
        }  # fmt: skip
        if self.random.random() < 0.2:
            sizes["node_labels"] = {"zone": self.random.choice("xy")}
        return sizes

    def start(self, record: JobRecord) -> None:
        """Place a gang anywhere, if there is room."""
        size, count = next(brute_force.groups(record))
        places = list(brute_force.places(record, size, count, self.nodes))
        if not places:
            return
        place, layout = self.random.choice(places), record.spec.layouts()[0]
        for number, node in enumerate(self.nodes):
            left = {name: free - place.get(node.node_id, {}).get(name, 0) for name, free in node.free.items()}
            self.nodes[number] = replace(node, free=left)
        self.records.append(record)
        self.places.append(place)
        self.gangs[record.id] = Gang(layout, layout)

    def refused(self) -> bool | None:
        """Whether the other one must not start; ``None`` if there is no question."""
        layout = self.other.spec.layouts()[0]
        cluster = ClusterSnapshot(
            [*self.records, self.head, self.other], self.nodes, self.gangs, {}, ResizePolicy(), Limits(), (),
            SchedulerMemory(),
        )  # fmt: skip
        cluster.demands |= {one.id: cluster.alone(cluster.records[one.id]) for one in (self.head, self.other)}
        waits = cluster.possible(cluster.demands[self.head.id]) and not cluster.fitting(self.head, cluster.room)
        if not (waits and cluster.fitting(self.other, cluster.room)) or not cluster.nodes(self.head) & cluster.nodes(
            self.other
        ):
            return None
        return Head(cluster, self.head).delayed_by(self.other, layout)

    def harmful(self) -> bool:
        """Whether there is a place and an order of ends by which the other one would delay the head."""
        size, count = next(brute_force.groups(self.other))
        everywhere = brute_force.places(self.other, size, count, self.nodes)
        return any(brute_force.delays(self.head, self.nodes, self.places, place) for place in everywhere)


def outcomes(worlds: Sequence[World]) -> list[tuple[bool, bool]]:
    asked = [(world, refused) for world in worlds if (refused := world.refused()) is not None]
    return [(refused, world.harmful()) for world, refused in asked]


@pytest.mark.full
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2, 3))])
def test_what_is_let_through_harms_nowhere_and_in_no_order(part: int) -> None:
    found = outcomes([World(seed, alike=False) for seed in range(part * 2000, (part + 1) * 2000)])
    assert (False, True) not in found
    harmless = [refused for refused, harmful in found if not harmful]
    assert len(found) > 100
    assert harmless.count(False) > 0.3 * len(harmless)  # it does not refuse out of doubt only


@pytest.mark.nightly
def test_where_all_ranks_are_alike_the_test_is_exact() -> None:
    found = outcomes([World(seed, alike=True) for seed in range(2500)])
    assert len(found) > 200
    assert {True, False} == {refused for refused, _ in found}
    assert all(refused == harmful for refused, harmful in found)
