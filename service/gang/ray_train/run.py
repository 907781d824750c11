"""A job's attempt as a run of Ray Train, in a thread of the supervisor."""

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any, cast

from pyarrow.fs import PyFileSystem
from ray.train.v2._internal.callbacks.metrics import ControllerMetricsCallback, WorkerMetricsCallback
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.result import Result

from boost_core.config import JobSpec
from service.gang.assignment import GangContext
from service.gang.control.port import Finish
from service.gang.ray_train.controller import END_SECONDS, GangError, GangTrainController
from service.gang.ray_train.decided import Decided, FormGeneration, GenerationHalted, RunWorker, ShowMessage
from service.gang.ray_train.policies import GangFailurePolicy, GangScalingPolicy
from service.gang.ray_train.run_state import RunState
from service.gang.ray_train.settings import set_environment
from service.gang.ray_train.storage import RunStorage, folder_of
from service.gang.resources import worker_resources

logger = logging.getLogger(__name__)


class TrainRun:
    """One attempt of a job as a run of Ray Train, in its own thread. For use by the executor's thread.

    Args:
        spec: The job.
        context: Settings of the service that workers need.

    Attributes:
        result: Ray Train's result; ``None`` before the run ends.
    """

    def __init__(self, spec: JobSpec, context: GangContext) -> None:
        set_environment()
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        self.result: Result | None = None
        self._decided: queue.SimpleQueue[Decided] = queue.SimpleQueue()
        self._said = ""
        self._failure: Exception | None = None
        self._ending = False
        self._trainer = GangTrainer(spec, context, self._decided)
        self._thread = threading.Thread(target=self._run, name="ray-train", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except GangError:
            pass  # as ordered
        except Exception as error:
            logger.exception("Ray Train's run has failed")
            self._failure = error
        self.result = self._trainer.result

    def form(self, generation: int, workers: Sequence[RunWorker]) -> None:
        """Train a generation. Its workers have got their assignments through ``RankWorker.train``."""
        self._decided.put(FormGeneration(generation, workers))

    def halted(self) -> None:
        """Take note that all ranks have stopped as they were told to."""
        self._decided.put(GenerationHalted())

    def say(self, message: str) -> None:
        """Show people the gang's state."""
        if message != self._said:
            self._said = message
            self._decided.put(ShowMessage(message))

    def check(self) -> None:
        """Check that the run continues.

        Raises:
            RuntimeError: It has ended without being told to.
        """
        if not self._thread.is_alive() and not self._ending:
            raise RuntimeError(f"Ray Train's run has ended: {self._failure or 'it was not told to'}")

    def finish(self, end: Finish) -> None:
        """End the run, and wait a few seconds at most until it has ended."""
        self._ending = True
        self._decided.put(end)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            logger.warning("Ray Train's run has not ended within %g s", END_SECONDS)


class GangTrainer(DataParallelTrainer):
    """Ray Train's trainer, whose controller runs in this process and follows the gang's controller.

    Args:
        spec: The job.
        context: Settings of the service that workers need.
        decided: The decisions, in order.

    Attributes:
        result: Result of ``fit``, even if it raises.
    """

    def __init__(self, spec: JobSpec, context: GangContext, decided: "queue.SimpleQueue[Decided]") -> None:
        self.result: Result | None = None
        self._decided, self._tag = decided, context.tag
        assert spec.checkpoint.url is not None
        folder, files = folder_of(spec.checkpoint.url), PyFileSystem(RunStorage(spec.checkpoint.url, context.access))
        resources, tag = worker_resources(spec), context.tag
        run = RunConfig(name=f"{tag.name} ({tag.job_id})", storage_path=folder, storage_filesystem=files)
        vars(run)["storage_context"] = StorageContext(folder, "", files)  # without a subfolder of the run's name
        self._scaling = ScalingConfig(
            num_workers=spec.parallelism.world_size, use_gpu="GPU" in resources, resources_per_worker=resources
        )
        super().__init__(
            _train,
            train_loop_config={"page": tag.url, "tenant": tag.tenant, "submitted_by": tag.submitted_by},
            scaling_config=self._scaling,
            run_config=cast(Any, run),  # its types name the previous class
        )
        object.__setattr__(self.train_run_context, "run_id", tag.job_id)

    def _create_default_callbacks(self) -> list[Any]:
        """Return the callbacks that show the run. The others set up or clean up what the gang handles itself."""
        return [ControllerMetricsCallback(), WorkerMetricsCallback(self.train_run_context), RunState()]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        async def run() -> Result:
            arguments["scaling_policy"] = GangScalingPolicy(self._scaling)
            arguments["failure_policy"] = GangFailurePolicy(FailureConfig(max_failures=-1))
            controller = GangTrainController(self._tag.attempt, self._decided, **arguments)
            await controller.run()
            return controller.get_result()

        self.result = asyncio.run(run())
        return self.result


def _train() -> None:
    """A placeholder for the training function; workers get the generation instead, by ``TrainingFunction``."""
