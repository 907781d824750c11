from itertools import chain
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from boost_core.optim.zero import BLOCK, FlatLayout, boxes

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, prod(shape)))
    end = data.draw(st.integers(begin, prod(shape)))
    numbers = torch.arange(prod(shape)).view(shape)
    found = list(boxes(shape, begin, end))
    elements = [
        numbers[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
        .flatten()
        .tolist()
        for offsets, sizes in found
    ]
    assert all(elements)
    assert list(chain.from_iterable(elements)) == list(range(begin, end))
    assert len(found) <= 2 * len(shape) - 1


@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(1, 4))
def test_a_layout_has_room_for_all_and_divides(shapes: list[tuple[int, ...]], parts: int) -> None:
    layout = FlatLayout({str(index): torch.Size(shape) for index, shape in enumerate(shapes)}, parts)
    flat = torch.zeros(layout.length)
    views = layout.views(flat)
    for index, shape in enumerate(shapes):
        assert views[str(index)].shape == shape
        assert layout.ranges[str(index)][0] % BLOCK == 0
        views[str(index)].add_(1)
    assert flat.sum() == sum(map(prod, shapes))
    assert flat.max() == 1
    part = layout.length // parts
    assert part % BLOCK == 0
    found = [box for index in range(parts) for box in layout.boxes_within(index * part, (index + 1) * part)]
    for _, _, sizes, begin in found:
        inside = flat[begin : begin + prod(sizes)].view(sizes)
        assert (inside == 1).all()
        inside.zero_()
    assert flat.sum() == 0
