"""A gang's supervisor: the actor that passes events to its controller, and the executor of its decisions on Ray."""

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar, assert_never, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from boost_core.config import JobSpec
from boost_core.messages import WorkerCommand
from service.gang.assignment import End, GangContext, Message, RankEnd, selects
from service.gang.control import port
from service.gang.control.controller import GangController
from service.gang.control.record import GangRecord
from service.gang.ray.actors import RayReplica, RaySpare, WorkerHandle, ready
from service.gang.ray.private_api import draining_nodes, free_resources, node_table
from service.gang.status import GangPhase, GangStatus, Orders

UPDATES = "updates"  # concurrency group of calls that wait, so that others are answered meanwhile
WAITING_CALLS = 4  # calls of services that have died end after a while
WAIT_SECONDS = 10.0
TICK_SECONDS = 0.05
ANSWER_SECONDS = 5.0  # for a worker to answer
PREPARE_SECONDS = 30.0  # for one that has answered: a gang is formed with what it says
NODES_SECONDS = 1.0  # between two looks at the cluster's nodes
LAST_WORDS_SECONDS = 5.0  # for the service to read why the supervisor ends
PROBE_SECONDS, PROBES = 1.0, 64  # for a node to take a connection, and how many are asked at once
HALTS = frozenset({End.HALTED, End.STORED})

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Supervisor:
    """Drives one attempt of a job. All methods but one return at once; decisions are executed in a thread.

    Args:
        spec: The job.
        orders: The first orders.
        context: Settings of the service that workers need.
    """

    def __init__(self, spec: JobSpec, orders: Orders, context: GangContext) -> None:
        context.write_logs()
        runtime: Any = ray.get_runtime_context()
        self._tag = context.tag
        self._changed = threading.Condition()  # guards the controller and the record
        now = port.Moment(time.monotonic(), datetime.now(UTC))
        self._record = GangRecord(now, runtime.get_actor_id(), self._changed.notify_all)
        self._controller = GangController(spec, orders, self._record, context.basis)
        self._executor = RayExecutor(spec, runtime.current_actor, context)
        threading.Thread(target=self._run, name="gang", daemon=True).start()

    def __repr__(self) -> str:
        """Its name in Ray's dashboard."""
        return f"{self._tag}: supervisor"

    @ray.method
    def push(self, event: Message | WorkerCommand) -> None:
        """Handle a worker's message, or, as ``ask``, a request for a drill or a profile."""
        self._handle(event)

    ask = push

    @ray.method
    def poll(self, after_sequence: int, orders: Orders) -> GangStatus:
        """Take orders, and return the status with reports after ``after_sequence``; those up to it are dropped.

        A final phase comes with the last report, never before it.
        """
        self._handle(orders)
        with self._changed:
            return self._record.status(after_sequence)

    @ray.method(concurrency_group=UPDATES)
    def wait_for_update(self, after_sequence: int) -> bool:
        """Wait for reports after ``after_sequence`` or a new status; return whether there are any."""
        with self._changed:
            return self._changed.wait_for(lambda: self._record.has_more(after_sequence), WAIT_SECONDS)

    @ray.method
    def broadcast_from_rank_zero(self, data: str, **_: object) -> str:
        """Answer a rank that reports a checkpoint to Ray Train and asks for the name all ranks agree on: its own.

        Args:
            data: The name that it proposes; only rank 0 reports.
        """
        return data

    def _handle(self, event: port.Event) -> list[port.Decision]:
        with self._changed:
            return self._controller.handle(event, port.Moment(time.monotonic(), datetime.now(UTC)))

    def _run(self) -> None:
        """Train the job until it ends, is paused or fails, and give the record its final status.

        An error here, as when Ray's head is busy, is not the job's: this process ends, and the job gets another gang.
        """
        try:
            while True:
                if any(self._act_on(end) for end in self._executor.ended()) or self._act_on(self._executor.observe()):
                    return
                with self._changed:
                    _, message = self._record.status_text
                self._executor.run.say(message)
                time.sleep(TICK_SECONDS)
        except Exception as error:
            logger.exception("the gang's loop has failed")
            text = f"the gang's supervisor failed: {type(error).__name__}: {error}"
            with self._changed:
                self._record.log("ERROR", text)
                self._record.say(GangPhase.RECOVERING, text)
            time.sleep(LAST_WORDS_SECONDS)
            os._exit(1)

    def _act_on(self, event: port.Event) -> bool:
        """Execute what is decided about an event and the answers to it; return whether the gang has ended."""
        decisions = deque(self._handle(event))
        while decisions:
            decision = decisions.popleft()
            answer = self._executor.execute(decision)
            if isinstance(decision, port.Finish):
                with self._changed:
                    self._record.say(decision.phase, decision.message)
                return True
            if answer:
                decisions.extend(self._handle(answer))
        return False


