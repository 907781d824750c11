"""Micro-batches that a pipeline rank has in flight, by the schedules of ``torch.distributed.pipelining``.

The schedule's warm-up forward passes come first: under 1f1b one per stage from this one to the last; with v = 2 stages
per rank, (v − 1)·p and two more (one under zero_bubble) for each rank after this one. Then forward and backward passes
alternate. Under zero_bubble the weight gradients of rank r's first r backward passes are deferred, and from then on
always those of r passes (arXiv 2104.04473, 2401.10241).
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from boost_core.config.parallelism import ParallelismConfig

_ROUNDS = 4  # of p micro-batches; by then the pattern repeats

# Micro-batches kept by a rank's first and second stage, and how many of each still owe their weight gradients.
InHand = tuple[tuple[int, int], tuple[int, int]]


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
    late = parallelism.pipeline_schedule == "zero_bubble"
    return _of_two_stages(size, rank, min(micro_batches, _ROUNDS * size), late)


@lru_cache(maxsize=4096)
def _of_two_stages(size: int, rank: int, micro_batches: int, late: bool) -> frozenset[InHand]:
    passes = 2 * micro_batches
    warm_up = min(size + (1 if late else 2) * (size - 1 - rank), passes)
    forward = [(step // size) % 2 for step in range(passes)]
    backward = [1 - stage for stage in forward]
    changes = _changes(forward, backward, warm_up, rank if late else None)
    return frozenset(map(_counts, _corners(list(accumulate(changes, initial=0)))))


# While walking through a step, four counts are digits of one number: kept by either stage, owed by either stage.
_DIGIT_BITS = 24
_KEPT = (1, 1 << _DIGIT_BITS)
_OWED = (1 << 2 * _DIGIT_BITS, 1 << 3 * _DIGIT_BITS)


def _changes(forward: Sequence[int], backward: Sequence[int], warm_up: int, delay: int | None) -> list[int]:
    changes, paid = [], 0
    for step in range(len(forward) + warm_up):
        if step < len(forward):
            changes.append(_KEPT[forward[step]])
        if step < warm_up:
            continue
        done = step - warm_up
        changes.append((0 if delay is None else _OWED[backward[done]]) - _KEPT[backward[done]])
        if delay is not None and done >= delay:
            changes.append(-_OWED[backward[paid]])
            paid += 1
    return changes


def _corners(moments: Sequence[int]) -> set[int]:
    """All moments except those midway between two others: what grows with the counts never peaks there alone."""
    between = {
        moment
        for stride in (1, 2, 3)  # forward, backward and weight gradients take turns
        for before, moment, after in zip(moments, moments[stride:], moments[2 * stride :], strict=False)
        if before + after == 2 * moment and before != moment
    }
    return set(moments) - between


def _counts(moment: int) -> InHand:
    digits = [moment >> number * _DIGIT_BITS & (1 << _DIGIT_BITS) - 1 for number in range(4)]
    return (digits[0], digits[1]), (digits[2], digits[3])
