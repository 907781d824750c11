"""Random histories of a cluster, in which each pass must decide exactly what the reference does."""

import random
from dataclasses import fields, replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest

from boost_core.config import Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.messages import Cause
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from service.scheduler.cluster_snapshot import Action, Explain, Gang, ResizePolicy, SchedulerMemory
from service.scheduler.decisions import decide
from service.scheduler.quotas import Limits
from tests.reference_scheduler import decisions as reference
from tests.reference_scheduler.cluster_snapshot import Explain as ExplainOne
from tests.scheduling import SOME_DAY, STARTING, TRAINING, WAITING, job

SHORT, LONG_RUN, PARTS = 200, 10_000, 10
PASSES = 4
TOPOLOGIES = ((), ("rack",), ("zone", "rack"))
TEMPLATES: list[dict[str, Any]] = [
    {"workers": 1}, {"workers": 2}, {"workers": 6}, {"workers": 40}, {"workers": 1, "cpus": 2.5},
    {"workers": 3, "cpus": 0.1}, {"workers": 2, "tensor": 2}, {"workers": 1, "tensor": 4, "gpus": 1},
    {"workers": 1, "gpus": 1}, {"workers": 2, "gpus": 1, "cpus": 2}, {"workers": 1, "up_to": 4},
    {"workers": 2, "up_to": 6, "gpus": 1}, {"workers": 1, "tensor": 2, "up_to": 3, "gpus": 1},
    {"workers": 1, "tensor": 2, "up_to": 2, "layouts": [[2, 1], [1, 1], [4, 1]]},
    {"workers": 2, "placement": "SPREAD"}, {"workers": 2, "tensor": 2, "placement": "STRICT_PACK"},
    {"workers": 1, "up_to": 3, "placement": "SPREAD", "gpus": 1}, {"workers": 2, "node_labels": {"zone": "x"}},
    {"workers": 1, "gpus": 1, "accelerator_type": "H100"}, {"workers": 2, "up_to": 5, "node_labels": {"zone": "y"}},
]  # fmt: skip


@cache
def template(number: int, priority: int) -> JobRecord:
    return job("template", priority=priority, **TEMPLATES[number])


