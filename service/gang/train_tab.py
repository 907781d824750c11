"""A gang among Ray's training runs, which Ray's dashboard gives at ``/api/train/v2/runs/v1``.

Ray Train's controller would tell them to Ray Train's state actor. Our gangs have no such controller, so they do it
themselves. This leans on what Ray does not promise to keep, as ``ray_private`` does; its contract is tested, too.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from boost_core import __version__
from boost_core.config import JobSpec
from service.gang.assignment import WorkerPlace
from service.gang.replica import Member
from service.gang.resources import ON_THE_HEAD, worker_resources
from service.gang.status import GangPhase, JobTag

NAMESPACE = "boost-train-tab"  # not that of gangs, all of whose named actors are supervisors
ANSWER_SECONDS = 5.0
LAST_WORD_SECONDS = 1.0

_STATUSES = {
    GangPhase.STARTING: "INITIALIZING",
    GangPhase.WAITING: "SCHEDULING",
    GangPhase.TRAINING: "RUNNING",
    GangPhase.SAVING: "RUNNING",
    GangPhase.RECOVERING: "RESTARTING",
    GangPhase.PAUSED: "ABORTED",  # Ray has no other word for an end that is neither good nor bad
    GangPhase.SUCCEEDED: "FINISHED",
    GangPhase.FAILED: "ERRORED",
}
_ENDS = {GangPhase.SUCCEEDED: "FINISHED", GangPhase.FAILED: "ERRORED"}  # of an attempt; any other: ABORTED

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A job as Ray Train shows one. Times are nanoseconds since 1970."""

    tag: JobTag
    ray_job: str
    supervisor: str
    phase: GangPhase
    message: str
    workers: int
    resources: dict[str, float]
    began: int
    ended: int | None


@dataclass(frozen=True)
class Attempt:
    """One formation of its gang: what Ray Train calls an attempt."""

    tag: JobTag
    generation: int
    status: str
    places: tuple[WorkerPlace, ...]
    resources: dict[str, float]
    began: int
    ended: int | None


class TrainTab:
    """Shows one gang among the runs. It sends plain data, waits for nothing, and gives up where that fails.

    Args:
        tag: The job.
        spec: The same as its user has it.
    """

    def __init__(self, tag: JobTag, spec: JobSpec) -> None:
        context = ray.get_runtime_context()
        self._tag, self._spec, self._resources = tag, spec, worker_resources(spec)
        self._ray_job, self._supervisor = context.get_job_id(), str(context.get_actor_id())
        self._began = time.time_ns()
        self._attempt: Attempt | None = None
        self._said: tuple[object, ...] = ()
        self._keeper: Any = None
        self._given_up = False

    def show(self, phase: GangPhase, message: str, generation: int = 0, members: Sequence[Member] = ()) -> Any:
        """Tell what is new since the last call.

        Args:
            phase: Where the gang is in its life.
            message: The same for people.
            generation: Number of the gang's present formation; 0 while it has none.
            members: Its processes by rank.

        Returns:
            What answers once all of it has arrived; ``None`` if there was nothing to tell.
        """
        said = (phase, message, generation)
        if said == self._said or self._given_up:
            return None
        self._said = said
        try:
            self._keeper = self._keeper or _keeper()
            self._show_attempts(phase, generation, members)
            return self._keeper.show_run.remote(self._run(phase, message))
        except Exception as error:  # whatever it is, training goes on
            logger.warning("the job is not to be seen among Ray's training runs: %s", error)
            self._given_up = True
            return None

    def show_last(self, phase: GangPhase, message: str) -> None:
        """Tell how it ended. The process may be killed soon, so this waits a moment for an answer."""
        answer = self.show(phase, message)
        if answer is not None:
            ray.wait([answer], timeout=LAST_WORD_SECONDS)

    def _show_attempts(self, phase: GangPhase, generation: int, members: Sequence[Member]) -> None:
        if self._attempt is not None and self._attempt.generation != generation:
            ended = replace(self._attempt, status=_ENDS.get(phase, "ABORTED"), ended=time.time_ns())
            self._keeper.show_attempt.remote(ended)
            self._attempt = None
        if generation and self._attempt is None:
            places = tuple(member.where for member in members if member.where is not None)
            self._attempt = Attempt(self._tag, generation, "RUNNING", places, self._resources, time.time_ns(), None)
            self._keeper.show_attempt.remote(self._attempt)

    def _run(self, phase: GangPhase, message: str) -> Run:
        workers = len(self._attempt.places) if self._attempt else self._spec.parallelism.world_size
        ended = time.time_ns() if phase in (GangPhase.PAUSED, GangPhase.SUCCEEDED, GangPhase.FAILED) else None
        return Run(
            self._tag, self._ray_job, self._supervisor, phase, message, workers, self._resources, self._began, ended
        )


