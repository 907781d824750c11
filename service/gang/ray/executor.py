"""Executes a gang's decisions on Ray: actors, placement groups and object refs."""

import socket
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, assert_never

import ray
from ray import ObjectRef
from ray.actor import ActorProxy
from ray.exceptions import RayError

from boost_core.config import JobSpec
from service.gang.assignment import End, GangContext, RankEnd, selects
from service.gang.control import port
from service.gang.ray.private_api import draining_nodes, free_resources, node_table
from service.gang.ray.replica import RayReplica, WorkerHandle, next_number
from service.gang.ray.spare import RaySpare

if TYPE_CHECKING:
    from service.gang.ray.supervisor import Supervisor

ANSWER_SECONDS = 5.0  # for a worker to answer
NODES_SECONDS = 1.0  # between two looks at the cluster's nodes
PROBE_SECONDS = 1.0  # for a node to take a connection
HALTS = frozenset({End.HALTED, End.STORED})

T = TypeVar("T")


class RayExecutor:
    """Executes the decisions of one gang, a run of Ray Train, and observes the results. For use by one thread.

    Args:
        spec: The job.
        supervisor: Handle of the ``Supervisor`` actor, for the workers.
        context: Settings of the service that workers need.
    """

    def __init__(self, spec: JobSpec, supervisor: ActorProxy["Supervisor"], context: GangContext) -> None:
        from service.gang.ray_train.mirror import TrainRun  # not needed by the service's own process

        self._supervisor, self._context = supervisor, context
        self._run = TrainRun(spec, context)
        self._replicas: dict[int, RayReplica] = {}
        self._spare: RaySpare | None = None
        self._ends: dict[ObjectRef[RankEnd], tuple[int, int]] = {}  # of each generation and rank
        self._generation = 0
        self._halts = False  # whether its ranks that have stopped were told to
        self._nodes, self._looked = cluster_nodes(), time.monotonic()

    def ended(self) -> list[port.RankEnded]:
        """Return the ranks whose training has ended since the last call."""
        self._run.check()
        over = [port.RankEnded(*self._ends.pop(end), _result(end)) for end in _there(self._ends, 0)]
        ended = [each for each in over if each.generation == self._generation]
        self._halts &= all(each.end is not None and each.end.how in HALTS for each in ended)
        if ended and self._halts and all(generation != self._generation for generation, _ in self._ends.values()):
            self._run.halted()
        return over

    def observe(self) -> port.Observed:
        """Return the present state; that of the nodes is at most a second old."""
        if time.monotonic() >= self._looked + NODES_SECONDS:
            self._nodes, self._looked = cluster_nodes(), time.monotonic()
        replicas = {number: replica.status() for number, replica in self._replicas.items()}
        return port.Observed(replicas, *self._nodes, self._spare.status() if self._spare else None)

    def execute(self, decision: port.Decision) -> port.Answer | None:
        """Execute a decision; if it is a question, return the answer within seconds."""
        match decision:
            case port.StartReplica(number=number):
                self._replicas[number] = RayReplica(decision, self._supervisor, self._context)
            case port.RemoveReplica(number=number):
                self._replicas.pop(number).remove()
            case port.ReplaceWorker(worker=number):
                replica = next(each for each in self._replicas.values() if self._worker(number) in each.workers)
                replica.replace(self._worker(number))
            case port.KillWorkers(workers=numbers, stopped=stopped):
                for worker in self._some(numbers):
                    worker.kill(stopped)
            case port.StartTraining():
                self._train(decision)
            case port.HaltTraining(workers=numbers, store=store):
                for worker in self._some(numbers):
                    worker.actor.halt.remote(store)
            case port.AbortTraining(workers=numbers):
                for worker in self._some(numbers):
                    worker.actor.abort.remote()
            case port.SendCommand(worker=number, command=command):
                self._worker(number).actor.command.remote(command)
            case port.StartSpare(node=node):
                self._spare = RaySpare(next_number(), node, self._context)
            case port.CopyToSpare(generation=generation, workers=workers):
                if self._spare is not None:
                    actors = {rank: self._worker(number).actor for rank, number in workers.items()}
                    self._spare.copy(generation, actors)
            case port.EndSpare():
                self._end_spare()
            case port.Finish():
                self._end_spare()
                self._run.finish(decision)
                for replica in self._replicas.values():
                    replica.remove()
                self._replicas.clear()
            case port.Prepare():
                return self._prepare(decision)
            case port.Probe():
                return self._probe(decision)
            case port.FindIdleNodes():
                return port.IdleNodesFound(idle_nodes(decision))
            case port.DumpStacks(workers=numbers):
                return port.StacksDumped(
                    _answers({worker.number: worker.actor.stacks.remote() for worker in self._some(numbers)})
                )
            case port.MeasureMemory(workers=numbers):
                return port.MemoryMeasured(
                    _answers({worker.number: worker.actor.free_memory.remote() for worker in self._some(numbers)})
                )
            case _:
                assert_never(decision)
        return None

    def show(self, message: str) -> None:
        """Show the gang's state to people who look at the cluster; called repeatedly."""
        self._run.say(message)

    def _end_spare(self) -> None:
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _some(self, numbers: Collection[int]) -> list[WorkerHandle]:
        return [worker for replica in self._replicas.values() for worker in replica.workers if worker.number in numbers]

    def _worker(self, number: int) -> WorkerHandle:
        (worker,) = self._some([number])
        return worker

    def _prepare(self, question: port.Prepare) -> port.Prepared:
        try:
            rendezvous = ray.get(self._worker(question.first).actor.rendezvous.remote(), timeout=ANSWER_SECONDS)
        except RayError as error:
            return port.Prepared(None, type(error).__name__, {})
        asked = {worker.number: worker.actor.indexes.remote() for worker in self._some(question.owners)}
        if self._spare is not None and self._spare.number in question.owners:
            asked[self._spare.number] = self._spare.actor.indexes.remote()
        return port.Prepared(rendezvous, "", _answers(asked))

    def _probe(self, question: port.Probe) -> port.Probed:
        asked = {worker.number: worker.actor.place.remote() for worker in self._some(question.workers)}
        silent, dead = lost_nodes(question.nodes)
        places = {worker.number: worker.status().place for worker in self._some(question.workers)}
        unreachable = {number for number, place in places.items() if place and place.node in silent | dead}
        _there([answer for number, answer in asked.items() if number not in unreachable], ANSWER_SECONDS)
        return port.Probed(frozenset(_answers(asked, 0)), frozenset(silent), frozenset(dead))

    def _train(self, start: port.StartTraining) -> None:
        workers = {worker.number: worker for replica in self._replicas.values() for worker in replica.workers}
        actors: dict[int, Any] = {number: worker.actor for number, worker in workers.items()}
        if self._spare is not None:
            actors[self._spare.number] = self._spare.actor  # it is read from like a worker
        needed = set(start.recovery.owners.values()) if start.recovery else set()
        recovery, owners = ray.put(start.recovery), ray.put({number: actors[number] for number in needed})
        for number, assignment in zip(start.workers, start.assignments, strict=True):
            end = workers[number].actor.train.remote(assignment, recovery, owners)
            self._ends[end] = assignment.generation, assignment.rank
        self._generation, self._halts = start.assignments[0].generation, True
        self._run.form(self._generation, [workers[number].as_run_worker() for number in start.workers])


