"""A gang's life, from its first replica to its last step. Pure: an event and its time in, decisions out.

    between gangs ──▶ preparing ──▶ training ──▶ between gangs, halted with its state in memory
        ▲                 │          │    ▲
        │                 │          ▼    │ all answer
        │                 │      suspecting: it hangs, or a worker is silent
        │                 ▼          ▼
        └─────────── checking ◀── stopping: a rank has failed or is gone

``policy`` decides between gangs and while one trains; the other states wait for an answer or for ranks to stop.
"""

from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import replace
from itertools import count, islice
from typing import assert_never

from boost_core.config import JobSpec, Layout
from boost_core.config.base import counted
from boost_core.messages import Cause, Drill, Fault, FaultReport, Profile, RankTimesReport, SteeredReport, WorkerCommand
from boost_core.plan.machine import NOMINAL, Basis
from boost_core.plan.report import at
from boost_core.plan.snapshots import copy_owners, newest_whole_state, uncopied_ranks
from service.gang import assignment
from service.gang.assignment import FAILURES, Assignment, End, Message, WorkerPlace
from service.gang.control import policy, port
from service.gang.control.fault_detection import GangWatch, NodeWatch, RestartLimit, RestartPauses
from service.gang.control.record import GangRecord
from service.gang.status import GangPhase, Orders

# For ranks to stop by themselves once one has failed or is being killed. A stopped process is killed by a task of Ray's
# on its node, which a busy node takes seconds to start; what is in the memory of those that are late is lost.
STOP_SECONDS = 15.0
SILENT_SECONDS = 15.0  # of silence, after which a worker is probed
MOST_FAILED_STARTS = 5  # of a worker on a node, in a row
START_SECONDS = 180.0  # for a replica's workers to be up; twice as long for each one in a row that did not start
MOST_FAILED_REPLICAS = 3  # that did not start, in a row
AVOID_SECONDS = 60.0, 3600.0  # how long to avoid a node where replicas do not start or GPUs fail: doubled each time
SECONDS_TO_HOLD = 5.0, 60.0  # minimum and maximum time to hold workers while the store refuses the last checkpoint
SHARE_TO_HOLD = 0.1  # of the time that the store is waited for, between these limits
SECONDS_TO_SEND_AGAIN = 30.0  # a change of values that the gang has not made
SAVE_AGAIN_SECONDS = 30.0  # after a pause or a change of layout that failed because the store was unavailable


class GangFailed(Exception):
    """The job cannot continue."""


