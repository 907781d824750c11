"""The actor that stands for a gang: it runs the gang's loop, and answers the scheduler and the ranks meanwhile."""

import threading
from typing import Any

import ray

from boost_core.config import JobSpec
from boost_core.messages.commands import WorkerCommand
from service.gang.context import GangContext
from service.gang.gang import Gang
from service.gang.record import GangRecord
from service.gang.reporter import Message
from service.gang.status import GangStatus, Orders

UPDATES = "updates"  # the concurrency group of calls that wait, so that all others are answered meanwhile
WAITING_CALLS = 4  # those of services that have died come to their end after a while
WAIT_SECONDS = 10.0


class Supervisor:
    """Drives one attempt of a job. Its methods return at once but for one; the loop has a thread of its own.

    Args:
        spec: The job.
        orders: The first orders.
        context: What the gang's processes are told of their surroundings.
    """

    def __init__(self, spec: JobSpec, orders: Orders, context: GangContext) -> None:
        context.logs.write()
        runtime: Any = ray.get_runtime_context()
        self._tag = context.tag
        self._record = GangRecord(runtime.get_actor_id())
        self._gang = Gang(spec, orders, self._record, runtime.current_actor, context)
        threading.Thread(target=self._gang.run, name="gang", daemon=True).start()

    def __repr__(self) -> str:
        """What Ray's dashboard shows of it."""
        return f"{self._tag}: supervisor"

    def push(self, message: Message) -> None:
        """Take a rank's message."""
        self._gang.hear(message)

    def ask(self, command: WorkerCommand) -> None:
        """Take what the gang is to do besides training."""
        self._gang.ask(command)

    def poll(self, after_sequence: int, orders: Orders) -> GangStatus:
        """Take orders; the status with reports after ``after_sequence``, and those up to it are forgotten.

        A final phase is told together with the last report and never before.
        """
        self._gang.order(orders)
        return self._record.status(after_sequence)

    @ray.method(concurrency_group=UPDATES)
    def wait_for_update(self, after_sequence: int) -> bool:
        """Wait until there are reports after ``after_sequence`` or the status is not the one told last; whether so."""
        return self._record.wait_for_update(after_sequence, WAIT_SECONDS)