def cluster_nodes() -> tuple[frozenset[str], dict[str, float | None]]:
    """Return the alive nodes, and when nodes will go away on the monotonic clock; ``None`` if no time is given."""
    since_1970 = time.time() - time.monotonic()
    leaving = {node: None if at is None else at - since_1970 for node, at in draining_nodes().items()}
    return frozenset(node["NodeID"] for node in node_table() if node["Alive"]), leaving


def idle_nodes(wanted: port.FindIdleNodes) -> tuple[str, ...]:
    """Return suitable idle nodes, the least used first."""
    free, taken = free_resources(), {}
    for node in node_table():
        left = free.get(node["NodeID"], {})
        enough = all(left.get(name, 0) >= amount for name, amount in wanted.resources.items())
        if node["Alive"] and enough and selects(wanted.selector, node["Labels"]):
            taken[node["NodeID"]] = sum(node["Resources"].get(name, 0) - left[name] for name in wanted.resources)
    return tuple(sorted(taken, key=lambda node: (taken[node], node)))


def lost_nodes(nodes: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the lost ones of these nodes: those whose raylets accept no connection, and those known to be dead."""
    entries = [entry for entry in node_table() if entry["NodeID"] in nodes]
    silent = {entry["NodeID"] for entry in entries if entry["Alive"] and not _takes_connections(entry)}
    return silent, {entry["NodeID"] for entry in entries if not entry["Alive"]}


def _takes_connections(node: Mapping[str, object]) -> bool:
    address = str(node["NodeManagerAddress"]), int(str(node["NodeManagerPort"]))
    try:
        with socket.create_connection(address, PROBE_SECONDS):
            return True
    except OSError:
        return False


def _answers(asked: Mapping[int, ObjectRef[T]], seconds: float = ANSWER_SECONDS) -> dict[int, T]:
    """Return answers by worker, without workers that are gone or did not answer in time."""
    there = set(_there(asked.values(), seconds))
    results = {number: _result(answer) for number, answer in asked.items() if answer in there}
    return {number: result for number, result in results.items() if result is not None}


def _there(answers: Iterable[ObjectRef[T]], seconds: float) -> list[ObjectRef[T]]:
    waited_for = list(answers)
    return ray.wait(waited_for, num_returns=len(waited_for), timeout=seconds)[0] if waited_for else []


def _result(answer: ObjectRef[T]) -> T | None:
    """Return the result of a completed call; ``None`` if the worker is gone."""
    try:
        return ray.get(answer)
    except RayError:
        return None
