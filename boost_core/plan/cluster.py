"""A network as levels, and how many ranks of each group there are at each of them.

A level joins what the level inside it makes up: a node its GPUs, a rack its nodes. Ranks are numbered as
``Layout.coordinates`` has it, so a group of the innermost size takes ranks next to each other; what a group leaves of a
level's fan-out is for the next size out. The counts are a placement matrix (arXiv 2110.10548): a row for each size, a
column for each level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from boost_core.hardware import Link

Row = tuple[int, ...]  # ranks of a group at each level, the innermost first; their product is its size


@dataclass(frozen=True)
class Level:
    """One level.

    Attributes:
        name: For people: node, rack.
        fan_out: How many of the level inside it joins.
        link: What each rank has there while all of them send at once, so what the level's switches lack is in it.
        meshed: Whether every two have wires of their own, in place of a switch. The link is what one has to all others
            together; among fewer ranks the wires to those that take no part carry nothing.
    """

    name: str
    fan_out: int
    link: Link
    meshed: bool = False

    def among(self, ranks: int) -> Link:
        """What each of some of them has."""
        if not self.meshed or ranks == self.fan_out:
            return self.link
        share = (ranks - 1) / (self.fan_out - 1)
        return replace(self.link, bytes_per_second=share * self.link.bytes_per_second)


@dataclass(frozen=True)
class Cluster:
    """A network.

    Attributes:
        levels: The innermost first.
    """

    levels: tuple[Level, ...]

    @property
    def size(self) -> int:
        """Ranks that it has room for."""
        return math.prod(level.fan_out for level in self.levels)

    def rows(self, sizes: Sequence[int]) -> list[Row]:
        """A placement matrix. What does not divide among the inner levels is spread over the outermost.

        Args:
            sizes: Of the groups, the innermost first.

        Raises:
            ValueError: There are fewer places than ranks.
        """
        if (ranks := math.prod(sizes)) > self.size:
            joined = " × ".join(f"{level.fan_out} ({level.name})" for level in self.levels)
            raise ValueError(
                f"{ranks} ranks do not go into {joined}; choose smaller sizes, or describe a larger network"
            )
        room = [level.fan_out for level in self.levels]
        return [self._row(size, room) for size in sizes]

    def _row(self, size: int, room: list[int]) -> Row:
        """One size's; takes it from the room that each level has left."""
        row, left = [], size
        for index, places in enumerate(room[:-1]):
            taken = next(divisor for divisor in range(min(left, places), 0, -1) if left % divisor == 0)
            row.append(taken)
            left //= taken
            # What a group leaves that goes on outside is of no use to those that are spread further.
            room[index] = 1 if left > 1 else places // taken
        return (*row, left)

    def level_between(self, row: Row, place: int) -> int:
        """The outermost level at which a place of a group and the next one are apart, by its index.

        Args:
            row: The group's.
            place: From 0; the next one of the last is the first.
        """
        inside = [1]
        for ranks in row:
            inside.append(inside[-1] * ranks)
        following = (place + 1) % inside[-1]
        apart = [
            index for index, ranks in enumerate(row)
            if ranks > 1 and place // inside[index] % ranks != following // inside[index] % ranks
        ]  # fmt: skip
        return max(apart, default=0)