def _keeper() -> Any:
    return (
        ray.remote(TrainTabKeeper)
        .options(
            name="keeper", namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0,
            resources=ON_THE_HEAD, max_restarts=-1,
        )
        .remote()
    )  # fmt: skip


class TrainTabKeeper:
    """Tells Ray Train's state actor of all gangs' runs: one process, because what it imports takes 110 MB."""

    def __init__(self) -> None:
        self._warned = False

    def show_run(self, run: Run) -> None:
        """Show a job."""
        self._tell("create_or_update_train_run", lambda: train_run(run))

    def show_attempt(self, attempt: Attempt) -> None:
        """Show a formation of its gang."""
        self._tell("create_or_update_train_run_attempt", lambda: train_run_attempt(attempt))

    def _tell(self, method: str, made: Callable[[], Any]) -> None:
        try:
            from ray.train.v2._internal.state.state_actor import get_or_create_state_actor

            ray.get(getattr(get_or_create_state_actor(), method).remote(made()), timeout=ANSWER_SECONDS)
        except Exception as error:  # a page that lacks a line is no reason to disturb anybody
            if not self._warned:
                logger.warning("jobs are not to be seen among Ray's training runs: %s", error)
            self._warned = True


def train_run(run: Run) -> Any:
    """A run as Ray Train has it: who it belongs to and where its page is; nothing of what it trains."""
    from ray.train.v2._internal.state import schema

    name = f"{run.tag.name} ({run.tag.job_id})"
    nothing = schema.ExecutionOptions(
        resource_limits={}, exclude_resources={}, preserve_order=False, actor_locality_enabled=False,
        verbose_progress=False,
    )  # fmt: skip
    settings = schema.RunSettings(
        train_loop_config={"page": run.tag.url, "tenant": run.tag.tenant, "submitted_by": run.tag.submitted_by},
        backend_config=schema.BackendConfig(config={}),
        scaling_config=schema.ScalingConfig(
            num_workers=run.workers, use_gpu="GPU" in run.resources, resources_per_worker=run.resources,
            placement_strategy="", use_tpu=False,
        ),
        datasets=[],
        data_config=schema.DataConfig(
            datasets_to_split=[], enable_shard_locality=False,
            data_execution_options=schema.DataExecutionOptions(default=nothing),
        ),
        run_config=schema.RunConfig(
            name=name, worker_runtime_env={}, storage_path="",
            failure_config=schema.FailureConfig(max_failures=0, controller_failure_limit=0),
            checkpoint_config=schema.CheckpointConfig(checkpoint_score_order="max"),
        ),
    )  # fmt: skip
    return schema.TrainRun(
        id=run.tag.job_id, name=name, job_id=run.ray_job, controller_actor_id=run.supervisor,
        status=schema.RunStatus(_STATUSES[run.phase]), status_detail=run.message,
        start_time_ns=run.began, end_time_ns=run.ended,
        framework_versions={"ray": ray.__version__, "boost": __version__}, run_settings=settings,
    )  # fmt: skip


def train_run_attempt(attempt: Attempt) -> Any:
    """A formation as Ray Train has it."""
    from ray.train.v2._internal.state import schema

    alive = schema.ActorStatus.ALIVE if attempt.ended is None else schema.ActorStatus.DEAD
    nodes = list(dict.fromkeys(place.node for place in attempt.places))
    resources = schema.TrainResources(resources=attempt.resources)
    workers = [
        schema.TrainWorker(
            world_rank=rank, node_rank=nodes.index(place.node), actor_id=place.actor, node_id=place.node,
            local_rank=[other.node for other in attempt.places[:rank]].count(place.node), node_ip=place.address,
            pid=place.pid, gpu_ids=[int(gpu) for gpu in place.accelerators if gpu.isdigit()], status=alive,
            resources=resources,
        )
        for rank, place in enumerate(attempt.places)
    ]  # fmt: skip
    return schema.TrainRunAttempt(
        run_id=attempt.tag.job_id, attempt_id=f"{attempt.tag.attempt}.{attempt.generation}",
        status=schema.RunAttemptStatus(attempt.status), start_time_ns=attempt.began, end_time_ns=attempt.ended,
        resources=[resources] * len(attempt.places), workers=workers,
    )  # fmt: skip