class History:
    """A cluster in which things happen at random, and in which decisions are more or less carried out."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.gpus = self.random.random() < 0.6
        self.nodes = [self.node(number) for number in range(self.random.choice([0, 1, 2, 3, 4, 6, 9]))]
        self.jobs: list[JobRecord] = []
        self.gangs: dict[str, Gang] = {}
        self.limits, self.topology = Limits(), self.random.choice(TOPOLOGIES)
        self.policy = ResizePolicy()
        self.tenants = self.random.choice([["a"], ["a", "b"]])
        self.templates = self.random.sample(range(len(TEMPLATES)), self.random.choice([1, 3, 6]))
        self.numbers = 0
        for _ in range(self.random.randint(0, 12)):
            self.submit()
        for record in self.jobs[: self.random.randint(0, 6)]:
            self.train(record)

    def node(self, number: int) -> NodeCapacity:
        total = {"CPU": self.random.choice([1.0, 2.0, 4.0, 4.0, 8.0, 7.5])}
        if self.gpus:
            total["GPU"] = self.random.choice([0.0, 2.0, 4.0])
        labels = {"zone": self.random.choice("xy"), "rack": self.random.choice(["r1", "r2", "not a label!"])}
        if self.gpus and self.random.random() < 0.7:
            labels[ACCELERATOR_LABEL] = self.random.choice(["H100", "L4"])
        free = {name: self.random.choice([amount, amount, amount / 2, 0.0]) for name, amount in total.items()}
        draining, unusable = self.random.random() < 0.08, "has no torch" if self.random.random() < 0.05 else None
        return NodeCapacity(f"node-{number}", total, free, labels, draining, unusable)

    def submit(self) -> None:
        self.numbers += 1
        name = f"job-{self.numbers:03}"
        record = template(self.random.choice(self.templates), self.random.choice([0, 0, 0, 1, 2]))
        state = self.random.choice([(JobState.QUEUED, Reason.SUBMITTED), (JobState.QUEUED, Reason.SUBMITTED), WAITING])
        if self.random.random() < 0.05:
            state = JobState.PAUSED, Reason.PAUSED_BY_USER
        self.jobs.append(
            record.with_values(
                {
                    "id": name,
                    "name": f"name of {name}",
                    "tenant": self.random.choice(self.tenants),
                    "queue": self.random.choice(["default", "default", "other"]),
                    "arrival": self.random.choice([self.numbers, None]),
                    "queued_at": SOME_DAY + timedelta(seconds=self.numbers),
                    "state": state[0],
                    "reason": state[1],
                    "pause_requested": self.random.random() < 0.03,
                }
            )
        )

    def train(self, record: JobRecord) -> None:
        """Give a job a gang of some layout."""
        layout = self.random.choice(record.spec.layouts())
        self.put(
            record, dict(zip(("state", "reason"), self.random.choice([TRAINING, TRAINING, STARTING]), strict=True))
        )
        self.gangs[record.id] = self.gang(record, layout)

    def gang(self, record: JobRecord, layout: Layout) -> Gang:
        layouts = record.spec.layouts()
        present = self.random.choice([layout, layout, layout, None, self.random.choice(layouts)])
        target = self.random.choice([layout, layout, layout, layout, self.random.choice(layouts), None])
        return Gang(
            present,
            target,
            self.random.choice([Cause.WORKER_BACK, Cause.PREEMPTED]),
            waiting=present is None and self.random.random() < 0.7,
            unchanged_seconds=self.random.choice([0.0, 6.0, 100.0]),
            stalled_seconds=self.random.choice([0.0, 0.0, 100.0]),
            limits_changed=self.random.random() < 0.1,
            limit=self.random.choice([None, None, 24e9, float("inf")]),
            near=(("zone", "x"),) if self.random.random() < 0.2 else (),
        )

    def put(self, record: JobRecord, values: dict[str, Any]) -> None:
        place = next(number for number, each in enumerate(self.jobs) if each.id == record.id)
        self.jobs[place] = record.with_values({"version": record.version + 1} | values)

    def go_on(self, actions: list[Action]) -> None:
        """Carry out some of the decisions, and let other things happen."""
        for action in actions:
            words, record = type(action).__name__, action.job
            if self.random.random() < 0.2 or record not in self.jobs:
                continue
            if words == "Launch":
                self.put(record, dict(zip(("state", "reason"), STARTING, strict=True)))
                self.gangs[record.id] = self.gang(record, action.layout)
            elif words == "Resize":
                self.gangs[record.id] = replace(self.gangs[record.id], target=action.layout, cause=action.cause)
            elif words == "Pause":
                self.gangs.pop(record.id)
                self.put(record, {"state": JobState.QUEUED, "reason": Reason.PAUSED_FOR_PRIORITY})
            elif words == "Explain":  # which is no new version
                self.put(record, {"waiting_for": action.message, "version": record.version})
            elif words == "Wait":
                self.put(record, dict(zip(("state", "reason"), WAITING, strict=True)))
        for _ in range(self.random.choice([0, 1, 1, 3])):
            self.happen()

    def happen(self) -> None:
        number = self.random.randrange(7)
        if number == 0:
            self.submit()
        elif number == 1 and self.jobs:
            gone = self.random.choice(self.jobs)
            self.jobs.remove(gone)
            self.gangs.pop(gone.id, None)
        elif number == 2 and self.nodes:
            place = self.random.randrange(len(self.nodes))
            node = self.nodes[place]
            free = {name: self.random.choice([amount, amount / 2, 0.0]) for name, amount in node.total.items()}
            self.nodes[place] = replace(node, free=free)
        elif number == 3:
            self.nodes = [*self.nodes, self.node(len(self.nodes))]
        elif number == 4 and self.nodes:
            place = self.random.randrange(len(self.nodes))
            self.nodes[place] = replace(self.nodes[place], draining=not self.nodes[place].draining)
        elif number == 5:
            amounts = {"CPU": self.random.choice([0.0, 2.0, 4.0, 10.0]), "GPU": self.random.choice([1.0, 4.0])}
            of = self.random.choice([{"tenants": {"a": amounts}}, {"queues": {"default": amounts}}, {}])
            self.limits = Limits(**of)
        elif number == 6 and self.jobs:
            record = self.random.choice(self.jobs)
            if not record.has_gang:
                self.train(record)


def in_full(actions: list[Any]) -> tuple[list[tuple[Any, ...]], dict[str, tuple[JobRecord, str]]]:
    """Decisions in their order, and what each job that stays in the queue is told."""
    decided, told = list[tuple[Any, ...]](), dict[str, tuple[JobRecord, str]]()
    for each in actions:
        if isinstance(each, Explain):
            told |= {entry.job.id: (entry.job, each.to(entry)) for entry in each.entries}
        elif isinstance(each, ExplainOne):
            told[each.job.id] = each.job, each.message
        else:
            decided.append((type(each).__name__, *(getattr(each, field.name) for field in fields(each))))
    return decided, told


def check(seed: int) -> int:
    history, memory, number = History(seed), SchedulerMemory(), 0
    for _ in range(PASSES):
        seconds = {record.id: history.random.choice([0.0, 100.0]) for record in history.jobs}
        asked = (list(history.jobs), history.nodes, dict(history.gangs), seconds, history.policy, history.limits)
        expected = reference.decide(*asked, history.topology)
        assert in_full(decide(*asked, history.topology, memory=memory)) == in_full(expected), seed
        number += len(expected)
        history.go_on(expected)
    return number


@pytest.mark.full
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, PARTS + 1))])
def test_each_pass_decides_what_the_reference_does(part: int) -> None:
    first = SHORT + (part - 1) * LONG_RUN // PARTS if part else 0
    decided = sum(check(seed) for seed in range(first, first + (LONG_RUN // PARTS if part else SHORT)))
    assert decided > 5 * SHORT  # something has happened
