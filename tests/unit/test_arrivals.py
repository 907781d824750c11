"""Thousands of jobs of several tenants come, are paused, cancelled and end; what must hold is checked in every pass."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.plan.report import step_seconds
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from service.scheduler import reconcile
from service.scheduler.cluster_snapshot import Action, Gang, Launch, Resize, ResizePolicy
from service.scheduler.quotas import Limits
from service.scheduler.reconcile import Reconciler
from tests import brute_force
from tests.jobs import tiny_job
from tests.scheduling import messages
from tests.simulated_cluster import Cluster, MemoryStore

MOST_ACTIVE = 30  # no more come while so many are there
POLICY = ResizePolicy(cooldown_seconds=12, settle_seconds=3, patience_seconds=12)
PASS_SECONDS = 4
WORKS = (5, 15, 50, 150)
# The longest that a gang lasts: its work at one rank, as long again for its start and changes of its layout.
GANG_SECONDS = 2 * max(WORKS)
# Where a job may have to wait in turn, each time for all gangs that are there: its quotas of CPUs and of GPUs, as its
# tenant's and as its queue's, and the nodes.
TURNS = 5


def spec(tensor: int, low: int, high: int | None = None, **settings) -> JobSpec:
    elasticity = {"data_parallel_size": {"min": low, "max": high}} if high else None
    return tiny_job(
        "corpus", "checkpoints", parallelism={"tensor_parallel_size": tensor, "data_parallel_size": low},
        training={"global_batch_size": 48}, elasticity=elasticity, priority=settings.pop("priority", 0),
        resources=settings,
    )  # fmt: skip


def large(preset: str, micro_batch: int, *tensors: int, **settings) -> JobSpec:
    """One that fits some GPUs at some of its layouts."""
    return JobSpec.model_validate(
        {
            "name": "large",
            "model": {"preset": preset, "vocab_size": 32_000},
            "parallelism": {"tensor_parallel_size": tensors[0]},
            "training": {
                "steps": 8, "global_batch_size": 48, "micro_batch_size": micro_batch, "sequence_length": 2048,
                "precision": "bf16",
            },
            "resources": GPU | settings,
            "elasticity": {"data_parallel_size": {"max": 4}, "layouts": [[tensor, 1] for tensor in tensors]},
        }
    )  # fmt: skip


GPU, H100, ZONE = (
    {"gpus_per_worker": 1},
    {"gpus_per_worker": 1, "accelerator_type": "H100"},
    {"node_labels": {"zone": "b"}},
)
SIZES = [
    spec(1, 1), spec(1, 2), spec(1, 3), spec(1, 8), spec(1, 2, 8), spec(1, 1, cpus_per_worker=4),
    spec(1, 1, **ZONE), spec(1, 1, 4, **ZONE),
    spec(1, 1, **GPU), spec(1, 2, **GPU), spec(2, 1, **GPU), spec(4, 1, **GPU), spec(1, 6, **GPU),
    spec(1, 1, 4, **GPU), spec(2, 1, 3, **GPU), spec(1, 2, placement="SPREAD", **GPU),
    spec(1, 1, **H100), spec(2, 2, **H100), spec(4, 2, **H100), spec(1, 12, **H100), spec(4, 1, 3, **H100),
    spec(4, 6, **GPU),  # never fits
    # Ranks of 77, 73, 70, 66 GB; 44, 42, 40.0, 38; 27, …; and of 90, 82, 76, 69; 49, 45, 42, 38; 29, …
    large("3b", 8, 1), large("3b", 8, 2), large("3b", 8, 1, 2, 4), large("3b", 8, 2, 1),
    large("7b", 4, 1), large("7b", 4, 1, 2), large("7b", 4, 2, 4, accelerator_type="H100"),
    large("3b", 8, 2, 1, accelerator_type="A100-40G"), large("7b", 4, 1, accelerator_type="L4"),
]  # fmt: skip
SPECS = [size.model_copy(update={"priority": priority}) for size in SIZES for priority in (0, 0, 0, 0, 0, 0, 2, 5)]
TENANTS, QUEUES = ("alpha", "beta", "gamma"), ("default", "batch")


@dataclass
class Waiting:
    """How long a job has waited, and who came before it meanwhile."""

    since: int
    before: set[str] = field(default_factory=set)


class Simulation:
    """Jobs, nodes and quotas, and what must hold."""

    def __init__(self, seed: int, arrivals: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.store = Cluster(seed, WORKS), MemoryStore()
        self.random = self.cluster.random
        self.limits = Limits()
        self.reconciler = Reconciler(self.store, self.cluster, POLICY, lambda: self.cluster.now, lambda: self.limits)
        self.waits: dict[str, Waiting] = {}
        self.arrivals, self.arrived = arrivals, 0
        self.seen: Counter[str] = Counter()
        self._decide = reconcile.decide
        monkeypatch.setattr(reconcile, "decide", self.decide_and_check)
        for total, labels in (
            ({"CPU": 16, "GPU": 8}, {ACCELERATOR_LABEL: "H100", "zone": "a"}),
            ({"CPU": 16, "GPU": 8}, {ACCELERATOR_LABEL: "H100", "zone": "a"}),
            ({"CPU": 8, "GPU": 4}, {ACCELERATOR_LABEL: "A100-40G", "zone": "b"}),
            ({"CPU": 8}, {"zone": "b"}),
        ):
            self.cluster.join({name: float(amount) for name, amount in total.items()}, labels)
        self.change_limits()

    def make_pass(self) -> None:
        self.reconciler.tick()
        for _ in range(PASS_SECONDS):
            self.cluster.step()
        for job in [job for job in self.store.jobs.values() if job.finished]:
            self.seen[job.state] += 1
            self.seen["preempted"] += job.attempt > 1
            del self.store.jobs[job.id]
        self.check_gangs()

    def event(self) -> None:
        jobs = list(self.store.jobs.values())
        kind = self.random.choices(("job", "burst", "cancel", "pause", "limits"), (70, 5, 7, 7, 0.5))[0]
        if kind in ("job", "burst"):
            for _ in range(8 if kind == "burst" else 1):
                self.arrive()
        elif kind == "limits":
            self.change_limits()
        elif jobs and kind == "cancel":
            self.store.update(self.random.choice(jobs).id, cancel_requested=True)
        elif jobs:
            self.pause_or_resume(self.random.choice(jobs))

    def arrive(self) -> None:
        if self.arrived < self.arrivals and len(self.store.jobs) < MOST_ACTIVE:
            self.arrived += 1
            names = self.random.choice(TENANTS), self.random.choice(QUEUES)
            self.store.submit(f"job-{self.arrived:05}", self.random.choice(SPECS), *names)

    def pause_or_resume(self, job: JobRecord) -> None:
        wanted = not job.pause_requested
        self.store.update(job.id, pause_requested=wanted)
        if job.state is JobState.PAUSED and not wanted:
            self.store.change(job.id, Reason.RESUMED_BY_USER, "")

    def change_limits(self) -> None:
        choice = self.random.choice
        self.limits = Limits(
            {"alpha": {"GPU": choice([4, 8, 12])}, "beta": {"GPU": choice([0, 6, 16]), "CPU": choice([10, 24])}},
            {"batch": {"GPU": choice([6, 10, 14])}, "default": choice([{}, {"CPU": 30}])},
        )

    # What must hold

    def decide_and_check(
        self, jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang], *others
    ) -> list[Action]:
        actions = self._decide(jobs, nodes, gangs, *others)
        queue = sorted(jobs, key=attrgetter("queue_order"))
        launched = {action.job.id: action.layout for action in actions if isinstance(action, Launch)}
        chosen = {action.job.id: action.limit for action in actions if isinstance(action, Launch)}
        waiting = [job for job in queue if self.is_queued(job) and job.id not in launched]
        self.check_quotas(jobs, gangs, actions)
        self.check_layouts(actions)
        self.check_reasons(waiting, actions)
        self.check_order(queue, launched)
        self.check_progress(jobs, waiting, launched)
        self.check_patience(queue, waiting)
        self.check_backfill(queue, nodes, gangs, launched, chosen, actions)
        if self.cluster.now % 200 == 0:
            assert self._decide(list(reversed(jobs)), nodes, gangs, *others) == actions, (
                "it depends on more than is told"
            )
        return actions

    @staticmethod
    def is_queued(job: JobRecord) -> bool:
        return not (job.has_gang or job.pause_requested or job.state is JobState.PAUSED)

    def check_quotas(self, jobs: Sequence[JobRecord], gangs: Mapping[str, Gang], actions: Sequence[Action]) -> None:
        """What gangs hold, or may take, is within the quotas, but for what was given out before they were lowered."""
        before = {job.id: gangs[job.id].claimed for job in jobs if job.id in gangs}
        after = dict(before)
        for action in actions:
            if isinstance(action, Launch | Resize):
                after[action.job.id] = max(before.get(action.job.id, 0), action.layout.world_size)
        for name, limits, of_job in (
            *((name, limits, "tenant") for name, limits in self.limits.tenants.items()),
            *((name, limits, "queue") for name, limits in self.limits.queues.items()),
        ):
            concerned = [job for job in jobs if getattr(job, of_job) == name]
            for resource, limit in limits.items():
                old, new = (
                    sum(brute_force.rank_amounts(job).get(resource, 0) * ranks.get(job.id, 0) for job in concerned)
                    for ranks in (before, after)
                )
                assert new <= max(old, limit), (name, resource, new)
                self.seen["full quotas"] += new == limit

    def check_layouts(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch | Resize):
                assert action.layout in brute_force.layouts(action.job, action.limit)

    def check_gangs(self) -> None:
        """Each gang trains with all of a layout or not at all, and has no more than it was told to have."""
        for (job_id, _), gang in self.cluster.gangs.items():
            ranks = (
                sum(place["CPU"] for place in self.cluster.places(job_id).values())
                / gang.spec.resources.cpus_per_worker
            )
            layouts, job = gang.spec.layouts(), self.store.jobs.get(job_id)
            there = [
                brute_force.memory(self.cluster.nodes_by_name[name].labels) for name in self.cluster.places(job_id)
            ]
            for layout in (gang.layout, gang.orders.target, *gang.orders.allowed) if job and there else ():
                assert layout is None or brute_force.needed(job)[layout] <= min(there), f"{job_id} is out of memory"
                self.seen["only on larger GPUs"] += layout is not None and brute_force.needed(job)[layout] > 40e9
            if gang.phase == "TRAINING":
                assert gang.layout in layouts
                assert gang.layout.world_size <= ranks
            if gang.orders.target:
                assert ranks <= max(layout.world_size for layout in (gang.orders.target, gang.layout) if layout)

    def check_reasons(self, waiting: Sequence[JobRecord], actions: Sequence[Action]) -> None:
        told = messages(actions)
        assert Counter(job.id for job, _ in told) == Counter(job.id for job in waiting)
        assert all(message.startswith("needs ") for _, message in told)

    def check_order(self, queue: Sequence[JobRecord], launched: Mapping[str, Layout]) -> None:
        """Of equals nobody starts before who came first."""
        passed: set[tuple] = set()
        for job in filter(self.is_queued, queue):
            equals = (job.tenant, job.queue, job.spec.model_dump_json())
            assert not (job.id in launched and equals in passed), f"{job.id} starts before its equal"
            if job.id not in launched:
                passed.add(equals)

    def startable(self, job: JobRecord) -> bool:
        """Whether a job could start if there were no other."""
        return any(self.shapes_alone(job, limit) for limit in self.memory_limits(job))

    def memory_limits(self, job: JobRecord) -> list[float]:
        """What ranks may need of their GPUs, if the job names no kind."""
        resources = job.spec.resources
        named = resources.accelerator_type or not resources.gpus_per_worker
        return [inf] if named else sorted({*brute_force.BYTES.values(), inf})

    def shapes_alone(self, job: JobRecord, limit: float) -> list[Layout]:
        """Those that a job could start at if there were no other."""
        nodes = [
            NodeCapacity(name, node.total, node.total, node.labels) for name, node in self.cluster.nodes_by_name.items()
        ]
        limits = [self.limits.tenants.get(job.tenant, {}), self.limits.queues.get(job.queue, {})]
        each = brute_force.rank_amounts(job)
        sizes = zip(brute_force.layouts(job, limit), brute_force.groups(job, limit), strict=True)
        return [
            layout
            for layout, (size, count) in sizes
            if all(each.get(name, 0) * size * count <= most for one in limits for name, most in one.items())
            and next(brute_force.places(job, size, count, nodes, limit), None) is not None
        ]

    def best_limit(self, job: JobRecord) -> float:
        """That at which a job would be fastest if it were alone; of equals the lowest."""
        options = self.memory_limits(job)
        if len(options) == 1:
            return options[0]
        ranked = [
            ((step_seconds(job.spec, layout), layout.world_size), limit)
            for limit in self.memory_limits(job)
            for layout in self.shapes_alone(job, limit)
        ]
        return min(ranked)[1] if ranked else inf

    def check_progress(
        self, jobs: Sequence[JobRecord], waiting: Sequence[JobRecord], launched: Mapping[str, Layout]
    ) -> None:
        """On an idle cluster something starts if anything can."""
        shown = self.cluster.shown.items()
        idle = not any(job.has_gang for job in jobs) and all(
            free == self.cluster.nodes_by_name[name].total for name, free in shown
        )  # fmt: skip
        if idle and not launched:
            assert not any(self.startable(job) for job in waiting)
            self.seen["idle"] += 1

    def check_patience(self, queue: Sequence[JobRecord], waiting: Sequence[JobRecord]) -> None:
        """Nobody waits for longer than who came before it may take, one after the other."""
        waits, before = {}, []
        patient = {job.id for job in waiting}
        for job in queue:
            if job.id in patient and self.startable(job):
                waits[job.id] = self.waits.get(job.id) or Waiting(self.cluster.now)
                waits[job.id].before.update(before)
                allowed = (1 + len(waits[job.id].before)) * TURNS * GANG_SECONDS
                assert self.cluster.now - waits[job.id].since <= allowed, f"{job.id} starves"
            if not job.pause_requested:
                before.append(job.id)
        self.waits = waits

    def check_backfill(
        self, queue: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang],
        launched: Mapping[str, Layout], chosen: Mapping[str, float], actions: Sequence[Action],
    ) -> None:  # fmt: skip
        """Who starts before a job that waits for nodes cannot delay it, wherever it will be and whoever ends first."""
        said = {job.id: message for job, message in messages(actions)}
        places = [self.cluster.places(job_id) for job_id in gangs]
        heads: list[JobRecord] = []
        limits = {job.id: chosen.get(job.id) or self.best_limit(job) for job in filter(self.is_queued, queue)}
        for job in filter(self.is_queued, queue):
            before = [head for head in heads if self.shares_nodes(head, job, nodes, limits)]
            if job.id not in launched:
                on_nodes = not ("may hold" in said[job.id] or "nodes to join" in said[job.id])
                if on_nodes and not before:
                    heads.append(job)
                continue
            free = self.free_beside(nodes, places)
            layout = launched[job.id]
            strict = job.spec.resources.placement == "STRICT_PACK"
            size = layout.tp * (layout.pp if strict else 1)
            options = list(brute_force.places(job, size, layout.world_size // size, free, limits[job.id]))
            for head in before:
                self.seen["backfills"] += 1
                harmful = [
                    place for place in options if brute_force.delays(head, nodes, places, place, limits[head.id])
                ]
                assert not harmful, f"{job.id} may delay {head.id}"
            if options:
                places.append(self.random.choice(options))

    @staticmethod
    def shares_nodes(
        one: JobRecord, other: JobRecord, nodes: Sequence[NodeCapacity], limits: Mapping[str, float]
    ) -> bool:
        """Whether there is a node that could take ranks of both."""
        able = [
            {
                node.node_id
                for node in brute_force.usable(nodes, job, limits[job.id])
                if all(
                    node.total.get(name, 0) >= amount * size for name, amount in brute_force.rank_amounts(job).items()
                )
            }
            for job in (one, other)
            for size in (min((size for size, _ in brute_force.groups(job, limits[job.id])), default=1),)
        ]
        return bool(able[0] & able[1])

    @staticmethod
    def free_beside(nodes: Sequence[NodeCapacity], places: Sequence[brute_force.Place]) -> list[NodeCapacity]:
        taken: dict[str, Counter[str]] = {node.node_id: Counter() for node in nodes}
        for place in places:
            for name, amounts in place.items():
                taken[name].update(amounts)
        return [
            NodeCapacity(
                node.node_id, node.total,
                {name: amount - taken[node.node_id][name] for name, amount in node.total.items()}, node.labels,
            )
            for node in nodes
        ]  # fmt: skip


@pytest.mark.parametrize(("seed", "arrivals"), [(4, 750), (1, 2500)])
@pytest.mark.nightly
def test_thousands_of_arrivals(
    seed: int, arrivals: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation(seed, arrivals, monkeypatch)
    while simulation.arrived < arrivals:
        for _ in range(simulation.random.choice((0, 1, 2, 4))):
            simulation.event()
        simulation.make_pass()
    for job in list(simulation.store.jobs.values()):
        if job.pause_requested:
            simulation.pause_or_resume(job)
    deadline = simulation.cluster.now + len(simulation.store.jobs) * GANG_SECONDS
    while any(map(simulation.startable, simulation.store.jobs.values())):
        assert simulation.cluster.now < deadline, f"{list(simulation.store.jobs)} starve"
        simulation.make_pass()
    assert all(job.state in (JobState.QUEUED, JobState.SCHEDULING) for job in simulation.store.jobs.values())
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]
    for what in ("SUCCEEDED", "CANCELLED", "full quotas", "backfills", "preempted", "only on larger GPUs"):
        assert simulation.seen[what] > 10, simulation.seen
