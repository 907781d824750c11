"""Which trackers a job uses, and how each is created from its spec and the service's settings."""

from collections.abc import Iterator, Sequence

from boost_core.config import JobSpec
from boost_core.config.job import MlflowConfig, WandbConfig
from boost_core.config.storage import StorageOptions
from service.jobs.model import JobRecord
from service.models.problems import FieldError
from service.security.secrets import SecretReference, SecretUnusable, read
from service.settings import Settings
from service.trackers.curves import Tracker
from service.trackers.mlflow import Mlflow
from service.trackers.tensorboard import FOLDER, TensorBoard, has_tensorboard
from service.trackers.wandb import FOLDER as WANDB_FOLDER
from service.trackers.wandb import OfflineWandb, Wandb, has_wandb

TENSORBOARD, MLFLOW, WANDB = "tensorboard", "mlflow", "wandb"


def kinds_of(spec: JobSpec, settings: Settings) -> Sequence[str]:
    """Return the kinds of trackers for a new job."""
    default = settings.tensorboard if settings.tensorboard is not None else has_tensorboard()
    wanted = spec.trackers.tensorboard if spec.trackers.tensorboard is not None else default
    named = [(TENSORBOARD, wanted), (MLFLOW, spec.trackers.mlflow), (WANDB, spec.trackers.wandb)]
    return [kind for kind, given in named if given]


def tracker_errors(spec: JobSpec, settings: Settings, tenant: str) -> list[FieldError]:
    """Return what is wrong with a job's trackers, as far as can be told without contacting them."""
    trackers, errors = spec.trackers, []
    if trackers.tensorboard and not has_tensorboard():
        problem = (
            "TensorBoard is not installed where the service runs; leave it out, or ask the operator of the service"
        )
        errors.append(FieldError(field="trackers.tensorboard", message=problem))
    if trackers.mlflow is not None:
        errors += _mlflow_errors(trackers.mlflow, settings, tenant)
    if trackers.wandb is not None:
        errors += _wandb_errors(trackers.wandb, settings, tenant)
    return errors


def _mlflow_errors(mlflow: MlflowConfig, settings: Settings, tenant: str) -> Iterator[FieldError]:
    if mlflow.credentials is not None:
        try:
            _of_secret(mlflow.credentials, settings, tenant)
        except SecretUnusable as error:
            yield FieldError(field="trackers.mlflow.credentials", message=str(error))
    elif not _may_name(mlflow, settings):
        listed = f"use {' or '.join(settings.tracking_uris)}" if settings.tracking_uris else "the service allows none"
        problem = f"is not a server that jobs may name; {listed}, or set credentials"
        yield FieldError(field="trackers.mlflow.tracking_uri", message=problem, value=mlflow.tracking_uri)


def _wandb_errors(wandb: WandbConfig, settings: Settings, tenant: str) -> Iterator[FieldError]:
    if not has_wandb():
        problem = "wandb is not installed where the service runs; leave it out, or ask the operator of the service"
        yield FieldError(field="trackers.wandb", message=problem)
    if wandb.credentials is not None:
        try:
            _of_wandb_secret(wandb.credentials, settings, tenant)
        except SecretUnusable as error:
            yield FieldError(field="trackers.wandb.credentials", message=str(error))


def place_of(kind: str, job: JobRecord) -> str:
    """Return where a tracker keeps a job, as far as its spec tells."""
    if kind == TENSORBOARD:
        return f"{job.checkpoint_url}/{FOLDER}"
    if kind == WANDB:
        wandb = job.spec.trackers.wandb
        return f"{job.checkpoint_url}/{WANDB_FOLDER}" if wandb and wandb.mode == "offline" else ""
    mlflow = job.spec.trackers.mlflow
    return (mlflow.tracking_uri if mlflow else None) or ""


class TrackerFactory:
    """Creates the tracker of a kind for a job.

    Args:
        settings: The operator's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self, kind: str, job: JobRecord) -> Tracker:
        """Create the tracker.

        Raises:
            SecretUnusable: The secret that the job names is missing or invalid.
            PermissionError: The operator no longer allows the server.
        """
        if kind == MLFLOW and (mlflow := job.spec.trackers.mlflow) is not None:
            return self._mlflow(mlflow, job)
        if kind == WANDB and (wandb := job.spec.trackers.wandb) is not None:
            return self._wandb(wandb, job)
        return TensorBoard(job.checkpoint_url, self._storage_options(job))

    def _wandb(self, wandb: WandbConfig, job: JobRecord) -> Tracker:
        if wandb.credentials is None:
            return OfflineWandb(wandb, job.checkpoint_url, self._storage_options(job), self._page(job))
        values = _of_wandb_secret(wandb.credentials, self._settings, job.tenant)
        return Wandb(wandb, values, self._page(job))

    def _storage_options(self, job: JobRecord) -> StorageOptions:
        return self._settings.access(job.tenant, job.spec.credentials).storage_options()

    def _page(self, job: JobRecord) -> str | None:
        return f"{self._settings.public_url}/jobs/{job.id}" if self._settings.public_url else None

    def _mlflow(self, mlflow: MlflowConfig, job: JobRecord) -> Mlflow:
        page = self._page(job)
        if mlflow.credentials is not None:
            values = _of_secret(mlflow.credentials, self._settings, job.tenant)
            return Mlflow(values.pop("tracking_uri"), mlflow.experiment, values, page)
        if mlflow.tracking_uri is None or not _may_name(mlflow, self._settings):
            raise PermissionError(f"{mlflow.tracking_uri} is not a server that jobs may name")
        return Mlflow(mlflow.tracking_uri, mlflow.experiment, {}, page)


def _may_name(mlflow: MlflowConfig, settings: Settings) -> bool:
    if settings.tracking_uris is None:
        return not settings.auth
    return mlflow.tracking_uri in settings.tracking_uris


def _of_secret(name: str, settings: Settings, tenant: str) -> dict[str, str]:
    reference = SecretReference(str(settings.secrets_dir), tenant, name)
    return read(reference, ("tracking_uri",), ("token", "username", "password"))


def _of_wandb_secret(name: str, settings: Settings, tenant: str) -> dict[str, str]:
    return read(SecretReference(str(settings.secrets_dir), tenant, name), ("api_key",), ("base_url",))
