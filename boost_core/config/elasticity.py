"""Which layouts a gang may take while its job runs."""

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from boost_core.config.base import Config, FieldProblem, raise_problems
from boost_core.config.layout import Layout
from boost_core.config.parallelism import ContextSize, DataSize, PipelineSize, TensorSize
from boost_core.config.parsing.kinds import Wanted

MOST_LAYOUTS = 32  # per job, over all numbers of replicas: each is examined when a job is checked and scheduled

Pair = tuple[TensorSize, PipelineSize]
Triple = tuple[TensorSize, PipelineSize, ContextSize]

_PAIR: TypeAdapter[tuple[int, int]] = TypeAdapter(Pair)
_TRIPLE: TypeAdapter[tuple[int, int, int]] = TypeAdapter(Triple)


def _pair_or_triple(value: Any, _: ValidatorFunctionWrapHandler) -> tuple[int, int] | tuple[int, int, int]:
    """Validate as either a pair or a triple, so that errors do not mention both as a union's would."""
    three = isinstance(value, list | tuple) and len(value) > 2
    return _TRIPLE.validate_python(value) if three else _PAIR.validate_python(value)


def _in_one(schema: dict[str, Any]) -> None:
    """Merge both forms into one list, so that editors' errors do not mention both."""
    pair, triple = schema.pop("anyOf")
    schema.update(triple, minItems=pair["minItems"])


ReplicaSizes = Annotated[Pair | Triple, WrapValidator(_pair_or_triple), Field(json_schema_extra=_in_one)]
Listed = Annotated[tuple[ReplicaSizes, ...], Field(max_length=16)]
Chosen = Annotated[tuple[tuple[TensorSize, PipelineSize, DataSize], ...], Field(max_length=MOST_LAYOUTS)]

_LISTED: TypeAdapter[tuple[tuple[int, int] | tuple[int, int, int], ...]] = TypeAdapter(Listed)


class DataParallelRange(Config):
    """The minimum and maximum number of replicas."""

    min: DataSize = 1
    max: DataSize

    @model_validator(mode="after")
    def _not_empty(self) -> "DataParallelRange":
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        return self


class GpuRange(DataParallelRange):
    """The minimum and maximum number of a gang's GPUs; on CPUs, of workers."""


class ElasticityConfig(Config):
    """How the service may resize a gang as nodes and other jobs come and go. The global batch stays the same."""

    layouts: Literal["auto"] | Listed | None = Field(
        None,
        json_schema_extra={"minItems": 1},
        description="Allowed sizes of a replica, each as [tensor_parallel_size, pipeline_parallel_size] with the "
        "context_parallel_size of parallelism, or as [tensor_parallel_size, pipeline_parallel_size, "
        "context_parallel_size]; default: those of parallelism. auto: for each number of gpus the service chooses "
        "among all sizes without context parallelism that are legal and fit the GPUs.",
    )
    gpus: GpuRange | None = Field(
        None, description="With layouts=auto: minimum and maximum number of the gang's GPUs; on CPUs, of workers."
    )
    data_parallel_size: DataParallelRange | None = Field(
        None,
        validate_default=True,
        description="Minimum and maximum number of replicas; required unless layouts=auto, where gpus determines it.",
    )
    resolved: Chosen | None = Field(
        None,
        description="With layouts=auto: the layouts chosen by the service, as [tensor_parallel_size, "
        "pipeline_parallel_size, data_parallel_size]. Written by the service, which chooses again when the "
        "job is submitted.",
    )

    @field_validator("layouts", mode="wrap")
    @classmethod
    def _auto_or_listed(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Report only the entry at fault; a union's error would mention all its types."""
        if value is None or value == "auto":
            return handler(value)
        if isinstance(value, str):
            raise ValueError(f"{value!r} is not auto, nor a list of sizes such as [[2, 1], [1, 1]]; use one of these")
        wanted = Wanted.by(Listed)
        if wanted and (found := wanted.mixed_up(value)):
            raise ValidationError.from_exception_data(cls.__name__, found, hide_input=True)
        # A min_length would also be reported for layouts that are given but wrong.
        if not (listed := _LISTED.validate_python(value)):
            raise ValueError("this allows no sizes; give one pair or more, or leave layouts out")
        return listed

    @field_validator("data_parallel_size")
    @classmethod
    def _needed_without_auto(cls, value: DataParallelRange | None, info: Any) -> DataParallelRange | None:
        if info.data.get("gpus") is not None:
            return value  # gpus without layouts=auto is reported by itself
        if value is None and info.data.get("layouts", "auto") != "auto":  # absent if layouts are invalid themselves
            raise PydanticKnownError("missing")
        return value

    @model_validator(mode="after")
    def _limits_of_one_kind(self) -> "ElasticityConfig":
        problems = []
        if self.automatic and self.gpus is None:
            message = "required with layouts=auto, for example gpus: {min: 1, max: 8}"
            problems.append(FieldProblem(("gpus",), None, message))
        if self.automatic and self.data_parallel_size is not None:
            message = "layouts=auto also chooses the number of replicas; leave it out, and limit gpus"
            problems.append(FieldProblem(("data_parallel_size",), None, message))
        if not self.automatic and self.gpus is not None:
            message = "only goes with layouts=auto; set that, or limit data_parallel_size instead"
            problems.append(FieldProblem(("gpus",), None, message))
        if not self.automatic and self.resolved is not None:
            problems.append(FieldProblem(("resolved",), None, "is only for layouts=auto; leave it out"))
        raise_problems("ElasticityConfig", problems)
        return self

    @property
    def automatic(self) -> bool:
        """Whether the service chooses the layouts."""
        return self.layouts == "auto"

    def replicas(self, own: Layout) -> tuple[Layout, ...]:
        """The distinct layouts that a replica may have, with dp 1.

        Args:
            own: The layout in parallelism, which also supplies the cp that pairs leave out.
        """
        listed = self.layouts if isinstance(self.layouts, tuple) else ()
        allowed = (Layout(tp, pp, dp=1, cp=cp[0] if cp else own.cp) for tp, pp, *cp in listed)
        return tuple(dict.fromkeys(allowed)) or (own.per_replica,)

    @property
    def chosen(self) -> tuple[Layout, ...]:
        """The layouts that the service has chosen, fewest ranks first; empty before the choice."""
        layouts = (Layout(*sizes) for sizes in self.resolved or ())
        return tuple(sorted(layouts, key=lambda layout: (layout.world_size, layout)))

    def with_chosen(self, layouts: tuple[Layout, ...] | None) -> "ElasticityConfig":
        """Return a copy with layouts chosen by the service; ``None`` for none."""
        sizes = None if layouts is None else tuple((layout.tp, layout.pp, layout.dp) for layout in layouts)
        return self.model_copy(update={"resolved": sizes})
