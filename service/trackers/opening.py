"""Which trackers a job uses, and how each is created from its spec and the service's settings."""

from collections.abc import Sequence
from importlib.util import find_spec

from boost_core.config import JobSpec
from boost_core.config.job import MlflowConfig, server_url
from service.jobs.model import JobRecord
from service.models.problems import FieldError
from service.security.secrets import SecretReference, SecretUnusable, read
from service.settings import Settings
from service.trackers.curves import Tracker
from service.trackers.mlflow import Mlflow
from service.trackers.tensorboard import FOLDER, TensorBoard, TrackerFolder, has_tensorboard
from service.trackers.wandb import FOLDER as WANDB_FOLDER
from service.trackers.wandb import OfflineWandb, Wandb

TENSORBOARD, MLFLOW, WANDB = "tensorboard", "mlflow", "wandb"
# The files of a secret for a kind of tracker: those that it must have, and those that it may have.
_SECRET_FILES = {MLFLOW: (("tracking_uri",), ("token", "username", "password")), WANDB: (("api_key",), ("base_url",))}
_NO_ADDRESS = "is no http(s) address without user, password, ? and #; ask the operator of the service to correct it"


def kinds_of(spec: JobSpec, settings: Settings) -> Sequence[str]:
    """Return the kinds of trackers for a new job."""
    default = settings.tensorboard if settings.tensorboard is not None else has_tensorboard()
    tensorboard = spec.trackers.tensorboard if spec.trackers.tensorboard is not None else default
    kinds = [(TENSORBOARD, tensorboard), (MLFLOW, spec.trackers.mlflow), (WANDB, spec.trackers.wandb)]
    return [kind for kind, settings_of_kind in kinds if settings_of_kind]


def tracker_errors(spec: JobSpec, settings: Settings, tenant: str) -> list[FieldError]:
    """Return what is wrong with a job's trackers, as far as can be told without contacting them."""
    mlflow, wandb, errors = spec.trackers.mlflow, spec.trackers.wandb, []
    remedy = "is not installed where the service runs; leave it out, or ask the operator of the service"
    if spec.trackers.tensorboard and not has_tensorboard():
        errors.append(FieldError(field="trackers.tensorboard", message=f"TensorBoard {remedy}"))
    for kind, tracker in ((MLFLOW, mlflow), (WANDB, wandb)):
        if tracker is None:
            continue
        if kind == WANDB and find_spec("wandb") is None:
            errors.append(FieldError(field="trackers.wandb", message=f"wandb {remedy}"))
        if tracker.credentials is not None:
            try:
                _secret(kind, tracker.credentials, settings, tenant)
            except SecretUnusable as error:
                errors.append(FieldError(field=f"trackers.{kind}.credentials", message=str(error)))
        elif isinstance(tracker, MlflowConfig) and not _may_name(tracker, settings):
            uris, field = settings.tracking_uris, "trackers.mlflow.tracking_uri"
            listed = f"use {' or '.join(uris)}" if uris else "the service allows none"
            problem = f"is not a server that jobs may name; {listed}, or set credentials"
            errors.append(FieldError(field=field, message=problem, value=tracker.tracking_uri))
    return errors


def place_of(kind: str, job: JobRecord) -> str:
    """Return where a tracker keeps a job, as far as its spec tells."""
    if kind == TENSORBOARD:
        return f"{job.checkpoint_url}/{FOLDER}"
    if kind == WANDB:
        wandb = job.spec.trackers.wandb
        return f"{job.checkpoint_url}/{WANDB_FOLDER}" if wandb and wandb.mode == "offline" else ""
    mlflow = job.spec.trackers.mlflow
    return (mlflow.tracking_uri if mlflow else None) or ""


def open_tracker(settings: Settings, kind: str, job: JobRecord) -> Tracker:
    """Create the tracker of a kind for a job.

    Args:
        settings: The operator's settings.
        kind: The kind.
        job: The job.

    Raises:
        SecretUnusable: The secret that the job names is missing or invalid.
        PermissionError: The operator no longer allows the server.
    """
    mlflow, wandb = job.spec.trackers.mlflow, job.spec.trackers.wandb
    page = f"{settings.public_url}/jobs/{job.id}" if settings.public_url else None
    if kind == MLFLOW and mlflow is not None:
        if mlflow.credentials is not None:
            values = _secret(MLFLOW, mlflow.credentials, settings, job.tenant)
            return Mlflow(values.pop("tracking_uri"), mlflow.experiment, values, page)
        if mlflow.tracking_uri is None or not _may_name(mlflow, settings):
            raise PermissionError(f"{mlflow.tracking_uri} is not a server that jobs may name")
        return Mlflow(mlflow.tracking_uri, mlflow.experiment, {}, page)
    if kind == WANDB and wandb is not None and wandb.credentials is not None:
        return Wandb(wandb, _secret(WANDB, wandb.credentials, settings, job.tenant), page)
    storage_options = settings.access(job.tenant, job.spec.credentials).storage_options()
    if kind == WANDB and wandb is not None:
        return OfflineWandb(wandb, TrackerFolder(job.checkpoint_url, WANDB_FOLDER, storage_options), page)
    return TensorBoard(TrackerFolder(job.checkpoint_url, FOLDER, storage_options))


def _may_name(mlflow: MlflowConfig, settings: Settings) -> bool:
    if settings.tracking_uris is None:
        return not settings.auth
    return mlflow.tracking_uri in settings.tracking_uris


def _secret(kind: str, name: str, settings: Settings, tenant: str) -> dict[str, str]:
    reference = SecretReference(str(settings.secrets_dir), tenant, name)
    values = read(reference, *_SECRET_FILES[kind])
    for file in {"tracking_uri", "base_url"} & values.keys():
        try:
            server_url(values[file])
        except ValueError:  # it is shown, so it must not hold a password
            raise SecretUnusable(f"{file} of {reference} {_NO_ADDRESS}") from None
    return values
