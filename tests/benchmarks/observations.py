"""What a gang's supervisor takes by its ranks: observations, quiet and just after a step, and the ranks' messages.

``python -m tests.benchmarks.observations`` writes docs/figures/observations.md; it takes some minutes. Messages are
those of a step a second: each rank's by itself, and a node's ranks' in one. They reach a Ray actor with the controller
behind it, from two processes and as fast as it takes them; its CPU is that of the whole process.
"""

import gc
import logging
import statistics
import time
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import ray

from boost_core.config import Layout
from boost_core.messages import Cause
from service.gang.assignment import Message, Rendezvous, WorkerPlace
from service.gang.control import port
from service.gang.control.controller import GangController
from service.gang.control.fault_detection import Heartbeat
from service.gang.control.record import GangRecord
from service.gang.status import Orders
from tests.benchmarks.figures import FIGURES, provenance, table
from tests.jobs import tiny_job
from tests.service.records import a_start

SIZES = ((64, 4), (1024, 4), (4096, 4), (4096, 1))  # ranks, and those of a tensor parallel group
STEPS, OBSERVATIONS, RANKS_A_NODE = 12, 50, 8
CALLERS, ROUNDS = 2, 5


class Trained:
    """A controller of a gang that has done some steps."""

    def __init__(self, ranks: int, tensor: int) -> None:
        data, self._seconds = ranks // tensor, 0.0
        spec = tiny_job(
            Path("corpus"), "checkpoints",
            parallelism={"tensor_parallel_size": tensor, "data_parallel_size": data},
            training={"steps": 1000, "global_batch_size": 2 * data},
        )  # fmt: skip
        layout = Layout(tensor, 1, data)
        self._record = GangRecord(self._moment())
        self._controller = GangController(spec, Orders(layout, (layout,), Cause.WORKER_BACK), self._record)
        names = [f"{number:056x}" for number in range(ranks // RANKS_A_NODE)]
        self._nodes, hosts = frozenset(names), [f"host-{name}" for name in names]
        self._replicas: dict[int, tuple[port.WorkerStatus, ...]] = {}
        number = 0
        for decision in self._tell(self._observed()):
            assert isinstance(decision, port.StartReplica)
            workers = []
            for _ in range(tensor):
                node, host = names[number // RANKS_A_NODE], hosts[number // RANKS_A_NODE]
                number += 1
                place = WorkerPlace(node, "10.0.0.1", (str(number % 8),), number, host, f"{number:056x}")
                workers.append(port.WorkerStatus(number, place, node=node))
            self._replicas[decision.number] = tuple(workers)
        self._tell(self._observed())
        (training,) = self._tell(port.Prepared(Rendezvous("10.0.0.1", 1, "secret"), "", {}))
        assert isinstance(training, port.StartTraining)
        self._workers, self._steps = training.workers, 0
        self._tell(Message(self._workers[0], 0, 1, [(datetime.now(UTC), a_start(0))], None, 0))
        for _ in range(STEPS):
            self.step()

    def step(self) -> None:
        """All ranks do a step."""
        self._steps += 1
        for rank, worker in enumerate(self._workers):
            beat = Heartbeat(self._steps, 1.0, 0.5 + rank % 100 / 1000)
            self._tell(Message(worker, rank, 1, [], beat, self._steps))
        self._seconds += 1

    def observe(self) -> float:
        """Milliseconds of an observation that is as the one before."""
        self._seconds += 0.05
        event = self._observed()
        begun = time.process_time()
        self._tell(event)
        return 1000 * (time.process_time() - begun)

    def _observed(self) -> port.Observed:
        return port.Observed(dict(self._replicas), self._nodes if self._seconds else frozenset(), {})

    def _tell(self, event: port.Event) -> list[port.Decision]:
        return self._controller.handle(event, self._moment())

    def _moment(self) -> port.Moment:
        return port.Moment(self._seconds, datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self._seconds))


def measure(ranks: int, tensor: int) -> list[str]:
    """A row of the table."""
    gc.collect()
    tracemalloc.start()
    gang = Trained(ranks, tensor)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gang.observe()
    quiet = statistics.median(gang.observe() for _ in range(OBSERVATIONS))
    after_steps = []
    for _ in range(5):
        gang.step()
        after_steps.append(gang.observe())
    return [
        f"{ranks:,}",
        f"{ranks // tensor:,}",
        f"{quiet:.2f} ms",
        f"{statistics.median(after_steps):.2f} ms",
        f"{size / ranks / 1024:.1f} KiB",
    ]


class Supervising(Trained):
    """In the place of a supervisor's actor."""

    def push(self, message: Message) -> None:
        """Handle a worker's message."""
        self._tell(message)

    def cpu_seconds(self) -> float:
        """What its process has worked so far."""
        return time.process_time()


def send(supervisor: Any, ranks: range, together: int) -> None:
    """Send the messages of ranks about a step, so many in one call."""
    messages = [Message(rank + 1, rank, 1, [], Heartbeat(STEPS + 1, 1.0, 0.5), STEPS + 1) for rank in ranks]
    calls = [
        replace(messages[first], others=tuple(messages[first + 1 : first + together]))
        for first in range(0, len(messages), together)
    ]
    for first in range(0, len(calls), 64):
        ray.get([supervisor.push.remote(each) for each in calls[first : first + 64]])


def measure_messages(ranks: int, tensor: int) -> list[list[str]]:
    """Rows of the second table, measured in turns."""
    supervisor: Any = ray.remote(Supervising).options(num_cpus=0).remote(ranks, tensor)
    caller, part = ray.remote(send).options(num_cpus=0), ranks // CALLERS
    worked: dict[int, list[float]] = {1: [], RANKS_A_NODE: []}
    for _ in range(ROUNDS):
        for together, seconds in worked.items():
            before = ray.get(supervisor.cpu_seconds.remote())
            ray.get(
                [caller.remote(supervisor, range(first, first + part), together) for first in range(0, ranks, part)]
            )
            seconds.append(ray.get(supervisor.cpu_seconds.remote()) - before)
    return [
        [f"{ranks:,}", f"{ranks // RANKS_A_NODE:,}", f"{ranks // together:,}", f"{statistics.median(seconds):.2f} s"]
        for together, seconds in worked.items()
    ]


def main() -> None:
    """Measure and write the figure."""
    header = ["ranks", "replicas", "an observation without news", "after a step of all ranks", "memory per rank"]
    observations = table(header, [measure(*size) for size in SIZES])
    ray.init("local", num_cpus=CALLERS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    header = ["ranks", "nodes", "messages a second", "CPU of the supervisor's process per second"]
    messages = table(header, measure_messages(4096, 4))
    ray.shutdown()
    (FIGURES / "observations.md").write_text("\n".join([*observations, "", *messages, "", provenance(), ""]))


if __name__ == "__main__":
    main()
