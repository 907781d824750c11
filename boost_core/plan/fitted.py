"""Correcting predictions by how long earlier jobs took.

Each job that has run in a shape contributes one ratio: the measured seconds of its steps over those predicted without
any correction, so that corrections do not feed back into themselves. For n jobs

    factor  = before^(3/(n + 3)) · median^(n/(n + 3))
    spread² = (3 · spread before² + Σ (log ratio − log factor)²) / (n + 3)

first for a kind of device and a precision, with a prior factor of 1 and the profile's spread; then for each shape that
has run, with the result for its kind as the prior. A job of several shapes counts for its kind with their median.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec

MOST = 10.0  # a ratio above this, or below its inverse, has other causes than the device
MOST_SHAPES = 32
_BEFORE = 3  # weight of the prior, in jobs
_DIGITS = 16

Factor = Annotated[float, Field(ge=1 / MOST, le=MOST)]
Spread = Annotated[float, Field(ge=0, le=10)]


@dataclass(frozen=True)
class Ran:
    """One job that has run in one shape.

    Attributes:
        job: Its id.
        model: Digest of its model.
        shape: Digest of everything that its step time depends on.
        ratio: Measured seconds of its steps over those predicted without a correction.
    """

    job: str
    model: str
    shape: str
    ratio: float


class Correction(Config):
    """Correction of the predictions for some jobs."""

    jobs: int = Field(ge=0, description="Number of jobs that it is based on.")
    factor: Factor = Field(description="Factor by which predicted seconds are multiplied.")
    spread: Spread = Field(description="Standard deviation of the logarithm of the remaining error.")

    def refined(self, ratios: Sequence[float]) -> "Correction":
        """Return the correction updated by some jobs' ratios, with this one as the prior."""
        count = len(ratios)
        logs = [math.log(ratio) for ratio in ratios]
        middle = (_BEFORE * math.log(self.factor) + count * statistics.median(logs)) / (_BEFORE + count)
        squares = _BEFORE * self.spread**2 + sum((log - middle) ** 2 for log in logs)
        return Correction(jobs=count, factor=math.exp(middle), spread=math.sqrt(squares / (_BEFORE + count)))


class ShapeCorrection(Correction):
    """Correction for one shape that has run."""

    shape: str = Field(max_length=_DIGITS, description="Digest of the job in its layout.")


class Fitted(Correction):
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
        ran = [each for each in ran if 1 / MOST <= each.ratio <= MOST]
        if not ran:
            return None
        of_jobs = map(statistics.median, _grouped((each.job, each.ratio) for each in ran).values())
        whole = Correction(jobs=0, factor=1.0, spread=spread).refined(list(of_jobs))
        shapes = _grouped((each.shape, each.ratio) for each in ran if each.model == model)
        return cls(
            **dict(whole),
            kind=kind,
            precision=precision,
            shapes=tuple(
                ShapeCorrection(**dict(whole.refined(ratios)), shape=shape)
                for shape, ratios in list(shapes.items())[:MOST_SHAPES]
            ),
        )

    def of(self, job: JobSpec) -> Correction:
        """Return the correction of a job in its layout: its shape's, or else its kind's with ``jobs`` = 0."""
        shape = shape_of(job) if self.shapes else None
        found = (each for each in self.shapes if each.shape == shape)
        return next(found, self.model_copy(update={"jobs": 0}))

    @property
    def least(self) -> float:
        """The smallest factor of any shape."""
        return min([self.factor, *(each.factor for each in self.shapes)])


def shape_of(job: JobSpec) -> str:
    """Return a digest of everything that a job's step time depends on besides the device.

    Args:
        job: The job in its layout (``devices.at``).
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


def _grouped(pairs: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:_DIGITS]
