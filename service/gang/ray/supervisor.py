"""The actor that represents a gang: it passes events to the controller, and its decisions to the executor."""

import logging
import threading
import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import ray

from boost_core.config import JobSpec
from boost_core.messages import WorkerCommand
from service.gang.assignment import GangContext, Message
from service.gang.control.controller import GangController
from service.gang.control.port import Decision, Event, Finish, Moment
from service.gang.control.record import GangRecord
from service.gang.ray.executor import RayExecutor
from service.gang.status import GangPhase, GangStatus, Orders

UPDATES = "updates"  # concurrency group of calls that wait, so that others are answered meanwhile
WAITING_CALLS = 4  # calls of services that have died end after a while
WAIT_SECONDS = 10.0
TICK_SECONDS = 0.05

logger = logging.getLogger(__name__)


class Supervisor:
    """Drives one attempt of a job. All methods but one return at once; decisions are executed in a thread.

    Args:
        spec: The job.
        orders: The first orders.
        context: Settings of the service that workers need.
    """

    def __init__(self, spec: JobSpec, orders: Orders, context: GangContext) -> None:
        context.logs.write()
        runtime: Any = ray.get_runtime_context()
        self._tag = context.tag
        self._changed = threading.Condition()  # guards the controller and the record
        self._record = GangRecord(_now(), runtime.get_actor_id(), self._changed.notify_all)
        self._controller = GangController(spec, orders, self._record, context.basis)
        self._executor = RayExecutor(spec, runtime.current_actor, context)
        threading.Thread(target=self._run, name="gang", daemon=True).start()

    def __repr__(self) -> str:
        """Its name in Ray's dashboard."""
        return f"{self._tag}: supervisor"

    @ray.method
    def push(self, message: Message) -> None:
        """Handle a worker's message."""
        self._handle(message)

    @ray.method
    def ask(self, command: WorkerCommand) -> None:
        """Handle a request for a drill or a profile."""
        self._handle(command)

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

    def _handle(self, event: Event) -> list[Decision]:
        with self._changed:
            return self._controller.handle(event, _now())

    def _run(self) -> None:
        """Train the job until it ends, is paused or fails, and give the record its final status."""
        try:
            while not self._tick():
                time.sleep(TICK_SECONDS)
        except Exception as error:
            logger.exception("the gang's loop has failed")
            self._finish(Finish(GangPhase.FAILED, f"the gang's supervisor failed: {type(error).__name__}: {error}"))

    def _tick(self) -> bool:
        """Run one round; return whether it was the last."""
        if any(self._act_on(end) for end in self._executor.ended()) or self._act_on(self._executor.observe()):
            return True
        with self._changed:
            _, message = self._record.said
        self._executor.show(message)
        return False

    def _act_on(self, event: Event) -> bool:
        """Execute what is decided about an event and the answers to it; return whether the gang has ended."""
        decisions = deque(self._handle(event))
        while decisions:
            decision = decisions.popleft()
            if isinstance(decision, Finish):
                self._finish(decision)
                return True
            if answer := self._executor.execute(decision):
                decisions.extend(self._handle(answer))
        return False

    def _finish(self, end: Finish) -> None:
        self._executor.execute(end)
        with self._changed:
            self._record.say(end.phase, end.message)


def _now() -> Moment:
    return Moment(time.monotonic(), datetime.now(UTC))
