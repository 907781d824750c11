"""Simulates a pipeline step pass by pass, in the order of ``torch.distributed.pipelining``'s schedules.

``passes`` gives that order: what each pipeline rank computes in sequence. ``play`` returns when each rank finishes.
There are three kinds of passes: forward; backward, whole or for inputs only; and, under ``zero_bubble``, weight
gradients.

Transfers between stages cost what torch's schedules make them cost. Under 1f1b a rank receives nothing while it
computes: it waits for its sends and receives before it continues, except for sends while the pipeline fills and drains,
which overlap. A transfer begins when both ends are ready. The schedules with two stages per rank receive ahead of their
computation and send behind it, so they only wait for what arrives late; transfers between two ranks in the same
direction are sequential.

Steps of many micro-batches are periodic: after 32 rounds of p micro-batches, each further round is assumed to take as
long as the one before. ``in_hand`` counts the micro-batches that a rank has in flight, for ``memory``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from boost_core.config.parallelism import ParallelismConfig

FORWARD, BACKWARD, WEIGHTS = range(3)
_ROUNDS = 32


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one stage for a micro-batch.

    Attributes:
        forward: Forward pass.
        backward: Backward pass without weight gradients.
        weights: Weight gradients.
        send: From its output to the next stage's input; the gradient takes as long on its way back. 0 for the last.
    """

    forward: float
    backward: float
    weights: float
    send: float


Stages = Sequence[Sequence[StageSeconds]]  # of each pipeline rank, in order


class Pass(NamedTuple):
    """One pass of a rank.

    Attributes:
        kind: ``FORWARD``, ``BACKWARD`` or ``WEIGHTS``.
        chunk: Index among the rank's stages, from 0.
        micro_batch: Index of the micro-batch, from 0.
    """

    kind: int
    chunk: int
    micro_batch: int


