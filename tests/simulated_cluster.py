"""A cluster that exists on paper: what the scheduler asks of gangs, without Ray, processes or waiting.

Time goes by in seconds. What nodes say is free is a second old, orders take effect with the next second, and a gang
that has lost a worker takes three seconds to go on.
"""

import random
from dataclasses import dataclass, field

from boost_core.config import JobSpec, Shape
from service.gang.status import GangPhase, GangStatus, NodeCapacity, Orders

RECOVERY_SECONDS = 3
DRAIN_SECONDS = 6


@dataclass
class Node:
    cpus: float
    zone: str
    drained_at: int | None = None
    used: float = 0


@dataclass
class Gang:
    """Replicas, each a list of the nodes of its groups."""

    spec: JobSpec
    orders: Orders
    work: int
    replicas: list[list[str]] = field(default_factory=list)
    layout: tuple[int, int] = (0, 0)
    shape: Shape | None = None
    phase: GangPhase = GangPhase.STARTING
    busy: int = 2  # seconds until it trains


class Cluster:
    """Nodes and gangs. A gang takes what replicas it can get of its target, and trains with what is allowed of them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes_by_name: dict[str, Node] = {}
        self.names = (f"node-{number}" for number in range(10_000))
        self.gangs: dict[tuple[str, int], Gang] = {}
        self.shown: dict[str, float] = {}  # what was free a second ago
        self.now = 0

    def add_node(self, cpus: float | None = None, zone: str | None = None) -> None:
        cpus, zone = cpus or self.random.choice([4, 4, 8]), zone or self.random.choice("aab")
        self.nodes_by_name[next(self.names)] = Node(cpus, zone)

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
        return sum(self.nodes_by_name[name].cpus for name in self.steady())

    def step(self) -> None:
        self.shown = {name: node.cpus - node.used for name, node in self.nodes_by_name.items()}
        for name, node in list(self.nodes_by_name.items()):
            if node.drained_at is not None and self.now >= node.drained_at + DRAIN_SECONDS:
                self.lose_node(name)
        for gang in self.gangs.values():
            self._live(gang)
        assert all(0 <= node.used <= node.cpus + 1e-9 for node in self.nodes_by_name.values())
        self.now += 1

    def _live(self, gang: Gang) -> None:
        if gang.phase in (GangPhase.SUCCEEDED, GangPhase.PAUSED):
            return
        target = gang.orders.target
        if target is None:
            self._release_all(gang, GangPhase.PAUSED)
            return
        if gang.layout != target.layout:
            self._release_all(gang, gang.phase)
            gang.layout, gang.busy = target.layout, RECOVERY_SECONDS
        for replica in list(gang.replicas):
            if any(self.nodes_by_name[name].drained_at is not None for name in replica):
                self._release(gang, replica)
        for replica in gang.replicas[target.data :]:
            self._release(gang, replica)
        while len(gang.replicas) < target.data and (place := self._place(gang)):
            gang.replicas.append(place)
        self._form(gang, target)

    def _form(self, gang: Gang, target: Shape) -> None:
        allowed = [shape for shape in {*gang.orders.allowed, target} if shape.data <= len(gang.replicas)]
        begun = GangPhase.RECOVERING if gang.shape else GangPhase.STARTING
        if not allowed:
            gang.phase, gang.busy = begun if gang.replicas else GangPhase.WAITING, RECOVERY_SECONDS
            return
        if gang.busy:
            gang.busy -= 1
            gang.phase = begun
            return
        gang.shape, gang.phase = max(allowed), GangPhase.TRAINING
        gang.work -= gang.shape.world_size
        if gang.work <= 0:
            self._release_all(gang, GangPhase.SUCCEEDED)

    def _place(self, gang: Gang) -> list[str] | None:
        tensor, pipeline = gang.layout
        strict = gang.spec.resources.placement == "STRICT_PACK"
        each = tensor * (pipeline if strict else 1) * gang.spec.resources.cpus_per_worker
        wanted = gang.spec.resources.node_labels.get("zone")
        taken: list[str] = []
        for _ in range(1 if strict else pipeline):
            open_nodes = [
                name
                for name, node in self.nodes_by_name.items()
                if node.cpus - node.used >= each and node.drained_at is None and wanted in (None, node.zone)
            ]
            if not open_nodes:
                for name in taken:
                    self.nodes_by_name[name].used -= each
                return None
            taken.append(self.random.choice(open_nodes))
            self.nodes_by_name[taken[-1]].used += each
        return taken

    def _release(self, gang: Gang, replica: list[str]) -> None:
        tensor, pipeline = gang.layout
        each = tensor * pipeline * gang.spec.resources.cpus_per_worker / len(replica)
        for name in replica:
            self.nodes_by_name[name].used -= each
        gang.replicas.remove(replica)

    def _release_all(self, gang: Gang, phase: GangPhase) -> None:
        for replica in list(gang.replicas):
            self._release(gang, replica)
        gang.phase = phase

    # The protocol ``Gangs``

    def nodes(self) -> list[NodeCapacity]:
        return [
            NodeCapacity(
                name, {"CPU": node.cpus}, {"CPU": self.shown.get(name, node.cpus)}, {"zone": node.zone},
                node.drained_at is not None,
            )
            for name, node in self.nodes_by_name.items()
        ]  # fmt: skip

    def alive(self) -> set[tuple[str, int]]:
        return set(self.gangs)

    def launch(self, job_id: str, attempt: int, one: JobSpec, orders: Orders, tenant: str) -> None:
        assert not [name for name, _ in self.gangs if name == job_id], "a job has one gang at a time"
        self.gangs[job_id, attempt] = Gang(one, orders, self.random.choice([10, 40, 120]))

    def poll(self, job_id: str, attempt: int, after: int, orders: Orders) -> GangStatus | None:
        gang = self.gangs.get((job_id, attempt))
        if gang is None:
            return None
        gang.orders = orders
        return GangStatus(gang.phase, str(gang.phase), [], gang.shape)

    def end(self, job_id: str, attempt: int) -> None:
        self._release_all(self.gangs.pop((job_id, attempt)), GangPhase.PAUSED)
