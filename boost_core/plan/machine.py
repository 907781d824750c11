"""The machine that a job's workers run on, as far as the job specifies it.

A network as levels (``Cluster``), the speed of a kind of device (``Profile``), and where these come from: data sheets
(``machine_for``), measurements (``MeasuredProfile``) or a description by people (``NetworkConfig``), and what
jobs that have run add to them (``Fitted``).
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from hashlib import sha256
from itertools import accumulate
from math import exp, inf
from operator import add, mul
from typing import Annotated, Literal, NamedTuple, cast

from pydantic import Field

from boost_core import hardware
from boost_core.config.base import Config, Moment, Share
from boost_core.config.job import JobSpec, ResourcesConfig, flash_takes
from boost_core.config.parallelism import SymmetricMemoryConfig
from boost_core.hardware import LINK_EFFICIENCY, Device, Link, device_named
from boost_core.messages import Provenance
from boost_core.terminal import rounded

# Corrects predictions by how long earlier jobs took.
#
# A device's arithmetic and its links differ from their figures for different reasons, so a step's exposed collectives
# are corrected apart from the rest of it. Each job that has run in a shape contributes one ratio for each of the two:
# the measured seconds over those predicted; ratios are always against the uncorrected prediction. For n jobs
#
#     factor  = before^(3/(n + 3)) · median^(n/(n + 3))
#     spread² = (3 · spread before² + Σ (log ratio − log factor)²) / (n + 3)
#
# first for a kind of device and a precision, with a prior factor of 1 and the profile's spread; then for each shape
# that has run, with the result for its kind as the prior. A job of several shapes counts for its kind with their
# median. A job that has no collectives to wait for, or hardly any by the prediction, says nothing about them.
#
# The rest includes transfers between pipeline stages, which are timed together with waiting for the other stages.

MOST = 10.0  # a ratio above this, or below its inverse, has other causes than the device
LEAST_SHARE = 0.01  # of a predicted step; less communication is too little to compare
MOST_SHAPES = 32
_BEFORE = 3  # weight of the prior, in jobs
_DIGITS = 16

Factor = Annotated[float, Field(ge=1 / MOST, le=MOST)]
Spread = Annotated[float, Field(ge=0, le=10)]


class Factors(NamedTuple):
    """Factors by which predicted seconds are multiplied.

    Attributes:
        rest: Factor of everything but exposed collectives.
        communication: Factor of exposed collectives.
    """

    rest: float = 1.0
    communication: float = 1.0


class PredictedCommunication(NamedTuple):
    """Exposed collectives in a step's prediction without a correction.

    Attributes:
        seconds: Seconds of a step that the reporting rank waits for collectives.
        share: Share of the step that is proportional to the speed of collectives, from 0 to 1: besides these seconds,
            waiting for pipeline ranks that wait for theirs.
    """

    seconds: float
    share: float


class Ratios(NamedTuple):
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


class Ran(NamedTuple):
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
        rest = self.refined([each.rest for each in ratios])
        return StepCorrection(**dict(rest), communication=self.of_communication.refined(communication))


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
        newest = list(shapes.items())[:MOST_SHAPES]
        corrections = tuple(ShapeCorrection(**dict(whole.updated(ratios)), shape=shape) for shape, ratios in newest)
        return cls(**dict(whole), kind=kind, precision=precision, shapes=corrections)

    def of(self, job: JobSpec) -> StepCorrection:
        """Return the correction of a job in its layout: its shape's, or else its kind's with ``jobs`` = 0."""
        shape = shape_of(job) if self.shapes else None
        return next((each for each in self.shapes if each.shape == shape), self.model_copy(update={"jobs": 0}))

    @property
    def least(self) -> Factors:
        """The smallest of each of the factors of any shape."""
        return Factors(*map(min, zip(self.factors, *(each.factors for each in self.shapes), strict=True)))


def shape_of(job: JobSpec) -> str:
    """Return a digest of everything that a job's step time depends on besides the device.

    Args:
        job: The job in its layout (``report.at``).
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
    return sha256(repr(parts).encode()).hexdigest()[:_DIGITS]


def model_of(job: JobSpec) -> str:
    """Return a digest of a job's model."""
    return sha256(job.model.model_dump_json().encode()).hexdigest()[:_DIGITS]


def median_of(ratios: Sequence[Ratios]) -> Ratios:
    """Return the medians of both ratios; that of collectives is of those that there are."""
    communication = [each.communication for each in ratios if each.communication is not None]
    rest = statistics.median(each.rest for each in ratios)
    return Ratios(rest, statistics.median(communication) if communication else None)


