"""Fault after fault on a running job: what is lost, what leaks, and what is left for training.

``python -m tests.benchmarks.soak --faults 200`` writes docs/figures/soak.md; it takes some half an hour on two cores.
"""

import argparse
import logging
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from ray.util.state import list_actors

from boost_core.messages import PLANNED_CAUSES, Cause
from tests.benchmarks.figures import FIGURES, write_table
from tests.elastic.ray_cluster import Job, Nodes, Service, elastic_job, world
from tests.jobs import write_corpus

logger = logging.getLogger(__name__)

NODES = 3
ROUND_SECONDS = 180.0  # for a job to be over a fault
SETTLE_FAULTS = 20  # before memory is looked at for the first time


@dataclass
class Soak:
    """One run.

    Attributes:
        nodes: The cluster.
        service: The service.
        job: The job that all this happens to.
        chance: Draws faults.
        done: How often each has been brought about.
        memory: Bytes of the service's and the gang supervisor's processes after each fault.
    """

    nodes: Nodes
    service: Service
    job: Job
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[int, int]] = field(default_factory=list)

    def run(self, faults: int) -> None:
        """Bring about so many."""
        self.job.trains(NODES)
        for number in range(faults):
            fault, restarts = self.chance.choice(list(_FAULTS)), len(self.job.of("restart"))
            _FAULTS[fault](self)
            self.done[fault] += 1
            self._goes_on()
            self.memory.append(_memory(self.service, self.nodes))
            logger.info("%d of %d, %s: step %d, %s", number + 1, faults, fault, self.job.step, self.memory[-1])
            for restart in self.job.of("restart")[restarts:]:
                logger.info("%s", restart)

    def _goes_on(self) -> None:
        """Until it has made some steps at whatever shape, and there are as many nodes as there were."""
        while len(self.nodes) < NODES:
            self.nodes.add()
        self.job.listen()
        begun, deadline = self.job.sequence, time.monotonic() + ROUND_SECONDS
        while self.job.sequence < begun + 10:
            assert time.monotonic() < deadline, (self.job.record, self.job.events[-30:])
            time.sleep(0.1)
            self.job.listen()

    def kill_worker(self) -> None:
        _signal(self.a_process(), signal.SIGKILL)

    def kill_two_workers(self) -> None:
        for process in (self.a_process(), self.a_process()):
            _signal(process, signal.SIGKILL)

    def stop_worker(self) -> None:
        _signal(self.a_process(), signal.SIGSTOP)

    def lose_node(self) -> None:
        self.nodes.remove(self.chance.choice(self.job.nodes()))

    def drain_node(self) -> None:
        node = self.chance.choice(self.job.nodes())
        self.nodes.drain(node, seconds=30)
        self.job.until(lambda: node not in self.job.nodes(), "left the node")
        self.nodes.remove(node)

    def pause_and_resume(self) -> None:
        self.service.client.pause(self.job.id)
        self.job.until(lambda: self.job.record.state == "PAUSED", "paused")
        self.service.client.resume(self.job.id)

    def change_limits(self) -> None:
        self.service.client.patch(self.job.id, {"data_parallel_size": {"max": self.chance.choice([1, 2, 3])}})

    def kill_service(self) -> None:
        self.service.kill()
        self.service.start()
        self.service.wait()

    def drill(self) -> None:
        kind = self.chance.choice(["kill_rank", "delay_rank", "fill_store", "drop_node"])
        request = {"kind": kind, "rank": 0, "seconds": 0.1 if kind == "delay_rank" else 3.0, "steps": 20}
        self.job.until(lambda: self.job.record.state == "RUNNING", "runs")
        self.service.client.drill(self.job.id, request)

    def a_process(self) -> psutil.Process:
        self.job.until(lambda: len(self.job.processes()) == len(self.job.nodes()), "all ranks are up")
        return self.chance.choice(list(self.job.processes().values()))