class RayExecutor:
    """Executes the decisions of one gang, a run of Ray Train, and observes the results. For use by one thread.

    Args:
        spec: The job.
        supervisor: Handle of the supervisor's actor, for the workers.
        context: Settings of the service that workers need.

    Attributes:
        run: The run of Ray Train.
    """

    def __init__(self, spec: JobSpec, supervisor: ActorHandle[Any], context: GangContext) -> None:
        from service.gang.ray_train.mirror import TrainRun  # not needed by the service's own process

        self._supervisor, self._context = supervisor, context
        self.run = TrainRun(spec, context)
        self._replicas: dict[int, RayReplica] = {}
        self._spare: RaySpare | None = None
        self._ends: dict[ray.ObjectRef[RankEnd], tuple[int, int]] = {}  # of each generation and rank
        self._generation = 0
        self._halts = False  # whether its ranks that have stopped were told to
        self._nodes, self._looked = cluster_nodes(), time.monotonic()

    def ended(self) -> list[port.RankEnded]:
        """Return the ranks whose training has ended since the last call."""
        self.run.check()
        over = [port.RankEnded(*self._ends.pop(end), _result(end)) for end in ready(self._ends, 0)]
        ended = [each for each in over if each.generation == self._generation]
        self._halts &= all(each.end is not None and each.end.how in HALTS for each in ended)
        if ended and self._halts and all(generation != self._generation for generation, _ in self._ends.values()):
            self.run.halted()
        return over

    def observe(self) -> port.Observed:
        """Return the present state; that of the nodes is at most a second old."""
        if time.monotonic() >= self._looked + NODES_SECONDS:
            self._nodes, self._looked = cluster_nodes(), time.monotonic()
        replicas = {number: replica.status() for number, replica in self._replicas.items()}
        return port.Observed(replicas, *self._nodes, self._spare.status() if self._spare else None)

    def execute(self, decision: port.Decision) -> port.Answer | None:
        """Execute a decision; if it is a question, return the answer within seconds."""
        by_number = {worker.number: worker for replica in self._replicas.values() for worker in replica.workers}
        match decision:
            case port.StartReplica(number=number):
                self._replicas[number] = RayReplica(decision, self._supervisor, self._context)
            case port.RemoveReplica(number=number):
                self._replicas.pop(number).remove()
            case port.ReplaceWorker(worker=number):
                worker = by_number[number]
                worker.kill()
                replica = next(each for each in self._replicas.values() if worker in each.workers)
                place = replica.workers.index(worker)
                replica.workers[place] = replica.start(place)
            case port.KillWorkers(workers=numbers, stopped=stopped):
                for worker in self._workers(numbers):
                    worker.kill(stopped)
            case port.StartTraining():
                actors: dict[int, Any] = {number: worker.actor for number, worker in by_number.items()}
                if self._spare is not None:
                    actors[self._spare.number] = self._spare.actor  # it is read from like a worker
                needed = set(decision.recovery.owners.values()) if decision.recovery else set()
                recovery, read_from = ray.put(decision.recovery), ray.put({number: actors[number] for number in needed})
                workers, first_on = [by_number[number] for number in decision.workers], dict[str, WorkerHandle]()
                for worker, assignment in zip(workers, decision.assignments, strict=True):
                    assert worker.place is not None  # only workers that are up form a gang
                    first = first_on.setdefault(worker.place.node, worker)
                    relay = None if first is worker else first.actor
                    end = worker.actor.train.remote(assignment, recovery, read_from, relay)
                    self._ends[end] = assignment.generation, assignment.rank
                self._generation, self._halts = decision.assignments[0].generation, True
                self.run.form(self._generation, workers)
            case port.HaltTraining(workers=numbers, store=store):
                for worker in self._workers(numbers):
                    worker.actor.halt.remote(store)
            case port.AbortTraining(workers=numbers):
                for worker in self._workers(numbers):
                    worker.actor.abort.remote()
            case port.SendCommand(worker=number, command=command):
                by_number[number].actor.command.remote(command)
            case port.StartSpare(node=node):
                self._spare = RaySpare(node, self._context)
            case port.CopyToSpare(generation=generation, workers=numbers_by_rank):
                if self._spare is not None:
                    ranks = {rank: by_number[number].actor for rank, number in numbers_by_rank.items()}
                    self._spare.copying = self._spare.actor.copy.remote(generation, ranks)
            case port.EndSpare() | port.Finish():
                if self._spare is not None:
                    ray.kill(cast(ActorHandle[Any], self._spare.actor))
                    self._spare = None
                if isinstance(decision, port.Finish):
                    self.run.finish(decision)
                    for replica in self._replicas.values():
                        replica.remove()
                    self._replicas.clear()
            case port.Prepare(first=first, owners=owners):
                try:
                    rendezvous = ray.get(by_number[first].actor.rendezvous.remote(), timeout=PREPARE_SECONDS)
                except RayError as error:
                    return port.Prepared(None, type(error).__name__, {})
                indexes = {worker.number: worker.actor.indexes.remote() for worker in self._workers(owners)}
                if self._spare is not None and self._spare.number in owners:
                    indexes[self._spare.number] = self._spare.actor.indexes.remote()
                return port.Prepared(rendezvous, "", _answers(indexes, PREPARE_SECONDS))
            case port.Probe(workers=numbers, nodes=nodes):
                places = {worker.number: worker.actor.place.remote() for worker in self._workers(numbers)}
                silent, dead = lost_nodes(nodes)
                last = {worker.number: worker.status().place for worker in self._workers(numbers)}
                unreachable = {number for number, place in last.items() if place and place.node in silent | dead}
                ready([answer for number, answer in places.items() if number not in unreachable], ANSWER_SECONDS)
                answering = frozenset(_answers(places, 0))
                silent -= {place.node for number, place in last.items() if place and number in answering}
                return port.Probed(answering, frozenset(silent), frozenset(dead))
            case port.FindIdleNodes():
                free, used = free_resources(), {}
                for row in node_table():
                    left, total = free.get(row["NodeID"], {}), row["Resources"]
                    enough = all(left.get(name, 0) >= amount for name, amount in decision.resources.items())
                    if row["Alive"] and enough and selects(decision.selector, row["Labels"]):
                        used[row["NodeID"]] = sum(total.get(name, 0) - left[name] for name in decision.resources)
                return port.IdleNodesFound(tuple(sorted(used, key=lambda each: (used[each], each))))
            case port.DumpStacks(workers=numbers):
                stacks = {worker.number: worker.actor.stacks.remote() for worker in self._workers(numbers)}
                return port.StacksDumped(_answers(stacks))
            case port.MeasureMemory(workers=numbers):
                memory = {worker.number: worker.actor.free_memory.remote() for worker in self._workers(numbers)}
                return port.MemoryMeasured(_answers(memory))
            case _:
                assert_never(decision)
        return None

    def _workers(self, numbers: Collection[int]) -> list[WorkerHandle]:
        return [worker for replica in self._replicas.values() for worker in replica.workers if worker.number in numbers]


