import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from boost_core.config.training import MIXTURE_PERIOD
from boost_core.data.corpus import (
    Corpus,
    EvaluationSet,
    Sampler,
    Stream,
    TokenStream,
    replica_share,
    turns,
    unigram_entropy,
)

TOKENS = np.arange(1000, dtype=np.int64) % 251
GLOBAL_BATCH = 24


def corpus(*weights: float) -> Corpus:
    """Sources that hold no token of each other's."""
    streams = []
    for number, weight in enumerate(weights):
        tokens = TokenStream(np.array_split(TOKENS[: 1000 - 100 * number] + 1000 * number, 3))
        streams.append(Stream(tokens, tokens, weight))
    return Corpus(tuple(streams), end_of_document=0)


@given(
    seed=st.integers(0, 2**31 - 1), length=st.integers(2, 40), cuts=st.lists(st.integers(1, 9), max_size=12),
    weights=st.lists(st.floats(0.1, 1), min_size=1, max_size=3),
)  # fmt: skip
def test_any_portioning_yields_the_same_samples(seed: int, length: int, cuts: list[int], weights: list[float]) -> None:
    whole = Sampler(corpus(*weights), length, seed).sequences(0, sum(cuts) or 1)
    portions, begin = [], 0
    for count in cuts or [1]:
        portions.append(Sampler(corpus(*weights), length, seed).sequences(begin, count))
        begin += count
    assert np.array_equal(np.concatenate(portions), whole)


@given(replicas=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=1, max_size=30))
def test_resizing_neither_repeats_nor_skips_a_sample(replicas: list[int]) -> None:
    consumed: list[int] = []
    for step, parts in enumerate(replicas):
        for part in range(parts):
            first, count = replica_share(step * GLOBAL_BATCH, GLOBAL_BATCH, part, parts)
            consumed.extend(range(first, first + count))
    assert sorted(consumed) == list(range(len(replicas) * GLOBAL_BATCH))


@pytest.mark.full
@given(replicas=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=16, max_size=16))
def test_resizing_through_two_epochs_of_a_small_corpus(replicas: list[int]) -> None:
    """The consumed sequences are those of the deterministic order, each of two epochs having every window once."""
    sampler, consumed = Sampler(corpus(1.0), 20, 3), []
    for step, parts in enumerate(replicas):
        for part in range(parts):
            consumed += [tuple(row) for row in sampler.sequences(*replica_share(step * 12, 12, part, parts))]
    expected = [tuple(row) for row in Sampler(corpus(1.0), 20, 3).sequences(0, 16 * 12)]
    assert sorted(consumed) == sorted(expected)
    windows = (len(TOKENS) - 1) // 20
    assert len(set(expected[:windows])) == len(set(expected[windows : 2 * windows])) == windows


@given(seed=st.integers(0, 99), length=st.integers(2, 300))
def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(seed: int, length: int) -> None:
    sampler = Sampler(corpus(1.0), length, seed)
    windows = (len(TOKENS) - 1) // length
    starts = np.arange(windows) * length
    expected = {tuple(TOKENS[start : start + length + 1]) for start in starts}
    for epoch in range(2):
        seen = [tuple(row) for row in sampler.sequences(epoch * windows, windows)]
        assert len(seen) == windows
        assert set(seen) == expected
    if windows > 20:
        assert not np.array_equal(sampler.sequences(0, windows), sampler.sequences(windows, windows))


@pytest.mark.full
@given(weights=st.lists(st.floats(0.01, 1), min_size=2, max_size=5))
def test_each_source_has_its_share_of_every_stretch(weights: list[float]) -> None:
    pattern = turns(weights, MIXTURE_PERIOD)
    assert len(pattern) == MIXTURE_PERIOD
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        had = np.cumsum(pattern == source)
        assert abs(had[-1] - share * MIXTURE_PERIOD) < 1
        # Nowhere ahead or behind by more than a turn for each of the sources.
        assert np.abs(had - share * np.arange(1, MIXTURE_PERIOD + 1)).max() < len(weights) + 1


def test_a_source_goes_through_all_its_windows_before_any_comes_again() -> None:
    rows = Sampler(corpus(3.0, 1.0), 20, 5).sequences(0, 200)
    second = [tuple(row) for row in rows if row[0] >= 1000]
    assert len(second) == 50
    windows = (900 - 1) // 20
    assert len(set(second[:windows])) == windows


def evaluation_set(asked: int, *weights: float) -> EvaluationSet:
    return EvaluationSet.of([(stream.validation, stream.weight) for stream in corpus(*weights).streams], 20, asked)


@given(parts=st.integers(1, 5), batch=st.integers(1, 7), asked=st.integers(1, 80))
def test_the_evaluation_set_is_the_same_however_it_is_dealt(parts: int, batch: int, asked: int) -> None:
    whole = evaluation_set(asked, 1.0)
    rows = [tuple(row) for part in range(parts) for few in whole.batches(batch, part, parts) for row in few]
    alone = [tuple(row) for batch in whole.batches(1000, 0, 1) for row in batch]
    assert sorted(rows) == sorted(alone)
    assert len(alone) == min(asked, 49)


def test_the_evaluation_set_has_each_source_by_its_weight() -> None:
    rows = np.concatenate(list(evaluation_set(40, 1.0, 3.0).batches(7, 0, 1)))
    assert (rows[:, 0] >= 1000).sum() == 30
    assert (rows[:, 0] < 1000).sum() == 10


def test_bytes_of_tokens_are_weighed_as_windows_are() -> None:
    of_two, of_four, unknown = (TokenStream([TOKENS], text and text * len(TOKENS)) for text in (2, 4, None))
    assert EvaluationSet.of([(of_two, 3.0), (of_four, 1.0)], 20, 40).bytes_per_token == pytest.approx(2.5)
    assert EvaluationSet.of([(of_two, 3.0), (unknown, 1.0)], 20, 40).bytes_per_token is None


def test_unigram_entropy_is_in_nats() -> None:
    def of(*tokens: int) -> Corpus:
        stream = TokenStream([np.array(tokens[:1], np.uint8), np.array(tokens[1:], np.uint8)])
        return Corpus((Stream(stream, stream, 1.0),), end_of_document=0)

    assert unigram_entropy(of(1, 2, 3, 4)) == pytest.approx(math.log(4))
    assert unigram_entropy(of(5, 5)) == 0


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
def test_a_stream_reads_across_its_pieces(sizes: list[int], data: st.DataObject) -> None:
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    stream = TokenStream(np.split(tokens, np.cumsum(sizes)[:-1]))
    begin = data.draw(st.integers(0, len(tokens) - 1))
    end = data.draw(st.integers(begin + 1, len(tokens)))
    assert len(stream) == len(tokens)
    assert stream.read(begin, end).tolist() == list(range(begin, end))
    assert stream.counts().tolist() == [1] * len(tokens)
    with patch("boost_core.data.corpus._MOST_COUNTED", most := data.draw(st.integers(1, 20))):
        assert stream.counts().tolist() == [1] * min(most, len(tokens))
