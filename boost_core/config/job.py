"""The job spec: everything a user can specify about a training job, and which combinations of it are legal."""

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, AliasChoices, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from boost_core.config.base import (
    UNSHOWN,
    Config,
    Count,
    FieldProblem,
    Location,
    Moment,
    ResourceName,
    Share,
    counted,
    raise_problems,
    read_yaml,
    refuse_unserved,
    spelled,
)
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import (
    EFFICIENT,
    MOST_CHUNKS,
    MOST_LAYOUTS,
    ElasticityConfig,
    Layout,
    ParallelismConfig,
    cannot_send_latents,
    chunk_tokens,
    divisors,
    strategy_of,
    strategy_problems,
)
from boost_core.config.training import (
    BYTE_TOKENS,
    BYTES,
    MOST_TOKENS,
    DataConfig,
    OptimizerConfig,
    SampleConfig,
    Schedule,
    TrainingConfig,
)

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
    final_save_timeout_seconds: Annotated[float, Field(ge=1, le=30 * 86_400)] = Field(
        86_400,
        description="How long a job that has finished its last step waits for its store to accept the last "
        "checkpoint before it fails.",
    )
    store_wait_seconds: Annotated[float, Field(ge=0, le=3600)] = Field(
        10,
        description="How long, at most, steps wait for the store to take one checkpoint when the next copy of the "
        "state is due. After that training goes on, and the newest state is written once the store has taken the "
        "checkpoint or failed to.",
    )
    continue_from: StorageUrl | None = Field(
        None,
        validation_alias=AliasChoices("continue_from", "resume_from"),  # its name in records of earlier versions
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

    @field_validator("weights_from", "keep_every")
    @classmethod
    def _fields_go_together(cls, value: Any, info: Any) -> Any:
        is_set, name = value is not None, info.field_name
        if is_set and name == "weights_from" and info.data.get("continue_from") is not None:
            raise ValueError("the job is also to continue from continue_from; leave one of them out")
        if is_set and name == "keep_every" and info.data.get("keep_last") is None:
            raise ValueError("without keep_last all checkpoints are kept; set keep_last, too, or leave keep_every out")
        return value


# What can be changed while a job trains, within the limits of the fields themselves: a job file may list what held
# before, which nobody else checks.


class SteeredTraining(Config):
    """The fields of ``training`` that can be changed while a job trains."""

    steps: Count
    evaluate_every_steps: Count
    sample: SampleConfig | None = None


class SteeredOptimizer(Config):
    """The fields of ``optimizer`` that can be."""

    learning_rate: float = Field(gt=0, lt=10)
    schedule: Schedule
    decay_steps: Count | None = None
    warmup_steps: int = Field(ge=0)
    final_learning_rate_ratio: Share


class SteeredCheckpoint(Config):
    """The field of ``checkpoint`` that can be."""

    every_steps: Count


class Steering(Config):
    """What can be changed while a job trains, as its sections have it."""

    training: SteeredTraining
    optimizer: SteeredOptimizer
    checkpoint: SteeredCheckpoint

    def changes_to(self, other: "Steering") -> dict[str, dict[str, Any]]:
        """``from`` and ``to`` of each field that another one has different, such as ``optimizer.learning_rate``."""
        before, after = self.model_dump(mode="json"), other.model_dump(mode="json")
        return {
            f"{section}.{field}": {"from": value, "to": after[section][field]}
            for section in Steering.model_fields
            for field, value in before[section].items()
            if value != after[section][field]
        }


class SteeringStage(Steering):
    """What held up to a step, after which the job was steered."""

    until_step: int = Field(ge=0, le=100_000_000, description="The last optimizer step with these values.")
    changed_by: str = Field("", max_length=100, description="Name of the API key with which they were changed.")
    requested_at: Moment | None = Field(None, description="When that was requested.")


MOST_STEERED = 200  # changes of a job, which its record holds

# How a job handles faults.

# Faults that no job causes, within its restart_window_seconds: a node or a gang's supervisor that is gone. They do not
# count as restarts; but a job that keeps losing them without a new checkpoint in between stops.
MOST_LOSSES = 10


class FaultToleranceConfig(Config):
    """How often to restart, how to detect faults, and what to do about them."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = Field(
        3,
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
    slow_rank_factor: Annotated[float, Field(gt=1, le=1e6)] = Field(
        1.5, description="Report a rank as slow if it computes this many times as long as the median rank."
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

_EXPERIMENT_NAME = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9/][A-Za-z0-9._/ -]*$")
_IN_WORDS = "letters, digits, dots, underscores, slashes, spaces and hyphens"
ExperimentName = Annotated[str, _EXPERIMENT_NAME, spelled(_IN_WORDS)]

_WANDB_NAME = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
WandbName = Annotated[str, _WANDB_NAME, spelled("letters, digits, dots, underscores and hyphens")]


def server_url(value: str) -> str:
    """Return the address of a server without a trailing slash.

    Raises:
        ValueError: It is not a valid address. The error as shown never repeats the value, since people put passwords
            into URLs.
    """
    if not _SERVER.fullmatch(value):
        problem = "an address begins with http:// or https:// and has no user, password, ? or #; "
        problem += "a server's credentials belong in a named secret: set credentials instead"
        raise PydanticCustomError(UNSHOWN, "{problem}", {"problem": problem})
    return value.rstrip("/")


ServerUrl = Annotated[str, Field(max_length=2000), AfterValidator(server_url)]


Credentials = Annotated[ResourceName | None, Field(validate_default=True)]  # some trackers require a secret


class MlflowConfig(Config):
    """A run on an MLflow server."""

    tracking_uri: ServerUrl | None = Field(None, description="Address of a server that requires no credentials.")
    credentials: Credentials = Field(
        None, description="Name of the secret with a server's tracking_uri and the credentials it requires."
    )
    experiment: ExperimentName = Field(
        "boost", description="The experiment that the run is in; created if it does not exist."
    )

    @field_validator("credentials")
    @classmethod
    def _one_server(cls, value: str | None, info: Any) -> str | None:
        if "tracking_uri" in info.data and (info.data["tracking_uri"] is None) == (value is None):
            either = "give either tracking_uri or credentials, the name of a secret with its own tracking_uri"
            raise ValueError(f"{either}, so that it is sent to no other server")
        return value


class WandbConfig(Config):
    """A run in Weights & Biases."""

    mode: Literal["online", "offline"] = Field(
        "online", description="online: sent during training; offline: files next to the checkpoints, for `wandb sync`."
    )
    project: WandbName = Field("boost", description="The project that the run is in; created if it does not exist.")
    entity: WandbName | None = Field(
        None, description="The team or user that owns the project. Default: the owner of the key."
    )
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        (), max_length=20, description="Tags of the run."
    )
    credentials: Credentials = Field(
        None, description="Name of the secret with an api_key and, for a server of your own, its base_url. Online only."
    )

    @field_validator("credentials")
    @classmethod
    def _online_alone(cls, value: str | None, info: Any) -> str | None:
        if "mode" in info.data and (info.data["mode"] == "online") == (value is None):
            online = "mode=online needs credentials, the name of a secret with an api_key"
            raise ValueError(f"{online}; mode=offline sends nothing, so leave credentials out")
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


_NAMES = "letters, digits, dots, underscores, spaces and hyphens, starting with a letter or digit"
_LABELS = "letters, digits, underscores, dots, slashes and hyphens, at most 63, starting with a letter or digit"
_NOTES = "text without control characters other than tabs and line breaks"
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$"), spelled(_NAMES)]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$"), spelled(_LABELS)]
Notes = Annotated[str, Field(max_length=4000, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$"), spelled(_NOTES)]
MOST_TAGS = 20
AcceleratorType = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,63}$"), spelled("Ray's name for it, such as H100")]


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
    group: Label | None = Field(None, description="The runs that it belongs with, such as a series of experiments.")
    tags: tuple[Label, ...] = Field((), max_length=MOST_TAGS, description="Words to find it by, each once.")
    notes: Notes = Field("", description="What its users write down about it.")
    steered: tuple[SteeringStage, ...] = Field(
        (),
        max_length=MOST_STEERED,
        description="What held at first of a job that was changed while it trained, in order; written by the service.",
    )

    @field_validator("tags", "steered")
    @classmethod
    def _tags_once_and_stages_in_order(cls, value: tuple[Any, ...], info: Any) -> tuple[Any, ...]:
        if info.field_name == "tags":
            if twice := [tag for number, tag in enumerate(value) if tag in value[:number]]:
                raise ValueError(f"has {twice[0]} more than once; leave it out there")
            return value
        for before, after in pairwise(stage.until_step for stage in value):
            if after < before:
                raise ValueError(f"until_step={after} comes after until_step={before}")
        return value

    @model_validator(mode="after")
    def _parts_go_together(self) -> "JobSpec":
        """Refuse parts that are valid one by one but cannot be combined."""
        model, data, training, optimizer = self.model, self.data, self.training, self.optimizer
        sections = model, self.parallelism, training, optimizer, self.resources.gpus_per_worker
        problems = layout_problems(*sections, accepted=True)
        in_bytes = not data.tokenized and data.tokenizer in (None, BYTES)  # otherwise only the trainer can count tokens
        if in_bytes and (size := model.vocab_size) < BYTE_TOKENS:
            message = f"{size} is below {BYTE_TOKENS}, the number of byte-level tokens; use at least {BYTE_TOKENS}"
            problems.append(FieldProblem(("model", "vocab_size"), size, message))

        warmup, decay, steps = optimizer.warmup_steps, optimizer.decay_steps or 0, f"training.steps={training.steps}"
        if warmup > training.steps:
            message = f"a warm-up of {warmup} steps does not fit into {steps}; shorten it"
            problems.append(FieldProblem(("optimizer", "warmup_steps"), warmup, message))
        elif warmup + decay > training.steps:
            message = f"a decay of {decay} steps after a warm-up of {warmup} does not fit into {steps}"
            problems.append(FieldProblem(("optimizer", "decay_steps"), decay, f"{message}; shorten one of them"))

        if in_bytes and training.sample is not None:
            room = training.sequence_length - training.sample.max_new_tokens
            for number, prompt in enumerate(training.sample.prompts):
                if (size := len(prompt.encode(errors="replace"))) > room:
                    message = too_long_a_prompt(number, size, room)
                    problems.append(FieldProblem(("training", "sample", "prompts"), None, message))
        raise_problems("JobSpec", problems or elasticity_problems(*sections, self.elasticity))
        return self

    def as_written(self) -> dict[str, Any]:
        """The job as JSON, without those fields of its model and optimizer that their others decide anyway.

        A change of one takes effect on the others, as in a job file: made dense, a model loses its preset's rank. What
        held before the job was steered is left out, too.
        """
        written = self.model_dump(mode="json", exclude={"steered"})
        if self.training.tokens is not None:
            del written["training"]["steps"]
        for name, section in (("model", self.model), ("optimizer", self.optimizer)):
            written[name] = section.model_dump(mode="json")
            _leave_out(written[name], written[name], section)
        return written

    def layouts(self) -> tuple[Layout, ...]:
        """All layouts that the gang may take, largest last; at most ``MOST_LAYOUTS``.

        With ``layouts: auto``, these are the chosen ones or, before the choice, the one in parallelism.
        """
        if self.elasticity is None or self.elasticity.layouts == "auto":
            chosen = () if self.elasticity is None else self.elasticity.chosen
            return chosen or (Layout.of(self.parallelism),)
        gpus = self.resources.gpus_per_worker
        return legal_layouts(self.model, self.parallelism, self.training, self.optimizer, gpus, self.elasticity)

    def at(self, layout: Layout) -> "JobSpec":
        """Return the job with its gang in another layout."""
        return self.model_copy(update={"parallelism": self.parallelism.at(layout)})

    def with_parallelism(self, **changes: object) -> "JobSpec":
        """Return the job with other fields of ``parallelism``, which are not checked."""
        return self.model_copy(update={"parallelism": self.parallelism.model_copy(update=changes)})

    @property
    def steering(self) -> Steering:
        """What can be changed while the job trains, as it is now."""
        return Steering.model_validate(self, from_attributes=True)

    def with_steering(self, steering: Steering) -> "JobSpec":
        """Return the job with other values of what can be changed while it trains, which are not checked."""
        changes = {
            name: getattr(self, name).model_copy(update=dict(getattr(steering, name))) for name in Steering.model_fields
        }
        if steering.training.steps != self.training.steps:
            changes["training"] = changes["training"].model_copy(update={"tokens": None})
        return self.model_copy(update=changes)

    def steered_after(self, step: int, steering: Steering, changed_by: str, requested_at: datetime | None) -> "JobSpec":
        """Return the job with other values from the optimizer step after ``step`` on."""
        stage = SteeringStage(**dict(self.steering), until_step=step, changed_by=changed_by, requested_at=requested_at)
        return self.with_steering(steering).model_copy(update={"steered": (*self.steered, stage)})

    def at_step(self, step: int) -> "JobSpec":
        """Return the job with the values that hold in optimizer step ``step``, counted from 1."""
        stage = next((stage for stage in self.steered if step <= stage.until_step), None)
        return self if stage is None else self.with_steering(stage)

    @property
    def leaves_layouts(self) -> bool:
        """Whether the job leaves the choice of its layouts to the service."""
        return self.elasticity is not None and self.elasticity.layouts == "auto"

    @property
    def lacks_layouts(self) -> bool:
        """Whether the service has yet to choose the job's layouts."""
        return self.elasticity is not None and self.leaves_layouts and not self.elasticity.resolved

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
    raise_problems(JobSpec.__name__, [*door_problems(spec.training), *uneven_layouts(spec)])
    return spec


# Which models, layouts and batches can be combined.

_REMEMBERED = 4096  # specs
_PIECE = 16  # columns


def layout_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int, accepted: bool = False,
) -> list[FieldProblem]:  # fmt: skip
    """The problems that depend on how the gang is split.

    Args:
        model: The job's model.
        parallelism: Its layout.
        training: Its batches and sequences.
        optimizer: Its optimizer.
        gpus_per_worker: GPUs of each worker, 0 or 1.
        accepted: Whether to leave out what jobs that were accepted earlier may have (``uneven_tokens``).
    """
    problems = strategy_problems(model, parallelism) + _pipeline_problems(model, parallelism, training)
    name, stages, blocks = "pipeline_layers_per_stage", parallelism.stages, model.num_hidden_layers
    if (layers := parallelism.pipeline_layers_per_stage) is not None:
        wrong = ""
        if len(layers) != stages:
            wrong = f"{name} lists {counted(len(layers), 'stage')}, but there are {stages}; give an entry for each"
        elif (total := sum(layers)) != blocks:
            wrong = f"the entries of {name} add up to {total}, but model.num_hidden_layers is {blocks}; make them equal"
        if wrong:
            problems.append(FieldProblem(("parallelism", name), list(layers), f"{wrong}, or leave it out"))
    problems += _sequence_problems(model, parallelism, training)
    problems += [] if accepted else uneven_tokens(model, parallelism, training)

    if parallelism.split_micro_batch and training.micro_batch_size == 1:
        whole = ""
        if parallelism.context_parallel_size > 1:
            whole = "over context parallel ranks"
        elif parallelism.recompute_text not in ("none", "auto"):  # two halves of its tokens have one backward pass
            whole = f"with recompute={parallelism.recompute_text}"
        if whole:
            why = f"a micro-batch of 1 sequence cannot be split {whole}; use 2 or more, or leave split_micro_batch out"
            problems.append(FieldProblem(("training", "micro_batch_size"), 1, why))
    micro_batch, replicas = training.micro_batch_size, parallelism.data_parallel_size
    portion = micro_batch * replicas
    warmup = (("batch_size_warmup", stage.global_batch_size) for stage in training.batch_size_warmup)
    for field, size in (("global_batch_size", training.global_batch_size), *warmup):
        if size % portion:
            near = -(-size // portion) * portion
            split = f"split into micro-batches of {micro_batch} on {replicas} data parallel rank(s)"
            remedy = f"use a multiple of {portion} such as {near}, or a smaller micro_batch_size"
            problems.append(FieldProblem(("training", field), size, f"{size} sequences cannot be {split}; {remedy}"))

    kind, strategy, message = optimizer.kind, strategy_of(model, parallelism), ""
    if kind == "loro" and model.family != "svd":
        message = f"optimizer.kind=loro requires model.family=svd, not {model.family}; use family=svd or adamw"
    elif kind == "muon" and model.family == "dense":
        message = "muon is for low-rank factors, but model.family=dense has none; use another family, or adamw"
    elif kind != "adamw" and strategy != "btp":
        message = f"{kind} needs factors that are whole along their rank; use strategy=btp"
    if message:
        problems.append(FieldProblem(("optimizer", "kind"), kind, message))

    # Tensor cores take 8-bit matrices in multiples of 16 along every axis except tokens.
    ranks = parallelism.tensor_parallel_size
    if training.precision == "fp8" and strategy != "btp":
        message = f"fp8 is for btp; {strategy} computes in bf16 or fp32: use bf16"
        problems.append(FieldProblem(("training", "precision"), "fp8", message))
    elif training.precision == "fp8" and model.rank is not None:  # otherwise refused already
        widths = {"hidden_size": model.hidden_size / ranks, "num_key_value_heads": model.key_value_size / ranks}
        widths |= {"intermediate_size": model.intermediate_size / ranks, "rank": model.bottleneck_rank}
        for name, width in widths.items():
            if width % _PIECE:
                uneven = f"fp8 needs multiples of {_PIECE}, but model.{name} gives a rank {width:g} columns"
                remedy = f"change model.{name} or parallelism.tensor_parallel_size, or use bf16"
                problems.append(FieldProblem(("training", "precision"), "fp8", f"{uneven}; {remedy}"))

    # Whether workers compute on CPU or GPU, and what keeps a step from being captured.
    size = parallelism.context_parallel_size
    if gpus_per_worker == 0:
        if training.cuda_graphs == "on":
            message = "CPUs have no CUDA graphs; use auto or off, or set resources.gpus_per_worker to 1"
            problems.append(FieldProblem(("training", "cuda_graphs"), "on", message))
    elif size > 1 and not flash_takes(model, training):
        unfit = f"which does not support {training.precision} with heads of {model.head_size}"
        remedy = "use bf16 (on Ampere or later), and a head size that is a multiple of 8, up to 256"
        message = f"on GPUs, context parallelism needs flash attention, {unfit}; {remedy}"
        problems.append(FieldProblem(("parallelism", "context_parallel_size"), size, message))
    if training.cuda_graphs == "on" and parallelism.keeps_on_host:
        why = "recompute=offload copies what blocks keep to the host and back, which is not captured"
        problems.append(FieldProblem(("training", "cuda_graphs"), "on", f"{why}; use auto or off"))
    return problems


def too_long_a_prompt(number: int, size: int, room: int) -> str:
    """The message for a prompt of ``size`` tokens where there is room for fewer."""
    problem = f"prompt {number} has {size} tokens, but with max_new_tokens a sequence has room for only {room}"
    return f"{problem}; shorten it, or lower max_new_tokens"


def flash_takes(model: ModelConfig, training: TrainingConfig) -> bool:
    """Whether flash attention on a GPU supports a job's compute type and head size; see ``model.attention``."""
    return training.precision != "fp32" and model.head_size % 8 == 0 and model.head_size <= 256


def _sequence_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    """Why sequences cannot be shared by context parallel ranks, or not use the sparse attention that is asked for."""
    problems, attention, length = [], training.attention, training.sequence_length
    sequence = f"training.sequence_length={length}"
    not_captured = "which cannot be captured; set cuda_graphs to auto or off"
    if (size := parallelism.context_parallel_size) > 1:
        messages = []
        if length % size:
            messages.append(f"{sequence} cannot be split equally among {size} ranks; choose a divisor")
        elif (chunks := length // size // chunk_tokens(length, size)) > MOST_CHUNKS:
            unit = size * EFFICIENT
            near = min(-(-length // unit), MOST_TOKENS // unit) * unit
            cut = f"{sequence} would be cut into {chunks:,} chunks for each of {size} ranks"
            messages.append(f"{cut}, but {MOST_CHUNKS} is the limit; use a multiple of {unit} such as {near}")
        if training.cuda_graphs == "on":
            messages.append(f"the host plans each micro-batch, {not_captured}")
        problems = [FieldProblem(("parallelism", "context_parallel_size"), size, message) for message in messages]
        if parallelism.context.exchange == "latents" and (why := cannot_send_latents(model, parallelism, training)):
            problems.append(FieldProblem(("parallelism", "context", "exchange"), "latents", f"{why}; use auto or keys"))
        if parallelism.context.pool == "tasks" and attention is not None:
            why = "sparse attention cannot choose keys before it has the queries, so these cannot be moved; use none"
            problems.append(FieldProblem(("parallelism", "context", "pool"), "tasks", why))

    if attention is None:
        return problems
    messages, shortest = [], attention.from_length
    if parallelism.split_micro_batch:
        messages.append("the halves of split_micro_batch use dense attention; leave one of the two out")
    if (window := model.sliding_window) is not None:
        messages.append(f"model.sliding_window={window} already says what each query sees; leave one of the two out")
    if training.cuda_graphs == "on":
        messages.append(f"the host chooses what to compute in each step, {not_captured}")
    if shortest > length:
        unused = f"from_length={shortest} is above {sequence}, so no document would use sparse attention"
        messages.append(f"{unused}; use at most {length}")
    always, budget = attention.always_pairs(shortest), attention.pairs(shortest)
    if always > budget:
        over = f"sink and window alone take {always} pairs in a document of from_length={shortest}"
        remedy = "lower window or sink, or raise from_length or budget"
        messages.append(f"{over}, but budget={attention.budget:g} allows {budget}; {remedy}")
    return problems + [FieldProblem(("training", "attention"), None, message) for message in messages]


def _pipeline_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig
) -> list[FieldProblem]:
    size, stages, blocks = parallelism.pipeline_parallel_size, parallelism.stages, model.num_hidden_layers
    schedule, of_schedule = parallelism.pipeline_schedule, ("parallelism", "pipeline_schedule")
    if size == 1:
        message = f"{schedule} is for several pipeline stages; leave it out, or set pipeline_parallel_size"
        return [] if schedule == "1f1b" else [FieldProblem(of_schedule, schedule, message)]
    problems = []
    if stages > blocks:
        message = f"{stages} stages need at least as many blocks, but model.num_hidden_layers is {blocks}"
        problems.append(FieldProblem(("parallelism", "pipeline_parallel_size"), size, f"{message}; use fewer stages"))
    if schedule == "zero_bubble" and strategy_of(model, parallelism) != "btp":
        message = "zero_bubble defers weight gradients, which only btp supports; use interleaved_1f1b"
        problems.append(FieldProblem(of_schedule, schedule, message))
    if training.cuda_graphs == "on":
        message = "the host takes part in pipeline schedules, which cannot be captured; use auto or off"
        problems.append(FieldProblem(("training", "cuda_graphs"), "on", message))
    if parallelism.split_micro_batch:
        message = "pipeline stages take whole micro-batches; leave split_micro_batch out"
        problems.append(FieldProblem(("parallelism", "split_micro_batch"), True, message))
    if training.batch_size_warmup:
        message = "a pipeline has a fixed number of micro-batches; leave it out, or use pipeline_parallel_size=1"
        problems.append(FieldProblem(("training", "batch_size_warmup"), None, message))
    count = training.micro_batches(parallelism.data_parallel_size)
    if count < size:
        needed = f"{size} pipeline ranks need at least {size} micro-batches per step and data parallel rank"
        message = f"{needed}, but the batch gives {count}; raise global_batch_size, or lower micro_batch_size"
        problems.append(FieldProblem(("training", "global_batch_size"), training.global_batch_size, message))
    elif schedule != "1f1b" and count % size:
        needed = f"{schedule} needs a multiple of {size} micro-batches per step and data parallel rank"
        remedy = "change training.global_batch_size or micro_batch_size, or use 1f1b"
        problems.append(FieldProblem(of_schedule, schedule, f"{needed}, but there are {count}; {remedy}"))
    return problems


def door_problems(training: TrainingConfig) -> list[FieldProblem]:
    """Problems for which only new jobs are refused; jobs that were accepted earlier may have them."""
    if not training.batch_size_warmup or (until := training.batch_size_warmup[-1].until_step) < training.steps:
        return []
    lasts = f"its last stage lasts until step {until} of training.steps={training.steps}"
    left = f"which leaves no step for global_batch_size={training.global_batch_size}"
    message = f"{lasts}, {left}; end it earlier, or raise training.steps"
    return [FieldProblem(("training", "batch_size_warmup"), until, message)]


def uneven_tokens(model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig) -> list[FieldProblem]:
    """Why dense tensor parallel ranks cannot have equal parts of a sequence's tokens."""
    tensor, tokens = parallelism.tensor_parallel_size, training.sequence_length // parallelism.context_parallel_size
    if strategy_of(model, parallelism) != "fullrank" or tokens % tensor == 0:
        return []
    message = f"{tensor} does not divide the {tokens} tokens of a sequence on a rank; choose a divisor"
    return [FieldProblem(("parallelism", "tensor_parallel_size"), tensor, message)]


def uneven_layouts(spec: JobSpec) -> list[FieldProblem]:
    """``uneven_tokens`` in any of a job's layouts, for which, too, only new jobs are refused."""
    each = (uneven_tokens(spec.model, spec.parallelism.at(layout), spec.training) for layout in spec.layouts())
    return next(filter(None, each), [])


@lru_cache(_REMEMBERED)
def legal_layouts(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int, elasticity: ElasticityConfig,
) -> tuple[Layout, ...]:  # fmt: skip
    """All layouts that a job allows and that are legal with the rest of its spec, fewest ranks first.

    Args:
        model: The job's model.
        parallelism: Its own parallelism.
        training: Its batches: only numbers of replicas that divide a step's micro-batches are legal.
        optimizer: Its optimizer.
        gpus_per_worker: GPUs of each worker, 0 or 1.
        elasticity: The layouts it allows.
    """
    sizes = elasticity.data_parallel_size
    numbers = [] if sizes is None else numbers_of_replicas(training, sizes.min, sizes.max)
    replicas, rest = elasticity.replicas(Layout.of(parallelism)), (training, optimizer, gpus_per_worker)
    layouts = [replace(replica, dp=number) for replica in replicas for number in numbers]
    legal = (each for each in layouts if not layout_problems(model, parallelism.at(each), *rest, accepted=True))
    return tuple(sorted(legal, key=lambda layout: (layout.world_size, layout)))


def elasticity_problems(
    model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, optimizer: OptimizerConfig,
    gpus_per_worker: int, elasticity: ElasticityConfig | None,
) -> list[FieldProblem]:  # fmt: skip
    """Why a job cannot run in the layouts it allows: each kind of replica needs a legal number of replicas."""
    if elasticity is None:
        return []
    automatic = elasticity.layouts == "auto"
    if automatic and (size := parallelism.context_parallel_size) > 1:
        message = "layouts=auto chooses among layouts without context parallelism; leave it out, or list layouts"
        return [FieldProblem(("parallelism", "context_parallel_size"), size, message)]
    if automatic and isinstance(parallelism.recompute, tuple):
        message = "layouts=auto tries other numbers of stages; use recompute=auto, or one mode for all blocks"
        return [FieldProblem(("parallelism", "recompute"), parallelism.recompute_text, message)]
    if automatic and (layers := parallelism.pipeline_layers_per_stage) is not None:
        message = "layouts=auto tries other numbers of stages; leave it out, or list layouts"
        return [FieldProblem(("parallelism", "pipeline_layers_per_stage"), list(layers), message)]
    sizes = elasticity.data_parallel_size
    if sizes is None:
        # The layouts recorded as chosen by the service.
        gpus, problems = elasticity.gpus, []
        for layout in elasticity.chosen:
            there = parallelism.at(layout)
            illegal = layout_problems(model, there, training, optimizer, gpus_per_worker, accepted=True)
            causes = [problem.message for problem in illegal]
            if gpus and not gpus.min <= layout.world_size <= gpus.max:
                causes.append(f"it has {layout.world_size} ranks, but gpus allows {gpus.min} to {gpus.max}")
            if causes:
                message = f"{layout} is not legal: {'; '.join(causes)}; leave resolved out, the service writes it"
                problems.append(FieldProblem(("elasticity", "resolved"), [layout.tp, layout.pp, layout.dp], message))
        return problems
    replicas = elasticity.replicas(Layout.of(parallelism))
    numbers = len(numbers_of_replicas(training, sizes.min, sizes.max))
    if (count := len(replicas) * numbers) > MOST_LAYOUTS:
        split = f"{numbers} numbers of replicas from {sizes.min} to {sizes.max} split the batch"
        makes = f"which makes {count} layouts with {len(replicas)} kind(s) of replica"
        remedy = f"a job may allow at most {MOST_LAYOUTS}: narrow the range, or list fewer kinds"
        return [FieldProblem(("elasticity", "data_parallel_size"), sizes.max, f"{split}, {makes}; {remedy}")]
    layouts = legal_layouts(model, parallelism, training, optimizer, gpus_per_worker, elasticity)
    legal = {layout.per_replica for layout in layouts}
    problems = []
    for replica in replicas:
        if replica not in legal:
            where = ("elasticity", "layouts" if elasticity.layouts else "data_parallel_size")
            smallest = parallelism.at(replace(replica, dp=sizes.min))
            illegal = layout_problems(model, smallest, training, optimizer, gpus_per_worker, accepted=True)
            reasons = "; ".join(problem.message for problem in illegal) or "the batch cannot be split that way"
            message = f"{replica.replica_text} is legal with no number of replicas from {sizes.min} to {sizes.max}"
            problems.append(FieldProblem(where, [replica.tp, replica.pp, replica.cp], f"{message}: {reasons}"))
    return problems


def numbers_of_replicas(training: TrainingConfig, least: int, most: int) -> list[int]:
    """Numbers of replicas from ``least`` to ``most`` that divide a step's micro-batches."""
    micro_batches = training.common_batch // training.micro_batch_size
    return [number for number in divisors(micro_batches) if least <= number <= most]


# A rank's part of a micro-batch.


def rank_tokens(job: JobSpec) -> int:
    """Return the number of a micro-batch's tokens on a rank."""
    training = job.training
    return training.micro_batch_size * training.sequence_length // job.parallelism.context_parallel_size


def tokens_by_part(job: JobSpec) -> Sequence[int]:
    """Return a context parallel rank's tokens of each part with its own partition: a micro-batch, or its halves."""
    sequences = job.training.micro_batch_size
    parts = (-(-sequences // 2), sequences // 2) if job.parallelism.split_micro_batch else (sequences,)
    return [part * job.training.sequence_length // job.parallelism.context_parallel_size for part in parts]
