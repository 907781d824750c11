"""A gang's life: executes the moves that ``moves`` decides on, from the first process to the last step."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from boost_core.config import JobSpec, Layout
from boost_core.messages.commands import Drill, WorkerCommand
from boost_core.messages.reports import Cause, Fault, FaultReport, RankTimesReport
from boost_core.plan.snapshots import MemoryState, copy_owners, newest_whole_state
from service.gang.assignment import FAILURES, Assignment, End, MisplacedRanks, RankEnd, SnapshotOwner
from service.gang.cluster_view import ClusterView
from service.gang.context import GangContext
from service.gang.moves import Form, Halt, Keep, Move, Pause, ReplicaView, View, next_move, population
from service.gang.record import GangRecord
from service.gang.replica import CannotStart, Member, Replica, node_selector
from service.gang.reporter import Message
from service.gang.resources import bytes_to_keep, gang_in_words, without_resources, worker_resources
from service.gang.status import GangPhase, Orders
from service.gang.train_tab import TrainTab
from service.gang.watch import GangWatch, RestartLimit

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
ANSWER_SECONDS = 5.0  # for a process to say what it has
STOP_SECONDS = 5.0  # for ranks to stop by themselves once the gang is broken
SILENT_SECONDS = 15.0  # without a word, after which a process is asked whether it is there
SECONDS_TO_HOLD = 5.0, 60.0  # at least and at most, that workers are held for a store without the last checkpoint
SHARE_TO_HOLD = 0.1  # of the time for which it is waited for, between these
SAVE_AGAIN_SECONDS = 30.0  # after a pause or a change of layout that failed because the store was away


class GangFailed(Exception):
    """The job cannot go on."""


@dataclass
class Formation:
    """The gang that trains.

    Attributes:
        generation: Its number.
        replicas: Those that it consists of.
        members: Its processes by rank.
        ends: What each rank's training will have come to.
        watch: Watches its steps.
        halting: What it has been told to halt for.
    """

    generation: int
    replicas: list[int]
    members: list[Member]
    ends: dict[Any, int]
    watch: GangWatch
    halting: Halt | None = None


class Gang:
    """Runs in a thread of its own; orders, messages and commands come from others.

    Args:
        spec: The job.
        orders: The first orders.
        record: Takes what happens.
        supervisor: Handle of the ``Supervisor`` actor, for the processes.
        context: What its processes are told of their surroundings.
    """

    def __init__(
        self, spec: JobSpec, orders: Orders, record: GangRecord, supervisor: Any, context: GangContext
    ) -> None:
        self._spec, self._orders, self._record, self._supervisor = spec, orders, record, supervisor
        self._context, self._train_tab = context, TrainTab(context.tag, spec)
        self._cluster = ClusterView()
        self._limit = RestartLimit(spec.fault_tolerance)
        self._replicas: dict[int, Replica] = {}
        self._formation: Formation | None = None
        self._generation = 0
        self._layout: Layout | None = None
        self._most = 0
        self._stored = False
        self._no_store_before = 0.0
        self._orders_of_layout = orders  # the newest that ask for the layout that the gang has
        self._waits_since: float | None = None
        self._memory_is_lost = False
        self._keep_on: list[list[str]] = []  # by replica, the nodes on which the state is kept without CPUs and GPUs
        self._no_room_before = 0.0  # in the nodes' memory, for that
        self._heard: dict[int, float] = {}  # when each process was heard last
        self._lock = threading.Lock()  # around what the actor's methods touch
        self._commands: list[WorkerCommand] = []

    def order(self, orders: Orders) -> None:
        """Take new orders."""
        with self._lock:
            if orders.target != self._orders.target:
                self._most = 0
            self._orders = orders

    def ask(self, command: WorkerCommand) -> None:
        """Take what the gang is to do besides training."""
        with self._lock:
            self._commands.append(command)

    def hear(self, message: Message) -> None:
        """Take a process's message."""
        now = time.monotonic()
        with self._lock:
            self._heard[message.member] = now
            formation = self._formation
            if formation is None or message.generation != formation.generation or message.rank is None:
                return
            if message.beat:
                formation.watch.beat(message.rank, message.beat, now)
            elif message.reports or message.saving is not None:
                formation.watch.progress(now)
        self._record.take(message.reports, message.kept_step)
        if message.saving and message.rank == 0:  # all ranks hear the same, one a moment after the other
            self._record.saving(message.saving)

    def run(self) -> None:
        """Train the job to its end, or until it is paused or fails; gives the record its final status."""
        try:
            while not self._tick():
                self._show()
                time.sleep(TICK_SECONDS)
        except GangFailed as failure:
            self._finish(GangPhase.FAILED, str(failure))
        except Exception as error:
            logger.exception("the gang's loop has failed")
            self._finish(GangPhase.FAILED, f"the gang's supervisor failed: {type(error).__name__}: {error}")

    def _show(self) -> None:
        if self._layout is None:  # what shows the gang takes seconds of a CPU to start, which its processes need now
            return
        formation = self._formation
        now_formed = (formation.generation, formation.members) if formation else ()
        self._train_tab.show(*self._record.said, *now_formed)

    def _tick(self) -> bool:
        """One round; whether it was the last."""
        self._cluster.look()
        self._populate()
        self._pass_on_commands()
        if self._formation is None:
            return self._execute(next_move(self._view()))
        if self._is_over(self._formation):
            return True
        if self._formation is not None:
            self._look_after(self._formation)
            self._give_back_resources(self._formation)
        if self._formation is not None and self._formation.halting is None:
            return self._execute(next_move(self._view()))
        return False

    def _orders_now(self) -> Orders:
        """The scheduler's; or those before, as long as what is asked for has to go through the store and cannot."""
        with self._lock:
            orders = self._orders
        target, layout = orders.target, self._layout
        if layout is None or (target is not None and target.per_replica == layout.per_replica):
            self._orders_of_layout = orders
            return orders
        # What is in memory alone comes to the store by a gang that writes it, if there are processes for one.
        only_in_memory = self._formation is None and not self._stored and self._record.step > 0
        layouts = {replica.layout for replica in self._replicas.values() if replica.placed}
        refused = time.monotonic() < self._no_store_before
        return self._orders_of_layout if refused or (only_in_memory and layout.per_replica in layouts) else orders

    def _view(self) -> View:
        formation = self._formation
        return View(
            orders=self._orders_now(),
            replicas=[
                ReplicaView(
                    replica.number,
                    replica.layout,
                    replica.placed,
                    self._ready(replica),
                    self._cluster.leaving(replica.nodes()),
                    self._cluster.urgent(replica.nodes()),
                    replica.keeps,
                )
                for replica in self._replicas.values()
            ],
            members=formation.replicas if formation else (),
            settled=formation is not None and self._record.settled,
            layout=self._layout,
            stored=formation is None and self._stored,
            most=self._most,
            finishing=formation is not None and self._record.step >= self._spec.training.steps,
            keeping=bool(self._keep_on),
        )

    def _ready(self, replica: Replica) -> bool:
        try:
            return replica.ready()
        except CannotStart as error:
            raise GangFailed(str(error)) from error

    def _populate(self) -> None:
        view = self._view()
        wanted = population(view)
        selector = node_selector(self._spec, self._cluster.unusable(), view.orders.avoid)
        # What avoids other nodes than are to be avoided by now might wait for ever.
        stale = [
            number for number, replica in self._replicas.items() if not replica.placed and replica.selector != selector
        ]
        for number in {*wanted.give_up, *stale}:
            self._replicas.pop(number).give_up()
        for _ in range(wanted.start):
            assert view.orders.target is not None
            keepers = sum(replica.keeps for replica in self._replicas.values())
            nodes = self._keep_on[keepers % len(self._keep_on)] if self._keep_on else ()
            replica = Replica(self._spec.at(view.orders.target), selector, self._supervisor, self._context, nodes)
            self._replicas[replica.number] = replica

    def _execute(self, move: Move) -> bool:
        match move:
            case Form():
                self._form(move)
            case Halt():
                self._halt(move)
            case Pause():
                self._finish(GangPhase.PAUSED, f"paused after step {self._record.step}")
                return True
            case Keep(waiting=waiting):
                if self._formation is None:
                    self._await(waiting)
        return False

    def _await(self, waiting: bool) -> None:
        now = time.monotonic()
        if waiting:
            self._record.waited(now - (self._waits_since or now))
        self._waits_since = now if waiting else None
        smallest = min((*self._orders.allowed, *filter(None, [self._orders.target])), default=self._layout)
        if smallest is not None:
            gang = gang_in_words(smallest.world_size, worker_resources(self._spec))
            message = f"waits for {gang}" if waiting else f"starting {gang}"
            started = GangPhase.STARTING if self._layout is None else GangPhase.RECOVERING
            self._record.say(GangPhase.WAITING if waiting else started, message)

    # Forming

    def _form(self, move: Form) -> None:
        """Make a gang of some replicas and have it train."""
        self._record.reached("place")
        self._waits_since = None
        try:
            members = [member for number in move.members for member in self._replicas[number].in_order()]
            rendezvous = ray.get(members[0].call("rendezvous"), timeout=ANSWER_SECONDS)
        except MisplacedRanks as error:
            raise GangFailed(str(error)) from error
        except RayError as error:
            message = f"a worker was lost while the gang was formed: {type(error).__name__}"
            self._broken(Cause.WORKER_LOST, message, time.monotonic())
            return
        spec, recovery = self._spec.at(move.layout), self._recovery()
        keeps = bool(self._keep_on)
        if keeps:
            if recovery is None or recovery.step < spec.training.steps:
                self._record.log("WARNING", "the state that was kept for the store is lost; steps are done again")
                self._keep_on = []
                return
            spec = without_resources(spec)
        self._generation += 1
        places = [member.where for member in members if member.where is not None]
        nodes = [place.node for place in places]
        copies = copy_owners(nodes) if spec.fault_tolerance.memory_copy_every_steps and len(nodes) > 1 else []
        watch = GangWatch(spec.fault_tolerance, time.monotonic())
        formation = Formation(self._generation, list(move.members), members, {}, watch)
        with self._lock:
            self._formation = formation
        self._layout, self._stored = move.layout, False
        self._most = max(self._most, move.layout.dp)
        self._record.formed(move.layout, places, makes_copies=bool(copies), keeps=keeps)
        self._memory_is_lost, waited, state = False, self._record.waited_seconds, ray.put(recovery)
        for rank, member in enumerate(members):
            assignment = Assignment(self._generation, spec, rank, rendezvous, tuple(copies), waited)
            formation.ends[member.call("train", assignment, state)] = rank

    def _recovery(self) -> MemoryState[SnapshotOwner] | None:
        """The newest state that is in memory, unless the store has a newer one."""
        if self._memory_is_lost:
            return None
        asked = {
            member.call("indexes"): member.owner
            for replica in self._replicas.values()
            for member in replica.members
            if member.where is not None
        }
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        stores = [(asked[answer], index) for answer in answered if (index := _result(answer)) is not None]
        state = newest_whole_state(stores)
        return state if state is not None and state.step >= self._record.stored_step else None

    # While it trains

    def _look_after(self, formation: Formation) -> None:
        """Report what ranks take; break up a gang that hangs, or of which a process is silent and does not answer."""
        now = time.monotonic()
        with self._lock:
            hanging, slow = formation.watch.hangs(now), formation.watch.newly_slow()
            times = formation.watch.rank_times(len(formation.members), now)
            silent = [
                member for member in formation.members if now - self._heard.get(member.number, now) > SILENT_SECONDS
            ]
        if times is not None:
            self._record.add(RankTimesReport(step=self._record.step, busy_seconds=times))
        for rank in slow:
            message = (
                f"rank {rank.rank} computes {rank.times:.1f} times as long as the median rank, "
                f"{rank.share:.0%} of the step; the others wait for it"
            )
            self._record.add(
                FaultReport(
                    what=Fault.SLOW_RANK, step=self._record.step, rank=rank.rank, share=rank.share, message=message
                )
            )
        if hanging is not None:
            message = f"no step for {hanging:.0f} s; the stacks of all ranks are in the log"
            self._record.add(FaultReport(what=Fault.HANG, step=self._record.step, message=message))
            self._broken(Cause.HANG, message, now, unresponsive=self._dump_stacks(formation))
        elif silent and (unresponsive := self._unresponsive(silent)):
            gone = self._cluster.gone({member.where.node for member in unresponsive if member.where is not None})
            message = f"{len(unresponsive)} workers have been silent for {SILENT_SECONDS:.0f} s and do not answer"
            self._broken(Cause.NODE_LOST if gone else Cause.WORKER_LOST, message, now, unresponsive)

    def _give_back_resources(self, formation: Formation) -> None:
        """Have others keep the state once the store has not taken the last checkpoint for a while.

        These take no CPUs and no GPUs, but memory of the same nodes, which must have it.
        """
        now, waits, waited = (
            time.monotonic(),
            self._spec.checkpoint.final_save_timeout_seconds,
            self._record.waited_seconds,
        )
        least, most = SECONDS_TO_HOLD
        hold = min(most, max(least, SHARE_TO_HOLD * waits))
        if self._keep_on or waited < hold or waits - waited < hold:  # what is about to end is left alone
            return
        if not self._record.settled or formation.halting or now < self._no_room_before or self._layout is None:
            return
        asked = [member.call("free_memory") for member in formation.members]
        ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
        nodes = [member.where.node for member in formation.members if member.where is not None]
        each = bytes_to_keep(self._spec, self._layout)
        if all((_result(free) or 0) >= each * nodes.count(node) for free, node in zip(asked, nodes, strict=True)):
            ranks = self._layout.per_replica.world_size
            self._keep_on = [nodes[first : first + ranks] for first in range(0, len(nodes), ranks)]
        else:
            self._no_room_before = now + most

    def _unresponsive(self, members: Sequence[Member]) -> list[Member]:
        """Those of some processes that do not answer."""
        asked = {member.call("place"): member for member in members}
        if not asked:
            return []
        ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_SECONDS)
        return [member for answer, member in asked.items() if _result(answer) is None]

    def _dump_stacks(self, formation: Formation) -> list[Member]:
        """Put the stacks of all ranks into the log; the processes that do not answer."""
        asked = [member.call("stacks") for member in formation.members]
        ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
        stacks = [_result(answer) for answer in asked]
        for rank, text in enumerate(stacks):
            self._record.log("ERROR", text or "the process does not answer", rank)
        return [member for member, text in zip(formation.members, stacks, strict=True) if text is None]

    def _halt(self, halt: Halt) -> None:
        """Have the gang stop after a step."""
        formation = self._formation
        assert formation is not None
        formation.halting = halt
        for member in formation.members:
            member.call("halt", halt.store)

    def _is_over(self, formation: Formation) -> bool:
        """See to ranks whose training has ended; whether the job has, too."""
        over, _ = ray.wait(list(formation.ends), num_returns=len(formation.ends), timeout=0)
        if not over:
            return False
        ends = {formation.ends[end]: _result(end) for end in over}
        if any(end is None or end.how in FAILURES for end in ends.values()):
            self._fell(formation)
            return False
        if len(over) < len(formation.ends):
            return False
        if all(end is not None and end.how is End.FINISHED for end in ends.values()):
            self._finish(GangPhase.SUCCEEDED, f"trained {self._spec.training.steps} steps")
            return True
        self._halted(formation, stored=all(end is not None and end.how is End.STORED for end in ends.values()))
        return False

    def _halted(self, formation: Formation, stored: bool) -> None:
        halting = formation.halting
        assert halting is not None
        self._record.interrupted(
            halting.cause, _IN_WORDS.get(halting.cause, "there is room for fewer workers"), self._record.last_sign
        )
        self._record.reached("stop")
        with self._lock:
            self._formation = None
        self._stored = stored
        if halting.store and not stored:
            self._no_store_before = time.monotonic() + SAVE_AGAIN_SECONDS

    # Faults

    def _fell(self, formation: Formation) -> None:
        """A rank has failed or is gone: find out which, and what for."""
        detected = time.monotonic()
        ends = self._stopped(formation)
        lost = [rank for answer, rank in formation.ends.items() if ends[rank] is None and _has_ended(answer)]
        lasting = [end for end in ends.values() if end is not None and end.how is End.LASTING]
        if lasting and not lost:  # what a lost peer sets off may look like a defect
            raise GangFailed(lasting[0].message)
        self._memory_is_lost = any(end is not None and end.how is End.STATE_LOST for end in ends.values())
        places = [formation.members[rank].where for rank in lost]
        gone = self._cluster.gone({place.node for place in places if place is not None})
        ranks = ", ".join(map(str, lost))
        if gone:
            names = ", ".join(sorted(node[:12] for node in gone))
            cause, message = Cause.NODE_LOST, f"node {names} was lost, and with it rank {ranks}"
        elif lost:
            cause = Cause.WORKER_LOST
            message = f"rank {ranks} was lost: its process was killed, crashed, or ran out of memory"
        else:
            # A rank that has lost its connection is not to blame, if another says something else.
            rank, blamed = min(ends.items(), key=lambda item: item[1] is None or item[1].how is End.CONNECTION)
            cause, message = Cause.ERROR, f"rank {rank}: {blamed.message if blamed else 'does not stop'}"
        self._broken(cause, message, detected)

    def _stopped(self, formation: Formation) -> dict[int, RankEnd | None]:
        """What each rank's training came to; ``None``: it is gone, or does not stop by itself."""
        for answer, rank in formation.ends.items():
            if not _has_ended(answer):
                formation.members[rank].call("abort")
        ray.wait(list(formation.ends), num_returns=len(formation.ends), timeout=STOP_SECONDS)
        return {rank: _result(answer) for answer, rank in formation.ends.items()}

    def _broken(self, cause: Cause, message: str, detected: float, unresponsive: Sequence[Member] = ()) -> None:
        """Take note of a fault, and make what is left of the gang fit to be formed again.

        Args:
            cause: What it was.
            message: The same for people.
            detected: When it was seen, on the monotonic clock.
            unresponsive: Processes that do not answer.
        """
        self._record.interrupted(cause, message, detected)
        self._record.log("WARNING", f"{message}; the gang is formed anew")
        for member in unresponsive:
            member.kill_from_outside()  # which the others then notice, and stop
        formation, unhealthy = self._formation, {member.number for member in unresponsive}
        if formation is not None:
            ends = self._stopped(formation)
            unhealthy |= {
                formation.members[rank].number for rank, end in ends.items() if end is None or not end.reusable
            }
        with self._lock:
            self._formation = None
        self._replace_failed(unhealthy)
        self._record.reached("stop")
        if self._limit.exceeded(time.monotonic()):
            policy = self._spec.fault_tolerance
            raise GangFailed(
                f"{policy.max_restarts + 1} faults within {policy.restart_window_seconds:g} s are more than "
                f"fault_tolerance.max_restarts = {policy.max_restarts} allows; the last one: {message}"
            )

    def _replace_failed(self, unhealthy: set[int]) -> None:
        """Give up the replicas on nodes that are gone, and replace processes that are unhealthy or do not answer."""
        gone = self._cluster.gone({node for replica in self._replicas.values() for node in replica.nodes()})
        for number, replica in list(self._replicas.items()):
            if replica.nodes() & gone:
                self._replicas.pop(number).give_up()
        up = [member for replica in self._replicas.values() for member in replica.members if member.where is not None]
        unhealthy |= {
            member.number for member in self._unresponsive([member for member in up if member.number not in unhealthy])
        }
        for replica in self._replicas.values():
            for member in [member for member in replica.members if member.number in unhealthy]:
                member.kill()
                replica.start_again(member)

    def _pass_on_commands(self) -> None:
        """Hand drills and profiles on to the processes that they are for."""
        formation = self._formation
        if formation is None or not self._record.started:
            return
        with self._lock:
            commands, self._commands = self._commands, []
        for command in commands:
            for rank in {command.rank} if isinstance(command, Drill) else set(command.ranks):
                if rank < len(formation.members):
                    self._pass_on(formation, command, rank)
                else:  # the gang has shrunk since it was asked for
                    message = f"no {command.kind}: there is no rank {rank} of {len(formation.members)}"
                    self._record.log("WARNING", message)

    def _pass_on(self, formation: Formation, command: WorkerCommand, rank: int) -> None:
        if command.kind == "drop_node":
            self._drop_node(formation, command)
        elif command.kind == "fill_store":  # the store is written to by all, and asked first by rank 0
            formation.members[0].call("ask", command)
        else:
            formation.members[rank].call("ask", command)

    def _drop_node(self, formation: Formation, drill: Drill) -> None:
        where = formation.members[drill.rank].where
        if where is None:
            return
        if drill.at_step is not None and self._record.step < drill.at_step:
            self.ask(drill)
            return
        self._cluster.quarantine(where.node, drill.seconds)
        for replica in self._replicas.values():
            for member in replica.members:
                if member.where is not None and member.where.node == where.node:
                    member.kill()

    def _finish(self, phase: GangPhase, message: str) -> None:
        for replica in self._replicas.values():
            replica.give_up()
        self._replicas.clear()
        self._train_tab.show_last(phase, message)
        self._record.say(phase, message)


_IN_WORDS = {
    Cause.NODE_DRAINED: "a node will go away",
    Cause.NODE_JOINED: "there is room for more workers",
    Cause.PREEMPTED: "a job of higher priority needs room",
    Cause.LIMITS_CHANGED: "the job's limits were changed",
    Cause.WORKER_BACK: "lost workers have been replaced",
    Cause.PAUSED: "the job is to be paused",
    Cause.WAITING_FOR_STORE: "its resources are given back while the store is waited for",
}


def _has_ended(answer: Any) -> bool:
    return bool(ray.wait([answer], timeout=0)[0])


def _result(answer: Any) -> Any:
    """What a call to a process came to; ``None`` if it has not answered yet, or never will."""
    if not _has_ended(answer):
        return None
    try:
        return ray.get(answer)
    except RayError:
        return None
