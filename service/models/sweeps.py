"""Sweeps: what a sweep file says, the job of each of its trials, and sweeps as the API shows them."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from enum import StrEnum
from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationError, field_validator, model_validator

from boost_core.config import JobSpec
from boost_core.config.base import Config, Count, FieldProblem, ResourceName, raise_problems, spelled
from service.models.jobs import Tabular
from service.models.problems import FieldError, job_errors

MOST_TRIALS = 1000  # of a sweep
MOST_PARALLEL = 64
_MOST_RUNGS = 100  # of a trial; all of them are read whenever the next trial is chosen

_ENTRY = r"[a-z][a-z0-9_]*(\[[0-9]{1,4}\])?"
_PATHS = "the path of a field of the job, for example optimizer.learning_rate or data.mixture[0].weight"
FieldPath = Annotated[str, StringConstraints(pattern=rf"^{_ENTRY}(\.{_ENTRY}){{0,7}}$"), spelled(_PATHS)]
_OWN_FIELDS = frozenset({"name", "group", "tags"})  # those that the sweep writes into its jobs
_STANDS_FOR = {"training.steps": "tokens", "training.tokens": "steps"}

Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]  # ranges of them have a length, and floats hold them


class Dimension(Config):
    """Values of one field: exactly one of a range and a list."""

    uniform: tuple[Number, Number] | None = Field(None, description="The lowest and the highest number.")
    log_uniform: tuple[Number, Number] | None = Field(
        None, description="The same, above 0; each order of magnitude is as likely."
    )
    int_uniform: tuple[Whole, Whole] | None = Field(None, description="The lowest and the highest whole number.")
    choices: tuple[Any, ...] | None = Field(
        None, min_length=1, max_length=MOST_TRIALS, description="The values themselves, of whatever kind the field has."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> "Dimension":
        given = {name: value for name, value in self if value is not None}
        if len(given) != 1:
            raise ValueError("give exactly one of uniform, log_uniform, int_uniform and choices")
        ((kind, value),) = given.items()
        if kind == "choices":
            if len({json.dumps(each, sort_keys=True) for each in value}) < len(value):
                raise ValueError("a value is among the choices twice; give it once")
        elif value[0] >= value[1]:
            raise ValueError(f"{kind} is the lowest and the highest value, but {value[0]:g} is not below {value[1]:g}")
        elif kind == "log_uniform" and value[0] <= 0:
            raise ValueError("log_uniform needs numbers above 0; use uniform")
        return self

    @property
    def listed(self) -> Sequence[Any] | None:
        """All values in order; ``None`` if they are real numbers of a range."""
        if self.choices is not None:
            return self.choices
        return None if self.int_uniform is None else range(self.int_uniform[0], self.int_uniform[1] + 1)


class Budget(Config):
    """When no more trials start. Those that have started still end by themselves."""

    trials: int | None = Field(None, ge=1, le=MOST_TRIALS, description="Number of trials.")
    tokens: int | None = Field(None, ge=1, le=10**18, description="Tokens of all trials up to their newest rungs.")
    gpu_hours: float | None = Field(
        None, gt=0, le=1e9, description="GPU-hours of all trials, as `boost compare` shows them."
    )


class StopEarly(Config):
    """Pruning of trials that do worse than others, by one of Optuna's pruners."""

    kind: Literal["successive_halving", "hyperband", "median"] = Field(
        description="successive_halving: at each rung, continue the best 1/reduction_factor of the trials that have "
        "reached it. hyperband: the same in brackets that begin at different rungs. median: continue those that are "
        "no worse than the median of the completed trials at the same step."
    )
    first_step: Count = Field(description="Step of the first rung.")
    reduction_factor: int = Field(
        3, ge=2, le=10, description="For halving and hyperband: step of a rung divided by that of the previous rung."
    )
    every_steps: Count | None = Field(None, description="Steps from a rung of median to the next; default: first_step.")

    @field_validator("every_steps")
    @classmethod
    def _only_median(cls, value: int | None, info: Any) -> int | None:
        if value is not None and info.data.get("kind") != "median":
            raise ValueError("only median has rungs at equal distances; for others set reduction_factor")
        return value

    def rungs(self, steps: int) -> Sequence[int]:
        """The rungs of a job with this number of steps, all before its last step."""
        if self.kind == "median":
            return range(self.first_step, steps, self.every_steps or self.first_step)  # perhaps 100 million
        rungs = (self.first_step * self.reduction_factor**each for each in itertools.count())
        return [*itertools.takewhile(lambda rung: rung < steps, rungs)]