class GangController:
    """Decides for one attempt of a job. It has no clock: each event carries its time.

    Args:
        spec: The job.
        orders: The first orders.
        record: Records what happens.
        basis: What the scheduler plans the job for.
    """

    def __init__(self, spec: JobSpec, orders: Orders, record: GangRecord, basis: Basis = NOMINAL) -> None:
        self._spec, self._record, self._machine = spec, record, basis.machine(spec)
        self._orders = self._layout_orders = orders  # the newest; those that ask for the gang's present layout
        self._state: policy.State = policy.Idle()
        self._now = 0.0
        self._nodes, self._limit = NodeWatch(), RestartLimit(spec.fault_tolerance)
        self._pauses, self._paused_until = RestartPauses(), 0.0  # no gang is formed before this time
        self._replicas: dict[int, policy.Replica] = {}
        self._replica_numbers = count(1)
        self._failed_replicas = 0  # in a row
        self._failed_on = Counter[str]()  # how many replicas did not start, by node
        self._device_faults = Counter[str]()  # how many gangs a GPU of it has broken, by node
        self._why_elsewhere = ""  # the last one's, for messages
        self._generation = 0
        self._layout: Layout | None = None
        self._most = 0  # most replicas of a gang under these orders
        self._stored = False
        self._no_store_before = 0.0
        self._waits_since: float | None = None
        self._memory_is_lost, self._lost_after = False, -1  # and after which step state was last lost
        self._keep_on: list[list[str]] = []  # by replica, the nodes on which the state is kept without CPUs and GPUs
        self._no_room_before = 0.0  # no memory for that on the nodes before this time
        self._last_message: dict[int, float] = {}  # when each worker sent its last one
        self._heard_until = 0.0  # before this time, no worker of the gang can have been silent for too long
        self._idle_view: tuple[object, ...] | None = None  # of which nothing follows, while all replicas are ready
        self._idle_at = 0.0  # when that was so last
        self._commands: list[WorkerCommand] = []
        self._steers_sent = 0  # number of the newest change of values that the gang's ranks have been given
        self._steers_sent_at = 0.0  # when that, or an older one that they have not made since, was sent
        self._spare = policy.SparePolicy(spec, record)
        self._could_have_spare = False  # whether some node suits a spare copy, as of when a gang of one rank is formed

    @property
    def formation(self) -> policy.Formation | None:
        """The gang that trains or stops."""
        match self._state:
            case policy.Formation() as formation:
                return formation
            case policy.Suspecting() | policy.Stopping() | policy.Checking() as state:
                return state.formation
        return None

    def handle(self, event: port.Event, moment: port.Moment) -> list[port.Decision]:
        """Return what to do about an event, in order; nothing about what workers and services say, only later.

        Args:
            event: The event.
            moment: When it happened; not before the previous event.
        """
        self._record.now, self._now = moment, moment.seconds
        if isinstance(self._state, policy.Finished):
            return []
        try:
            return list(self._decide(event))
        except (GangFailed, assignment.MisplacedRanks) as failure:
            return [self._finish(GangPhase.FAILED, str(failure))]

    def _decide(self, event: port.Event) -> Iterator[port.Decision]:
        match event:
            case Orders():
                self._most = self._most if event.target == self._orders.target else 0
                self._orders = event
            case Drill() | Profile():
                self._commands.append(event)
            case Message():
                for other in event.others:
                    yield from self._decide(other)
                self._last_message[event.worker] = self._now
                gang = self.formation
                if gang is None or event.generation != gang.generation or event.rank is None:
                    return
                if event.beat:
                    gang.watch.beat(event.rank, event.beat, self._now)
                # Not a line in the log: a thread that retries to save writes some for ever, whatever the steps do.
                elif event.going_on is not None or any(report.kind != "log" for _, report in event.reports):
                    gang.watch.progress(self._now)
                if event.kept_step is not None:
                    gang.kept_step = max(gang.kept_step, event.kept_step)
                self._record.take(event.reports, event.kept_step)
                for _, report in event.reports:
                    if isinstance(report, SteeredReport):
                        self._spec = report.applied_to(self._spec)
                if event.going_on and event.rank == 0:  # all ranks hear the same within a moment
                    self._record.saving(event.going_on)
                if event.failed is not None:  # acted on with the next observation: workers' calls carry out nothing
                    gang.failures[event.rank] = event.failed
            case port.Observed():
                yield from self._observed(event)
            case port.RankEnded(generation=generation, rank=rank, end=end):
                if (gang := self.formation) is not None and generation == gang.generation:
                    gang.ends[rank] = end
                    if isinstance(self._state, policy.Stopping):
                        yield from self._check_if_stopped(self._state)
                    elif isinstance(self._state, policy.Formation):
                        yield from self._check_ends(self._state)
            case port.Prepared():
                yield from self._prepared(event)
            case port.Probed():
                yield from self._probed(event)
            case port.StacksDumped(stacks=stacks):
                if isinstance(suspecting := self._state, policy.Suspecting):
                    for rank, worker in enumerate(suspecting.workers):
                        self._record.log("ERROR", stacks.get(worker) or "the process does not answer", rank)
                    yield from self._convict(suspecting, frozenset(suspecting.workers) - stacks.keys())
            case port.MemoryMeasured(free=free):
                if isinstance(formation := self._state, policy.Formation) and self._layout is not None:
                    # Other processes keep the state if there is memory for it on the same nodes.
                    size = assignment.bytes_to_keep(self._spec, self._layout)
                    nodes = [place.node for place in formation.places]
                    room = [free.get(worker, 0) for worker in formation.workers]
                    if all(each >= size * nodes.count(node) for each, node in zip(room, nodes, strict=True)):
                        ranks = self._layout.per_replica.world_size
                        self._keep_on = [nodes[first : first + ranks] for first in range(0, len(nodes), ranks)]
            case port.IdleNodesFound():
                self._could_have_spare = bool(event.nodes)
                if isinstance(self._state, policy.Formation):
                    yield from self._spare.start(event.nodes)
            case _:
                assert_never(event)

    # Many times per second

    def _observed(self, event: port.Observed) -> Iterator[port.Decision]:
        self._nodes.see(event.alive, event.leaving, self._now)
        # An observation is mostly the same as the one before, and so are its workers, which are the same objects then.
        known = ((each, self._replicas[number]) for number, each in event.replicas.items() if number in self._replicas)
        changed = [(replica, new) for new, replica in known if new is not replica.workers and new != replica.workers]
        if self._idle_view is not None and (changed or self._idle_view != self._lasting_view()):
            self._idle_view = None
            for replica in self._replicas.values():  # all were ready until then
                replica.placed_at = self._idle_at
        for replica, workers in changed:
            replica.observe(workers)
        self._spare.observe(event.spare)
        match self._state:
            case policy.Stopping() as stopping:
                yield from self._check_if_stopped(stopping)
            case policy.Idle():
                yield from self._tend_replicas()
                yield from self._act()
            case policy.Formation() as formation if formation.failures:  # the others wait for it in a collective
                yield from self._check_ends(formation)
            case policy.Formation() as formation:
                tended = list(self._tend_replicas()) if self._idle_view is None else []
                yield from tended
                yield from self._tend_training(formation)
                if self._state is formation and formation.halting is None:
                    view = self._lasting_view()
                    if view is None or view != self._idle_view:
                        self._idle_view = None
                        acted = list(self._act())
                        yield from acted
                        if not (tended or acted) and all(each.ready for each in self._replicas.values()):
                            self._idle_view = view
                    self._idle_at = self._now

    def _lasting_view(self) -> tuple[object, ...] | None:
        """What ``_view`` of a training gang follows from if all replicas are ready; ``None`` if also from the time."""
        formation, layout, target = self._state, self._layout, self._orders.target
        if not isinstance(formation, policy.Formation) or formation.halting is not None or self._nodes.leaving:
            return None
        if layout is None or target is None or target.per_replica != layout.per_replica:
            return None
        return (
            formation.generation, self._orders, layout, self._most, bool(self._keep_on), self._record.settled,
            self._record.step >= self._spec.training.steps, len(self._replicas), self._nodes.unusable(self._now),
        )  # fmt: skip

    def _act(self) -> Iterator[port.Decision]:
        action = policy.next_action(self._view())
        if self.formation is None and self._now < self._paused_until and not isinstance(action, policy.Pause):
            return  # meanwhile processes are replaced
        match action:
            case policy.Form():
                self._record.reached("place")
                self._waits_since = None
                workers: dict[int, WorkerPlace] = {}
                for replica in map(self._replicas.__getitem__, action.members):
                    numbers, places = list(replica.up), list(replica.up.values())
                    if not replica.keeps:  # those that do exchange little, wherever they are
                        numbers = [numbers[place] for place in assignment.ordered(places, replica.layout.tp)]
                    workers |= {number: replica.up[number] for number in numbers}
                self._state = policy.Preparing(action, workers)
                unusable = self._nodes.unusable(self._now)
                if len(workers) == 1 and self._spec.fault_tolerance.memory_copy_every_steps:
                    nodes = {place.node for place in workers.values()}
                    yield self._spare.look(1, unusable | nodes, self._orders.avoid)
                spare, owners = self._spare.status, [each for replica in self._replicas.values() for each in replica.up]
                if spare and spare.saved and spare.node not in unusable:  # it has a copy, and may still be there
                    owners.append(spare.number)
                yield port.Prepare(next(iter(workers)), () if self._memory_is_lost else tuple(owners))
            case policy.Halt() if (formation := self.formation) is not None:
                formation.halting = action
                yield port.HaltTraining(formation.workers, action.store)
            case policy.Pause():
                step, stored = self._record.step, max(0, self._record.stored_step)
                lost = "" if self._stored or step <= stored else f"; its steps after {stored} will be repeated"
                yield self._finish(GangPhase.PAUSED, f"paused after step {step}{lost}")
            case policy.Keep(waiting=waiting) if self.formation is None:
                if waiting:
                    self._record.waited(self._now - (self._waits_since or self._now))
                self._waits_since = self._now if waiting else None
                smallest = min((*self._orders.allowed, *filter(None, [self._orders.target])), default=self._layout)
                if smallest is not None:
                    gang = assignment.gang_in_words(smallest.world_size, assignment.worker_resources(self._spec))
                    message = (f"waits for {gang}" if waiting else f"starting {gang}") + self._why_elsewhere
                    started = GangPhase.STARTING if self._layout is None else GangPhase.RECOVERING
                    self._record.say(GangPhase.WAITING if waiting else started, message)

    def _view(self) -> policy.View:
        formation, layout, target = self.formation, self._layout, self._orders.target
        # The scheduler's orders; the previous ones while the new ones need a store that does not answer.
        orders = self._orders
        if layout is None or (target is not None and target.per_replica == layout.per_replica):
            self._layout_orders = orders
        else:
            # State that is only in memory reaches the store through a gang that writes it, if there are workers.
            # They come within some time, or are not there to be had.
            may_come = formation is None and self._now < self._record.last_sign + START_SECONDS
            only_in_memory = may_come and not self._stored and self._record.step > 0
            can_form = any(each.layout == layout.per_replica and each.workers for each in self._replicas.values())
            if self._now < self._no_store_before or (only_in_memory and can_form):
                orders = self._layout_orders
        leaving = self._nodes.leaving
        return policy.View(
            orders=orders,
            replicas=list(self._replicas.values()),
            members=formation.replicas if formation else (),
            settled=formation is not None and self._record.settled,
            layout=layout,
            stored=formation is None and self._stored,
            most=self._most,
            finishing=formation is not None and self._record.step >= self._spec.training.steps,
            keeping=bool(self._keep_on),
            leaving=leaving.keys(),
            urgent={node for node, by in leaving.items() if by <= self._now},
        )

    def _tend_replicas(self) -> Iterator[port.Decision]:
        """Start and remove replicas; replace workers that ended before they were up, or give up their replica."""
        for replica in list(self._replicas.values()):
            if replica.workers and replica.placed_at is None:
                replica.placed_at = self._now
            problem, ended = "", list[int]()
            for place, worker in enumerate(replica.workers):
                if worker.failure is not None:
                    replica.failed_starts[place] += 1
                    if replica.failed_starts[place] >= MOST_FAILED_STARTS:
                        problem = f"a worker ended {MOST_FAILED_STARTS} times while starting: {worker.failure}"
                    ended.append(worker.number)
                elif worker.place is not None:
                    replica.failed_starts.pop(place, None)
            limit = START_SECONDS * 2 ** min(self._failed_replicas, MOST_FAILED_REPLICAS)
            if replica.ready:
                replica.placed_at = self._now
                self._failed_replicas, self._why_elsewhere = 0, ""
            elif replica.placed_at is not None and self._now - replica.placed_at > limit:
                starting = sum(worker.place is None for worker in replica.workers)
                problem = f"{counted(starting, 'worker')} did not start within {limit:g} s; see Ray's logs on the node"
            if not problem:
                yield from map(port.ReplaceWorker, ended)
                continue
            nodes = sorted(replica.starts_on)
            if not nodes or any(self._nodes.quarantined.get(node, 0.0) <= self._now for node in nodes):
                self._failed_replicas += 1  # others that fail on a node which is avoided by now tell nothing new
                too_many = self._failed_replicas >= MOST_FAILED_REPLICAS or not nodes
                if too_many and not isinstance(self._state, policy.Formation):
                    raise GangFailed(problem)
                self._failed_on.update(nodes)
                times = max((self._failed_on[node] for node in nodes), default=1)
                self._why_elsewhere = f"; {self._avoid(nodes, times)}: {problem}"
                self._record.log("WARNING", self._why_elsewhere.removeprefix("; "))
            del self._replicas[replica.number]
            yield port.RemoveReplica(replica.number)

        view = self._view()
        changes, orders = policy.replica_set(view), view.orders
        unusable = {*self._nodes.unusable(self._now), *orders.unusable}
        selector = assignment.node_selector(self._spec, unusable, orders.avoid, orders.near)
        # A replica that avoids nodes which need no longer be avoided might wait forever.
        stale = {each.number for each in self._replicas.values() if not each.workers and each.selector != selector}
        lost = {each.number for each in self._replicas.values() if each.starts_on & set(orders.unusable)}
        for number in {*changes.give_up, *stale, *(lost - set(view.members))}:
            del self._replicas[number]
            yield port.RemoveReplica(number)
        if changes.start:
            assert orders.target is not None
            # Once for all of them, because there may be thousands.
            layout, keepers = orders.target.per_replica, sum(replica.keeps for replica in self._replicas.values())
            spec = at(self._spec, orders.target, self._machine)
            for number in islice(self._replica_numbers, changes.start):
                keep_on = self._keep_on[keepers % len(self._keep_on)] if self._keep_on else []
                keepers += bool(keep_on)
                self._replicas[number] = policy.Replica(number, layout, selector, bool(keep_on))
                yield port.StartReplica(number, spec, selector, keep_on)

    def _avoid(self, nodes: list[str], times: int) -> str:
        """Avoid nodes for a while, twice as long each time, and return that in words."""
        avoid = min(AVOID_SECONDS[0] * 2 ** (times - 1), AVOID_SECONDS[1])
        self._nodes.quarantined |= dict.fromkeys(nodes, self._now + avoid)
        names = ", ".join(node[:12] for node in nodes) or "of the last replica"
        return f"node {names} is avoided for {avoid:g} s"

    # Forming

    def _prepared(self, event: port.Prepared) -> Iterator[port.Decision]:
        """Have the workers train, if they can."""
        if not isinstance(self._state, policy.Preparing):
            return
        form, workers = self._state.form, self._state.workers
        if event.rendezvous is None:
            reason = policy.Break(Cause.WORKER_LOST, f"a worker was lost while the gang was formed: {event.failure}")
            yield self._check(policy.Checking(None, self._now, reason, first=next(iter(workers.values())).node))
            return
        spec = at(self._spec, form.layout, self._machine)
        recovery = newest_whole_state(event.snapshots.items())
        if recovery is not None and recovery.step < self._record.stored_step:
            recovery = None
        if self._keep_on:
            if recovery is None or recovery.step < spec.training.steps:
                self._record.log("WARNING", "the state that was kept for the store is lost; steps will be repeated")
                self._keep_on, self._state = [], policy.Idle()
                return
            # These processes run on CPUs that others leave free.
            resources = spec.resources.model_copy(update={"gpus_per_worker": 0, "cpus_per_worker": 1})
            spec = spec.model_copy(update={"resources": resources})
        self._generation += 1
        places = tuple(workers.values())
        nodes = [place.node for place in places]
        copies = spec.fault_tolerance.memory_copy_every_steps and (len(places) > 1 or self._could_have_spare)
        owners = tuple(copy_owners(nodes)) if copies else ()
        watch = GangWatch(spec.fault_tolerance, self._now)
        uncopied = tuple(uncopied_ranks(nodes, owners))
        self._state = policy.Formation(self._generation, form.members, tuple(workers), places, watch, uncopied)
        self._heard_until = 0.0
        self._layout, self._stored, self._memory_is_lost = form.layout, False, False
        self._most = max(self._most, form.layout.dp)
        self._record.formed(form.layout, places, makes_copies=bool(owners), keeps=bool(self._keep_on))
        waited, steers = self._record.waited_seconds, self._orders.steers
        self._steers_sent = max((steer.number for steer in steers), default=len(spec.steered))
        self._steers_sent_at = self._now
        tensor = form.layout.tp
        gpus = assignment.visible_gpus([places[begin : begin + tensor] for begin in range(0, len(places), tensor)])
        assignments = (
            Assignment(self._generation, spec, rank, event.rendezvous, owners, waited, gpus[rank], steers)
            for rank in range(len(workers))
        )
        yield port.StartTraining(tuple(workers), tuple(assignments), recovery)

    # While it trains

    def _tend_training(self, formation: policy.Formation) -> Iterator[port.Decision]:
        """Send what is asked of workers, report the ranks' times, suspect a gang that hangs or has a silent worker."""
        if self._record.start is not None:
            commands, self._commands = self._commands, []
            for command in commands:
                if isinstance(command, Drill) and command.at_step is not None and self._record.step < command.at_step:
                    self._commands.append(command)  # a worker could be gone before, or another rank by then
                    continue
                for rank in {command.rank} if isinstance(command, Drill) else set(command.ranks):
                    if rank >= len(formation.workers):  # the gang has shrunk since the request
                        ranks = counted(len(formation.workers), "rank")
                        message = f"{command.kind} skipped: rank {rank} is gone; the gang has {ranks} now"
                        self._record.log("WARNING", message)
                    elif command.kind == "drop_node":
                        node = formation.places[rank].node
                        self._nodes.quarantined[node] = self._now + command.seconds
                        up = (each for replica in self._replicas.values() for each in replica.up.items())
                        yield port.KillWorkers(tuple(worker for worker, place in up if place.node == node))
                    else:  # all ranks write to the store, and rank 0 is asked first
                        yield port.SendCommand(formation.workers[0 if command.kind == "fill_store" else rank], command)
            known = max(self._steers_sent, len(self._spec.steered))
            if self._now >= self._steers_sent_at + SECONDS_TO_SEND_AGAIN:  # a call may be lost, and all ranks need it
                known = len(self._spec.steered)
            for steer in self._orders.steers:
                if steer.number > known:
                    self._steers_sent, self._steers_sent_at = steer.number, self._now
                    yield from (port.SendCommand(worker, steer) for worker in formation.workers)

        now, step = self._now, self._record.step
        if (times := formation.watch.rank_times(len(formation.workers), now)) is not None:
            self._record.add(RankTimesReport(step=step, busy_seconds=times))
        for slow in formation.watch.newly_slow():
            computes = f"{slow.times:.1f} times as long as the median rank, {slow.share:.0%} of the step"
            message = f"rank {slow.rank} computes {computes}; the others wait for it"
            fault = FaultReport(what=Fault.SLOW_RANK, step=step, rank=slow.rank, share=slow.share, message=message)
            self._record.add(fault)
        hanging = formation.watch.hangs(now)
        silent: tuple[int, ...] = ()
        if now > self._heard_until:
            last = self._last_message
            silent = tuple(each for each in formation.workers if now - last.get(each, now) > SILENT_SECONDS)
            if not silent:
                self._heard_until = min(last.get(each, now) for each in formation.workers) + SILENT_SECONDS
        if hanging is not None:
            message = f"no step for {hanging:.0f} s; the stacks of all ranks are in the log"
            self._record.add(FaultReport(what=Fault.HANG, step=step, message=message))
            self._state = policy.Suspecting(formation, formation.workers, now, policy.Break(Cause.HANG, message))
            yield port.DumpStacks(formation.workers)
        elif silent:
            self._state = policy.Suspecting(formation, silent, now, None)
            places = zip(formation.workers, formation.places, strict=True)
            yield port.Probe(silent, frozenset(place.node for worker, place in places if worker in silent))
        elif not self._keep_on and self._record.settled and formation.halting is None and now >= self._no_room_before:
            # Once the store has refused the last checkpoint for a while, other processes should keep the state, which
            # take no CPUs and no GPUs but need memory on the same nodes. What is about to end anyway is left alone.
            waits, waited = self._spec.checkpoint.final_save_timeout_seconds, self._record.waited_seconds
            hold = min(SECONDS_TO_HOLD[1], max(SECONDS_TO_HOLD[0], SHARE_TO_HOLD * waits))
            if waited >= hold and waits - waited >= hold:
                self._no_room_before = now + SECONDS_TO_HOLD[1]
                yield port.MeasureMemory(formation.workers)

        if self._state is formation:
            assert self._layout is not None
            members = frozenset(formation.replicas)
            growing = any(each.workers for number, each in self._replicas.items() if number not in members)
            yield from self._spare.tend(formation, self._layout, self._nodes.unusable(now), self._orders.avoid, growing)

    # Ends and faults

    def _check_ends(self, formation: policy.Formation) -> Iterator[port.Decision]:
        ends = list(formation.ends.values())
        if formation.failures or any(end is None or end.how in FAILURES for end in ends):
            yield from self._stop(policy.Stopping(formation, self._now, self._now + STOP_SECONDS, None))
        elif len(ends) < len(formation.workers):
            return
        elif all(end is not None and end.how is End.FINISHED for end in ends):
            yield self._finish(GangPhase.SUCCEEDED, f"trained up to step {self._spec.training.steps}")
        else:  # halted
            halting = formation.halting
            assert halting is not None
            message = policy.HALT_MESSAGES.get(halting.cause, "there is room for fewer workers")
            self._record.interrupted(halting.cause, message, self._record.last_sign)
            self._record.reached("stop")
            self._state, self._stored = policy.Idle(), all(end is not None and end.how is End.STORED for end in ends)
            if halting.store and not self._stored:
                self._no_store_before = self._now + SAVE_AGAIN_SECONDS

    def _finish(self, phase: GangPhase, message: str) -> port.Finish:
        self._state = policy.Finished()
        self._replicas.clear()
        self._spare.forget()
        return port.Finish(phase, message)

    def _probed(self, event: port.Probed) -> Iterator[port.Decision]:
        """Break up a suspected gang unless its workers answer; once a gang has stopped, clean up for the next one."""
        gone = self._nodes.probed(event.silent, event.dead, self._now)
        self._last_message.update(dict.fromkeys(event.answering, self._now))
        if isinstance(suspecting := self._state, policy.Suspecting):
            formation = suspecting.formation
            if unresponsive := frozenset(suspecting.workers) - event.answering:
                members = zip(formation.workers, formation.places, strict=True)
                node_lost = any(worker in unresponsive and place.node in gone for worker, place in members)
                workers_silent = f"{counted(len(unresponsive), 'worker')} silent for {SILENT_SECONDS:.0f} s"
                cause = Cause.NODE_LOST if node_lost else Cause.WORKER_LOST
                silence = policy.Break(cause, f"{workers_silent}, and not answering")
                yield from self._convict(replace(suspecting, reason=silence), unresponsive)
            else:
                self._state = formation
                yield from self._check_ends(formation)
            return
        if not isinstance(checking := self._state, policy.Checking):
            return

        # A gang has stopped, or could not be formed: replicas on nodes that are gone are given up, and workers that
        # are unhealthy or do not answer are replaced.
        unhealthy = checking.unhealthy | (checking.probed - event.answering)
        reason = checking.reason
        if reason is not None and checking.formation is None:
            if checking.first in gone:  # this is not the job's fault
                reason = replace(reason, cause=Cause.NODE_LOST)
            self._interrupt(reason, checking.detected)
        if reason is None:  # it follows from the ends of the ranks and the nodes that are gone
            assert checking.formation is not None
            ends, places = checking.formation.outcomes, checking.formation.places
            # Of a node that went without a word, its peers' errors may arrive, but no ends.
            away = event.silent | event.dead
            lost = [rank for rank, at in enumerate(places) if (ends[rank] is None if rank in ends else at.node in away)]
            ranks = ", ".join(map(str, lost))
            if nodes := {places[rank].node for rank in lost} & gone:
                names = ", ".join(sorted(node[:12] for node in nodes))
                reason = policy.Break(Cause.NODE_LOST, f"node {names} was lost, and with it rank {ranks}")
            elif lost:
                message = f"rank {ranks} was lost: its process was killed, crashed, or ran out of memory"
                reason = policy.Break(Cause.WORKER_LOST, message)
            else:  # a rank that lost its connection is not to blame if another one reports something else
                by_rank = [(rank, ends.get(rank)) for rank in range(len(places))]
                blame = {End.CONNECTION: 1, **dict.fromkeys(FAILURES - {End.CONNECTION}, 0)}
                rank, blamed = min(by_rank, key=lambda item: blame.get(item[1].how, 2) if item[1] else 3)
                reason = policy.Break(Cause.ERROR, f"rank {rank}: {blamed.message if blamed else 'does not stop'}")
            self._interrupt(reason, checking.detected)
        for number, replica in list(self._replicas.items()):
            if replica.nodes & gone:
                del self._replicas[number]
                yield port.RemoveReplica(number)
            else:
                ended = [worker.number for worker in replica.workers if worker.number in unhealthy]
                yield from map(port.ReplaceWorker, ended)
        self._state = policy.Idle()
        self._record.reached("stop")
        if exceeded := self._limit.exceeded(reason.cause, self._now, self._record.stored_step):
            raise GangFailed(f"{exceeded}; the last one: {reason.message}")
        # A job that has made no progress since its previous fault waits before its next gang is formed.
        own_fault = reason.cause is not Cause.NODE_LOST
        if own_fault and (pause := self._pauses.fault(self._record.most_steps, self._record.stored_step)):
            self._paused_until = self._now + pause
            left = f"{counted(self._limit.left, 'more restart')} allowed"
            message = f"restarts in {pause:g} s, as it made no progress since the previous fault ({left})"
            self._record.say(GangPhase.RECOVERING, f"{message}: {reason.message}")
            self._record.log("WARNING", message)

    def _convict(self, suspecting: policy.Suspecting, unresponsive: Set[int]) -> Iterator[port.Decision]:
        """Break up a gang that hangs or has workers that do not answer."""
        formation, detected, reason = suspecting.formation, suspecting.detected, suspecting.reason
        assert reason is not None
        self._interrupt(reason, detected)
        if unresponsive:
            yield port.KillWorkers(tuple(unresponsive), stopped=True)  # the others notice this, and stop
        yield from self._stop(policy.Stopping(formation, detected, self._now + STOP_SECONDS, reason, unresponsive))

    def _interrupt(self, reason: policy.Break, detected: float) -> None:
        self._record.interrupted(reason.cause, reason.message, detected)
        self._record.log("WARNING", f"{reason.message}; the gang is formed again")

    def _stop(self, stopping: policy.Stopping) -> Iterator[port.Decision]:
        """Wait for all ranks to stop."""
        self._state, formation = stopping, stopping.formation
        running = [worker for rank, worker in enumerate(formation.workers) if rank not in formation.ends]
        if running:
            yield port.AbortTraining(tuple(running))
        yield from self._check_if_stopped(stopping)

    def _check_if_stopped(self, stopping: policy.Stopping) -> Iterator[port.Decision]:
        """Once all ranks have stopped, or failed to stop by themselves, find out what is left."""
        formation = stopping.formation
        if len(formation.ends) < len(formation.workers) and self._now < stopping.deadline:
            return
        ends, outcomes = formation.ends, formation.outcomes
        if stopping.reason is None:
            lasting = [end for _, end in sorted(outcomes.items()) if end is not None and end.how is End.LASTING]
            if lasting and None not in outcomes.values():  # what a lost peer causes may look like a defect
                raise GangFailed(lasting[0].message)
            if any(end is not None and end.how is End.STATE_LOST for end in outcomes.values()):
                # The other processes may have an older one. Once that is lost, too, the store has it.
                self._memory_is_lost = self._lost_after == self._record.most_steps
                self._lost_after = self._record.most_steps
        # Report the GPUs that ranks have failed on, and avoid a node on which this happens again.
        failed = {rank: end for rank, end in outcomes.items() if end is not None and end.how is End.DEVICE}
        self._device_faults.update({formation.places[rank].node for rank in failed})
        for rank, failure in sorted(failed.items()):
            place = formation.places[rank]
            gpu = ", ".join(place.accelerators) or "none"
            times = self._device_faults[place.node]
            message = f"GPU {gpu} of host {place.host} failed: {failure.message}"
            if times > 1:
                message += f"; {times} gangs have ended like this there, so {self._avoid([place.node], times - 1)}"
            self._record.add(FaultReport(what=Fault.DEVICE, step=self._record.step, rank=rank, message=message))
        # What fails again without a step in between may be the process: full memory, a connection that it keeps.
        again = self._pauses.stalled(self._record.most_steps, self._record.stored_step)
        fit = {rank for rank, end in ends.items() if end and end.reusable and not (again and end.how is End.FAILED)}
        unusable = {worker for rank, worker in enumerate(formation.workers) if rank not in fit}
        unhealthy = stopping.unresponsive | unusable
        yield self._check(policy.Checking(formation, stopping.detected, stopping.reason, unhealthy))

    def _check(self, checking: policy.Checking) -> port.Decision:
        """Probe the workers not known to be unhealthy, and the nodes of all workers and of the spare copy."""
        up = {worker: place for replica in self._replicas.values() for worker, place in replica.up.items()}
        probed = up.keys() - checking.unhealthy
        nodes = frozenset([*(place.node for place in up.values()), *filter(None, [self._spare.node])])
        self._state = replace(checking, probed=probed)
        return port.Probe(tuple(probed), nodes)
