"""The reconciler on a simulated cluster: jobs come and end, nodes come, drain and are lost, users pause and patch."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from service.scheduler import reconcile
from service.scheduler.cluster_snapshot import Action, Gang, Launch, Resize, ResizePolicy
from service.scheduler.reconcile import Reconciler
from tests.jobs import tiny_job
from tests.simulated_cluster import Cluster, MemoryStore

EVENTS = 200  # for each of ten seeds
POLICY = ResizePolicy(cooldown_seconds=12, settle_seconds=3, patience_seconds=12)


def spec(tensor: int, low: int, high: int, **changes) -> JobSpec:
    parallelism = {"tensor_parallel_size": tensor, "pipeline_parallel_size": changes.pop("pipeline", 1)}
    elasticity = {"data_parallel_size": {"min": low, "max": high}, "layouts": changes.pop("layouts", None)}
    return tiny_job(
        "corpus", "checkpoints", parallelism=parallelism, training={"global_batch_size": 48}, elasticity=elasticity,
        **changes,
    )  # fmt: skip


RIGID = [spec(1, 1, 1), spec(1, 3, 3), spec(2, 1, 1), spec(2, 2, 2), spec(4, 1, 1), spec(1, 8, 8)]
ELASTIC = [
    spec(1, 1, 4), spec(1, 2, 8), spec(2, 1, 3), spec(2, 1, 2, layouts=[[2, 1], [1, 1], [1, 2]]),
    spec(1, 1, 2, pipeline=2, resources={"placement": "STRICT_PACK"}),
    spec(2, 1, 2, resources={"cpus_per_worker": 0.5}), spec(1, 1, 2, resources={"node_labels": {"zone": "b"}}),
    spec(1, 1, 3, resources={"placement": "SPREAD"}),
]  # fmt: skip
SPECS = [one.model_copy(update={"priority": priority}) for one in RIGID + ELASTIC for priority in (0, 0, 0, 2, 5)]


class Simulation:
    """All of it, and what must hold in every second."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster, self.store, self.random = Cluster(seed), MemoryStore(), random.Random(seed)
        self.reconciler = Reconciler(self.store, self.cluster, POLICY, lambda: self.cluster.now, topology=["zone"])
        self.grown_at: dict[str, int] = {}
        self.causes: Counter[Cause] = Counter()
        self.jobs, self.events = 0, 0
        self._decide = reconcile.decide
        monkeypatch.setattr(reconcile, "decide", self.decide_and_check)
        for _ in range(3):
            self.cluster.add_node()

    def second(self) -> None:
        self.reconciler.tick()
        queued = [job for job in self.store.jobs.values() if job.state is JobState.QUEUED and not job.pause_requested]
        assert all(job.waiting_for for job in queued), "a job waits and nobody knows why"
        self.cluster.step()
        ended = [job for job in self.store.jobs.values() if job.finished]
        assert all(job.state is JobState.SUCCEEDED for job in ended)
        for job in ended:
            del self.store.jobs[job.id]

    def event(self) -> None:
        """Something happens: mostly jobs come."""
        steady, jobs = self.cluster.steady(), list(self.store.jobs.values())
        match self.random.choices(("job", "lost", "drain", "join", "patch", "pause"), (60, 5, 5, 11, 8, 8))[0]:
            case "job" if len(jobs) < 10:
                self.jobs += 1
                self.store.submit(f"job-{self.jobs}", self.random.choice(SPECS))
            case "lost" if len(steady) > 2:
                self.cluster.lose_node(self.random.choice(steady))
            case "drain" if len(steady) > 2:
                self.cluster.drain_node(self.random.choice(steady))
            case "join" if len(steady) < 5:
                self.cluster.add_node()
            case "patch" if jobs:
                self.patch(self.random.choice(jobs))
            case "pause" if jobs:
                self.pause_or_resume(self.random.choice(jobs))
            case _:
                return
        self.events += 1

    def patch(self, job: JobRecord) -> None:
        sizes = job.spec.elasticity.data_parallel_size
        high = sizes.min if sizes.min == sizes.max else self.random.randint(sizes.min, 6)
        changed = job.spec.elasticity.model_copy(
            update={"data_parallel_size": sizes.model_copy(update={"max": high})}
        )  # fmt: skip
        self.store.update(job.id, spec=job.spec.model_copy(update={"elasticity": changed}))

    def pause_or_resume(self, job: JobRecord) -> None:
        wanted = not job.pause_requested
        self.store.update(job.id, pause_requested=wanted)
        if job.state is JobState.PAUSED and not wanted:
            self.store.change(job.id, Reason.RESUMED_BY_USER, "")

    def decide_and_check(
        self, jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang], *others
    ) -> list[Action]:
        actions = self._decide(jobs, nodes, gangs, *others)
        held = {job_id: gang.allocated for job_id, gang in gangs.items()}
        targets = {job_id: gang.target for job_id, gang in gangs.items()}
        for action in actions:
            if isinstance(action, Launch | Resize):
                gang, targets[action.job.id] = gangs.get(action.job.id), action.layout
                present = gang.layout.world_size if gang and gang.layout else held.get(action.job.id, 0)
                held[action.job.id] = max(present, action.layout.world_size)
            if isinstance(action, Resize):
                self.causes[action.cause] += 1
                self.check_hysteresis(action, gangs[action.job.id].layout)
        self.check_targets(jobs, gangs, targets)
        if any(ranks > (gangs[job_id].allocated if job_id in gangs else 0) for job_id, ranks in held.items()):
            self.check_sums(jobs, nodes, held)
        return actions

    def check_hysteresis(self, action: Resize, present: Layout | None) -> None:
        """No gang grows twice within the cooldown, but for what its user asks."""
        if present is None or action.cause is not Cause.NODE_JOINED:
            return
        assert self.cluster.now - self.grown_at.get(action.job.id, -100) >= POLICY.cooldown_seconds
        self.grown_at[action.job.id] = self.cluster.now

    def check_targets(self, jobs: Sequence[JobRecord], gangs: Mapping[str, Gang], targets: Mapping) -> None:
        """No gang is to be what its job does not allow."""
        for job in jobs:
            target = targets.get(job.id)
            if target and not (job.id in gangs and gangs[job.id].waiting):
                assert target in job.spec.layouts(), (job.id, target)

    def check_sums(self, jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], held: Mapping[str, int]) -> None:
        """When something is given out, there is no more given out in all than there is."""
        zones = {node.labels["zone"] for node in nodes if not node.draining}
        given = sum(
            held.get(job.id, 0) * job.spec.resources.cpus_per_worker
            for job in jobs
            if job.spec.resources.node_labels.get("zone", "a") in zones | {"a"}
        )
        assert given <= self.cluster.total()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_whatever_comes(seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(seed, monkeypatch)
    while simulation.events < EVENTS:
        if simulation.random.random() < 0.5:
            simulation.event()
        simulation.second()
    for job in list(simulation.store.jobs.values()):
        if job.pause_requested:
            simulation.pause_or_resume(job)
    simulation.cluster.add_node(8, "b")
    deadline = simulation.cluster.now + 250 * len(simulation.store.jobs)  # what the longest take alone, one by one
    while simulation.store.jobs:
        assert simulation.cluster.now < deadline, f"{list(simulation.store.jobs)} starve"
        simulation.second()
    simulation.second()
    assert not simulation.cluster.gangs
    assert not any(any(node.used.values()) for node in simulation.cluster.nodes_by_name.values())
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]
