"""What a block gives a GPU to do is counted, so that no change adds to it unseen."""

from collections.abc import Iterator

import pytest

from tests.numerics import host_counts
from tests.numerics.host_counts import BLOCKS, Cost, of_a_block

# Forward and backward: launches, calls, bytes, sliced gradients, nested backward passes. Of our calls, 29 (12 with
# documents apart) choose attention's kernels, which torch would choose for itself, and not alike in all its versions.
# Our backward pass has the squares of the block's gradients in it: of those that no kernel leaves, in two launches.
MOST = {
    "as the published code": (Cost(40, 256, 7_078_400, 0, 0), Cost(83, 147, 17_609_216, 2, 0)),
    "ours": (Cost(26, 709, 4_091_392, 0, 0), Cost(35, 396, 8_215_168, 0, 0)),
    "ours, documents apart": (Cost(26, 740, 4_091_476, 0, 0), Cost(37, 439, 8_217_316, 0, 0)),
}


@pytest.fixture
def on_a_gpu() -> Iterator[None]:
    with host_counts.as_on_a_gpu():
        yield


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("name", ["ours", "ours, documents apart"])
def test_a_block_takes_no_more_than_it_has_taken(name: str) -> None:
    for found, most in zip(of_a_block(BLOCKS[name]), MOST[name], strict=True):
        assert found.launches <= most.launches
        assert found.calls <= most.calls
        assert found.moved <= most.moved
        assert (found.slices, found.nested) == (0, 0)


@pytest.mark.full
@pytest.mark.usefixtures("on_a_gpu")
def test_a_plain_block_takes_more() -> None:
    plain = of_a_block(BLOCKS["as the published code"])
    for found, expected, mine in zip(plain, MOST["as the published code"], MOST["ours"], strict=True):
        assert (found.launches, found.slices) == (expected.launches, expected.slices)
        assert found.launches > mine.launches and found.moved > mine.moved