# A network as levels, and the number of ranks of each group at each of them.
#
# A level joins units of the level inside it: a node its GPUs, a rack its nodes. Ranks are numbered as in
# ``Layout.coordinates``, so a group of the innermost size takes adjacent ranks; what a group leaves of a level's
# fan-out goes to the next size out. The counts are a placement matrix (arXiv 2110.10548): a row for each size, a column
# for each level.

Row = tuple[int, ...]  # ranks of a group at each level, innermost first; their product is the group's size


@dataclass(frozen=True)
class Level:
    """One level of a network.

    Attributes:
        name: Name shown to people: node, rack.
        fan_out: Number of units of the level inside that it joins.
        link: Link of each rank while all send at once, so oversubscribed switches are accounted for.
        meshed: Whether every pair has its own wires instead of a switch. The link is then to all others together; among
            fewer ranks the wires to those that do not take part carry nothing.
        as_in_node: Whether its link is that of a node's GPUs, which goes on beyond the node.
    """

    name: str
    fan_out: int
    link: Link
    meshed: bool = False
    as_in_node: bool = False

    def among(self, ranks: int) -> Link:
        """Return each rank's link when only ``ranks`` of them take part."""
        if not self.meshed or ranks == self.fan_out:
            return self.link
        share = (ranks - 1) / (self.fan_out - 1)
        return replace(self.link, bytes_per_second=share * self.link.bytes_per_second)


