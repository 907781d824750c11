"""Which tokens the sample with a given global index holds: a pure function, so that resuming needs one number."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from boost_core.data.corpus import Tokens

Sequences = npt.NDArray[np.int64]


class Sampler:
    """Samples are windows of ``sequence_length + 1`` tokens that overlap by one, shuffled anew each epoch.

    Sample i of the job is window ``permutation[i mod n]`` of epoch ``i div n``, whatever the number of
    workers, so the data cursor of a job is the number of samples it has consumed.

    Args:
        tokens: The training stream.
        sequence_length: Tokens a sequence.
        seed: The job's seed.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int) -> None:
        self._tokens, self._length, self._seed = tokens, sequence_length, seed
        self.windows = (len(tokens) - 1) // sequence_length
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def sequences(self, first_sample: int, count: int) -> Sequences:
        """Samples ``first_sample`` … ``first_sample + count − 1`` as ``[count, sequence_length + 1]``."""
        windows = [self._window(sample) for sample in range(first_sample, first_sample + count)]
        return _cut(self._tokens, windows, self._length)

    def _window(self, sample: int) -> int:
        epoch, place = divmod(sample, self.windows)
        if epoch != self._epoch:
            self._permutation = np.random.default_rng((self._seed, epoch)).permutation(self.windows)
            self._epoch = epoch
        return int(self._permutation[place])


def micro_batches(
    first_sample: int, global_batch_size: int, micro_batch_size: int, part: int, parts: int
) -> Iterator[int]:
    """First samples of the micro-batches that fall to one of several replicas in a step.

    Args:
        first_sample: First sample of the step's global batch.
        global_batch_size: Samples a step; a multiple of ``micro_batch_size · parts``.
        micro_batch_size: Samples a micro-batch.
        part: Which replica, from 0.
        parts: How many replicas.
    """
    share = global_batch_size // parts
    yield from range(first_sample + share * part, first_sample + share * (part + 1), micro_batch_size)


def held_out_batches(
    tokens: Tokens, sequence_length: int, sequences: int, batch_size: int, part: int, parts: int
) -> Iterator[Sequences]:
    """The part of a fixed evaluation set that falls to one of several ranks, in batches.

    The set is ``sequences`` windows spread evenly over the held-out stream, or all windows if it has fewer.

    Args:
        tokens: The held-out stream.
        sequence_length: Tokens a sequence.
        sequences: Windows in the whole set.
        batch_size: Windows a batch; the last one of a part may be smaller.
        part: Which part, from 0.
        parts: In how many the set is dealt.
    """
    available = (len(tokens) - 1) // sequence_length
    chosen = np.unique(np.linspace(0, available - 1, min(sequences, available)).astype(np.int64))[part::parts]
    for begin in range(0, len(chosen), batch_size):
        yield _cut(tokens, chosen[begin : begin + batch_size].tolist(), sequence_length)


def _cut(tokens: Tokens, windows: list[int], length: int) -> Sequences:
    return np.stack([tokens[window * length : (window + 1) * length + 1] for window in windows]).astype(np.int64)
