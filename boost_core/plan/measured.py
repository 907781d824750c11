"""A profile as ``boost bench profile`` writes it, and the machine that a plan makes of it.

Samples of work and its seconds become rates by non-negative least squares of relative errors, as ``profile`` adds them
up. A training step of a few blocks, with and without some of them, says by how much a block takes longer than its work
at those rates: the correction, by which all rates are divided. What is left between kinds of blocks is the spread, of
which a plan's range is made.
"""

import re
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.config.parallelism import SymmetricMemoryConfig
from boost_core.config.parsing.moment import Moment
from boost_core.hardware import DEVICE_BYTES, LINK_EFFICIENCY, Link, device_named
from boost_core.plan.cluster import Cluster
from boost_core.plan.fitted import Fitted
from boost_core.plan.machine import Machine, machine_for, with_nodes_of
from boost_core.plan.profile import Profile

# Wider than anything measured, and narrow enough that no prediction overflows.
Rate = Annotated[float, Field(ge=1, le=1e20)]
Seconds = Annotated[float, Field(ge=0, le=1e3)]
Line = Annotated[str, Field(max_length=200)]  # of text


ProfilePrecision = Literal["fp32", "bf16"]


class MeasuredLink(Config):
    """All-reduces among the ranks of one node, all at once: α + n/β."""

    ranks: int = Field(ge=2, le=65_536)
    base_seconds: Seconds = Field(description="α, of so many ranks.")
    bytes_per_second: Rate = Field(description="β, of each rank.")
    overlap: float = Field(
        ge=0,
        le=1,
        description="Of the shorter of an all-reduce and a product, the share that is saved if both go on.",
    )
    symmetric_memory: SymmetricMemoryConfig | None = Field(
        None, description="Up to which sizes symmetric memory was faster, for parallelism.symmetric_memory."
    )


class MeasuredProfile(Config):
    """What one kind of device does, at one precision."""

    format: Literal[1] = 1
    device: Line = Field(min_length=1, description="What CUDA calls it.")
    commit: Line
    torch_version: Line
    triton_version: Line
    measured_at: Moment | None = Field(None, description="When; null in profiles that do not say so.")
    precision: ProfilePrecision
    cores: int = Field(ge=1, le=65_536, description="CPU cores that a rank had; of a GPU it does not matter.")
    cases: tuple[Line, ...] = Field(max_length=64, description="What was timed.")
    product_flops: Rate
    attention_flops: Rate
    bandwidth: Rate
    start_seconds: Seconds
    block_seconds: Seconds
    correction: float = Field(ge=1e-3, le=1e3, description="A block's seconds over those of its work at the rates.")
    spread: float = Field(ge=0, le=10, description="Standard deviation of the logarithm of what is left.")
    link: MeasuredLink | None = Field(None, description="Added by boost bench comm --profile.")

    def refuse_other_kind(self, kind: str) -> None:
        """Check that this may be a GPU of a kind, as far as such GPUs are known.

        Args:
            kind: Ray's name of it.

        Raises:
            ValueError: It is of another one.
        """
        known = device_named(kind)
        if kind not in DEVICE_BYTES and kind.upper() in DEVICE_BYTES:
            raise ValueError(f"would be of no job's kind, as Ray writes {kind.upper()}; store it under that")
        if known is not None and known.words[0].upper() not in re.findall(r"[A-Z0-9]+", self.device.upper()):
            raise ValueError(f"was measured on {self.device!r}, which is no {kind}; store it under that device's kind")

    def serves(self, precision: str) -> bool:
        """Whether a job of some precision computes in that of the profile."""
        return computed_in(precision) == self.precision

    def machine(self, otherwise: Machine, precision: str) -> Machine:
        """What a job runs on if it runs on such devices; what was not measured is as otherwise.

        Raises:
            ValueError: The job's precision is another one.
        """
        if not self.serves(precision):
            raise ValueError(
                f"the profile is of {self.precision}, and training.precision={precision}: "
                f"measure one of {computed_in(precision)}"
            )
        device = device_named(self.device)
        when = f"{self.measured_at:%Y-%m-%d} " if self.measured_at else ""
        profile = Profile(
            self.product_flops / self.correction, self.attention_flops / self.correction,
            self.bandwidth / self.correction, self.start_seconds * self.correction, self.block_seconds,
            self.link.overlap if self.link else otherwise.profile.overlap, self.spread, True,
            f"{self.device}, measured {when}at {self.commit[:12]}",
            1.0 if device is None else device.fp8_speedup,
            otherwise.profile.host_bandwidth if device is None else LINK_EFFICIENCY * device.host_bandwidth,
        )  # fmt: skip
        return replace(otherwise, profile=profile, cluster=self._cluster(otherwise.cluster))

    def _cluster(self, otherwise: Cluster) -> Cluster:
        if self.link is None:
            return otherwise
        inner, *outer = otherwise.levels
        link = Link(self.link.base_seconds, 0.0, self.link.bytes_per_second, f"measured among {self.link.ranks} ranks")
        return Cluster((replace(inner, link=link), *outer))


class Basis(Config):
    """What a job's seconds are predicted by."""

    profile: MeasuredProfile | None = Field(None, description="What was measured of its devices; null: data sheets.")
    fitted: Fitted | None = Field(None, description="What jobs took beside predictions by that; null: none has run.")
    node_gpus: int | None = Field(None, description="GPUs of a node; null: as many as machine.machine_for says.")

    def machine(self, spec: JobSpec) -> Machine:
        """What a job is planned for.

        Raises:
            ValueError: The profile is of another precision.
        """
        machine = replace(machine_of(spec, self.profile), fitted=self.fitted)
        return with_nodes_of(machine, spec, self.node_gpus)


NOMINAL = Basis()  # data sheets


def machine_of(spec: JobSpec, profile: MeasuredProfile | None = None, cluster: Cluster | None = None) -> Machine:
    """What a job is planned for.

    Args:
        spec: The job.
        profile: What was measured of the devices; by default what data sheets promise.
        cluster: The network; by default what is assumed of the job's kind of GPU.

    Raises:
        ValueError: The profile is of another precision.
    """
    machine = machine_for(spec.resources, spec.training.precision)
    if cluster is not None:
        machine = replace(machine, cluster=cluster)
    return machine if profile is None else profile.machine(machine, spec.training.precision)


def computed_in(precision: str) -> str:
    """What profiles are taken at for a job's precision; how much faster products in 8 bits are, data sheets say."""
    return "bf16" if precision == "fp8" else precision
