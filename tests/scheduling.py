"""Jobs, gangs and nodes for tables of the scheduler's decisions, and decisions in words."""

from dataclasses import replace
from datetime import UTC, datetime

from boost_core.config import Layout
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState, Reason
from service.scheduler.cluster_snapshot import Action, Explain, Gang, Launch, Resize, Wait
from tests.jobs import tiny_job

WAITING = (JobState.SCHEDULING, Reason.WAITING_FOR_RESOURCES)
STARTING = (JobState.SCHEDULING, Reason.GANG_STARTING)
TRAINING = (JobState.RUNNING, Reason.GANG_STARTED)
LONG = 1000.0
SOME_DAY = datetime(2026, 1, 1, tzinfo=UTC)  # of equals who has the lower name came first


def job(
    name: str, workers: int, state: JobState = JobState.QUEUED, reason: Reason = Reason.SUBMITTED, *,
    tensor: int = 1, up_to: int | None = None, layouts: list | None = None, priority: int = 0, cpus: float = 1,
    gpus: int = 0, batches: int | None = None, tenant: str = "default", queue: str = "default", **resources,
) -> JobRecord:  # fmt: skip
    """A job of so many replicas, at least, if there may be up to some more."""
    elasticity = {"data_parallel_size": {"min": workers, "max": up_to}, "layouts": layouts} if up_to else None
    spec = tiny_job(
        "corpus", "checkpoints",
        parallelism={"tensor_parallel_size": tensor, "data_parallel_size": workers},
        training={"global_batch_size": 2 * (batches or workers * (24 if up_to else 1))},
        resources={"cpus_per_worker": cpus, "gpus_per_worker": gpus} | resources,
        elasticity=elasticity, priority=priority,
    )  # fmt: skip
    return JobRecord(
        id=name, tenant=tenant, submitted_by="anonymous", queue=queue, name=name, spec=spec, state=state, reason=reason,
        message="", attempt=0, cancel_requested=False, checkpoint_url="checkpoints", submitted_at=SOME_DAY,
        queued_at=SOME_DAY, started_at=None, finished_at=None, progress=None, evaluation=None, checkpoint=None,
        version=0,
    )  # fmt: skip


def running(name: str, workers: int, **settings) -> JobRecord:
    return job(name, workers, *TRAINING, **settings)


def trains(data: int, tensor: int = 1, **changes) -> Gang:
    """A gang that is what it was to become."""
    layout = Layout(tensor, 1, data)
    return replace(Gang(layout, layout, unchanged_seconds=LONG), **changes)


def nodes(*cpus: float, free: list[float] | None = None, gpus: float = 0, **settings) -> list[NodeCapacity]:
    frees = cpus if free is None else free
    return [
        NodeCapacity(f"node-{index}", {"CPU": total, "GPU": gpus}, {"CPU": left, "GPU": gpus}, **settings)
        for index, (total, left) in enumerate(zip(cpus, frees, strict=True))
    ]


def summary(actions: list[Action]) -> list[str]:
    return [words for action in actions for words in _in_words(action)]


def messages(actions: list[Action]) -> list[tuple[JobRecord, str]]:
    """What jobs that wait are told."""
    told = list[tuple[JobRecord, str]]()
    for action in actions:
        if isinstance(action, Explain):
            told += [(entry.job, action.to(entry)) for entry in action.entries]
        elif isinstance(action, Wait):
            told.append((action.job, action.message))
    return told


def _in_words(action: Action) -> list[str]:
    if isinstance(action, Explain):
        return [f"Explain {entry.job.id}" for entry in action.entries]
    words = f"{type(action).__name__} {action.job.id}"
    match action:
        case Launch(layout=layout):
            return [f"{words} {layout.tp}x{layout.dp}"]
        case Resize(layout=layout, cause=cause):
            return [f"{words} {layout.tp}x{layout.dp} {cause}"]
    return [words]
