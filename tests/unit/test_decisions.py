"""The scheduler's decisions: tables, and a simulation that shows what holds whatever comes."""

import random
from datetime import UTC, datetime

import pytest

from boost_core.config import JobSpec
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from service.scheduler.decisions import Admit, Launch, Wait, decide, has_gang
from tests.jobs import tiny_job


def spec(workers: int, cpus: float = 1, gpus: int = 0) -> JobSpec:
    return tiny_job(
        "corpus", "checkpoints",
        parallelism={"tensor_parallel_size": 1, "data_parallel_size": workers},
        training={"global_batch_size": 2 * workers},
        resources={"cpus_per_worker": cpus, "gpus_per_worker": gpus},
    )  # fmt: skip


def job(name: str, workers: int, state: JobState = JobState.QUEUED, reason: Reason = Reason.SUBMITTED, **resources):
    return JobRecord(
        id=name, name=name, spec=spec(workers, **resources), state=state, reason=reason, message="", attempt=0,
        cancel_requested=False, checkpoint_url="checkpoints", submitted_at=datetime.now(UTC), started_at=None,
        finished_at=None, progress=None, evaluation=None, checkpoint=None, version=0,
    )  # fmt: skip


def running(name: str, workers: int, **resources) -> JobRecord:
    return job(name, workers, JobState.RUNNING, Reason.GANG_STARTED, **resources)


def nodes(*cpus: float, free: list[float] | None = None) -> list[NodeCapacity]:
    frees = cpus if free is None else free
    return [
        NodeCapacity(f"node-{index}", {"CPU": total}, {"CPU": left})
        for index, (total, left) in enumerate(zip(cpus, frees, strict=True))
    ]


def summary(actions) -> list[str]:
    return [f"{type(action).__name__} {action.job.id}" for action in actions]


@pytest.mark.parametrize(
    ("jobs", "capacities", "expected"),
    [
        ([], nodes(2), []),
        ([job("a", 2)], nodes(2), ["Admit a", "Launch a"]),
        ([job("a", 1), job("b", 1)], nodes(2), ["Admit a", "Launch a", "Admit b", "Launch b"]),
        # The head waits for others and holds back those behind it, even one that would fit.
        ([running("a", 1), job("b", 2), job("c", 1)], nodes(2, free=[1]), ["Admit b", "Wait b"]),
        # A job that can never fit does not.
        ([job("a", 3), job("b", 2)], nodes(2), ["Admit a", "Wait a", "Admit b", "Launch b"]),
        # A worker must fit whole on one node.
        ([job("a", 1, cpus=3)], nodes(2, 2), ["Admit a", "Wait a"]),
        ([job("a", 3, cpus=2)], nodes(3, 5), ["Admit a", "Launch a"]),
        ([job("a", 4, cpus=2)], nodes(3, 5), ["Admit a", "Wait a"]),
        # Ray's numbers lag: a gang just launched still shows as free.
        ([job("a", 2, JobState.SCHEDULING, Reason.GANG_STARTING), job("b", 1)], nodes(2), ["Admit b", "Wait b"]),
        # What others hold on a shared cluster is not free either.
        ([job("a", 2)], nodes(2, free=[1]), ["Admit a", "Wait a"]),
        # One that waits is not admitted again.
        ([job("a", 2, JobState.SCHEDULING, Reason.WAITING_FOR_RESOURCES)], nodes(2), ["Launch a"]),
        ([job("a", 1, gpus=1)], nodes(2), ["Admit a", "Wait a"]),
        ([job("a", 1)], [], ["Admit a", "Wait a"]),
        ([job("a", 8, cpus=0.1)], nodes(0.8), ["Admit a", "Launch a"]),
    ],
)
def test_decisions(jobs, capacities, expected) -> None:
    assert summary(decide(jobs, capacities)) == expected


def test_messages_say_what_a_job_waits_for() -> None:
    *_, wait = decide([running("job-a", 1), job("job-b", 2)], nodes(2, free=[1]))
    assert wait.message == "waits for 2 × {CPU: 1}; 1 of 2 CPU free; behind job-a"
    *_, never = decide([job("job-c", 8)], nodes(2))
    assert never.message == "needs 8 × {CPU: 1}; the cluster has 2 CPU in all, room for 2; waits for nodes to join"
    *_, gpu = decide([job("job-d", 1, gpus=1)], nodes(2))
    assert gpu.message == (
        "needs 1 × {CPU: 1, GPU: 1}; the cluster has 2 CPU, 0 GPU in all, room for 0; waits for nodes to join"
    )
    crowd = [running(f"job-{index}", 1) for index in range(5)]
    *_, behind = decide([*crowd, job("job-z", 2)], nodes(6, free=[1]))
    assert behind.message.endswith("behind job-0, job-1, job-2 and 2 more")


class Simulation:
    """Jobs that come, run for a while and end, on nodes whose free resources are told some rounds late."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.capacities = [self.random.randint(1, 4) for _ in range(self.random.randint(1, 3))]
        self.waiting: list[JobRecord] = []
        self.remaining: dict[str, int] = {}  # rounds that a running job has left
        self.launch_order: list[str] = []

    def submit(self, name: str) -> None:
        workers, cpus = self.random.randint(1, 5), self.random.choice([0.5, 1, 2])
        self.waiting.append(job(name, workers, cpus=cpus))

    def round(self, stale_free: list[NodeCapacity]) -> None:
        for action in decide(self.waiting, stale_free):
            index = next(i for i, waiting in enumerate(self.waiting) if waiting.id == action.job.id)
            match action:
                case Admit():
                    change = {"state": JobState.SCHEDULING, "reason": Reason.HEAD_OF_QUEUE}
                case Wait():
                    change = {"state": JobState.SCHEDULING, "reason": Reason.WAITING_FOR_RESOURCES}
                case Launch():
                    change = {"state": JobState.RUNNING, "reason": Reason.GANG_STARTED}
                    self.remaining[action.job.id] = self.random.randint(1, 4)
                    self.launch_order.append(action.job.id)
            self.waiting[index] = self.waiting[index].model_copy(update=change)
        assert self.held() <= sum(self.capacities) + 1e-9
        self.remaining = {name: left - 1 for name, left in self.remaining.items() if left > 1}
        self.waiting = [one for one in self.waiting if not has_gang(one) or one.id in self.remaining]

    def held(self) -> float:
        return sum(
            one.spec.parallelism.world_size * one.spec.resources.cpus_per_worker
            for one in self.waiting
            if has_gang(one)
        )

    def fits_empty_cluster(self, one: JobRecord) -> bool:
        each = one.spec.resources.cpus_per_worker
        return sum(int(capacity / each) for capacity in self.capacities) >= one.spec.parallelism.world_size


@pytest.mark.parametrize("seed", range(40))
def test_no_job_starves_and_capacity_holds(seed: int) -> None:
    simulation = Simulation(seed)
    for number in range(15):
        simulation.submit(f"job-{number:02}")
        simulation.round(nodes(*simulation.capacities))  # as if Ray still showed all of it free
    fitting = [one.id for one in simulation.waiting if simulation.fits_empty_cluster(one)]
    for _ in range(15 * 5):
        simulation.round(nodes(*simulation.capacities))
    assert set(fitting) <= set(simulation.launch_order)
    assert simulation.launch_order == sorted(simulation.launch_order)  # first in, first out
    assert not any(simulation.fits_empty_cluster(one) for one in simulation.waiting)
