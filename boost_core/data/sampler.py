"""The tokens of the sample with a given global index, as a pure function, so that resuming needs only one number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from boost_core.config.data import MIXTURE_PERIOD
from boost_core.data.corpus import Corpus, TokenStream

Sequences = npt.NDArray[np.int64]


class Windows:
    """One source's windows of ``sequence_length + 1`` tokens, overlapping by one and reshuffled each epoch.

    Sample i is window ``permutation[i mod n]`` of epoch ``i div n``.

    Args:
        tokens: The source's training tokens.
        sequence_length: Tokens per sequence.
        seed: Seed of the permutations, together with the epoch's number.
    """

    def __init__(self, tokens: TokenStream, sequence_length: int, seed: Sequence[int]) -> None:
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self.count = (len(tokens) - 1) // sequence_length
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def sequence(self, sample: int) -> Sequences:
        """A sample, ``[sequence_length + 1]``."""
        epoch, place = divmod(sample, self.count)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((*self._seed, epoch)).permutation(self.count)
            self._epoch = epoch
        return _window(self._tokens, int(self._permutation[place]), self._length)


class Sampler:
    """The samples of a job, which take turns among its sources by weight.

    The order of sources repeats every 4096 samples, so each stretch of that length has every source's share to within
    1/4096. A job's data cursor is the number of samples it has consumed, whatever the number of workers.

    Args:
        corpus: The sources.
        sequence_length: Tokens per sequence.
        seed: The job's seed.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int) -> None:
        self._sources: list[Windows] = [
            Windows(stream.training, sequence_length, (seed, number) if number else (seed,))
            for number, stream in enumerate(corpus.streams)
        ]
        self._pattern = turns([stream.weight for stream in corpus.streams], MIXTURE_PERIOD)
        self._counts = np.bincount(self._pattern, minlength=len(self._sources))
        self._before = np.empty_like(self._pattern)  # for each turn, the number of earlier turns of the same source
        for source in np.unique(self._pattern):
            turns_of_source = np.flatnonzero(self._pattern == source)
            self._before[turns_of_source] = np.arange(len(turns_of_source))
        self._newest: tuple[tuple[int, int], Sequences] | None = None

    def sequences(self, first_sample: int, count: int) -> Sequences:
        """Samples ``first_sample`` … ``first_sample + count − 1`` as ``[count, sequence_length + 1]``.

        The newest batch is kept, so that a caller that has prefetched it need not wait for it to be read again.
        """
        if self._newest is None or self._newest[0] != (first_sample, count):
            batch = []
            for sample in range(first_sample, first_sample + count):
                period, place = divmod(sample, len(self._pattern))
                source = self._pattern[place]
                number = int(period * self._counts[source] + self._before[place])
                batch.append(self._sources[int(source)].sequence(number))
            self._newest = (first_sample, count), np.stack(batch)
        return self._newest[1]


def turns(weights: Sequence[float], period: int) -> npt.NDArray[np.int64]:
    """Source numbers in the order of their turns, each as often as its weight requires and spread evenly.

    Args:
        weights: A weight for each source; none less than 1/period of their sum.
        period: Total number of turns.
    """
    if len(weights) == 1:
        return np.zeros(1, np.int64)
    shares = np.array(weights) / sum(weights) * period
    counts = np.floor(shares).astype(np.int64)
    for source in np.argsort(counts - shares, kind="stable")[: period - counts.sum()]:
        counts[source] += 1
    # Turn j of n is due at (j + 1/2)/n of the period.
    due = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(weights)), counts)[np.argsort(due, kind="stable")]


def replica_share(first_sample: int, global_batch_size: int, part: int, parts: int) -> tuple[int, int]:
    """First sample and number of samples of one replica's share of a step.

    Args:
        first_sample: First sample of the step's global batch.
        global_batch_size: Samples per step; a multiple of ``parts``.
        part: Number of the replica, from 0.
        parts: Number of replicas.
    """
    share = global_batch_size // parts
    return first_sample + share * part, share


@dataclass(frozen=True)
class EvaluationSet:
    """Windows to evaluate on, the same each time.

    Attributes:
        windows: For each window, the tokens it is taken from and its number among their windows.
        sequence_length: Tokens per sequence.
    """

    windows: Sequence[tuple[TokenStream, int]]
    sequence_length: int

    @classmethod
    def of(cls, parts: Sequence[tuple[TokenStream, float]], sequence_length: int, sequences: int) -> "EvaluationSet":
        """Choose the given number of windows, or all if there are fewer.

        Args:
            parts: The tokens, each with the weight that sets its share of the windows, which are spread evenly over it.
            sequence_length: Tokens per sequence.
            sequences: Windows in the whole set.
        """
        total = sum(weight for _, weight in parts)
        shares = np.cumsum([0.0] + [weight / total for _, weight in parts])
        windows: list[tuple[TokenStream, int]] = []
        bounds = np.rint(shares * sequences).astype(int).tolist()
        for (tokens, _), (low, high) in zip(parts, pairwise(bounds), strict=True):
            available = (len(tokens) - 1) // sequence_length
            spread = np.linspace(0, available - 1, min(high - low, available))
            windows += [(tokens, window) for window in np.unique(spread.astype(np.int64)).tolist()]
        return cls(windows, sequence_length)

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text per token; ``None`` if they are unknown for some windows."""
        known = [tokens.bytes_per_token for tokens, _ in self.windows if tokens.bytes_per_token is not None]
        return sum(known) / len(known) if len(known) == len(self.windows) else None

    def batches(self, batch_size: int, part: int, parts: int) -> Iterator[Sequences]:
        """Yield one rank's part of the set, in batches.

        Args:
            batch_size: Windows per batch; the last batch of a part may be smaller.
            part: Number of the part, from 0.
            parts: Number of parts.
        """
        windows = self.windows[part::parts]
        for begin in range(0, len(windows), batch_size):
            yield np.stack([_window(*each, self.sequence_length) for each in windows[begin : begin + batch_size]])


def _window(tokens: TokenStream, window: int, length: int) -> Sequences:
    return tokens.read(window * length, (window + 1) * length + 1)
