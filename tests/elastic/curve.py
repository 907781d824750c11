"""What happens to an elastic job's loss when everything happens to its gang.

``python -m tests.elastic.curve`` makes the figure of docs/measurements.md.
"""

import argparse
import tempfile
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from boost_core.config import JobSpec, Layout
from boost_core.messages import Report, StepReport
from boost_core.train import Membership, Outcome, StepTimes, train
from tests.elastic.ray_cluster import Job, Nodes, Service, elastic_job, world
from tests.jobs import write_corpus
from tests.ranks import Ranks

TENSOR = 2


@dataclass
class Story:
    """What an elastic job went through.

    Attributes:
        spec: The job.
        losses: By step; of one that was computed again, the last.
        layouts: By step, as they were when that last loss was computed.
        tokens: By step, trained on up to then.
        happened: What was done to it, and after how many steps.
    """

    spec: JobSpec
    losses: dict[int, float]
    layouts: dict[int, Layout]
    tokens: dict[int, int]
    happened: list[tuple[int, str]]


def live_through_it(nodes: Nodes, service: Service, spec: JobSpec) -> tuple[Job, Story]:
    """Submit a job, and do everything to it that can be done; it still runs afterwards, at dp 2."""
    job, happened = Job(service, spec), []

    def now(what: str) -> None:
        job.listen()
        happened.append((job.step, what))

    job.trains(3)
    now("a worker is killed")
    job.processes()[3].kill()
    job.until(lambda: job.of("restart"), "a restart after a killed worker")
    job.trains(3)
    now("a node is lost")
    nodes.remove(job.nodes()[0])
    job.trains(2)
    now("a node joins")
    nodes.add()
    job.trains(3)
    now("a node is drained")
    leaving = job.nodes()[-1]
    nodes.drain(leaving, seconds=60)
    job.trains(2)
    nodes.remove(leaving)
    now("paused, resumed")
    service.client.pause(job.id)
    job.until(lambda: job.record.state == "PAUSED", "paused")
    service.client.resume(job.id)
    job.trains(2)
    now("at most 1 replica")
    service.client.patch(job.id, {"data_parallel_size": {"max": 1}})
    job.trains(1)
    now("at most 3 again")
    service.client.patch(job.id, {"data_parallel_size": {"max": 3}})
    job.trains(2)
    return job, _story(job, spec, happened)


def _story(job: Job, spec: JobSpec, happened: list[tuple[int, str]]) -> Story:
    tokens = {report["step"]: report["tokens"] for report in job.of("progress")}
    return Story(spec, job.losses(), job.layouts(), tokens, happened)


class _Losses:
    """Takes the reports; only rank 0 gets any, and the others follow it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self.losses.append(report.loss)


def trained_on(spec: JobSpec, steps: int) -> list[float]:
    """Losses of so many steps from where the checkpoint folder is; they are saved then."""
    membership, losses = Membership(), _Losses()

    def after_step(_: StepTimes | None) -> None:
        if len(losses.losses) == steps - 1:  # it stops after the next one
            membership.store.set()
            membership.halt.set()

    membership.after_step = after_step
    after_step(None)
    assert train(spec, losses, membership) is Outcome.STORED
    return losses.losses


def replayed(ranks: Ranks, spec: JobSpec, layouts: dict[int, Layout], folder: Path) -> list[float]:
    """Losses in the same layout at each step and without a fault: one gang after the other, through checkpoints."""
    losses: list[float] = []
    for layout, steps in groupby(layouts, key=lambda step: layouts[step]):
        count = len(list(steps))
        checkpoint = {"url": str(folder), "every_steps": 10**6, "keep_last": 1}
        changed = JobSpec.model_validate(spec.model_dump() | {"checkpoint": checkpoint})
        losses += ranks.run(layout.world_size, trained_on, changed.at(layout), count)[0]
    return losses


def main() -> None:
    """Make the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None, help="default: docs/figures/elastic-curve.svg")
    arguments = parser.parse_args()
    from tests.benchmarks.figures import FIGURES
    from tests.elastic.picture import draw

    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), Ranks()
        spec = elastic_job(write_corpus(folder / "corpus"))
        with world(folder, nodes=3) as (nodes, service):
            job, story = live_through_it(nodes, service, spec)
            service.client.cancel(job.id)
            job.until(lambda: job.record.finished, "cancelled")
        steady = replayed(ranks, spec, dict.fromkeys(story.layouts, Layout(TENSOR, 1, 1)), folder / "steady")
        ranks.close()
        draw(arguments.out or FIGURES / "elastic-curve.svg", story, steady)


if __name__ == "__main__":
    main()
