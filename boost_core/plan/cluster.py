"""A network as levels, and the number of ranks of each group at each of them.

A level joins units of the level inside it: a node its GPUs, a rack its nodes. Ranks are numbered as in
``Layout.coordinates``, so a group of the innermost size takes adjacent ranks; what a group leaves of a level's fan-out
goes to the next size out. The counts are a placement matrix (arXiv 2110.10548): a row for each size, a column for each
level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from boost_core.hardware import Link

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
    """

    name: str
    fan_out: int
    link: Link
    meshed: bool = False

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
            raise ValueError(
                f"{ranks} ranks do not fit into {joined}; choose smaller sizes, or describe a larger network"
            )
        room = [level.fan_out for level in self.levels]
        return [self._row(size, room) for size in sizes]

    def _row(self, size: int, room: list[int]) -> Row:
        """Return one size's row and take its ranks from the room left at each level."""
        row, left = [], size
        for index, places in enumerate(room[:-1]):
            taken = next(divisor for divisor in range(min(left, places), 0, -1) if left % divisor == 0)
            row.append(taken)
            left //= taken
            # What is left by a group that continues at outer levels is of no use to groups that are spread further.
            room[index] = 1 if left > 1 else places // taken
        return (*row, left)

    def level_between(self, row: Row, place: int) -> int:
        """Return the index of the outermost level that separates a place of a group from the next one.

        Args:
            row: The group's row.
            place: Place within the group, from 0; the last is followed by the first.
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
