"""A gang among Ray's training runs, which Ray's dashboard gives at ``/api/train/v2/runs/v1``.

Ray Train's controller would tell them to Ray Train's state actor. Our gangs have no such controller, so they do it
themselves.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import ray
from ray import ObjectRef
from ray.actor import ActorProxy

from boost_core.config import JobSpec
from service.gang.assignment import WorkerPlace
from service.gang.ray_private import TrainAttempt, TrainRun, show_train_attempt, show_train_run
from service.gang.resources import ON_THE_HEAD, worker_resources
from service.gang.status import GangPhase, JobTag

NAMESPACE = "boost-train-tab"  # not that of gangs, all of whose named actors are supervisors
LAST_WORD_SECONDS = 1.0

_ENDS = {GangPhase.SUCCEEDED: "FINISHED", GangPhase.FAILED: "ERRORED"}  # of an attempt; any other: ABORTED

logger = logging.getLogger(__name__)


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
        self._attempt: TrainAttempt | None = None
        self._said: tuple[object, ...] = ()
        self._keeper: ActorProxy[TrainTabKeeper] | None = None
        self._given_up = False

    def show(
        self, phase: GangPhase, message: str, generation: int = 0, places: Sequence[WorkerPlace] = ()
    ) -> "ObjectRef[None] | None":
        """Tell what is new since the last call.

        Args:
            phase: Where the gang is in its life.
            message: The same for people.
            generation: Number of the gang's present formation; 0 while it has none.
            places: Its workers by rank.

        Returns:
            What answers once all of it has arrived; ``None`` if there was nothing to tell.
        """
        said = (phase, message, generation)
        if said == self._said or self._given_up:
            return None
        self._said = said
        try:
            self._keeper = keeper = self._keeper or _keeper()
            self._show_attempts(keeper, phase, generation, places)
            return keeper.show_run.remote(self._run(phase, message))
        except Exception as error:  # whatever it is, training goes on
            logger.warning("the job is not to be seen among Ray's training runs: %s", error)
            self._given_up = True
            return None

    def show_last(self, phase: GangPhase, message: str) -> None:
        """Tell how it ended. The process may be killed soon, so this waits a moment for an answer."""
        answer = self.show(phase, message)
        if answer is not None:
            ray.wait([answer], timeout=LAST_WORD_SECONDS)

    def _show_attempts(
        self, keeper: ActorProxy["TrainTabKeeper"], phase: GangPhase, generation: int, places: Sequence[WorkerPlace]
    ) -> None:
        if self._attempt is not None and self._attempt.generation != generation:
            ended = replace(self._attempt, status=_ENDS.get(phase, "ABORTED"), ended=time.time_ns())
            keeper.show_attempt.remote(ended)
            self._attempt = None
        if generation and self._attempt is None:
            began = time.time_ns()
            self._attempt = TrainAttempt(self._tag, generation, "RUNNING", tuple(places), self._resources, began, None)
            keeper.show_attempt.remote(self._attempt)

    def _run(self, phase: GangPhase, message: str) -> TrainRun:
        workers = len(self._attempt.places) if self._attempt else self._spec.parallelism.world_size
        ended = time.time_ns() if phase in (GangPhase.PAUSED, GangPhase.SUCCEEDED, GangPhase.FAILED) else None
        return TrainRun(
            self._tag, self._ray_job, self._supervisor, phase, message, workers, self._resources, self._began, ended
        )


def _keeper() -> ActorProxy["TrainTabKeeper"]:
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

    @ray.method
    def show_run(self, run: TrainRun) -> None:
        """Show a job."""
        self._try(lambda: show_train_run(run))

    @ray.method
    def show_attempt(self, attempt: TrainAttempt) -> None:
        """Show a formation of its gang."""
        self._try(lambda: show_train_attempt(attempt))

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception as error:  # a page that lacks a line is no reason to disturb anybody
            if not self._warned:
                logger.warning("jobs are not to be seen among Ray's training runs: %s", error)
            self._warned = True
