"""The job spec: everything a user can specify about a training job."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from boost_core.config.base import Config, Count, Location, ResourceName, raise_problems, spelled
from boost_core.config.data import DataConfig
from boost_core.config.legality import door_problems, elasticity_problems, job_problems, legal_layouts
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ElasticityConfig, Layout, ParallelismConfig
from boost_core.config.reading import read_yaml
from boost_core.config.storage import UNSHOWN, refuse_unserved
from boost_core.config.training import OptimizerConfig, TrainingConfig

# Where checkpoints are stored.

StorageUrl = Annotated[Location, AfterValidator(refuse_unserved)]


class CheckpointConfig(Config):
    """Where and how often to save."""

    url: StorageUrl | None = Field(
        None, description="Folder for the checkpoints: a path, file:// or s3://. The service adds the job id."
    )
    every_steps: Count = Field(100, description="Save every this many steps, and at the end.")
    keep_last: Count | None = Field(
        None, description="Keep this many of the newest checkpoints and remove older ones; default: keep all."
    )
    keep_every: Count | None = Field(
        None, description="Of the checkpoints that keep_last would remove, keep those at multiples of this many steps."
    )
    final_save_timeout_seconds: float = Field(
        86_400,
        ge=1,
        le=30 * 86_400,
        description="How long a job that has finished its last step waits for its store to accept the last "
        "checkpoint before it fails.",
    )
    store_wait_seconds: float = Field(
        10,
        ge=0,
        le=3600,
        description="How long, at most, steps wait for the store to take one checkpoint when the next copy of the "
        "state is due. After that training goes on, and the newest state is written once the store has taken the "
        "checkpoint or failed to.",
    )
    continue_from: StorageUrl | None = Field(
        None,
        description="Folder of another job's checkpoints, or of one of them, that this job continues from while it "
        "has none of its own: with the weights, the optimizer's state, the step and the place in the data of the "
        "newest one. training.steps has to be above its step.",
    )
    weights_from: StorageUrl | None = Field(
        None,
        description="Folder of another job's checkpoints, or of one of them, whose newest weights this job starts "
        "from while it has none of its own: at step 0, with a new optimizer, schedule and place in the data. "
        "model.rope_theta, model.rope_scaling and model.sliding_window may differ.",
    )

    @property
    def origin(self) -> tuple[Literal["continue_from", "weights_from"], str] | None:
        """Which of the two fields names another job's checkpoints, and their URL; ``None`` if neither does."""
        if self.continue_from is not None:
            return "continue_from", self.continue_from
        return None if self.weights_from is None else ("weights_from", self.weights_from)

    @model_validator(mode="before")
    @classmethod
    def _former_name(cls, value: Any) -> Any:
        """Read ``resume_from``, as ``continue_from`` was called in the records of earlier versions."""
        if isinstance(value, dict) and "resume_from" in value and "continue_from" not in value:
            return {"continue_from" if name == "resume_from" else name: each for name, each in value.items()}
        return value

    @field_validator("weights_from", "keep_every")
    @classmethod
    def _fields_go_together(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return value
        if info.field_name == "weights_from" and info.data.get("continue_from") is not None:
            raise ValueError("the job is also to continue from continue_from; leave one of them out")
        if info.field_name == "keep_every" and info.data.get("keep_last") is None:
            raise ValueError("without keep_last all checkpoints are kept; set keep_last, too, or leave keep_every out")
        return value


# How a job handles faults.

# Faults that no job causes, within its restart_window_seconds: a node or a gang's supervisor that is gone. They do not
# count as restarts; but a job that keeps losing them without a new checkpoint in between stops.
MOST_LOSSES = 10


class FaultToleranceConfig(Config):
    """How often to restart, how to detect faults, and what to do about them."""

    max_restarts: int = Field(
        3,
        ge=0,
        le=1000,
        description="Restarts after faults of the job's own within restart_window_seconds before the job fails. "
        f"Lost nodes and supervisors do not count; it survives {MOST_LOSSES} of these without a new checkpoint.",
    )
    restart_window_seconds: float = Field(3600, gt=0, le=30 * 86_400)
    memory_copy_every_steps: Count | None = Field(
        10,
        description="Copy each rank's state into its own memory and a peer's every this many steps, to recover "
        "without the store; null: never.",
    )
    hang_factor: float = Field(
        20, ge=2, le=1e6, description="A gang counts as hung if a step takes this many times the median step,"
    )
    hang_seconds: float = Field(600, ge=1, le=30 * 86_400, description="and at least this many seconds.")
    slow_rank_factor: float = Field(
        1.5,
        gt=1,
        le=1e6,
        description="Report a rank as slow if it computes this many times as long as the median rank.",
    )
    on_divergence: Literal["stop", "skip", "roll_back"] = Field(
        "stop",
        description="If a step's loss or gradient is not finite, or the loss jumps: fail the job; skip the "
        "update; or roll back to the newest copy of the state and skip the batches since.",
    )
    loss_jump: float | None = Field(
        None, gt=0, le=1e6, description="Nats above the median loss of the last 32 steps that count as divergence."
    )
    max_divergences: Count = Field(10, description="Divergences within 100 steps before the job fails anyway.")


# Trackers, which show a job's curves besides the service.

_SERVER = re.compile(r"https?://[^\s/?#@]+[^\s?#@]*")

ExperimentName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9/][A-Za-z0-9._/ -]*$"),
    spelled("letters, digits, dots, underscores, slashes, spaces and hyphens"),
]

