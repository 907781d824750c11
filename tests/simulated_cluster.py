"""A cluster that exists on paper, and a record in memory: what the scheduler asks of both, without Ray or waiting.

Time goes by in seconds. What nodes say is free is a second old, orders take effect with the next second, and a gang
that has lost a worker takes three seconds to go on.
"""

import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.plan.machine import NOMINAL, Basis, required_labels
from service.gang.assignment import worker_resources
from service.gang.status import GangPhase, GangStatus, JobTag, NodeCapacity, Orders, PollRequest
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason, next_state

RECOVERY_SECONDS = 3
DRAIN_SECONDS = 6


@dataclass
class Node:
    total: dict[str, float]
    labels: dict[str, str]
    drained_at: int | None = None
    used: Counter[str] = field(default_factory=Counter)

    def free(self) -> dict[str, float]:
        return {name: amount - self.used[name] for name, amount in self.total.items()}


@dataclass
class Gang:
    """Replicas, each a list of the nodes of its groups."""

    spec: JobSpec
    orders: Orders
    work: int
    replicas: list[list[str]] = field(default_factory=list)
    replica_layout: Layout | None = None
    layout: Layout | None = None
    phase: GangPhase = GangPhase.STARTING
    busy: int = 2  # seconds until it trains


class Cluster:
    """Nodes and gangs. A gang takes what replicas it can get of its target, and trains with what is allowed of them.

    Args:
        seed: Of all that happens by chance.
        works: How much a gang may have to do, in seconds of a rank.
    """

    def __init__(self, seed: int, works: Sequence[int] = (10, 40, 120)) -> None:
        self.random, self.works = random.Random(seed), works
        self.nodes_by_name: dict[str, Node] = {}
        self.names = (f"node-{number}" for number in range(10_000))
        self.gangs: dict[tuple[str, int], Gang] = {}
        self.shown: dict[str, dict[str, float]] = {}  # what was free a second ago
        self.now = 0

    def add_node(self, cpus: float | None = None, zone: str | None = None) -> None:
        cpus, zone = cpus or self.random.choice([4, 4, 8]), zone or self.random.choice("aab")
        self.join({"CPU": cpus}, {"zone": zone})

    def join(self, total: dict[str, float], labels: dict[str, str]) -> None:
        self.nodes_by_name[next(self.names)] = Node(total, labels)

    def drain_node(self, name: str) -> None:
        self.nodes_by_name[name].drained_at = self.now

    def steady(self) -> list[str]:
        """Names of the nodes that do not drain."""
        return [name for name, node in self.nodes_by_name.items() if node.drained_at is None]

    def lose_node(self, name: str) -> None:
        """The node is gone, and every replica with a group there."""
        for gang in self.gangs.values():
            for replica in [replica for replica in gang.replicas if name in replica]:
                self._release(gang, replica)
                gang.busy = RECOVERY_SECONDS
        del self.nodes_by_name[name]

    def total(self) -> float:
        return sum(self.nodes_by_name[name].total["CPU"] for name in self.steady())

    def step(self) -> None:
        self.shown = {name: node.free() for name, node in self.nodes_by_name.items()}
        for name, node in list(self.nodes_by_name.items()):
            if node.drained_at is not None and self.now >= node.drained_at + DRAIN_SECONDS:
                self.lose_node(name)
        for gang in self.gangs.values():
            self._live(gang)
        for node in self.nodes_by_name.values():
            assert all(-1e-9 <= node.used[name] <= amount + 1e-9 for name, amount in node.total.items())
        self.now += 1

    def _live(self, gang: Gang) -> None:
        if gang.phase in (GangPhase.SUCCEEDED, GangPhase.PAUSED):
            return
        target = gang.orders.target
        if target is None:
            self._release_all(gang, GangPhase.PAUSED)
            return
        if gang.replica_layout != target.per_replica:
            self._release_all(gang, gang.phase)
            gang.replica_layout, gang.busy = target.per_replica, RECOVERY_SECONDS
        for replica in list(gang.replicas):
            if any(self.nodes_by_name[name].drained_at is not None for name in replica):
                self._release(gang, replica)
        for replica in gang.replicas[target.dp :]:
            self._release(gang, replica)
        while len(gang.replicas) < target.dp and (place := self._place(gang)):
            gang.replicas.append(place)
        self._form(gang, target)

    def _form(self, gang: Gang, target: Layout) -> None:
        allowed = [layout for layout in {*gang.orders.allowed, target} if layout.dp <= len(gang.replicas)]
        begun = GangPhase.RECOVERING if gang.layout else GangPhase.STARTING
        if not allowed:
            gang.phase, gang.busy = begun if gang.replicas else GangPhase.WAITING, RECOVERY_SECONDS
            return
        if gang.busy:
            gang.busy -= 1
            gang.phase = begun
            return
        gang.layout, gang.phase = max(allowed), GangPhase.TRAINING
        gang.work -= gang.layout.world_size
        if gang.work <= 0:
            self._release_all(gang, GangPhase.SUCCEEDED)

    def _place(self, gang: Gang) -> list[str] | None:
        """Take room for a replica, wherever there is some; the node of each of its groups."""
        strict = gang.spec.resources.placement == "STRICT_PACK"
        parts = 1 if strict else gang.replica_layout.pp
        each, wanted = self._of_group(gang, parts), required_labels(gang.spec.resources) | dict(gang.orders.near)
        taken: list[str] = []
        for _ in range(parts):
            open_nodes = [
                name
                for name, node in self.nodes_by_name.items()
                if node.drained_at is None
                and wanted.items() <= node.labels.items()
                and node.labels.get(ACCELERATOR_LABEL) not in gang.orders.avoid
                and all(node.free().get(resource, 0) >= amount for resource, amount in each.items())
            ]
            if not open_nodes:
                self._give_back(taken, each)
                return None
            taken.append(self.random.choice(open_nodes))
            self.nodes_by_name[taken[-1]].used.update(each)
        return taken

    def _of_group(self, gang: Gang, parts: int) -> dict[str, float]:
        ranks = gang.replica_layout.world_size
        return {name: amount * ranks / parts for name, amount in worker_resources(gang.spec).items()}

    def _give_back(self, names: Sequence[str], each: Mapping[str, float]) -> None:
        for name in names:
            self.nodes_by_name[name].used.subtract(each)

    def _release(self, gang: Gang, replica: list[str]) -> None:
        self._give_back(replica, self._of_group(gang, len(replica)))
        gang.replicas.remove(replica)

    def places(self, job_id: str) -> dict[str, Counter[str]]:
        """What a job's gang takes of which nodes."""
        found: dict[str, Counter[str]] = {}
        for gang in (gang for (name, _), gang in self.gangs.items() if name == job_id):
            for replica in gang.replicas:
                for node in replica:
                    found.setdefault(node, Counter()).update(self._of_group(gang, len(replica)))
        return found

    def _release_all(self, gang: Gang, phase: GangPhase) -> None:
        for replica in list(gang.replicas):
            self._release(gang, replica)
        gang.phase = phase

    # The protocol ``Gangs``

    def nodes(self) -> list[NodeCapacity]:
        return [
            NodeCapacity(
                name, dict(node.total), dict(self.shown.get(name, node.total)), node.labels,
                node.drained_at is not None,
            )
            for name, node in self.nodes_by_name.items()
        ]  # fmt: skip

    def alive(self) -> set[tuple[str, int]]:
        return set(self.gangs)

    def launch(self, tag: JobTag, one: JobSpec, orders: Orders, basis: Basis = NOMINAL) -> None:
        assert not [name for name, _ in self.gangs if name == tag.job_id], "a job has one gang at a time"
        self.gangs[tag.job_id, tag.attempt] = Gang(one, orders, self.random.choice(self.works))

    def poll(self, requests: Sequence[PollRequest]) -> list[GangStatus | None]:
        return [self._poll(request) for request in requests]

    def _poll(self, request: PollRequest) -> GangStatus | None:
        gang = self.gangs.get(request.gang)
        if gang is None:
            return None
        gang.orders = request.orders
        return GangStatus(gang.phase, str(gang.phase), [], gang.layout)

    def end(self, job_id: str, attempt: int) -> None:
        self._release_all(self.gangs.pop((job_id, attempt)), GangPhase.PAUSED)


