"""What ranks send each other, and when: in rounds, in each of which a rank sends and receives at most once.

The transfers are the edges of a multigraph from senders to receivers. By König's theorem it splits into as many
matchings as the busiest rank sends or receives, and no fewer; Kempe's chains find them. Consecutive rounds form a
stage, in which a rank thus sends and receives at most as many chunks as the stage has rounds: one uneven all-to-all, in
flight while the attention of the previous stage is computed.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from boost_core.plan.context.placement import Placement
from boost_core.plan.context.tasks import Task


@dataclass(frozen=True, order=True)
class Transfer:
    """One chunk's keys and values, or queries, from the rank that holds its tokens to one that computes with them.

    Attributes:
        chunk: The chunk.
        sender: The rank that holds it.
        receiver: The rank that receives it.
    """

    chunk: int
    sender: int
    receiver: int


def key_transfers(tasks: Sequence[Task], placement: Placement) -> Sequence[Transfer]:
    """The keys that each rank computes with and does not have, each once, in the order of chunks."""
    wanted = {(chunk, task.rank) for task in tasks for chunk in task.keys}
    return [Transfer(chunk, placement[chunk], rank) for chunk, rank in sorted(wanted) if placement[chunk] != rank]


def query_transfers(tasks: Sequence[Task], placement: Placement) -> Sequence[Transfer]:
    """The queries of tasks that are not computed where their tokens are; their outputs take the same path back."""
    moved = [task for task in tasks if placement[task.queries] != task.rank]
    return [Transfer(task.queries, placement[task.queries], task.rank) for task in moved]


def busiest(transfers: Sequence[Transfer]) -> int:
    """The most that a rank sends or receives."""
    sent = Counter(transfer.sender for transfer in transfers)
    received = Counter(transfer.receiver for transfer in transfers)
    return max((*sent.values(), *received.values()), default=0)


def rounds(transfers: Sequence[Transfer]) -> Sequence[Sequence[Transfer]]:
    """The transfers in ``busiest(transfers)`` rounds; in none does a rank send twice or receive twice."""
    count = busiest(transfers)
    # Senders have their own numbers, receivers -1 minus theirs: each one's transfer by round, and its rounds as bits.
    at: dict[int, dict[int, Transfer]] = defaultdict(dict)
    taken: dict[int, int] = defaultdict(int)
    for transfer in transfers:
        sender, receiver = _ends(transfer)
        number = _lowest_free(taken[sender] | taken[receiver])
        if number >= count:
            number, other = _lowest_free(taken[sender]), _lowest_free(taken[receiver])
            _swap_chain(at, taken, receiver, number, other)
        for end in (sender, receiver):
            at[end][number] = transfer
            taken[end] |= 1 << number
    found: list[list[Transfer]] = [[] for _ in range(count)]
    for end, edges in at.items():
        if end >= 0:
            for number, transfer in edges.items():
                found[number].append(transfer)
    return [sorted(each) for each in found]


def _ends(transfer: Transfer) -> tuple[int, int]:
    return transfer.sender, -1 - transfer.receiver


def _lowest_free(taken: int) -> int:
    return (~taken & (taken + 1)).bit_length() - 1


def _swap_chain(at: dict[int, dict[int, Transfer]], taken: dict[int, int], end: int, one: int, other: int) -> None:
    """Swap two rounds along the chain of transfers that leaves a node in the first, which is then free there.

    The chain cannot reach the node at which the first round is already free: the graph is bipartite, and the chain
    reaches the other side only by the first round.
    """
    chain, leaves_by = [], one
    while (transfer := at[end].get(leaves_by)) is not None:
        chain.append((transfer, leaves_by))
        sender, receiver = _ends(transfer)
        end, leaves_by = receiver if end == sender else sender, one + other - leaves_by
    ends = {end for transfer, _ in chain for end in _ends(transfer)}
    for end in ends:
        at[end].pop(one, None)
        at[end].pop(other, None)
        taken[end] &= ~(1 << one | 1 << other)
    for transfer, number in chain:
        for end in _ends(transfer):
            at[end][one + other - number] = transfer
            taken[end] |= 1 << (one + other - number)


def stages(transfers: Sequence[Transfer], count: int) -> Sequence[Sequence[Transfer]]:
    """The transfers divided into stages of consecutive rounds; the last stages are empty if there are fewer rounds."""
    found, size = rounds(transfers), -(-busiest(transfers) // count)
    return [
        sorted(transfer for each in found[stage * size : (stage + 1) * size] for transfer in each)
        for stage in range(count)
    ]
