"""Corrects predictions by how long earlier jobs took.

A device's arithmetic and its links differ from their figures for different reasons, so a step's exposed collectives
are corrected apart from the rest of it. Each job that has run in a shape contributes one ratio for each of the two:
the measured seconds over those predicted; ratios are always against the uncorrected prediction. For n jobs

    factor  = before^(3/(n + 3)) · median^(n/(n + 3))
    spread² = (3 · spread before² + Σ (log ratio − log factor)²) / (n + 3)

first for a kind of device and a precision, with a prior factor of 1 and the profile's spread; then for each shape
that has run, with the result for its kind as the prior. A job of several shapes counts for its kind with their
median. A job that has no collectives to wait for, or hardly any by the prediction, says nothing about them.

The rest includes transfers between pipeline stages, which are timed together with waiting for the other stages.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec

MOST = 10.0  # a ratio above this, or below its inverse, has other causes than the device
LEAST_SHARE = 0.01  # of a predicted step; less communication is too little to compare
MOST_SHAPES = 32
_BEFORE = 3  # weight of the prior, in jobs
_DIGITS = 16

Factor = Annotated[float, Field(ge=1 / MOST, le=MOST)]
Spread = Annotated[float, Field(ge=0, le=10)]


@dataclass(frozen=True)
class Factors:
    """Factors by which predicted seconds are multiplied.

    Attributes:
        rest: Factor of everything but exposed collectives.
        communication: Factor of exposed collectives.
    """

    rest: float = 1.0
    communication: float = 1.0


@dataclass(frozen=True)
class PredictedCommunication:
    """Exposed collectives in a step's prediction without a correction.

    Attributes:
        seconds: Seconds of a step that the reporting rank waits for collectives.
        share: Share of the step that is proportional to the speed of collectives, from 0 to 1: besides these seconds,
            waiting for pipeline ranks that wait for theirs.
    """

    seconds: float
    share: float


@dataclass(frozen=True)
class Ratios:
    """Measured seconds of a job's steps over those predicted without a correction.

    Attributes:
        rest: Ratio of everything but exposed collectives.
        communication: Ratio of exposed collectives; ``None`` if the job says nothing about them.
    """

    rest: float
    communication: float | None

    @classmethod
    def of(cls, whole: float, communication_seconds: float, predicted: PredictedCommunication) -> "Ratios | None":
        """Split the ratio of whole steps; ``None`` if what is left for the rest has other causes than the device.

        Args:
            whole: Measured over predicted seconds of whole steps.
            communication_seconds: Measured seconds of a step spent waiting for collectives.
            predicted: The prediction that this is compared with.
        """
        if predicted.seconds == 0:
            return cls(whole, None) if plausible(whole) else None
        ratio = communication_seconds / predicted.seconds
        rest = (whole - predicted.share * ratio) / (1 - predicted.share)
        if not plausible(rest):
            return None
        return cls(rest, ratio if predicted.share >= LEAST_SHARE and plausible(ratio) else None)


def plausible(ratio: float) -> bool:
    """Whether a ratio of measured to predicted seconds may be due to the device."""
    return 1 / MOST <= ratio <= MOST


@dataclass(frozen=True)
class Ran:
    """One job that has run in one shape.

    Attributes:
        job: Its id.
        model: Digest of its model.
        shape: Digest of everything that its step time depends on.
        ratios: Its measured over its predicted seconds.
    """

    job: str
    model: str
    shape: str
    ratios: Ratios


class Correction(Config):
    """Correction of predicted seconds."""

    jobs: int = Field(ge=0, description="Number of jobs that it is based on.")
    factor: Factor = Field(description="Factor by which predicted seconds are multiplied.")
    spread: Spread = Field(description="Standard deviation of the logarithm of the remaining error.")

    def refined(self, ratios: Sequence[float]) -> "Correction":
        """Return the correction updated by some jobs' ratios, with this one as the prior."""
        count = len(ratios)
        if not count:
            return Correction(jobs=0, factor=self.factor, spread=self.spread)
        logs = [math.log(ratio) for ratio in ratios]
        middle = (_BEFORE * math.log(self.factor) + count * statistics.median(logs)) / (_BEFORE + count)
        squares = _BEFORE * self.spread**2 + sum((log - middle) ** 2 for log in logs)
        return Correction(jobs=count, factor=math.exp(middle), spread=math.sqrt(squares / (_BEFORE + count)))


