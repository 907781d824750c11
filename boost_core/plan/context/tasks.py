"""Where the attention of each chunk is computed: where its tokens are, or moved away from ranks with more work.

A task has all keys of its queries, so its output is final. Moving whole tasks at the grain of chunks is DistCA's rule
(arXiv 2510.18121) with another greedy order: from the heaviest rank, the task that moves most work for the keys that it
needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from boost_core.plan.context.placement import Placement
from boost_core.plan.context.window import Window

SLACK = 3  # percent above the mean that no rank's area may exceed after tasks have moved


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
    """Every chunk's task, computed where its tokens are, in the order of chunks."""
    return [Task(chunk, window.keys(chunk), rank) for chunk, rank in enumerate(placement)]


def moved_tasks(
    window: Window, placement: Placement, ranks: int, slack: int = SLACK, most: int | None = None
) -> Sequence[Task]:
    """The same, but some tasks of ranks with more work than others are computed elsewhere.

    Repeatedly, the heaviest rank that can hand over a task hands over the one that moves the most excess work to a rank
    that lacks it, per chunk of keys that this rank does not have yet. A task moves only once.

    Args:
        window: The tokens.
        placement: The rank of each chunk.
        ranks: Number of ranks.
        slack: Percent above the mean at which a rank may end.
        most: Tasks that a rank may hand over, and may take on; ``None`` for any number.
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
    """The task to move from the heaviest rank, and where to; ``None`` if each would make another as heavy."""
    mean = window.area // len(load)
    best, worth = None, 0.0
    for chunk in (chunk for chunk, rank in enumerate(at) if rank == heaviest == placement[chunk]):
        area, need = window.areas[chunk], window.needs[chunk]
        for rank in takers:
            if load[rank] + area >= load[heaviest]:
                continue
            moved = min(area, load[heaviest] - mean, mean - load[rank])
            found = moved / ((need & ~here[rank]).bit_count() + 1)  # a correctly rounded quotient: the same everywhere
            if found > worth:
                best, worth = (chunk, rank), found
    return best


def areas(window: Window, tasks: Sequence[Task], ranks: int) -> Sequence[int]:
    """Pairs that each rank computes."""
    found = [0] * ranks
    for task in tasks:
        found[task.rank] += window.areas[task.queries]
    return found