class SweepRequest(Config):
    """A sweep: a job, fields of it to vary, and how to search for their best values."""

    name: ResourceName = Field(description="Its name, which is also the group of its jobs.")
    job: JobSpec = Field(description="The job. In a sweep file, also the path of a job file.")
    space: dict[FieldPath, Dimension] = Field(
        min_length=1, max_length=32, description="The fields to vary, by their path in the job file."
    )
    search: Literal["grid", "random", "tpe"] = Field(
        "random",
        description="grid: each combination once. random: independent draws. tpe: draws near the best trials so far "
        "(tree-structured Parzen estimator).",
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the search.")
    budget: Budget = Field(Budget(), description="When to stop; whichever limit is reached first.")
    parallel: int = Field(1, ge=1, le=MOST_PARALLEL, description="How many trials are under way at a time.")
    metric: str = Field(
        "loss",
        pattern=r"^(loss|tokens_per_second|validation(\.[a-z0-9][a-z0-9_-]{0,31})?)$",
        description="What trials are judged by: loss, of the training batch; validation, the loss on the part of the "
        "data kept for validation; validation.NAME, that on a set of data.validation; or tokens_per_second.",
    )
    minimize: bool = Field(True, description="Whether lower is better; with tokens_per_second, false by default.")
    stop_early: StopEarly | None = Field(None, description="How to stop bad trials early; default: not at all.")
    max_failures: int | None = Field(
        None, ge=0, le=MOST_TRIALS, description="Fail the sweep when more trials than this have failed; default: never."
    )

    @model_validator(mode="before")
    @classmethod
    def _more_tokens_are_better(cls, fields: Any) -> Any:
        fast = isinstance(fields, dict) and fields.get("metric") == "tokens_per_second"
        return {"minimize": False} | fields if fast else fields

    @model_validator(mode="after")
    def _parts_go_together(self) -> "SweepRequest":
        problems = []
        for path, dimension in self.space.items():
            if re.split(r"[.\[]", path)[0] in _OWN_FIELDS:
                problems.append(FieldProblem(("space", path), None, "the sweep sets this field; vary another one"))
            elif self.search == "grid" and dimension.listed is None:
                message = "a grid needs values that can be listed; use choices, int_uniform, or search=random"
                problems.append(FieldProblem(("space", path), None, message))
        if self.search == "grid" and not problems and (size := self.grid_size) > MOST_TRIALS:
            message = f"the grid has {size} combinations, but {MOST_TRIALS} is the limit; leave some out"
            problems.append(FieldProblem(("space",), None, message))
        if self.search != "grid" and not any(value for _, value in self.budget):
            message = f"search={self.search} has no end of its own; set budget.trials, budget.tokens or both"
            problems.append(FieldProblem(("budget",), None, message))
        # Rungs count only if all else is right.
        if (problem := self._unjudged(self.job)) and (not problems or problem.field == ("metric",)):
            problems.append(problem)
        raise_problems("SweepRequest", problems)
        return self

    @property
    def grid_size(self) -> int:
        """Number of combinations of a grid."""
        return math.prod(len(each.listed or ()) for each in self.space.values())

    def milestones(self, spec: JobSpec) -> list[int]:
        """The steps at which a trial's job is judged: its rungs, and its last step."""
        steps = spec.training.steps
        return [*(self.stop_early.rungs(steps) if self.stop_early else ()), steps]

    def _unjudged(self, spec: JobSpec) -> FieldProblem | None:
        """Why a job reports no such metric, or else could not be judged at its rungs; ``None`` if it can be."""
        names = [each.name for each in spec.data.validation]
        if self.metric.startswith("validation.") and (name := self.metric.partition(".")[2]) not in names:
            message = f"the job has no validation set {name!r}; it has: {', '.join(names) or 'none'}"
            return FieldProblem(("metric",), self.metric, message)
        if self.stop_early is None:
            return None
        steps, every = spec.training.steps, spec.training.evaluate_every_steps
        rungs = self.stop_early.rungs(steps)
        if not rungs:
            message = f"is not below training.steps={steps}, so no trial would stop early; lower it"
        elif len(rungs) > _MOST_RUNGS:
            message = f"gives {len(rungs)} rungs, but {_MOST_RUNGS} is the limit; raise it, or every_steps"
        elif self.metric.startswith("validation") and (between := [rung for rung in rungs if rung % every]):
            rhythm = f"the job is validated every {every} steps (training.evaluate_every_steps); use multiples of that"
            message = f"puts a rung at step {between[0]}, but {rhythm}"
        else:
            return None
        return FieldProblem(("stop_early", "first_step"), self.stop_early.first_step, message)

    def values(self, field: str) -> Iterator[Any]:
        """What trials may have in a field, by its path: the job's own value, and the choices for it or its section."""
        section, _, name = field.rpartition(".")
        yield reduce(getattr, field.split("."), self.job)
        for path, dimension in self.space.items():
            for choice in dimension.choices or ():
                if path == field:
                    yield choice
                elif path == section and isinstance(choice, dict):
                    yield choice.get(name)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Parameters that show whether trials are legal: the whole grid, or each edge of each field by itself."""
        if self.search == "grid":
            values = (dimension.listed or () for dimension in self.space.values())
            yield from (dict(zip(self.space, each, strict=True)) for each in itertools.product(*values))
        else:
            for path, field in self.space.items():
                # Each choice, or both ends of a range.
                edges: Sequence[Any] = field.choices or field.uniform or field.log_uniform or field.int_uniform or ()
                yield from ({path: value} for value in edges)

    def trial(self, number: int, parameters: Mapping[str, Any]) -> JobSpec:
        """The job of a trial.

        Args:
            number: Its number, from 0.
            parameters: Values of fields, by path.

        Raises:
            IllegalTrial: The parameters do not make a legal job.
        """
        job, whole = self.job.with_layouts(None).as_written(), self.job.model_dump(mode="json")
        tags = [*(tag for tag in job["tags"] if not tag.startswith("trial-")), f"trial-{number}"]
        try:
            for path, value in parameters.items():
                _set(job, whole, path, value)
                if (other := _STANDS_FOR.get(path)) and f"training.{other}" not in self.space:
                    job["training"].pop(other, None)
            described = {"name": f"{self.name}-{number}", "group": self.name, "tags": tags, "notes": self.job.notes}
            spec = JobSpec.model_validate(job | described)
        except ValidationError as error:
            raise IllegalTrial(parameters, job_errors(error.errors())) from error
        except LookupError as error:
            raise IllegalTrial(parameters, [FieldError(field=str(error.args[0]), message=str(error.args[1]))]) from None
        if problem := self._unjudged(spec):
            raise IllegalTrial(parameters, [FieldError.of(problem)])
        return spec


class IllegalTrial(ValueError):
    """Parameters do not make a job that can be submitted.

    Args:
        parameters: The values of fields, by path.
        errors: What is wrong with the job.
    """

    def __init__(self, parameters: Mapping[str, Any], errors: Sequence[FieldError]) -> None:
        reasons = "; ".join(f"{error.field}: {error.message}" for error in errors)
        super().__init__(f"with {parameters_in_words(parameters)}: {reasons}")


def parameters_in_words(parameters: Mapping[str, Any]) -> str:
    """Return parameters as one line."""
    values = {path: each if isinstance(each, str) else json.dumps(each) for path, each in parameters.items()}
    return ", ".join(f"{path}={value}" for path, value in values.items())


def _set(job: dict[str, Any], whole: Any, path: str, value: Any) -> None:
    """Set a field of a job by its path; sections that the job lacks are made.

    Args:
        job: The job as it is written.
        whole: The job with all its defaults, for a list of which one entry is set.
        path: The path.
        value: The value.

    Raises:
        LookupError: A part of the path is not there; the arguments are the path and what is wrong.
    """
    parts: list[str | int] = [int(part[1:-1]) if part[0] == "[" else part for part in re.findall(r"\w+|\[\d+\]", path)]
    section: Any = job
    for part, below in itertools.pairwise([*parts, ""]):
        if isinstance(part, int):
            if not isinstance(section, list) or part >= len(section):
                raise LookupError(path, f"the job has no entry {part} there")
        elif not isinstance(section, dict):
            raise LookupError(path, f"there is no such field; what is above {part} is not a section")
        else:
            whole = whole.get(part) if isinstance(whole, dict) else None
            if section.get(part) is None:
                section[part] = {} if isinstance(below, str) else deepcopy(whole)
        if below == "":
            section[part] = deepcopy(value)  # a further field may be within it
        else:
            section = section[part]


class SweepState(StrEnum):
    """The state of a sweep."""

    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    FAILED = "FAILED"


class TrialState(StrEnum):
    """The state of a trial."""

    RUNNING = "RUNNING"  # waits, or trains
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"  # counts as the worst
    STOPPED = "STOPPED"  # with its sweep


class SweepTrial(BaseModel):
    """A trial of a sweep."""

    number: int = Field(description="Its number, from 0.")
    state: TrialState = Field(description="RUNNING, COMPLETE, PRUNED, FAILED or STOPPED.")
    parameters: dict[str, Any] = Field(description="The values of the varied fields.")
    value: float | None = Field(description="The metric at its last step, or at the rung at which it was pruned.")
    rungs: dict[int, float | None] = Field(description="The metric at each rung so far, by step; null: it had failed.")
    reason: str | None = Field(description="Why it was pruned, has failed, or was stopped.")
    job_id: str | None = Field(description="Its job; null if it has none yet, or it was refused.")


class SweepTrialList(Tabular):
    """The trials of a sweep."""

    trials: list[SweepTrial] = Field(description="In order of their numbers.")

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row for each trial: a column for each varied field, and one for each rung."""
        paths = list(self.trials[0].parameters) if self.trials else []
        steps = sorted({step for trial in self.trials for step in trial.rungs})
        yield ["trial", "state", "value", "job", *paths, *(f"step {step}" for step in steps), "reason"]
        for trial in self.trials:
            row = [trial.value, trial.job_id, *map(trial.parameters.get, paths), *map(trial.rungs.get, steps)]
            yield [trial.number, trial.state, *row, trial.reason]


class Sweep(BaseModel):
    """A sweep."""

    name: str = Field(description="Its name, and the group of its jobs.")
    id: str = Field(description="Its unique ID.")
    tenant: str = Field(description="Tenant that owns it.")
    submitted_by: str = Field(description="Name of the key that created it.")
    state: SweepState = Field(description="RUNNING, STOPPING, FINISHED, STOPPED or FAILED.")
    message: str = Field(description="The state in words.")
    spec: SweepRequest = Field(description="The request.")
    trials: dict[TrialState, int] = Field(description="Number of trials by state.")
    best: SweepTrial | None = Field(description="The best complete trial so far; null: none has completed.")
    created_at: datetime = Field(description="When it was created.")
    finished_at: datetime | None = Field(description="When its last trial ended.")


class SweepDetail(Sweep):
    """A sweep with the importance of what it varies."""

    importance: dict[str, float] | None = Field(
        description="How much of the differences between the best trials and others each field explains, with a sum "
        "of 1 (PED-ANOVA, arXiv 2304.10255), over the COMPLETE trials; null with fewer than 4."
    )


class SweepList(BaseModel):
    """A tenant's sweeps."""

    sweeps: list[Sweep] = Field(description="The newest first.")