class StepCorrection(Correction):
    """Correction of the predictions for some jobs' steps."""

    communication: Correction | None = Field(
        None,
        description="Correction of exposed collectives in place of this one, from the jobs that had any; null in "
        "records of versions that corrected whole steps.",
    )

    @property
    def of_communication(self) -> Correction:
        """The correction of exposed collectives."""
        return self.communication or self

    @property
    def factors(self) -> Factors:
        """Both factors."""
        return Factors(self.factor, self.of_communication.factor)

    def updated(self, ratios: Sequence[Ratios]) -> "StepCorrection":
        """Return the correction updated by some jobs' ratios, with this one as the prior."""
        communication = [each.communication for each in ratios if each.communication is not None]
        return StepCorrection(
            **dict(self.refined([each.rest for each in ratios])),
            communication=self.of_communication.refined(communication),
        )


class ShapeCorrection(StepCorrection):
    """Correction for one shape that has run."""

    shape: str = Field(max_length=_DIGITS, description="Digest of the job in its layout.")


class Fitted(StepCorrection):
    """Corrections from jobs on one kind of device, at one precision."""

    kind: str = Field(max_length=63, description="The kind of GPU as Ray names it, or CPU.")
    precision: str = Field(max_length=8, description="The jobs' training.precision.")
    shapes: tuple[ShapeCorrection, ...] = Field(
        (), max_length=MOST_SHAPES, description="Corrections for shapes of the same model that have run."
    )

    @classmethod
    def to(cls, ran: Sequence[Ran], spread: float, kind: str, precision: str, model: str) -> "Fitted | None":
        """Fit corrections to jobs; ``None`` if none of them counts.

        Args:
            ran: What has run, newest first.
            spread: Spread of the profile's predictions, where nothing has run.
            kind: Kind of device that the jobs ran on.
            precision: The jobs' precision.
            model: Digest of the model whose shapes are of interest.
        """
        if not ran:
            return None
        jobs, shapes = defaultdict[str, list[Ratios]](list), defaultdict[str, list[Ratios]](list)
        for each in ran:
            jobs[each.job].append(each.ratios)
            if each.model == model:
                shapes[each.shape].append(each.ratios)
        prior = StepCorrection(jobs=0, factor=1.0, spread=spread)
        whole = prior.updated([median_of(ratios) for ratios in jobs.values()])
        return cls(
            **dict(whole),
            kind=kind,
            precision=precision,
            shapes=tuple(
                ShapeCorrection(**dict(whole.updated(ratios)), shape=shape)
                for shape, ratios in list(shapes.items())[:MOST_SHAPES]
            ),
        )

    def of(self, job: JobSpec) -> StepCorrection:
        """Return the correction of a job in its layout: its shape's, or else its kind's with ``jobs`` = 0."""
        shape = shape_of(job) if self.shapes else None
        same = (each for each in self.shapes if each.shape == shape)
        return next(same, self.model_copy(update={"jobs": 0}))

    @property
    def least(self) -> Factors:
        """The smallest of each of the factors of any shape."""
        every = [self.factors, *(each.factors for each in self.shapes)]
        return Factors(min(each.rest for each in every), min(each.communication for each in every))


def shape_of(job: JobSpec) -> str:
    """Return a digest of everything that a job's step time depends on besides the device.

    Args:
        job: The job in its layout (``resolve.at``).
    """
    training, resources = job.training, job.resources
    # Without defaults, so that new fields alter no digest; and without the cut, so that cuts can be compared.
    parallelism = job.parallelism.model_dump_json(exclude_defaults=True, exclude={"pipeline_layers_per_stage"})
    parts = (
        model_of(job), parallelism, training.global_batch_size, training.micro_batch_size, training.sequence_length,
        training.precision, training.cuda_graphs, job.optimizer.kind, job.data.documents_apart,
        training.attention and training.attention.model_dump_json(),
        0 if resources.gpus_per_worker else float(resources.cpus_per_worker),
    )  # fmt: skip
    return _digest(repr(parts))


def model_of(job: JobSpec) -> str:
    """Return a digest of a job's model."""
    return _digest(job.model.model_dump_json())


def median_of(ratios: Sequence[Ratios]) -> Ratios:
    """Return the medians of both ratios; that of collectives is of those that there are."""
    communication = [each.communication for each in ratios if each.communication is not None]
    return Ratios(
        statistics.median(each.rest for each in ratios), statistics.median(communication) if communication else None
    )


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:_DIGITS]
