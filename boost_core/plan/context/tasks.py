"""Where the attention of each chunk is computed: where its tokens are, or moved from ranks that have more than others.

A task has all keys of its queries, so its output is final. Moving whole tasks at the grain of chunks is DistCA's rule
(arXiv 2510.18121) with another greedy order: from the heaviest rank, what takes away most for the keys that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from boost_core.plan.context.placement import Placement
from boost_core.plan.context.window import Window

SLACK = 3  # percent above the mean that no rank's area may be, after tasks have moved


@dataclass(frozen=True)
class Task:
    """Attention of one chunk's queries.

    Attributes:
        queries: The chunk.
        keys: The chunks that they see.
        rank: Where it is computed.
    """

    queries: int
    keys: range
    rank: int


def own_tasks(window: Window, placement: Placement) -> Sequence[Task]:
    """Every chunk's task where its tokens are, in the order of chunks."""
    return [Task(chunk, window.keys(chunk), rank) for chunk, rank in enumerate(placement)]


def moved_tasks(
    window: Window, placement: Placement, ranks: int, slack: int = SLACK, most: int | None = None
) -> Sequence[Task]:
    """The same, but ranks that have more than the others have some of theirs computed elsewhere.

    Repeatedly, of the heaviest rank that can give something, the task goes that takes most of what the one has above
    the mean and the other lacks, for each chunk of keys that is not there yet. A task moves once.

    Args:
        window: The tokens.
        placement: The rank of each chunk.
        ranks: How many there are.
        slack: Percent of the mean above it that a rank may end at.
        most: Tasks that a rank may give, and that it may be given; ``None`` for any number.
    """
    at = list(placement)
    load, here = [0] * ranks, [0] * ranks  # here: chunks whose keys a rank has or is sent
    for chunk, rank in enumerate(placement):
        load[rank] += window.areas[chunk]
        here[rank] |= window.needs[chunk]
    most = window.chunks if most is None else most
    giving, gave, given = set(range(ranks)), [0] * ranks, [0] * ranks
    while giving:
        heaviest = max(giving, key=lambda rank: (load[rank], -rank))
        if 100 * ranks * load[heaviest] <= (100 + slack) * window.area:
            break
        takers = [rank for rank in range(ranks) if given[rank] < most and ranks * load[rank] < window.area]
        move = _best_move(window, placement, at, load, here, heaviest, takers) if gave[heaviest] < most else None
        if move is None:
            giving.discard(heaviest)
            continue
        chunk, rank = move
        at[chunk] = rank
        gave[heaviest] += 1
        given[rank] += 1
        load[heaviest] -= window.areas[chunk]
        load[rank] += window.areas[chunk]
        here[rank] |= window.needs[chunk]
    return [Task(chunk, window.keys(chunk), rank) for chunk, rank in enumerate(at)]


def _best_move(
    window: Window, placement: Placement, at: Sequence[int], load: Sequence[int], here: Sequence[int], heaviest: int,
    takers: Sequence[int],
) -> tuple[int, int] | None:  # fmt: skip
    """The task that goes from the heaviest rank, and where to; ``None`` if each would make another as heavy."""
    mean = window.area // len(load)
    best, worth = None, 0.0
    for chunk in (chunk for chunk, rank in enumerate(at) if rank == heaviest == placement[chunk]):
        area, need = window.areas[chunk], window.needs[chunk]
        for rank in takers:
            if load[rank] + area >= load[heaviest]:
                continue
            moved = min(area, load[heaviest] - mean, mean - load[rank])
            found = moved / ((need & ~here[rank]).bit_count() + 1)  # one correctly rounded quotient: alike everywhere
            if found > worth:
                best, worth = (chunk, rank), found
    return best


def areas(window: Window, tasks: Sequence[Task], ranks: int) -> Sequence[int]:
    """Pairs that each rank computes."""
    found = [0] * ranks
    for task in tasks:
        found[task.rank] += window.areas[task.queries]
    return found
