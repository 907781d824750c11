import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from boost_core.data.corpus import unigram_entropy
from boost_core.data.sampler import Sampler, held_out_batches, micro_batches

TOKENS = np.arange(1000, dtype=np.int64) % 251


@given(seed=st.integers(0, 2**31 - 1), length=st.integers(2, 40), cuts=st.lists(st.integers(1, 9), max_size=12))
def test_any_portioning_yields_the_same_samples(seed: int, length: int, cuts: list[int]) -> None:
    whole = Sampler(TOKENS, length, seed).sequences(0, sum(cuts) or 1)
    portions, begin = [], 0
    for count in cuts or [1]:
        portions.append(Sampler(TOKENS, length, seed).sequences(begin, count))
        begin += count
    assert np.array_equal(np.concatenate(portions), whole)


GLOBAL_BATCH = 24
LAYOUTS = [(part, micro) for part in (1, 2, 3, 4, 6, 12) for micro in (1, 2, 4) if GLOBAL_BATCH % (part * micro) == 0]


@given(layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=30))
def test_resizing_neither_repeats_nor_skips_a_sample(layouts: list[tuple[int, int]]) -> None:
    consumed: list[int] = []
    for step, (replicas, size) in enumerate(layouts):
        for replica in range(replicas):
            for first in micro_batches(step * GLOBAL_BATCH, GLOBAL_BATCH, size, replica, replicas):
                consumed.extend(range(first, first + size))
    assert sorted(consumed) == list(range(len(layouts) * GLOBAL_BATCH))


@given(seed=st.integers(0, 99), length=st.integers(2, 300))
def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(seed: int, length: int) -> None:
    sampler = Sampler(TOKENS, length, seed)
    windows = sampler.windows
    assert windows == (len(TOKENS) - 1) // length
    starts = np.arange(windows) * length
    expected = {tuple(TOKENS[start : start + length + 1]) for start in starts}
    for epoch in range(2):
        seen = [tuple(row) for row in sampler.sequences(epoch * windows, windows)]
        assert len(seen) == windows
        assert set(seen) == expected
    if windows > 20:
        assert not np.array_equal(sampler.sequences(0, windows), sampler.sequences(windows, windows))


@given(parts=st.integers(1, 5), batch=st.integers(1, 7), asked=st.integers(1, 80))
def test_the_evaluation_set_is_the_same_however_it_is_dealt(parts: int, batch: int, asked: int) -> None:
    rows = [
        tuple(row)
        for part in range(parts)
        for sequences in held_out_batches(TOKENS, 20, asked, batch, part, parts)
        for row in sequences
    ]
    alone = [tuple(row) for sequences in held_out_batches(TOKENS, 20, asked, 1000, 0, 1) for row in sequences]
    assert sorted(rows) == sorted(alone)
    assert len(alone) == min(asked, 49)


def test_unigram_entropy_is_in_nats() -> None:
    assert unigram_entropy(np.array([1, 2, 3, 4], dtype=np.uint8)) == math.log(4)
    assert unigram_entropy(np.array([5, 5], dtype=np.uint8)) == 0