@lru_cache(1024)
def passes(schedule: str, size: int, rank: int, micro_batches: int) -> Sequence[Pass]:
    """Return all passes of a pipeline rank in order.

    Args:
        schedule: ``1f1b``, ``interleaved_1f1b`` or ``zero_bubble``.
        size: Number of pipeline ranks.
        rank: The rank.
        micro_batches: Micro-batches of a step; a multiple of ``size`` unless the schedule is 1f1b.
    """
    listed: list[Pass] = []
    if schedule == "1f1b":
        ahead = min(micro_batches, size - rank)
        for number in range(micro_batches + ahead):
            if number < micro_batches:
                listed.append(Pass(FORWARD, 0, number))
            # The first backward pass follows the last of the passes that fill the pipeline.
            if number >= ahead - 1 and number - ahead + 1 < micro_batches:
                listed.append(Pass(BACKWARD, 0, number - ahead + 1))
        return tuple(listed)

    def at(kind: int, number: int) -> Pass:
        place, turn = number % size, number // size
        return Pass(kind, turn % 2 if kind == FORWARD else 1 - turn % 2, turn // 2 * size + place)

    late, every = schedule == "zero_bubble", 2 * micro_batches
    ahead = min(size + (1 if late else 2) * (size - 1 - rank), every)
    for number in range(every + ahead):
        if number < every:
            listed.append(at(FORWARD, number))
        if (done := number - ahead) >= 0:
            listed.append(at(BACKWARD, done))
            if late and done >= rank:
                listed.append(at(WEIGHTS, done - rank))
    if late:
        listed += (at(WEIGHTS, number) for number in range(max(0, every - rank), every))
    return tuple(listed)


def play(stages: Stages, schedule: str, micro_batches: int) -> list[float]:
    """Return when each rank has computed and sent everything.

    Args:
        stages: Seconds of each rank's stages.
        schedule: As in ``passes``.
        micro_batches: As in ``passes``.
    """
    size = len(stages)
    if size == 1:
        (alone,) = stages[0]
        return [micro_batches * (alone.forward + (alone.backward + alone.weights))]
    fewer = _ROUNDS * size + micro_batches % size
    if micro_batches > fewer + size:
        rounds = (micro_batches - fewer) // size
        first, second = (play(stages, schedule, number) for number in (fewer, fewer + size))
        return [before + (after - before) * rounds for before, after in zip(first, second, strict=True)]
    if schedule == "1f1b":
        return _play_one_stage([each for (each,) in stages], micro_batches)
    return _play_two_stages(stages, schedule, micro_batches)


def _play_one_stage(stages: Sequence[StageSeconds], micro_batches: int) -> list[float]:
    """Simulate 1f1b, whose ranks wait for each transfer.

    ``free`` is when a rank turns to the transfers after its last pass. It then posts the transfer of that pass's output
    together with that of the next pass's input; but while the pipeline fills and drains, it waits for the former only
    after the next pass. ``before`` is when it was free before its last forward pass while filling, later before its
    last backward pass.
    """
    size = len(stages)
    forward, sends = [each.forward for each in stages], [each.send for each in stages]
    backward = [each.backward + each.weights for each in stages]
    free, before = [0.0] * size, [0.0] * size
    for turn in range(size):  # the forward passes before each rank's first backward pass
        for rank in range(turn, -1, -1):
            if turn - rank < micro_batches:
                own = free[rank]
                ended = (max(free[rank - 1], own) + sends[rank - 1] if rank else own) + forward[rank]
                sent = max(own, before[rank + 1]) + sends[rank] if rank < turn else 0.0
                before[rank], free[rank] = own, max(ended, sent)
    for turn in range(micro_batches):  # the backward pass of each rank, the last first, and the forward pass after it
        for rank in range(size - 1, -1, -1):
            own = free[rank]
            begun = max(own, free[rank + 1]) + sends[rank] if rank + 1 < size else own
            ended = begun + backward[rank]
            if turn <= micro_batches - size + rank:
                if rank + 1 < size:
                    free[rank + 1] = begun + forward[rank + 1]  # the same exchange was of its input
            elif turn and rank:
                ended = max(ended, max(own, before[rank - 1]) + sends[rank - 1])
            before[rank], free[rank] = own, ended
        if turn < micro_batches - size:
            free[0] += forward[0]
    return [
        max(free[rank], max(free[rank], before[rank - 1]) + sends[rank - 1] if rank else 0.0) for rank in range(size)
    ]


def _play_two_stages(stages: Stages, schedule: str, micro_batches: int) -> list[float]:
    """Simulate schedules with two stages per rank, which receive ahead and send behind."""
    size = len(stages)
    last = 2 * size - 1
    whole = schedule != "zero_bubble"
    seconds = [
        [(each.forward, each.backward + each.weights if whole else each.backward, each.weights) for each in own]
        for own in stages
    ]
    sends = [stages[stage % size][stage // size].send for stage in range(2 * size)]
    arrived: tuple[list[list[float | None]], ...] = tuple(
        [[0.0 if stage == end else None] * micro_batches for stage in range(2 * size)] for end in (0, -1)
    )
    lists = [passes(schedule, size, rank, micro_batches) for rank in range(size)]
    time, following = [0.0] * size, [0] * size
    busy = [[0.0] * size for _ in range(2)]  # until when a rank's link onward, or back, is
    waiting = list(range(size))
    while waiting:
        for rank in waiting:
            now, own, listed = time[rank], seconds[rank], lists[rank]
            number = following[rank]
            while number < len(listed):
                kind, chunk, micro_batch = listed[number]
                if kind == WEIGHTS:
                    now += own[chunk][WEIGHTS]
                    number += 1
                    continue
                stage = chunk * size + rank
                ready = arrived[kind][stage][micro_batch]
                if ready is None:
                    break
                now = (ready if ready > now else now) + own[chunk][kind]
                if kind == FORWARD and stage < last:
                    begun = max(now, busy[kind][rank])
                    arrived[kind][stage + 1][micro_batch] = busy[kind][rank] = begun + sends[stage]
                elif kind == FORWARD:
                    arrived[BACKWARD][stage][micro_batch] = now
                elif stage:
                    begun = max(now, busy[kind][rank])
                    arrived[kind][stage - 1][micro_batch] = busy[kind][rank] = begun + sends[stage - 1]
                number += 1
            time[rank], following[rank] = now, number
        waiting = [rank for rank in waiting if following[rank] < len(lists[rank])]
    return [max(now, *(link[rank] for link in busy)) for rank, now in enumerate(time)]


def at_least(stages: Stages, schedule: str, micro_batches: int) -> list[float]:
    """Return a lower bound on when each rank finishes: the time to its first pass, its own passes, and what follows.

    Args:
        stages: As in ``play``.
        schedule: As in ``play``.
        micro_batches: As in ``play``.
    """
    waits, late = schedule == "1f1b", schedule == "zero_bubble"
    before, ready = 0.0, []
    for own in stages:
        ready.append(before)
        before += own[0].forward + own[0].send
    ended, after = [0.0] * len(stages), 0.0
    for rank in range(len(stages) - 1, -1, -1):
        own = stages[rank]
        transfers = (stages[rank - 1][0].send if rank else 0.0) + own[0].send if waits else 0.0
        inputs = sum(each.forward + each.backward for each in own) + transfers
        weights = sum(each.weights for each in own)
        first = own[0]
        back = after + first.send + (first.backward if late else first.backward + first.weights)
        begins = ready[rank] - (stages[rank - 1][0].send if waits and rank else 0.0)  # with its first transfer
        whole = begins + micro_batches * (inputs + weights)
        after = max(begins + micro_batches * inputs if late else whole, back)
        ended[rank] = max(whole, after + (first.weights if late else 0.0))
    return ended


# Micro-batches that a pipeline rank has in flight, by the schedules of ``torch.distributed.pipelining``.
#
# The schedule's warm-up forward passes come first: under 1f1b one per stage from this one to the last; with v = 2
# stages per rank, (v − 1)·p and two more (one under zero_bubble) for each rank after this one. Then forward and
# backward passes alternate. Under zero_bubble the weight gradients of rank r's first r backward passes are deferred,
# and from then on always those of r passes (arXiv 2104.04473, 2401.10241).

_IN_HAND_ROUNDS = 4  # of p micro-batches; by then the pattern repeats

# Micro-batches kept by a rank's first and second stage, and how many of each still owe their weight gradients.
InHand = tuple[tuple[int, int], tuple[int, int]]

# While walking through a step, four counts are digits of one number: kept by either stage, owed by either stage.
_DIGIT_BITS = 24
_KEPT = (1, 1 << _DIGIT_BITS)
_OWED = (1 << 2 * _DIGIT_BITS, 1 << 3 * _DIGIT_BITS)


def in_hand(parallelism: ParallelismConfig, rank: int, micro_batches: int) -> frozenset[InHand]:
    """Return a rank's in-flight counts at the moments of a step; moments midway between two others are left out.

    Args:
        parallelism: The pipeline.
        rank: The pipeline rank.
        micro_batches: Micro-batches of a step.
    """
    size = parallelism.pipeline_parallel_size
    if parallelism.pipeline_schedule == "1f1b":
        return frozenset({((min(micro_batches, size - rank), 0), (0, 0))})
    return _of_two_stages(parallelism.pipeline_schedule, size, rank, min(micro_batches, _IN_HAND_ROUNDS * size))


@lru_cache(maxsize=4096)
def _of_two_stages(schedule: str, size: int, rank: int, micro_batches: int) -> frozenset[InHand]:
    moment, moments = 0, [0]
    for kind, stage, _ in passes(schedule, size, rank, micro_batches):
        if kind == FORWARD:
            moment += _KEPT[stage]
        elif kind == BACKWARD:
            moment += (_OWED[stage] if schedule == "zero_bubble" else 0) - _KEPT[stage]
        else:
            moment -= _OWED[stage]
        moments.append(moment)
    # What grows with the counts never peaks midway between two other moments alone.
    between = {
        moment
        for stride in (1, 2, 3)  # forward, backward and weight gradients take turns
        for before, moment, after in zip(moments, moments[stride:], moments[2 * stride :], strict=False)
        if before + after == 2 * moment and before != moment
    }
    in_hand = set()
    for moment in set(moments) - between:
        digits = [moment >> number * _DIGIT_BITS & (1 << _DIGIT_BITS) - 1 for number in range(4)]
        in_hand.add(((digits[0], digits[1]), (digits[2], digits[3])))
    return frozenset(in_hand)
