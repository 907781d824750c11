"""A scheduling pass over many jobs and nodes, beside the reference in ``tests.reference_scheduler``.

``python -m tests.benchmarks.decide_at_scale`` writes docs/figures/decide_at_scale.md; it takes some minutes on two
cores. The nodes have 8 GPUs, and gangs of several sizes fill them; jobs of twelve shapes from eight tenants wait, each
with a seed, a number of steps and a learning rate of its own.
"""

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

from boost_core.config import JobSpec
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.scheduler import demand as demand_module
from service.scheduler.cluster_snapshot import Gang, SchedulerMemory
from service.scheduler.decisions import decide
from tests.benchmarks.figures import FIGURES, write_table
from tests.reference_scheduler import decisions as reference
from tests.scheduling import TRAINING, job, trains

SHAPES = [(1, 1), (1, 2), (1, 4), (4, 1), (1, 8), (4, 2), (2, 8), (4, 8), (4, 16), (4, 32), (4, 64), (4, 128)]  # tp, dp
NODE = {"CPU": 96.0, "GPU": 8.0, "memory": 1e12}
CHANGES, PASSES = 10, 5


class World:
    """A full cluster, and the jobs that wait for it.

    Args:
        waiting: Number of jobs.
        nodes: Number of nodes.
    """

    def __init__(self, waiting: int, nodes: int) -> None:
        self._random, self._numbers = random.Random(0), count()
        self._templates = {(shape, up_to): self._template(shape, up_to) for shape in SHAPES for up_to in (None, 2)}
        labels = [{"ray.io/accelerator-type": "H100", "host": f"host-{number}"} for number in range(nodes)]
        self.nodes = [NodeCapacity(f"node-{number}", NODE, dict(NODE), labels[number]) for number in range(nodes)]
        self.jobs: list[JobRecord] = []
        self.gangs: dict[str, Gang] = {}
        self._placed: dict[str, list[tuple[int, int]]] = {}
        free = list(range(nodes))
        while free:
            tensor, data = self._random.choice(SHAPES[4:8])
            ranks = min(tensor * data, 8 * len(free))
            if ranks == tensor * data:
                record = self._new((tensor, data), TRAINING)
                gang = trains(data, tensor)
            else:
                record, gang = self._new((1, 8), TRAINING), trains(8)
                ranks = 8
            self._place(record, gang, [(free.pop(), 8) for _ in range(ranks // 8)])
        self.jobs += [self._new(self._random.choice(SHAPES)) for _ in range(waiting)]

    @staticmethod
    def _template(shape: tuple[int, int], up_to: int | None) -> tuple[JobRecord, str]:
        tensor, data = shape
        record = job("template", data, tensor=tensor, up_to=up_to and up_to * data, gpus=1)
        return record, record.spec.model_dump_json()

    def _new(self, shape: tuple[int, int], state: Sequence[Any] = ()) -> JobRecord:
        number = next(self._numbers)
        record, text = self._templates[shape, 2 if number % 2 else None]
        spec = JobSpec.model_validate_json(text)  # a record from the store shares nothing with another
        training = spec.training.model_copy(update={"seed": number, "steps": 1_000 + number})
        optimizer = spec.optimizer.model_copy(update={"learning_rate": 1e-3 / (1 + number)})
        spec = spec.model_copy(update={"training": training, "optimizer": optimizer})
        changes = {"state": state[0], "reason": state[1]} if state else {}
        name = f"job-{number:07}"
        tenant = f"team-{number % 8}"
        return record.with_values(
            {"id": name, "name": name, "tenant": tenant, "arrival": number, "spec": spec, **changes}
        )

    def _place(self, record: JobRecord, gang: Gang, where: list[tuple[int, int]]) -> None:
        self.jobs.append(record)
        self.gangs[record.id], self._placed[record.id] = gang, where
        for number, ranks in where:
            node = self.nodes[number]
            left = {"CPU": node.free["CPU"] - ranks, "GPU": node.free["GPU"] - ranks, "memory": 1e12}
            self.nodes[number] = replace(node, free=left)

    def change(self) -> None:
        """Five gangs end, and five jobs come."""
        for job_id in self._random.sample(sorted(self._placed), CHANGES // 2):
            for number, ranks in self._placed.pop(job_id):
                node = self.nodes[number]
                left = {"CPU": node.free["CPU"] + ranks, "GPU": node.free["GPU"] + ranks, "memory": 1e12}
                self.nodes[number] = replace(node, free=left)
            del self.gangs[job_id]
            self.jobs = [each for each in self.jobs if each.id != job_id]
        self.jobs += [self._new(self._random.choice(SHAPES)) for _ in range(CHANGES // 2)]


def seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measure(waiting: int, nodes: int, compared: bool) -> list[str]:
    """A row of the table."""
    world = World(waiting, nodes)
    memory = SchedulerMemory()
    before = seconds(lambda: reference.decide(world.jobs, world.nodes, cast(Any, world.gangs))) if compared else None
    demand_module._known.cache_clear()  # both begin with what a service knows that has just started
    demand_module._remembered.cache_clear()
    first = seconds(lambda: decide(world.jobs, world.nodes, world.gangs, memory=memory))
    later = []
    for _ in range(PASSES):
        world.change()
        later.append(seconds(lambda: decide(world.jobs, world.nodes, world.gangs, memory=memory)))
    return [
        f"{waiting:,} × {nodes:,}",
        f"{len(world.gangs):,}",
        f"{before:.2f} s" if before is not None else "not run",
        f"{first:.3f} s",
        f"{before / first:.0f}" if before is not None else "",
        f"{1000 * sorted(later)[PASSES // 2]:.1f} ms",
    ]


def main() -> None:
    """Measure and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="only the smallest")
    given = parser.parse_args()
    sizes = [(1_000, 100, True)]
    if not given.small:
        sizes += [(10_000, 1_000, True), (10_000, 4_000, True), (100_000, 4_000, False)]
    rows = [measure(*size) for size in sizes]
    header = ["waiting jobs × nodes", "gangs", "reference", "first pass", "ratio", "a pass after ten changes: median"]
    write_table(FIGURES / "decide_at_scale.md", header, rows)


if __name__ == "__main__":
    main()