WandbName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
    spelled("letters, digits, dots, underscores and hyphens"),
]


def server_url(value: str) -> str:
    """Return the address of a server without a trailing slash.

    Raises:
        ValueError: It is not a valid address. The error as shown never repeats the value, since people put passwords
            into URLs.
    """
    if not _SERVER.fullmatch(value):
        problem = (
            "an address begins with http:// or https:// and has no user, password, ? or #; a server's credentials "
            "belong in a named secret: set credentials instead"
        )
        raise PydanticCustomError(UNSHOWN, "{problem}", {"problem": problem})
    return value.rstrip("/")


ServerUrl = Annotated[str, Field(max_length=2000), AfterValidator(server_url)]


class MlflowConfig(Config):
    """A run on an MLflow server."""

    tracking_uri: ServerUrl | None = Field(None, description="Address of a server that requires no credentials.")
    credentials: ResourceName | None = Field(
        None,
        description="Name of the secret with a server's tracking_uri and the credentials it requires.",
        validate_default=True,
    )
    experiment: ExperimentName = Field(
        "boost", description="The experiment that the run is in; created if it does not exist."
    )

    @field_validator("credentials")
    @classmethod
    def _one_server(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "tracking_uri" in info.data and (info.data["tracking_uri"] is None) == (value is None):
            raise ValueError(
                "give either tracking_uri or credentials, the name of a secret with its own tracking_uri, so that it "
                "is sent to no other server"
            )
        return value


class WandbConfig(Config):
    """A run in Weights & Biases."""

    mode: Literal["online", "offline"] = Field(
        "online",
        description="online: sent during training; offline: files next to the checkpoints, for `wandb sync`.",
    )
    project: WandbName = Field("boost", description="The project that the run is in; created if it does not exist.")
    entity: WandbName | None = Field(
        None, description="The team or user that owns the project. Default: the owner of the key."
    )
    tags: tuple[Annotated[str, StringConstraints(min_length=1, max_length=64)], ...] = Field(
        (), max_length=20, description="Tags of the run."
    )
    credentials: ResourceName | None = Field(
        None,
        description="Name of the secret with an api_key and, for a server of your own, its base_url. Online only.",
        validate_default=True,
    )

    @field_validator("credentials")
    @classmethod
    def _online_alone(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "mode" in info.data and (info.data["mode"] == "online") == (value is None):
            raise ValueError(
                "mode=online needs credentials, the name of a secret with an api_key; mode=offline sends nothing, so "
                "leave credentials out"
            )
        return value


class TrackersConfig(Config):
    """Where a job's curves and state changes go besides the service."""

    tensorboard: bool | None = Field(
        None,
        description="Event files for TensorBoard, in the folder tensorboard next to the checkpoints. Default: the "
        "service's setting, which is true if TensorBoard is installed.",
    )
    mlflow: MlflowConfig | None = Field(None, description="A run on an MLflow server. Default: none.")
    wandb: WandbConfig | None = Field(None, description="A run in Weights & Biases. Default: none.")


Name = Annotated[
    str,
    StringConstraints(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$"),
    spelled("letters, digits, dots, underscores, spaces and hyphens, starting with a letter or digit"),
]
Label = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$"),
    spelled("letters, digits, underscores, dots, slashes and hyphens, at most 63, starting with a letter or digit"),
]
AcceleratorType = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,63}$"), spelled("Ray's name for it, such as H100")
]


class ResourcesConfig(Config):
    """What one worker needs from its node."""

    cpus_per_worker: float = Field(1, ge=0.01, le=1024)
    gpus_per_worker: Literal[0, 1] = Field(0, description="1: NCCL, one GPU per rank; 0: gloo on CPU.")
    accelerator_type: AcceleratorType | None = Field(None, description="Ray's name for the GPU model, such as H100.")
    node_labels: dict[Label, Label] = Field({}, max_length=16, description="Labels that nodes must have.")
    placement: Literal["PACK", "STRICT_PACK", "SPREAD"] = Field(
        "PACK",
        description="How to place a replica's tensor parallel groups, each of which stays on one node: on as few "
        "nodes as possible, on a single node, or on different nodes if there are enough.",
    )