def cluster_nodes() -> tuple[frozenset[str], dict[str, float | None]]:
    """Return the alive nodes, and when nodes will go away on the monotonic clock; ``None`` if no time is given."""
    since_1970 = time.time() - time.monotonic()
    leaving = {node: None if at is None else at - since_1970 for node, at in draining_nodes().items()}
    return frozenset(node["NodeID"] for node in node_table() if node["Alive"]), leaving


def lost_nodes(nodes: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the lost ones of these nodes: those whose raylets accept no connection, and those known to be dead."""

    def accepts(node: Mapping[str, Any]) -> bool:
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    known = [node for node in node_table() if node["NodeID"] in nodes]
    alive = [node for node in known if node["Alive"]]
    with ThreadPoolExecutor(PROBES) as probes:  # lost nodes, a rack at worst, take a second together
        answers = zip(alive, probes.map(accepts, alive), strict=True)
        silent = {node["NodeID"] for node, accepted in answers if not accepted}
    return silent, {node["NodeID"] for node in known if not node["Alive"]}


def _answers(calls: Mapping[int, ray.ObjectRef[T]], seconds: float = ANSWER_SECONDS) -> dict[int, T]:
    """Return answers by worker, without workers that are gone or did not answer in time."""
    ended = set(ready(calls.values(), seconds))
    results = {number: _result(call) for number, call in calls.items() if call in ended}
    return {number: result for number, result in results.items() if result is not None}


def _result(call: ray.ObjectRef[T]) -> T | None:
    """Return the result of a completed call; ``None`` if the worker is gone."""
    try:
        return ray.get(call)
    except RayError:
        return None