_FAULTS: dict[str, Callable[[Soak], None]] = {
    "worker killed": Soak.kill_worker,
    "two workers killed": Soak.kill_two_workers,
    "worker stopped (SIGSTOP)": Soak.stop_worker,
    "node lost": Soak.lose_node,
    "node drained": Soak.drain_node,
    "paused and resumed": Soak.pause_and_resume,
    "limits changed": Soak.change_limits,
    "service killed and restarted": Soak.kill_service,
    "drill": Soak.drill,
}


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:  # the fault before has taken it
        return


def _memory(service: Service, nodes: Nodes) -> tuple[int, int]:
    found = list_actors(
        address=nodes.address, filters=[("class_name", "=", "Supervisor"), ("state", "=", "ALIVE")], detail=True
    )
    supervisors = [psutil.Process(actor.pid).memory_info().rss for actor in found]
    return psutil.Process(service.process.pid).memory_info().rss, max(supervisors, default=0)


def main() -> None:
    """Run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FIGURES / "soak.md")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = {"memory_copy_every_steps": 5, "max_restarts": 1000, "hang_seconds": 5, "hang_factor": 20}
        spec = elastic_job(write_corpus(folder / "corpus"), fault_tolerance=policy)
        with world(folder, NODES) as (nodes, service):
            soak = Soak(nodes, service, Job(service, spec), random.Random(arguments.seed))
            soak.run(arguments.faults)
            _write(arguments.out, soak, left_over=_end(soak))


def _end(soak: Soak) -> list[str]:
    """Cancel the job; what is still there ten seconds later."""
    processes = soak.job.processes()
    soak.service.client.cancel(soak.job.id)
    soak.job.until(lambda: soak.job.record.finished, "cancelled")
    deadline = time.monotonic() + 10
    while True:
        left = [*soak.nodes.taken(), *(str(process) for process in processes.values() if process.is_running())]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _write(path: Path, soak: Soak, left_over: list[str]) -> None:
    record, losses = soak.job.record, soak.job.losses()
    assert sorted(losses) == list(range(1, soak.job.step + 1)), "a step is missing"
    seconds = record.goodput.seconds
    life = sum(seconds.values())
    faults = [restart for restart in soak.job.of("restart") if Cause(restart["cause"]) not in PLANNED_CAUSES]
    planned = [restart for restart in soak.job.of("restart") if Cause(restart["cause"]) in PLANNED_CAUSES]
    from_memory = sum(restart["recovered_from"] == "memory" for restart in faults)
    service, supervisor = zip(*soak.memory, strict=True)
    rows = [[f"fault: {name}", str(count)] for name, count in sorted(soak.done.items())]
    rows += [
        ["final state of the job", f"{record.state}, attempt {record.attempt}"],
        ["placement groups, actors and processes left over", "; ".join(left_over) or "none"],
        ["steps trained", f"{soak.job.step}"],
        ["restarts after faults: median, longest", _spread([restart["seconds"] for restart in faults])],
        ["planned changes: median, longest", _spread([restart["seconds"] for restart in planned])],
        ["steps lost by planned changes", str(sum(restart["step"] - restart["resumed_step"] for restart in planned))],
        ["recovered from memory", f"{from_memory} of {len(faults)}"],
        [f"memory of the service: after {SETTLE_FAULTS} faults, at the end, peak", _growth(service)],
        [f"memory of the gang's supervisor: after {SETTLE_FAULTS} faults, at the end, peak", _growth(supervisor)],
    ]
    rows += [[f"goodput: {kind}", f"{value / life:.1%}"] for kind, value in seconds.items()]
    write_table(path, ["", f"{sum(soak.done.values())} faults in {life / 60:.0f} minutes"], rows)


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2]:.1f} s, {ordered[-1]:.1f} s (of {len(ordered)})" if ordered else "none"


def _growth(memory: Sequence[int]) -> str:
    mebibytes = [round(each / 2**20) for each in memory[SETTLE_FAULTS:] or memory]
    return f"{mebibytes[0]}, {mebibytes[-1]}, {max(mebibytes)} MiB"


if __name__ == "__main__":
    main()
