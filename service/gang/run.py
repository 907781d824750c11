"""One Ray Train run. Imports torch through Ray; only the supervisor imports this."""

import tempfile
from typing import Any

from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.torch.torch_trainer import TorchTrainer

from boost_core.config import JobSpec
from service.gang.failures import RestartLostWorkers
from service.gang.resources import worker_resources
from service.gang.worker import WorkerConfig, work


def run_gang(name: str, spec: JobSpec, supervisor: Any) -> None:
    """Train a job on a gang of workers of its own; returns after its last step.

    Args:
        name: Unique: Ray Train continues a run whose name it has seen before.
        spec: The job.
        supervisor: Handle of the ``Supervisor`` actor, for the workers' reports.

    Raises:
        ray.train.v2.api.exceptions.TrainingFailedError: The run failed and may not restart again.
    """
    failures = FailureConfig(max_failures=spec.fault_tolerance.max_restarts)
    # The trainer keeps its own checkpoints, so Ray Train stores nothing of weight here.
    with tempfile.TemporaryDirectory(prefix="boost-run-") as folder:
        _Trainer(
            RestartLostWorkers(failures, supervisor),
            train_loop_per_worker=work,
            train_loop_config=WorkerConfig(spec=spec, supervisor=supervisor),
            scaling_config=ScalingConfig(
                num_workers=spec.parallelism.world_size,
                resources_per_worker=worker_resources(spec),
                use_gpu=spec.resources.gpus_per_worker > 0,
                placement_strategy="PACK",
            ),
            run_config=RunConfig(name=name, storage_path=folder, failure_config=failures),
        ).fit()


class _Trainer(TorchTrainer):
    """A ``TorchTrainer`` with a failure policy of ours, which Ray Train has no public parameter for."""

    def __init__(self, policy: RestartLostWorkers, **settings: Any) -> None:
        super().__init__(**settings)
        self._policy = policy

    def _initialize_and_run_controller(self, **settings: Any) -> Any:
        return super()._initialize_and_run_controller(**settings | {"failure_policy": self._policy})
