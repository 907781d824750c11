"""A step's inputs from the host, at addresses that stay the same from step to step.

Shape suffixes: b sequences, t = s + 1 tokens of each.
"""

import torch

from boost_core.data.sampler import Sequences


class StepInputs:
    """A step's sequences, and what this rank tells all others.

    The host writes the next step's inputs only after it has read this step's values, and so never overwrites what is
    still being copied.

    Args:
        sequences: Maximum number of sequences per step on this replica.
        length: Tokens per sequence.
        device: Where they are read.

    Attributes:
        sequences: Those written last, on the host; there may be room for more.
        token_bt: Each sequence with the token that follows it.
        loss_limit: The loss above which the step has diverged, one float64 element.
        notices: What this rank tells all others, one float64 element each, 0 or 1: to halt, to store before that, to
            postpone a copy of the state, and that its next batch has more documents than a captured step has room for.
    """

    def __init__(self, sequences: int, length: int, device: torch.device) -> None:
        self._on_host = [
            torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
            for shape, dtype in (((sequences, length + 1), torch.int64), ((5,), torch.float64))
        ]
        self._written = [tensor.numpy() for tensor in self._on_host]
        self.sequences: Sequences = self._written[0]
        # On CPU these are the same tensors.
        self._read = [tensor.to(device) for tensor in self._on_host]
        self.token_bt, words = self._read
        self.loss_limit, *self.notices = words.unbind()

    def write(self, sequences: Sequences, loss_limit: float, notices: tuple[bool, bool, bool, bool]) -> None:
        """Write the next step's inputs, ``[b, t]`` tokens first; b may be smaller than the room."""
        tokens, words = self._written
        tokens[: len(sequences)] = sequences
        words[:] = loss_limit, *notices
        for there, here in zip(self._read, self._on_host, strict=True):
            if there is not here:
                there.copy_(here, non_blocking=True)
