"""A profile as ``boost bench profile`` writes it, and the machine that a plan derives from it.

Timed samples of work become rates by non-negative least squares of the relative errors, with the terms of ``profile``.
Training steps with different numbers of blocks show how much longer a block takes than its work at those rates: the
correction, by which all rates are divided. What remains between kinds of blocks is the spread, from which a plan's
range is computed.
"""

import re
from dataclasses import replace
from itertools import zip_longest
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
    """All-reduces at one level of the network, with all groups of the level at once: α + n/β."""

    ranks: int = Field(ge=2, le=65_536)
    base_seconds: Seconds = Field(description="α for this number of ranks.")
    bytes_per_second: Rate = Field(description="β of each rank.")
    overlap: float = Field(
        ge=0,
        le=1,
        description="Share of the shorter of an all-reduce and a product that is saved if both run concurrently.",
    )
    symmetric_memory: SymmetricMemoryConfig | None = Field(
        None, description="Sizes up to which symmetric memory was faster, for parallelism.symmetric_memory."
    )

    @property
    def link(self) -> Link:
        """The link of each rank."""
        return Link(self.base_seconds, 0.0, self.bytes_per_second, f"measured among {self.ranks} ranks")


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
        if kind not in DEVICE_BYTES and kind.upper() in DEVICE_BYTES:
            raise ValueError(f"would match no job, as Ray writes {kind.upper()}; store it under that name")
        if known is not None and known.words[0].upper() not in re.findall(r"[A-Z0-9]+", self.device.upper()):
            raise ValueError(f"was measured on {self.device!r}, not on {kind} GPUs; store it under that device's kind")

    def serves(self, precision: str) -> bool:
        """Whether a job of this precision computes in the profile's precision."""
        return computed_in(precision) == self.precision

    def machine(self, otherwise: Machine, precision: str, described: bool = False) -> Machine:
        """Return the machine of a job on such devices; what was not measured is taken from ``otherwise``.

        Args:
            otherwise: The machine without the profile.
            precision: The job's ``training.precision``.
            described: Whether its network is one that people described, of which only nodes may be as measured.

        Raises:
            ValueError: The job has another precision.
        """
        if not self.serves(precision):
            raise ValueError(
                f"the profile is of {self.precision}, but training.precision={precision}: "
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
            self._host_bandwidth(otherwise.profile), otherwise.profile.launches_in_turn,
        )  # fmt: skip
        return replace(otherwise, profile=profile, cluster=self._cluster(otherwise.cluster, described))

    def _host_bandwidth(self, otherwise: Profile) -> float:
        device = device_named(self.device)
        if self.host_bandwidth is not None:
            return self.host_bandwidth
        return otherwise.host_bandwidth if device is None else LINK_EFFICIENCY * device.host_bandwidth

    def _cluster(self, otherwise: Cluster, described: bool) -> Cluster:
        links = self.link, None if described else self.between_nodes
        levels = zip_longest(otherwise.levels, links[: len(otherwise.levels)])
        return Cluster(tuple(level if found is None else replace(level, link=found.link) for level, found in levels))


class Basis(Config):
    """What a job's predictions are based on."""

    profile: MeasuredProfile | None = Field(None, description="Measured profile of its devices; null: data sheets.")
    fitted: Fitted | None = Field(None, description="Corrections from earlier jobs; null: none has run.")
    node_gpus: int | None = Field(None, description="GPUs per node; null: as assumed by machine.machine_for.")
    node_memory_bytes: int | None = Field(
        None, description="Memory of a node's host; null if unknown, in which case it is not checked."
    )

    def machine(self, spec: JobSpec) -> Machine:
        """Return the machine that a job is planned for.

        Raises:
            ValueError: The profile is of another precision.
        """
        machine = replace(machine_of(spec, self.profile), fitted=self.fitted)
        machine = with_nodes_of(machine, spec, self.node_gpus)
        return replace(machine, node_memory_bytes=self.node_memory_bytes if spec.resources.gpus_per_worker else None)


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