class JobSpec(Config):
    """One training job.

    Raises:
        pydantic.ValidationError: A field is unknown, out of range, or conflicts with another; every problem is
            listed with its field and a remedy.
    """

    name: Name
    model: ModelConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resources: ResourcesConfig = ResourcesConfig()
    elasticity: ElasticityConfig | None = Field(
        None, description="Layouts that the gang may take; default: only the one in parallelism."
    )
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    trackers: TrackersConfig = TrackersConfig()
    queue: ResourceName = Field("default", description="The queue that the job waits and runs in.")
    credentials: ResourceName | None = Field(
        None,
        description="Name of the secret with credentials for s3:// data and checkpoints; default: the node's own "
        "credentials.",
    )
    priority: int = Field(
        0, ge=-1000, le=1000, description="Jobs with a higher priority start first and may preempt others."
    )

    @model_validator(mode="after")
    def _parts_go_together(self) -> "JobSpec":
        problems = job_problems(
            self.model, self.parallelism, self.data, self.training, self.optimizer, self.resources.gpus_per_worker
        )
        if not problems:
            problems = elasticity_problems(
                self.model, self.parallelism, self.training, self.optimizer, self.resources.gpus_per_worker,
                self.elasticity,
            )  # fmt: skip
        raise_problems("JobSpec", problems)
        return self

    def as_written(self) -> dict[str, Any]:
        """The job as JSON, without those fields of its model and optimizer that their others decide anyway.

        A change of one takes effect on the others, as in a job file: made dense, a model loses its preset's rank.
        """
        written = self.model_dump(mode="json")
        for name, section in (("model", self.model), ("optimizer", self.optimizer)):
            written[name] = section.model_dump(mode="json")
            _leave_out(written[name], written[name], section)
        return written

    def layouts(self) -> tuple[Layout, ...]:
        """All layouts that the gang may take, largest last; at most ``MOST_LAYOUTS``.

        With ``layouts: auto``, these are the chosen ones or, before the choice, the one in parallelism.
        """
        if self.elasticity is None:
            return (Layout.of(self.parallelism),)
        if self.elasticity.automatic:
            return self.elasticity.chosen or (Layout.of(self.parallelism),)
        return legal_layouts(
            self.model, self.parallelism, self.training, self.optimizer, self.resources.gpus_per_worker, self.elasticity
        )

    def at(self, layout: Layout) -> "JobSpec":
        """Return the job with its gang in another layout."""
        return self.model_copy(update={"parallelism": self.parallelism.at(layout)})

    def with_parallelism(self, **changes: object) -> "JobSpec":
        """Return the job with other fields of ``parallelism``, which are not checked."""
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update=changes)})

    @property
    def leaves_layouts(self) -> bool:
        """Whether the job leaves the choice of its layouts to the service."""
        return self.elasticity is not None and self.elasticity.automatic

    @property
    def lacks_layouts(self) -> bool:
        """Whether the service has yet to choose the job's layouts."""
        return self.elasticity is not None and self.elasticity.automatic and not self.elasticity.resolved

    def with_layouts(self, layouts: tuple[Layout, ...] | None) -> "JobSpec":
        """Return the job with layouts chosen by the service; ``None`` undoes the choice."""
        if self.elasticity is None:
            return self
        sizes = None if layouts is None else tuple((layout.tp, layout.pp, layout.dp) for layout in layouts)
        return self.model_copy(update={"elasticity": self.elasticity.model_copy(update={"resolved": sizes})})


def _leave_out(fields: dict[str, Any], content: dict[str, Any], section: Config) -> None:
    """Remove those ``fields`` of a section's ``content`` without which it is the same."""
    for name, value in list(fields.items()):
        del fields[name]
        try:
            decided = type(section).model_validate(content) == section
        except ValidationError:
            decided = False
        if not decided:
            fields[name] = value
            if isinstance(value, dict):
                _leave_out(value, content, section)


def load_job(path: str | Path) -> JobSpec:
    """Read a job spec from a YAML or JSON file.

    Raises:
        ValueError: The file is not a mapping or not a legal job spec (``pydantic.ValidationError``).
        OSError: The file cannot be read.
    """
    try:
        content: Any = read_yaml(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping with at least name, model and training")
    spec = JobSpec.model_validate(content)
    raise_problems(JobSpec.__name__, door_problems(spec.training))
    return spec
