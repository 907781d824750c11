"""Tensors one after the other in one block of memory, so that one kernel or one collective serves them all."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

BLOCK = 64  # elements; matrix products and 16-byte accesses need each tensor to begin at an aligned address

Offsets = tuple[int, ...]


@dataclass(frozen=True)
class FlatSlice:
    """A box of one tensor whose elements are contiguous.

    Attributes:
        name: The tensor's name.
        offsets: Where it begins in the tensor.
        sizes: Its shape.
        begin: Where it begins in the flat tensor.
    """

    name: str
    offsets: Offsets
    sizes: Offsets
    begin: int


class FlatLayout:
    """Positions of tensors of given shapes in one flat tensor.

    Args:
        shapes: Shape of each tensor by name, in memory order.
        parts: Number of equal parts that the length divides into, each beginning at an aligned address.

    Attributes:
        length: Elements of the flat tensor; the rest is padding, and stays zero.
        shapes: The shapes.
        ranges: Where each tensor begins and ends, by name.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], parts: int = 1) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            self.ranges[name] = (end, end + shape.numel())
            end = _rounded_up(end + shape.numel(), BLOCK)
        self.length = _rounded_up(end, BLOCK * parts)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return each tensor as a view of ``flat``."""
        return {name: flat[slice(*self.ranges[name])].view(shape) for name, shape in self.shapes.items()}

    def boxes_within(self, begin: int, end: int) -> Iterator[FlatSlice]:
        """Yield everything between two positions, padding left out."""
        for name, (first, last) in self.ranges.items():
            low, high = max(begin, first), min(end, last)
            for offsets, sizes in boxes(self.shapes[name], low - first, high - first):
                yield FlatSlice(name, offsets, sizes, low)
                low += prod(sizes)


def boxes(shape: Offsets, begin: int, end: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Split the elements from ``begin`` to ``end`` of a tensor, in order, into few boxes: offsets and sizes of each."""
    if begin >= end:
        return
    if len(shape) <= 1:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row, inner = prod(shape[1:]), shape[1:]
    first_whole, last_whole = -(-begin // row), end // row
    if first_whole > last_whole:  # within one row
        yield from _in_row(last_whole, boxes(inner, begin - last_whole * row, end - last_whole * row))
        return
    yield from _in_row(first_whole - 1, boxes(inner, begin - (first_whole - 1) * row, row if begin % row else 0))
    if first_whole < last_whole:
        yield (first_whole, *(0 for _ in inner)), (last_whole - first_whole, *inner)
    yield from _in_row(last_whole, boxes(inner, 0, end - last_whole * row))


def _in_row(row: int, inner: Iterator[tuple[Offsets, Offsets]]) -> Iterator[tuple[Offsets, Offsets]]:
    for offsets, sizes in inner:
        yield (row, *offsets), (1, *sizes)


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
