"""A network as people write it down, for plans."""

from dataclasses import replace

from pydantic import Field

from boost_core.config.base import Config
from boost_core.config.job import JobSpec
from boost_core.hardware import Link
from boost_core.plan.cluster import Cluster, Level
from boost_core.plan.machine import Machine
from boost_core.plan.measured import MeasuredProfile, machine_of


class LevelConfig(Config):
    """One level: what it joins, and the link of each rank while all of them send at once."""

    name: str = Field(min_length=1, max_length=63, description="Name shown to people: node, rack.")
    fan_out: int = Field(ge=1, le=1_000_000, description="Number of inner units that it joins: GPUs, nodes, racks.")
    gigabytes_per_second: float = Field(gt=0, le=1e6, description="Bandwidth of a rank in one direction.")
    microseconds: float = Field(10.0, ge=0, le=1e6, description="Latency of each step around a ring.")
    meshed: bool = Field(False, description="Whether every pair has its own wires instead of a switch.")


class NetworkConfig(Config):
    """Levels from the inside out; the innermost is a node."""

    levels: tuple[LevelConfig, ...] = Field(min_length=1, max_length=8)
    node_memory_gigabytes: float | None = Field(
        None, gt=0, le=1e6, description="Memory of each node's host; if omitted, it is unknown and not checked."
    )

    def cluster(self) -> Cluster:
        """Return the network as plans use it."""
        return Cluster(tuple(map(_level, self.levels)))

    def machine(self, spec: JobSpec, profile: MeasuredProfile | None = None) -> Machine:
        """Return the machine that a job runs on.

        Args:
            spec: The job.
            profile: Measured profile of its devices; by default the data sheets' figures.

        Raises:
            ValueError: The profile is of another precision.
        """
        machine = machine_of(spec, profile, self.cluster())
        if self.node_memory_gigabytes is None or not spec.resources.gpus_per_worker:
            return machine
        return replace(machine, node_memory_bytes=int(self.node_memory_gigabytes * 1e9))


def _level(given: LevelConfig) -> Level:
    link = Link(0.0, given.microseconds * 1e-6, given.gigabytes_per_second * 1e9, f"{given.name}, as described")
    return Level(given.name, given.fan_out, link, given.meshed)