class MemoryStore:
    """What the reconciler needs of the store, in memory; jobs that have ended are forgotten."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.reasons: Counter[Reason] = Counter()
        self._arrivals = itertools.count(1)

    def submit(self, job_id: str, one: JobSpec, tenant: str = "default", queue: str = "default") -> None:
        now = datetime.now(UTC)
        self.jobs[job_id] = JobRecord(
            id=job_id, tenant=tenant, submitted_by="anonymous", queue=queue, name="job", spec=one,
            state=JobState.QUEUED, reason=Reason.SUBMITTED, message="", attempt=0,
            cancel_requested=False, checkpoint_url="checkpoints", submitted_at=now, queued_at=now, started_at=None,
            finished_at=None, progress=None, evaluation=None, checkpoint=None, version=0, arrival=next(self._arrivals),
        )  # fmt: skip

    def update(self, job_id: str, **values) -> None:
        self.jobs[job_id] = self.jobs[job_id].model_copy(update={"version": self.jobs[job_id].version + 1, **values})

    def active(self) -> list[JobRecord]:
        return [job for job in self.jobs.values() if not job.finished]

    def get(self, job_id: str) -> JobRecord:
        return self.jobs[job_id]

    def change(self, job_id: str, reason: Reason, message: str, *, attempt: int | None = None) -> JobRecord:
        job = self.jobs[job_id]
        values = {"state": next_state(job.state, reason), "reason": reason, "message": message}
        self.update(job_id, **values, attempt=job.attempt if attempt is None else attempt)
        self.reasons[reason] += 1
        return self.jobs[job_id]

    def explain(self, messages: Mapping[str, str]) -> None:
        for job_id, message in messages.items():
            self.update(job_id, waiting_for=message, version=self.jobs[job_id].version)  # as in the store

    def keep_snapshot(self, *_) -> None: ...

    def forget_old_requests(self) -> None: ...

    def last_sequences(self, job_ids: Collection[str]) -> dict[str, int]:
        return dict.fromkeys(job_ids, 0)
