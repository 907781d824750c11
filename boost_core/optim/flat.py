"""Tensors one after the other in one piece of memory, so that one kernel or one collective serves them all."""

from collections.abc import Collection, Mapping

import torch

BLOCK = 64  # elements; matrix products and 16-byte accesses want each tensor to begin at a round address


class Flat:
    """Zeros of given shapes in one flat tensor; what pads them stays zero.

    Args:
        shapes: Shape of each tensor by name, in the order in which they are to lie.
        dtype: Their type.
        device: Where they live.

    Attributes:
        flat: All of them and the padding, ``[n]``.
        views: Each of them, a view of ``flat``.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        ends, end = {}, 0
        for name, shape in shapes.items():
            end += -(-shape.numel() // BLOCK) * BLOCK
            ends[name] = end
        self._ends = ends
        self.flat = torch.zeros(end, dtype=dtype, device=device)
        begins = [0, *ends.values()]
        self.views = {
            name: self.flat[begin : begin + shape.numel()].view(shape)
            for (name, shape), begin in zip(shapes.items(), begins, strict=False)
        }

    def up_to(self, count: int) -> int:
        """Where the first ``count`` tensors end, padding included."""
        return 0 if count == 0 else list(self._ends.values())[count - 1]

    def blocks_of(self, names: Collection[str]) -> torch.Tensor:
        """Which blocks of ``BLOCK`` elements belong to the tensors of these names, ``[n / BLOCK]``."""
        chosen = torch.zeros(len(self.flat) // BLOCK, dtype=torch.bool)
        begin = 0
        for name, end in self._ends.items():
            chosen[begin // BLOCK : end // BLOCK] = name in names
            begin = end
        return chosen.to(self.flat.device)