@dataclass(frozen=True)
class Cluster:
    """A network.

    Attributes:
        levels: Its levels, innermost first.
    """

    levels: tuple[Level, ...]

    @property
    def size(self) -> int:
        """Number of ranks that it has room for."""
        return math.prod(level.fan_out for level in self.levels)

    def rows(self, sizes: Sequence[int]) -> list[Row]:
        """Return a placement matrix. What does not divide among the inner levels is spread over the outermost.

        Args:
            sizes: Sizes of the groups, innermost first.

        Raises:
            ValueError: There are more ranks than places.
        """
        if (ranks := math.prod(sizes)) > self.size:
            joined = " × ".join(f"{level.fan_out} ({level.name})" for level in self.levels)
            raise ValueError(f"{ranks} ranks do not fit into {joined}; choose smaller sizes, or a larger network")
        room = [level.fan_out for level in self.levels]
        rows = []
        for size in sizes:
            row, rest = [], size
            for index, places in enumerate(room[:-1]):
                ranks = next(divisor for divisor in range(min(rest, places), 0, -1) if rest % divisor == 0)
                row.append(ranks)
                rest //= ranks
                # What a group that continues at outer levels leaves is of no use to groups that are spread further.
                room[index] = 1 if rest > 1 else places // ranks
            rows.append((*row, rest))
        return rows

    def level_between(self, row: Row, place: int) -> int:
        """Return the index of the outermost level that separates a place of a group from the next one.

        Args:
            row: The group's row.
            place: Place within the group, from 0; the last is followed by the first.
        """
        inside = list(accumulate(row, mul, initial=1))
        following = (place + 1) % inside[-1]
        return max((index for index, size in enumerate(inside) if place // size != following // size), default=0)


# Speed of a kind of device: rates that convert work into seconds.
#
#     seconds = FLOPs of products / rate + FLOPs of attention / rate + bytes / bandwidth + starts of kernels
#
# A product is slower the narrower it is: reading and writing its operands is added rather than hidden, and a tile of
# its result takes as long as ``TILE_DEPTH`` more of the inner width, in which its loop starts and its sums are written
# (NVIDIA, "Matrix Multiplication Background User's Guide"; with the memory traffic it is what the width of r costs).
# A device reads operands while it multiplies; the sum describes the times that result. Shares of the peaks were fitted
# with it, as measured rates are (``bench.profile``), and BOOST's times of narrow products on A100s follow it
# (``tests/unit/test_published_times.py``). The larger of both times would need another share, on an H100 0.55 instead
# of 0.66 to leave products of 4,096 by 4,096 as long as they are, and narrow ones would cost no more than wide ones.
#
# At 250 TFLOP/s and 1.4 TB/s a product of 16,384 × 1,024 by 1,024 × 1,024 reaches 172, one with widths of 4,096
# reaches 224. Nominal figures are shares of the data sheets' peaks by generation (``hardware.Shares``).
#
# Gradients, and keys of other context parallel ranks, are sent while the backward pass, or attention, goes on. They
# take streaming multiprocessors from it, 20 of an H800's 132 (arXiv 2412.19437, section 3.2.2): 0.85 is hidden. Of the
# short exchanges in a block nothing is taken to be hidden before it is measured.
#
# The host's time is taken from the trainer's counts (``docs/figures/host.md``): a block's forward and backward pass
# makes 1,174 Python calls for 72 launches; at 4 µs a call, with what torch does in it, that is 4.7 ms, and published
# pipelines of short micro-batches are bound by as much (nanotron, 1B on H100s: 4 to 6 ms a block).

BANDWIDTH_SHARE, TILE_DEPTH, LONG_OVERLAP = 0.7, 96, 0.85
_CALLS_OF_A_BLOCK, _CALL_SECONDS = 724 + 450, 4e-6
# Of a step, besides its work: the batch, the norm's and the loss's way to the host, and launching the update. Fitted to
# the same runs as the shares; the shortest of them are 30 to 50 ms longer than their work.
_STEP_SECONDS = 0.03
_ASSUMED_SPREAD = 0.2  # within a factor of exp(1.28 · 0.2) are 38 of the 44 published runs
_CORES_AT_BEST = 1 / 6  # wide vectors do products of a few hundred columns at well over 100 GFLOP/s
_TENTH = 1.2816  # standard deviations from the middle of a normal distribution to its lowest and its highest tenth
_UPDATE_BYTES = 28  # of a weight: its gradient, master and moments read, master and moments written, in fp32


@dataclass(frozen=True)
class Work:
    """Work of a device; a profile says how long it takes.

    Attributes:
        product_flops: FLOPs of matrix products.
        attention_flops: FLOPs of attention.
        moved_bytes: Bytes that products and passes read and write.
        starts: Number of product kernels launched.
        fp8_flops: FLOPs of products in 8 bits, not included in ``product_flops``.
        outputs: Elements of the results of products, of which each tile costs the same at any inner width.
    """

    product_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    starts: int = 0
    fp8_flops: float = 0.0
    outputs: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Profile:
    """One kind of device, as used by one rank.

    Attributes:
        product_flops: FLOPs per second of large matrix products.
        attention_flops: FLOPs per second of attention.
        bandwidth: Bytes per second at which passes and operands are read and written.
        start_seconds: Launch overhead of each product.
        block_seconds: Time to launch a block's kernels for a micro-batch; does not apply where steps are captured as
            CUDA graphs.
        overlap: Share hidden of the shorter of a block's exchange and the work that may run meanwhile; 0 if not
            measured.
        spread: Standard deviation of the logarithm of measured over predicted step time.
        measured: Whether it was measured on such a device, rather than assumed.
        description: The device and the source of its figures.
        fp8_speedup: Speedup of 8-bit products, by data sheets.
        host_bandwidth: Bytes per second to or from the host's memory.
        launches_in_turn: Whether each kernel is launched once the one before has ended, as on a CPU, rather than while
            it runs.
        tile_depth: Inner width that takes as long as a product's tile takes besides; 0 where rates were fitted to
            products without it.
        step_seconds: Time of a step besides its work.
        long_overlap: As ``overlap``, of gradients between replicas and of keys between context parallel ranks.
        cudnn: ``attention_flops`` where cuDNN computes attention, from each length of a sequence on; empty where it
            does not, and where the rate was measured.
        at_best: Share of the predicted seconds that the fastest of such devices take, beyond the spread.
        precise_flops: Peak FLOPs per second in fp64; infinite if not known.
    """

    product_flops: float
    attention_flops: float
    bandwidth: float
    start_seconds: float
    block_seconds: float
    overlap: float
    spread: float
    measured: bool
    description: str
    fp8_speedup: float = 1.0
    host_bandwidth: float = LINK_EFFICIENCY * 32e9  # of a device that is not known: PCIe 4
    launches_in_turn: bool = False
    tile_depth: float = 0.0
    step_seconds: float = 0.0
    long_overlap: float = 0.0
    cudnn: tuple[tuple[int, float], ...] = ()
    at_best: float = 1.0
    precise_flops: float = inf

    @classmethod
    def nominal(cls, device: Device, precision: str) -> "Profile":
        """Return the profile to expect from a data sheet."""
        precision = computed_in(precision)
        peak = device.tflops[precision] * 1e12
        products, attention = device.shares.products, device.shares.attention
        launching, by_length = _CALLS_OF_A_BLOCK * _CALL_SECONDS, device.shares.cudnn
        cudnn = f" (cuDNN's at {by_length[0][1]:.0%} or more)" if by_length else ""
        return cls(
            products * peak, attention * peak, BANDWIDTH_SHARE * device.bandwidth, 0.0, launching, 0.0,
            _ASSUMED_SPREAD, False,
            f"{peak / 1e12:g} TFLOP/s of dense {precision} and {device.bandwidth / 1e12:g} TB/s ({device.source}), "
            f"products at {rounded(100 * products)}%, attention at {attention:.0%}{cudnn}, bytes at "
            f"{BANDWIDTH_SHARE:.0%}; {1000 * launching:.1f} ms to launch a block where steps are not captured; assumed",
            device.fp8_speedup, LINK_EFFICIENCY * device.host_bandwidth, False, TILE_DEPTH, _STEP_SECONDS, LONG_OVERLAP,
            tuple((length, share * peak) for length, share in by_length),
            precise_flops=device.tflops.get("fp64", inf) * 1e12,
        )  # fmt: skip

    def attending(self, job: JobSpec) -> "Profile":
        """Return this profile with attention at the rate of the kernel that computes a job's, as far as that is known.

        From Hopper on cuDNN's, where ``train.state.attention_backend`` prefers it on the GPU itself.
        """
        model, training = job.model, job.training
        rates = [rate for least, rate in self.cudnn if least <= training.sequence_length]
        dense = job.parallelism.context_parallel_size == 1 and training.attention is None and attends_in_one(job)
        if not rates or model.head_size != hardware.CUDNN_HEAD or not (dense and flash_takes(model, training)):
            return self
        return replace(self, attention_flops=rates[-1])

    def seconds(self, work: Work) -> float:
        """Return the time of some work."""
        return (
            (work.product_flops + work.fp8_flops / self.fp8_speedup) / self.product_flops
            + work.attention_flops / self.attention_flops
            + work.moved_bytes / self.bandwidth
            + work.starts * self.start_seconds
            + 2 * self.tile_depth * work.outputs / self.product_flops
        )

    def of_a_block(self, work: Work, captured: bool = False) -> float:
        """Return the time of a block's work for a micro-batch, with launching it.

        Args:
            work: The work.
            captured: Whether it is replayed from a CUDA graph, which needs no launches.
        """
        computing, launching = self.seconds(work), 0.0 if captured else self.block_seconds
        return computing + launching if self.launches_in_turn else max(computing, launching)

    def exposed(self, exchange_seconds: float, work_seconds: float, long: bool = False) -> float:
        """Return the time that an exchange adds to the work that runs meanwhile.

        Args:
            exchange_seconds: The exchange alone.
            work_seconds: The work alone.
            long: Whether it is of gradients between replicas, or of keys between context parallel ranks.
        """
        return exchange_seconds - (self.long_overlap if long else self.overlap) * min(exchange_seconds, work_seconds)

    def update_seconds(self, weights: float, element_bytes: int) -> float:
        """Return the time of the optimizer's pass over this many weights of a rank, and of what else a step does."""
        return self.step_seconds + weights * (_UPDATE_BYTES + element_bytes) / self.bandwidth


def range_of(seconds: float, spread: float) -> tuple[float, float]:
    """Return the range expected to contain 80 % of step times, given the prediction and its spread."""
    return seconds * exp(-_TENTH * spread), seconds * exp(_TENTH * spread)


def of_cores(cores: float) -> Profile:
    """Return the profile of CPU cores: the rates of one core times their number."""
    return Profile(
        2e10 * cores, 2e10 * cores, 5e9 * cores, 0.0, 2e-3, 0.0, _ASSUMED_SPREAD, False,
        "20 GFLOP/s and 5 GB/s per core and 2 ms per block, all assumed; many cores are several times as fast, which "
        "boost plan --measure shows", host_bandwidth=5e9 * cores,
        launches_in_turn=True, at_best=_CORES_AT_BEST,
    )  # fmt: skip


SPARE = 0.04  # share of a GPU's memory kept free where the plan makes the choices
CPU = "CPU"  # as a kind of device
_MANY = 65_536  # more than any gang's nodes
_UNKNOWN_GPU = cast(Device, device_named("A100"))

LOCAL = Cluster((Level("node", _MANY, hardware.LOOPBACK),))


@dataclass(frozen=True)
class Machine:
    """What ranks run on.

    Attributes:
        profile: Profile of each rank's device.
        cluster: Network between the ranks.
        fitted: Corrections from jobs that ran on such machines; ``None`` if none has run.
        node_memory_bytes: Memory of each node's host; ``None`` if unknown.
        device_bytes: Memory of each GPU as people described it; ``None``: that of the kind that the job requests.
    """

    profile: Profile
    cluster: Cluster
    fitted: Fitted | None = None
    node_memory_bytes: int | None = None
    device_bytes: int | None = None

    def joined_at(self, gigabits: float | None) -> "Machine":
        """Return this machine with another network bandwidth per GPU; itself if ``None``."""
        if gigabits is None or len(self.cluster.levels) == 1:
            return self
        node, *outer = self.cluster.levels
        adapter = hardware.adapter(gigabits)
        levels = (node, *(level if level.as_in_node else replace(level, link=adapter) for level in outer))
        return replace(self, cluster=Cluster(levels))

    @property
    def provenance(self) -> Provenance:
        """What predictions for this machine are based on."""
        if self.profile.measured:
            return "measured_fitted" if self.fitted else "measured"
        return "fitted" if self.fitted else "assumed"

    def correction(self, job: JobSpec) -> StepCorrection:
        """Return the correction of a job's predictions.

        Args:
            job: The job in its layout (``report.at``).
        """
        if self.fitted is None:
            return StepCorrection(jobs=0, factor=1.0, spread=self.profile.spread)
        return self.fitted.of(job)

    def range_of(self, job: JobSpec, seconds: float, communication: float) -> tuple[float, float]:
        """Return the range expected to contain 80 % of a job's step times.

        It is the sum of both parts' ranges, as though both were slower or faster at once, so that telling them apart
        makes no range narrower.

        Args:
            job: The job in its layout, as in ``correction``.
            seconds: Predicted step time, with the correction.
            communication: Seconds of it that are exposed collectives (``StepParts.communication``).
        """
        correction = self.correction(job)
        low, high = range_of(seconds - communication, correction.spread)
        least, most = range_of(communication, correction.of_communication.spread)
        return (low + least) * (self.profile.at_best if self.fitted is None else 1.0), high + most


def kind_of_gpu(resources: ResourcesConfig) -> str | None:
    """Return the kind of GPU that a job requests; ``None`` if any will do."""
    return resources.accelerator_type or resources.node_labels.get(hardware.ACCELERATOR_LABEL)


def device_bytes(resources: ResourcesConfig, machine: Machine | None = None) -> int | None:
    """Return the memory of the GPU that a job requests; ``None`` if it requests none, or an unknown kind.

    Args:
        resources: The job's resources.
        machine: What it runs on, if people described that.
    """
    if machine is not None and machine.device_bytes is not None and resources.gpus_per_worker:
        return machine.device_bytes
    kind = kind_of_gpu(resources)
    return hardware.memory_named(kind) if resources.gpus_per_worker and kind else None


def lacks_precision(spec: JobSpec, profile: "MeasuredProfile | None" = None) -> str | None:
    """Say that a job's kind of GPU lacks the job's precision; ``None`` if it does not, or is not known.

    Args:
        spec: The job.
        profile: Measured profile that it is planned by, whose device counts where the job names none.
    """
    kind, precision = kind_of_gpu(spec.resources) or (profile and profile.device), spec.training.precision
    device = device_named(kind) if spec.resources.gpus_per_worker and kind else None
    if device is None or precision in device.precisions:
        return None
    lacks = "no 8-bit products, which need compute capability 8.9 (from Ada on); use bf16"
    if "bf16" not in device.precisions:
        lacks = "neither bf16 nor flash attention, which NVIDIA's have from Ampere on; use fp32"
    return f"training.precision={precision}: {kind} GPUs have {lacks}, or a resources.accelerator_type such as H100"


def refuse_unfit_gpu(spec: JobSpec, profile: "MeasuredProfile | None" = None) -> None:
    """Check that a job's kind of GPU, if it names one, has figures to plan with and computes in its precision.

    Args:
        spec: The job.
        profile: Measured profile that it is planned by; figures of its kind are then not needed.

    Raises:
        ValueError: It has none, with the nearest that do; or it does not.
    """
    kind = kind_of_gpu(spec.resources)
    if profile is None and spec.resources.gpus_per_worker and kind is not None and device_named(kind) is None:
        names = {each.upper(): each for each in hardware.DEVICE_BYTES}
        # Those with most of its letters and numbers first, sizes of memory aside, then the most alike.
        parts = {each: {*re.findall("[A-Z]+|[0-9]+", re.sub("[0-9]+GB?", "", each))} for each in (*names, kind.upper())}
        shared = {each: len(parts[each] & parts[kind.upper()]) for each in names}
        close, far = (get_close_matches(kind.upper(), names, n=len(names), cutoff=share) for share in (0.6, 0.4))
        alike = sorted((each for each in far if each in close or shared[each]), key=lambda each: -shared[each])
        nearest = ", ".join(names[each] for each in alike[:3])
        raise ValueError(
            f"no figures are known of GPUs named {kind!r}{f' (the nearest: {nearest})' if nearest else ''}; name "
            f"one of {', '.join(hardware.DEVICE_BYTES)}, or describe it as device in the file of --cluster"
        )
    if problem := lacks_precision(spec, profile):
        raise ValueError(problem)


def kind_of_device(resources: ResourcesConfig) -> str | None:
    """Return the device kind whose jobs correct predictions: the GPU's, or ``CPU``; ``None`` if any GPU will do."""
    return kind_of_gpu(resources) if resources.gpus_per_worker else CPU


def required_labels(resources: ResourcesConfig) -> dict[str, str]:
    """Return the labels that a node must have for a job."""
    kind = resources.accelerator_type
    return dict(resources.node_labels) | ({hardware.ACCELERATOR_LABEL: kind} if kind else {})


def machine_for(resources: ResourcesConfig, precision: str) -> Machine:
    """Return the machine that a job's workers run on.

    If no kind of GPU is named, it is an A100, but of unknown memory; so is one without figures for a gang that runs on
    it, which plans refuse (``refuse_unfit_gpu``). A node is assumed to have as many GPUs, and each GPU the network, as
    is usual for its kind.

    Args:
        resources: The job's resources.
        precision: Precision of its products.
    """
    if not resources.gpus_per_worker:
        return Machine(of_cores(resources.cpus_per_worker), LOCAL)
    kind = kind_of_gpu(resources)
    device = (device_named(kind) if kind else None) or _UNKNOWN_GPU
    levels = [Level("node", device.node_gpus, hardware.LINKS[device.link])]
    if device.rack_nodes > 1:
        levels.append(replace(levels[0], name="rack", fan_out=device.rack_nodes, as_in_node=True))
    fabric = Level("fabric", _MANY, hardware.NETWORKS[device.network_gigabits])
    return Machine(Profile.nominal(device, precision), Cluster((*levels, fabric)))


def captures_steps(job: JobSpec) -> bool:
    """Whether a job's steps are captured as CUDA graphs, as far as planning can tell; see ``train.state.StepGraph``."""
    on_gpu, parallelism = job.resources.gpus_per_worker > 0, job.parallelism
    by_itself = parallelism.pipeline_parallel_size == parallelism.context_parallel_size == 1
    by_itself = by_itself and job.training.attention is None and not parallelism.keeps_on_host
    return on_gpu and by_itself and job.training.cuda_graphs != "off" and attends_on_device(job)


def attends_in_one(job: JobSpec) -> bool:
    """Whether each position sees everything before it in its sequence."""
    window = job.model.sliding_window
    return not job.data.documents_apart and (window is None or window >= job.training.sequence_length)


def attends_on_device(job: JobSpec) -> bool:
    """Whether attention on a GPU needs no document lengths on the host."""
    return attends_in_one(job) or flash_takes(job.model, job.training)


# A profile as ``boost bench profile`` writes it, and the machine that a plan derives from it.
#
# Timed samples of work become rates by non-negative least squares of the relative errors, with the terms of
# ``Profile``. Training steps with different numbers of blocks show how much longer a block takes than its work at those
# rates: the correction, by which all rates are divided. What remains between kinds of blocks is the spread, from which
# a plan's range is computed.

# Wider than anything measured, and narrow enough that no prediction overflows.
Rate = Annotated[float, Field(ge=1, le=1e20)]
Seconds = Annotated[float, Field(ge=0, le=1e3)]
Line = Annotated[str, Field(max_length=200)]  # of text


ProfilePrecision = Literal["fp32", "bf16"]


class MeasuredLink(Config):
    """All-reduces at one level of the network, with all groups of the level at once: α + n/β."""

    ranks: int = Field(ge=2, le=65_536)
    base_seconds: Seconds = Field(description="α for this number of ranks.")
    bytes_per_second: Rate = Field(description="β of each rank.")
    overlap: Share = Field(
        description="Share of the shorter of an all-reduce and a product that is saved if both run concurrently."
    )
    symmetric_memory: SymmetricMemoryConfig | None = Field(
        None, description="Sizes up to which symmetric memory was faster, for parallelism.symmetric_memory."
    )


class MeasuredProfile(Config):
    """Measured speed of one kind of device, at one precision."""

    format: Literal[1] = 1
    device: Line = Field(min_length=1, description="The device's name in CUDA.")
    commit: Line
    torch_version: Line
    triton_version: Line
    measured_at: Moment | None = Field(None, description="When it was measured; null in profiles that do not say.")
    precision: ProfilePrecision
    cores: int = Field(ge=1, le=65_536, description="CPU cores per rank; irrelevant for a GPU.")
    cases: tuple[Line, ...] = Field(max_length=64, description="What was timed.")
    product_flops: Rate
    attention_flops: Rate
    bandwidth: Rate
    start_seconds: Seconds
    block_seconds: Seconds
    correction: float = Field(ge=1e-3, le=1e3, description="A block's seconds over those predicted by the rates.")
    spread: float = Field(ge=0, le=10, description="Standard deviation of the logarithm of the remaining error.")
    host_bandwidth: Rate | None = Field(
        None,
        description="Bytes per second to or from page-locked memory of the host, whichever is slower; null if not "
        "measured, in which case it is the data sheet's.",
    )
    link: MeasuredLink | None = Field(
        None, description="Link among the ranks of a node, added by boost bench comm --profile."
    )
    between_nodes: MeasuredLink | None = Field(
        None,
        description="Link among nodes, measured by boost bench comm --profile on several; it is used for networks that "
        "are not described otherwise.",
    )

    def refuse_other_kind(self, kind: str) -> None:
        """Check that the profile may be of a kind of GPU, as far as the kind is known.

        Args:
            kind: Ray's name of the kind.

        Raises:
            ValueError: It is of another kind.
        """
        known = device_named(kind)
        written = next((each for each in hardware.DEVICE_BYTES if each.upper() == kind.upper()), kind)
        if written != kind:
            raise ValueError(f"would match no job, as Ray writes {written}; store it under that name")
        if known is not None and known.words[0].upper() not in re.findall(r"[A-Z0-9]+", self.device.upper()):
            raise ValueError(f"was measured on {self.device!r}, not on {kind} GPUs; store it under that device's kind")

    def machine(self, otherwise: Machine, precision: str, described: bool = False) -> Machine:
        """Return the machine of a job on such devices; what was not measured is taken from ``otherwise``.

        Args:
            otherwise: The machine without the profile.
            precision: The job's ``training.precision``.
            described: Whether its network is one that people described, of which only nodes may be as measured.

        Raises:
            ValueError: The job has another precision.
        """
        if computed_in(precision) != self.precision:
            raise ValueError(
                f"the profile is of {self.precision}, but training.precision={precision}: "
                f"measure one of {computed_in(precision)}"
            )
        device = device_named(self.device)
        by_sheet = LINK_EFFICIENCY * device.host_bandwidth if device else otherwise.profile.host_bandwidth
        when = f"{self.measured_at:%Y-%m-%d} " if self.measured_at else ""
        profile = Profile(
            self.product_flops / self.correction, self.attention_flops / self.correction,
            self.bandwidth / self.correction, self.start_seconds * self.correction, self.block_seconds,
            self.link.overlap if self.link else otherwise.profile.overlap, self.spread, True,
            f"{self.device}, measured {when}at {self.commit[:12]}",
            1.0 if device is None else device.fp8_speedup,
            by_sheet if self.host_bandwidth is None else self.host_bandwidth,
            otherwise.profile.launches_in_turn, 0.0, otherwise.profile.step_seconds,
            self.link.overlap if self.link else otherwise.profile.long_overlap,
            precise_flops=inf if device is None else device.tflops.get("fp64", inf) * 1e12,
        )  # fmt: skip
        links, levels = (self.link, None if described else self.between_nodes), list(otherwise.cluster.levels)
        places = [place for place, level in enumerate(levels) if not level.as_in_node]
        for place, link in zip(places, links, strict=False):
            if link is not None:
                source = f"measured among {link.ranks} ranks"
                levels[place] = replace(levels[place], link=Link(link.base_seconds, 0.0, link.bytes_per_second, source))
        return replace(otherwise, profile=profile, cluster=Cluster(tuple(levels)))


NODE_HOST = "Memory of a node's host; null if unknown, in which case it is not checked."


class Basis(Config):
    """What a job's predictions are based on."""

    profile: MeasuredProfile | None = Field(None, description="Measured profile of its devices; null: data sheets.")
    fitted: Fitted | None = Field(None, description="Corrections from earlier jobs; null: none has run.")
    node_gpus: int | None = Field(None, description="GPUs per node; null: as assumed by machine.machine_for.")
    node_memory_bytes: int | None = Field(None, description=NODE_HOST)

    def machine(self, spec: JobSpec) -> Machine:
        """Return the machine that a job is planned for.

        Raises:
            ValueError: The profile is of another precision.
        """
        machine = replace(machine_of(spec, self.profile), fitted=self.fitted)
        if not spec.resources.gpus_per_worker:
            return machine
        if self.node_gpus is not None:
            node, *outer = machine.cluster.levels
            machine = replace(machine, cluster=Cluster((replace(node, fan_out=self.node_gpus), *outer)))
        return replace(machine, node_memory_bytes=self.node_memory_bytes)


NOMINAL = Basis()  # data sheets


def machine_of(spec: JobSpec, profile: MeasuredProfile | None = None, cluster: Cluster | None = None) -> Machine:
    """Return the machine that a job is planned for.

    Args:
        spec: The job.
        profile: Measured profile of the devices; by default the data sheets' figures.
        cluster: The network; by default the one assumed for the job's kind of GPU.

    Raises:
        ValueError: The profile is of another precision.
    """
    machine = machine_for(spec.resources, spec.training.precision)
    if cluster is not None:
        machine = replace(machine, cluster=cluster)
    return machine if profile is None else profile.machine(machine, spec.training.precision, cluster is not None)


def computed_in(precision: str) -> str:
    """Return the precision of profiles for a job's precision; data sheets give the speedup of 8-bit products."""
    return "bf16" if precision == "fp8" else precision


# A network as people write it down, for plans.


class LevelConfig(Config):
    """One level: what it joins, and the link of each rank while all of them send at once."""

    name: str = Field(min_length=1, max_length=63, description="Name shown to people: node, rack.")
    fan_out: int = Field(ge=1, le=1_000_000, description="Number of inner units that it joins: GPUs, nodes, racks.")
    gigabytes_per_second: float = Field(gt=0, le=1e6, description="Bandwidth of a rank in one direction.")
    microseconds: float = Field(10.0, ge=0, le=1e6, description="Latency of each step around a ring.")
    meshed: bool = Field(False, description="Whether every pair has its own wires instead of a switch.")


class DeviceConfig(Config):
    """A kind of GPU that ``hardware.DEVICES`` does not list, by its data sheet."""

    name: str = Field(min_length=1, max_length=63, description="Name shown to people.")
    memory_gigabytes: float = Field(gt=0, le=1e6, description="Memory.")
    teraflops: float = Field(gt=0, le=1e6, description="Dense products in the job's precision, in TFLOP/s.")
    terabytes_per_second: float = Field(gt=0, le=1e6, description="The memory's bandwidth.")
    host_gigabytes_per_second: float = Field(
        32.0, gt=0, le=1e6, description="To the host's memory, in one direction; default: PCIe 4."
    )


class NetworkConfig(Config):
    """Levels from the inside out; the innermost is a node."""

    levels: tuple[LevelConfig, ...] = Field(min_length=1, max_length=8)
    node_memory_gigabytes: float | None = Field(
        None, gt=0, le=1e6, description="Memory of each node's host; if omitted, it is unknown and not checked."
    )
    device: DeviceConfig | None = Field(None, description="The GPUs; default: the job's kind, by its data sheet.")

    def cluster(self) -> Cluster:
        """Return the network as plans use it."""
        levels = []
        for level in self.levels:
            latency, rate = level.microseconds * 1e-6, level.gigabytes_per_second * 1e9
            link = Link(0.0, latency, rate, f"{level.name}, as described")
            levels.append(Level(level.name, level.fan_out, link, level.meshed))
        return Cluster(tuple(levels))

    def machine(self, spec: JobSpec, profile: MeasuredProfile | None = None) -> Machine:
        """Return the machine that a job runs on.

        Args:
            spec: The job.
            profile: Measured profile of its devices; by default the data sheets' figures.

        Raises:
            ValueError: The profile is of another precision.
        """
        machine = machine_of(spec, profile, self.cluster())
        if not spec.resources.gpus_per_worker:
            return machine
        if (sheet := self.device) is not None:
            machine = replace(machine, device_bytes=int(sheet.memory_gigabytes * 1e9))
            if profile is None:
                # Like one that is listed; what training reaches of its rates is assumed to be as on an A100.
                device = replace(
                    _UNKNOWN_GPU, tflops=dict.fromkeys(("fp8", "bf16", "fp32"), sheet.teraflops),
                    source=f"{sheet.name}, as described", bandwidth=sheet.terabytes_per_second * 1e12,
                    host_bandwidth=sheet.host_gigabytes_per_second * 1e9, fp8_speedup=1.0, watts=None,
                )  # fmt: skip
                machine = replace(machine, profile=Profile.nominal(device, spec.training.precision))
        node_memory = None if self.node_memory_gigabytes is None else int(self.node_memory_gigabytes * 1e9)
        return replace(machine, node_memory_bytes=node_memory)
