"""A network as people write it down, for plans."""

from pydantic import Field

from boost_core.config.base import Config
from boost_core.hardware import Link
from boost_core.plan.cluster import Cluster, Level


class LevelConfig(Config):
    """One level: what it joins, and what a rank has there while all of them send at once."""

    name: str = Field(min_length=1, max_length=63, description="For people: node, rack.")
    fan_out: int = Field(ge=1, le=1_000_000, description="How many of the level inside it joins: GPUs, nodes, racks.")
    gigabytes_per_second: float = Field(gt=0, le=1e6, description="In one direction.")
    microseconds: float = Field(10.0, ge=0, le=1e6, description="Of each step over a ring.")
    meshed: bool = Field(False, description="Every two have wires of their own, in place of a switch.")


class NetworkConfig(Config):
    """Levels from the inside out; the innermost is a node."""

    levels: tuple[LevelConfig, ...] = Field(min_length=1, max_length=8)

    def cluster(self) -> Cluster:
        """The same for the plan."""
        return Cluster(tuple(map(_level, self.levels)))


def _level(given: LevelConfig) -> Level:
    link = Link(0.0, given.microseconds * 1e-6, given.gigabytes_per_second * 1e9, f"{given.name}, as described")
    return Level(given.name, given.fan_out, link, given.meshed)
