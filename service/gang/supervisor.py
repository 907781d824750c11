"""The actor that stands for a gang: it runs the gang's loop, and answers the scheduler and the ranks meanwhile."""

import threading
from typing import Any

import ray

from boost_core.config import Drill, JobSpec
from service.gang.gang import Gang
from service.gang.record import GangRecord
from service.gang.reporter import Message
from service.gang.status import GangStatus, Orders
from service.secrets import SecretReference


class Supervisor:
    """Drives one attempt of a job. Its methods return at once; the loop has a thread of its own.

    Args:
        spec: The job.
        orders: The first orders.
        secret: What the ranks reach data and checkpoints with; ``None`` for their nodes' own means.
        metrics_ports: What the ranks may serve their metrics on.
    """

    def __init__(self, spec: JobSpec, orders: Orders, secret: SecretReference | None, metrics_ports: range) -> None:
        myself: Any = ray.get_runtime_context().current_actor
        self._record = GangRecord()
        self._gang = Gang(spec, orders, self._record, myself, secret, metrics_ports)
        threading.Thread(target=self._gang.run, name="gang", daemon=True).start()

    def push(self, message: Message) -> None:
        """Take a rank's message."""
        self._gang.hear(message)

    def drill(self, drill: Drill) -> None:
        """Take a drill."""
        self._gang.drill(drill)

    def poll(self, after_sequence: int, orders: Orders) -> GangStatus:
        """Take orders; the status with reports after ``after_sequence``, and those up to it are forgotten.

        A final phase is told together with the last report and never before.
        """
        self._gang.order(orders)
        return self._record.status(after_sequence)
