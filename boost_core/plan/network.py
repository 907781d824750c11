"""A network as people write it down, for plans."""

from pydantic import Field

from boost_core.config.base import Config
from boost_core.hardware import Link
from boost_core.plan.cluster import Cluster, Level


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

    @property
    def node_memory_bytes(self) -> int | None:
        """Memory of each node's host in bytes, if given."""
        return None if self.node_memory_gigabytes is None else int(self.node_memory_gigabytes * 1e9)


def _level(given: LevelConfig) -> Level:
    link = Link(0.0, given.microseconds * 1e-6, given.gigabytes_per_second * 1e9, f"{given.name}, as described")
    return Level(given.name, given.fan_out, link, given.meshed)
