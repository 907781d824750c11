"""A cluster in a page for a gang's controller: nodes, replicas and workers without Ray, processes or time."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from typing import TypeVar

from boost_core.config import JobSpec
from boost_core.messages import Cause, Drill, InterruptionReport, Profile, Report
from boost_core.plan.machine import NOMINAL, Basis
from boost_core.plan.snapshots import SnapshotIndex, SnapshotKey
from service.gang.assignment import End, Message, RankEnd, Rendezvous, WorkerPlace, selects
from service.gang.control import port
from service.gang.control.controller import GangController
from service.gang.control.fault_detection import Heartbeat
from service.gang.control.record import GangRecord
from service.gang.status import Orders
from tests.service.records import a_start, a_step

START_SECONDS = 3.0  # of a worker
LOST_CONNECTION = RankEnd(End.CONNECTION, "lost its connection to another rank")
T = TypeVar("T")


@dataclass
class FakeWorker:
    """One with a state in its memory; ``stuck``: it is there, and does not answer."""

    number: int
    node: str
    up_at: float
    alive: bool = True
    stuck: bool = False
    snapshots: list[SnapshotIndex] = field(default_factory=list)

    @property
    def place(self) -> WorkerPlace:
        return WorkerPlace(self.node, "10.0.0.1", (), self.number, self.node, str(self.number))


class FakeGang:
    """A controller, and a cluster with room for one replica a node.

    Attributes:
        nodes: Those that are there. The cluster takes all others for alive, too.
        leaving: Those that will go away, and when.
        fail_starts: Whether workers end before they are up.
        bad_nodes: Nodes on which they do.
        start_seconds: How long a worker takes to be up, by node; of others, ``START_SECONDS``.
        free_memory: Of each node.
        copies_to_spare: Whether the spare comes to the end of the copies that it makes, at once.
        spare: The process that keeps a copy on another node; its snapshots are the copy.
        events: All that the controller has been told, with their times.
        decisions: All that it has decided.
    """

    def __init__(self, spec: JobSpec, orders: Orders, nodes: str, basis: Basis = NOMINAL) -> None:
        self.nodes, self._known = set(nodes), set(nodes)
        self.leaving: dict[str, float | None] = {}
        self.fail_starts, self.free_memory = False, 2**40
        self.bad_nodes: set[str] = set()
        self.start_seconds: dict[str, float] = {}
        self.events: list[tuple[port.Event, port.Moment]] = []
        self.decisions: list[port.Decision] = []
        self.now, self.step, self.training = 1000.0, 0, None
        self.record = GangRecord(self._moment())
        self.controller = GangController(spec, orders, self.record, basis)
        self.copies_to_spare = True
        self.spare: FakeWorker | None = None
        self.spare_failure: str | None = None
        self._copying = False
        self._replicas: dict[int, tuple[port.StartReplica, list[FakeWorker]]] = {}
        self._numbers = count(1)

    # What happens

    def tell(self, event: port.Event) -> None:
        """Have an event decided on, and the answers to what is asked then."""
        waiting = deque([event])
        while waiting:
            event, moment = waiting.popleft(), self._moment()
            self.events.append((event, moment))
            decisions = self.controller.handle(event, moment)
            # As the supervisor does nothing about them in the calls of workers and services.
            assert not (decisions and isinstance(event, Message | Orders | Drill | Profile)), (event, decisions)
            for decision in decisions:
                self.decisions.append(decision)
                if answer := self._execute(decision):
                    waiting.append(answer)

    def wait(self, seconds: float) -> None:
        """Let time pass, in which nobody does a step."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            self._place_replicas()
            self.tell(self.observed())

    def train(self, steps: int = 1) -> None:
        """All ranks do steps of a second, and keep their state and a copy of another's."""
        for _ in range(steps):
            self.step += 1
            members, generation = self.members, self._generation
            indexes = [
                SnapshotIndex(SnapshotKey(generation, self.step, rank), len(members), self.step, ())
                for rank in range(len(members))
            ]
            for rank, worker in enumerate(members):
                worker.snapshots = [indexes[rank], indexes[rank - len(members) // 2]]
            self.say(a_step(self.step), Heartbeat(self.step, 1.0, 0.5), kept_step=self.step)
            self.wait(1.0)

    def say(
        self, report: Report | None = None, beat: Heartbeat | None = None, kept_step: int | None = None,
        going_on: str | None = None,
    ) -> None:  # fmt: skip
        """All workers that can send a message, rank 0's with a report; those of a node in the first one's."""
        by_node: dict[str, list[Message]] = defaultdict(list)
        for rank, worker in enumerate(self.members):
            if worker.alive and not worker.stuck:
                reports = [(self._moment().utc, report)] if report and rank == 0 else []
                message = Message(worker.number, rank, self._generation, reports, beat, kept_step, going_on)
                by_node[worker.node].append(message)
        for first, *others in by_node.values():
            self.tell(replace(first, others=tuple(others)))

    def fail(self, rank: int, end: RankEnd) -> None:
        """A rank says how its training is about to end."""
        self.tell(Message(self.members[rank].number, rank, self._generation, [], None, None, failed=end))
        self.tell(self.observed())

    def end(self, end: RankEnd | None, *ranks: int) -> None:
        """The training of some ranks ends; of all, if none is named."""
        generation = self._generation
        for rank in ranks or range(len(self.members)):
            self.tell(port.RankEnded(generation, rank, end))

    def lose(self, *ranks: int) -> None:
        """Workers are gone; the others lose their connections."""
        members, generation = self.members, self._generation
        for rank in ranks:
            members[rank].alive = False
        for rank in sorted(range(len(members)), key=lambda rank: rank not in ranks):
            self.tell(port.RankEnded(generation, rank, None if rank in ranks else LOST_CONNECTION))

    def lose_node(self, node: str) -> None:
        """A node is gone with its workers; the cluster does not know it yet."""
        self.nodes.remove(node)
        self.lose(*(rank for rank, worker in enumerate(self.members) if worker.node == node))

    # What comes of it

    def of(self, kind: type[T]) -> list[T]:
        """Decisions of a kind."""
        return [decision for decision in self.decisions if isinstance(decision, kind)]

    @property
    def members(self) -> list[FakeWorker]:
        """Those that train, by rank."""
        workers = self._workers()
        return [workers[number] for number in self.training.workers] if self.training else []

    @property
    def causes(self) -> list[Cause]:
        """What the gang was interrupted for."""
        reports = [each.report for each in self.record.status(0).reports]
        return [report.cause for report in reports if isinstance(report, InterruptionReport)]

    def observed(self) -> port.Observed:
        """What there is now."""
        replicas = {number: tuple(map(self._status, workers)) for number, (_, workers) in self._replicas.items()}
        return port.Observed(replicas, frozenset(self.nodes | self._known), self.leaving, self._spare_status())

    def _spare_status(self) -> port.SpareStatus | None:
        if self.spare is None:
            return None
        keys = [index.key for index in self.spare.snapshots]
        kept = (keys[0].generation, keys[0].step) if keys else None
        busy = self._copying or self.now < self.spare.up_at
        return port.SpareStatus(self.spare.number, self.spare.node, busy, kept, self.spare_failure)

    def _status(self, worker: FakeWorker) -> port.WorkerStatus:
        if self.now < worker.up_at:
            return port.WorkerStatus(worker.number, node=worker.node)
        if self.fail_starts or worker.node in self.bad_nodes:
            return port.WorkerStatus(worker.number, failure="out of memory", node=worker.node)
        return port.WorkerStatus(worker.number, worker.place, node=worker.node)

    @property
    def _generation(self) -> int:
        return self.training.assignments[0].generation if self.training else 0

    def _moment(self) -> port.Moment:
        return port.Moment(self.now, datetime.fromtimestamp(self.now, UTC))

    def _workers(self) -> dict[int, FakeWorker]:
        return {worker.number: worker for _, workers in self._replicas.values() for worker in workers}

    def _place_replicas(self) -> None:
        for number, (wanted, workers) in self._replicas.items():
            taken = {each.node for other, each in self._members_of_replicas() if other.keep_on == wanted.keep_on}
            where = wanted.selector.get("ray.io/node-id", "")
            allowed = {node for node in self.nodes if selects({"id": where} if where else {}, {"id": node})}
            free = wanted.keep_on[:1] or sorted(allowed - taken - self.leaving.keys())
            if not workers and free:
                parallelism = wanted.spec.parallelism
                ranks = parallelism.tensor_parallel_size * parallelism.pipeline_parallel_size
                self._replicas[number][1].extend(self._started(free[0]) for _ in range(ranks))

    def _members_of_replicas(self) -> Iterator[tuple[port.StartReplica, FakeWorker]]:
        return ((wanted, worker) for wanted, workers in self._replicas.values() for worker in workers)

    def _started(self, node: str) -> FakeWorker:
        return FakeWorker(next(self._numbers), node, self.now + self.start_seconds.get(node, START_SECONDS))

    def _execute(self, decision: port.Decision) -> port.Answer | None:
        workers = self._workers()
        there = {number for number, worker in workers.items() if worker.alive and not worker.stuck}
        match decision:
            case port.StartReplica(number=number):
                self._replicas[number] = decision, []
            case port.RemoveReplica(number=number):
                del self._replicas[number]
            case port.ReplaceWorker(worker=replaced):
                for _, each in self._replicas.values():
                    each[:] = [self._started(old.node) if old.number == replaced else old for old in each]
            case port.KillWorkers(workers=numbers):
                for number in numbers:
                    workers[number].alive = False
            case port.StartTraining(recovery=recovery):
                self.training, self.step = decision, recovery.step if recovery else 0
                source = "memory" if recovery else None
                self.say(a_start(self.step).model_copy(update={"resumed_from": source}), kept_step=self.step)
            case port.Prepare(first=first) if first not in there:
                return port.Prepared(None, "ActorDiedError", {})
            case port.Prepare(owners=owners):
                if self.spare is not None and self.spare.node in self.nodes:
                    workers[self.spare.number], there = self.spare, there | {self.spare.number}
                snapshots = {number: workers[number].snapshots for number in owners if number in there}
                return port.Prepared(Rendezvous("10.0.0.1", 1, "secret"), "", snapshots)
            case port.Probe(workers=numbers, nodes=nodes):
                return port.Probed(frozenset(numbers) & there, nodes - self.nodes, frozenset())
            case port.FindIdleNodes(selector=selector):
                taken = {worker.node for worker in workers.values()}
                free = [node for node in self.nodes - taken if selects(selector, {"ray.io/node-id": node})]
                return port.IdleNodesFound(tuple(sorted(free)))
            case port.StartSpare(node=node):
                self.spare, self.spare_failure = self._started(node), None
            case port.EndSpare():
                self.spare, self._copying = None, False
            case port.CopyToSpare(workers=ranks):
                assert self.spare is not None
                self._copying = not self.copies_to_spare
                if self.copies_to_spare:
                    self.spare.snapshots = [workers[number].snapshots[0] for number in ranks.values()]
            case port.DumpStacks(workers=numbers):
                return port.StacksDumped({number: "in a step" for number in numbers if number in there})
            case port.MeasureMemory(workers=numbers):
                return port.MemoryMeasured(dict.fromkeys(numbers, self.free_memory))
            case port.Finish():
                self._replicas.clear()
                self.training = self.spare = None
        return None
