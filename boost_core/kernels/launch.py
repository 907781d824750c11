"""Where an operation runs, by Triton or by its reference, and how Triton's kernels are laid out over a tensor.

Triton is not installed on every machine: those without a GPU compute with the references.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

__all__ = [
    "Halves", "Implementation", "Part", "always", "block_of", "jit", "members", "precise", "rows",
    "runs_on_triton", "tl", "triton", "warps_of",
]  # fmt: skip

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

Implementation = Literal["naive", "triton"]

_forced: Implementation | None = None
_ELEMENTS_A_WARP = 256  # eight per thread: 16 bytes of bf16 in one access


def runs_on_triton(x: torch.Tensor) -> bool:
    """Return whether ``x`` is for Triton's kernels: on a GPU, and of a type for which fp32 arithmetic is enough."""
    if _forced is not None:
        return _forced == "triton"
    return x.is_cuda and x.dtype != torch.float64


@contextmanager
def always(implementation: Implementation) -> Iterator[None]:
    """Make all operations use one implementation in this context, to compare the two."""
    global _forced
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before


def jit(function: Callable[..., Any]) -> Any:
    """Compile with ``triton.jit`` where Triton is installed."""
    return function if triton is None else triton.jit(function)


def precise(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in at least fp32, in which the references compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its last axis dense, as the kernels read it; copies only if it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def members(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the matrices ``[T, f]`` that lie one after the other in tensors ``[g, T, f]``."""
    return [member_Tf for part_gTf in parts for member_Tf in part_gTf.unbind(0)]


def block_of(columns: int) -> int:
    """Return the power of two that holds a row."""
    return int(triton.next_power_of_2(columns))


def warps_of(block: int) -> int:
    """Return the number of warps for a program that works on ``block`` elements at once."""
    return max(1, min(16, block // _ELEMENTS_A_WARP))


# The same operations on two halves of the tokens and on all of them (``recompute.run_in_turns``). The halves compute,
# without autograd, into memory for all tokens; then the operation on all of them finds its result there, and is only
# recorded for the backward pass.


@dataclass(eq=False)
class Halves:
    """What two halves of the tokens and all of them have in common.

    Attributes:
        sizes: Number of tokens of each half.
        results: Results for all tokens by the operation's number, until the operation on all of them takes them.
        factors: Right factors of products, from when the first half has computed them until the second uses them.
        exchanged: Of each half, what its exchanges sum up, in order.
        attended: Attention's output for all tokens of one layer, in a list once it is computed.
    """

    sizes: tuple[int, int]
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    factors: deque[torch.Tensor] = field(default_factory=deque)
    exchanged: tuple[deque[Any], deque[Any]] = field(default_factory=lambda: (deque(), deque()))
    attended: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False)
class Part:
    """One of two halves of the tokens, or all of them.

    Attributes:
        halves: What the three have in common.
        place: 0 for the first half, 1 for the second; ``None`` for all tokens.
        operations: How many of its operations have memory for their results.
    """

    halves: Halves
    place: int | None
    operations: int = 0

    def of(self, x_Td: torch.Tensor) -> torch.Tensor:
        """The part's rows of what has rows for all tokens."""
        return x_Td if self.place is None else torch.split(x_Td, list(self.halves.sizes))[self.place]

    def result(
        self, like: torch.Tensor, shape: Sequence[int], room: bool = False, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Return memory for the next operation's result for this part, and whether the result is there already.

        Args:
            like: Has its type and device.
            shape: Its shape, ``[…, T, c]``.
            room: Whether there is to be room beside it for one more element per token: behind it, and in front of the
                first half, so that the halves' rows are next to each other; ``[T, c]`` then.
            dtype: Its type, if it is another.
        """
        number, self.operations = self.operations, self.operations + 1
        if self.place is None:
            return self.halves.results.pop(number).detach(), True  # the graph must not refer to the halves' views
        (first, _), tokens, columns = self.halves.sizes, sum(self.halves.sizes), shape[-1]
        if self.place == 0 and room:
            begin = -(-first // 8) * 8  # products of 8-bit rows are written from whole 16 bytes on
            memory = like.new_empty(begin + tokens * columns + tokens - first)
            self.halves.results[number] = memory[begin : begin + tokens * columns].view(tokens, columns)
        elif self.place == 0:
            self.halves.results[number] = like.new_empty((*shape[:-2], tokens, columns), dtype=dtype)
        return torch.split(self.halves.results[number], list(self.halves.sizes), dim=-2)[self.place], False
