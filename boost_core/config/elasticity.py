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

MOST_LAYOUTS = 32  # that a job may allow, replicas counted: each is looked at when a job is checked and scheduled

Pair = tuple[TensorSize, PipelineSize]
Triple = tuple[TensorSize, PipelineSize, ContextSize]

_PAIR: TypeAdapter[tuple[int, int]] = TypeAdapter(Pair)
_TRIPLE: TypeAdapter[tuple[int, int, int]] = TypeAdapter(Triple)


def _pair_or_triple(value: Any, _: ValidatorFunctionWrapHandler) -> tuple[int, int] | tuple[int, int, int]:
    """Name what is wrong with it as one of them: a union's error would speak of both."""
    three = isinstance(value, list | tuple) and len(value) > 2
    return _TRIPLE.validate_python(value) if three else _PAIR.validate_python(value)


def _in_one(schema: dict[str, Any]) -> None:
    """Say the same as one list, for editors, whose errors would else speak of both."""
    pair, triple = schema.pop("anyOf")
    schema.update(triple, minItems=pair["minItems"])


ReplicaSizes = Annotated[Pair | Triple, WrapValidator(_pair_or_triple), Field(json_schema_extra=_in_one)]
Listed = Annotated[tuple[ReplicaSizes, ...], Field(max_length=16)]
Chosen = Annotated[tuple[tuple[TensorSize, PipelineSize, DataSize], ...], Field(max_length=MOST_LAYOUTS)]

_LISTED: TypeAdapter[tuple[tuple[int, int] | tuple[int, int, int], ...]] = TypeAdapter(Listed)


class DataParallelRange(Config):
    """The fewest and the most replicas."""

    min: DataSize = 1
    max: DataSize

    @model_validator(mode="after")
    def _not_empty(self) -> "DataParallelRange":
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not exceed max ({self.max})")
        return self


class GpuRange(DataParallelRange):
    """The fewest and the most GPUs of a gang; on CPUs, workers."""


class ElasticityConfig(Config):
    """What the service may do to a gang when nodes and other jobs come and go. The global batch stays what it is."""

    layouts: Literal["auto"] | Listed | None = Field(
        None,
        json_schema_extra={"minItems": 1},
        description="Allowed sizes of a replica, each as [tensor_parallel_size, pipeline_parallel_size] with "
        "parallelism's own context_parallel_size, or as [tensor_parallel_size, pipeline_parallel_size, "
        "context_parallel_size]; default: parallelism's own. auto: the service chooses among all without context "
        "parallelism that are legal and fit the GPUs, for each number of gpus.",
    )
    gpus: GpuRange | None = Field(
        None, description="With layouts=auto: the fewest and the most GPUs of the gang; on CPUs, workers."
    )
    data_parallel_size: DataParallelRange | None = Field(
        None,
        validate_default=True,
        description="The fewest and the most replicas; required, unless layouts=auto, where it follows from gpus.",
    )
    resolved: Chosen | None = Field(
        None,
        description="With layouts=auto: the layouts that the service has chosen, as [tensor_parallel_size, "
        "pipeline_parallel_size, data_parallel_size]. The service writes it, and chooses anew for files that have it.",
    )

    @field_validator("layouts", mode="wrap")
    @classmethod
    def _auto_or_listed(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Name the entry at fault alone: a union's error would speak of all its types."""
        if value is None or value == "auto":
            return handler(value)
        if isinstance(value, str):
            raise ValueError(f"{value!r} is not auto, nor a list of sizes such as [[2, 1], [1, 1]]; use one of these")
        wanted = Wanted.by(Listed)
        if wanted and (found := wanted.mixed_up(value)):
            raise ValidationError.from_exception_data(cls.__name__, found, hide_input=True)
        # As a min_length this would also be said of layouts that are there and wrong.
        if not (listed := _LISTED.validate_python(value)):
            raise ValueError("no sizes are allowed so; give one pair or more, or leave layouts out")
        return listed

    @field_validator("data_parallel_size")
    @classmethod
    def _needed_without_auto(cls, value: DataParallelRange | None, info: Any) -> DataParallelRange | None:
        if info.data.get("gpus") is not None:
            return value  # which says by itself that it goes with layouts=auto
        if value is None and info.data.get("layouts", "auto") != "auto":  # not there if they are wrong themselves
            raise PydanticKnownError("missing")
        return value

    @model_validator(mode="after")
    def _limits_of_one_kind(self) -> "ElasticityConfig":
        problems = []
        if self.automatic and self.gpus is None:
            message = "required with layouts=auto, for example gpus: {min: 1, max: 8}"
            problems.append(FieldProblem(("gpus",), None, message))
        if self.automatic and self.data_parallel_size is not None:
            message = "layouts=auto chooses the number of replicas, too; leave it out, and limit gpus"
            problems.append(FieldProblem(("data_parallel_size",), None, message))
        if not self.automatic and self.gpus is not None:
            message = "only goes with layouts=auto; set that, or limit data_parallel_size instead"
            problems.append(FieldProblem(("gpus",), None, message))
        if not self.automatic and self.resolved is not None:
            problems.append(FieldProblem(("resolved",), None, "is for layouts=auto; leave it out"))
        raise_problems("ElasticityConfig", problems)
        return self

    @property
    def automatic(self) -> bool:
        """Whether the service chooses the layouts."""
        return self.layouts == "auto"

    def replicas(self, own: Layout) -> tuple[Layout, ...]:
        """How a replica may be laid out, dp 1, each once.

        Args:
            own: Parallelism's own, which also has what pairs leave out.
        """
        listed = self.layouts if isinstance(self.layouts, tuple) else ()
        allowed = (Layout(tp, pp, dp=1, cp=cp[0] if cp else own.cp) for tp, pp, *cp in listed)
        return tuple(dict.fromkeys(allowed)) or (own.per_replica,)

    @property
    def chosen(self) -> tuple[Layout, ...]:
        """What it has chosen, the fewest ranks first; none where it has not yet."""
        layouts = (Layout(*sizes) for sizes in self.resolved or ())
        return tuple(sorted(layouts, key=lambda layout: (layout.world_size, layout)))

    def with_chosen(self, layouts: tuple[Layout, ...] | None) -> "ElasticityConfig":
        """The same with layouts that the service has chosen; ``None``: with none."""
        sizes = None if layouts is None else tuple((layout.tp, layout.pp, layout.dp) for layout in layouts)
        return self.model_copy(update={"resolved": sizes})
