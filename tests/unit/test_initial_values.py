"""Initial weights by their places: published bits, normal values, the same in any part of any layout."""

import math
from unittest.mock import patch

import pytest
import torch

from boost_core.architecture import Role, WeightSpec
from boost_core.parallel import shard as philox_module
from boost_core.parallel.shard import initialize_, normal_, philox

KEY = 0x0123456789ABCDEF
ONES = 0xFFFFFFFF


def drawn(shape: tuple[int, ...], key: int = KEY) -> torch.Tensor:
    values = torch.full(shape, math.nan)
    normal_(values, shape, (0,) * len(shape), key, 1.0)
    return values


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # of Random123's kat_vectors
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_bits_are_the_published_ones(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:  # fmt: skip
    given = [torch.full((67,), word) for word in counter]  # no whole number of vector registers
    for found, word in zip(philox(tuple(given), key), words, strict=True):
        assert found.eq(word).all()


def test_a_place_and_a_key_give_the_values_that_the_docstring_says() -> None:
    rows, columns = 6, 10
    values = drawn((2, 3, columns))
    row, column = torch.arange(rows).repeat_interleave(columns), torch.arange(columns).repeat(rows)
    words = philox((column // 4, row, 0 * row, 0 * row), (KEY & ONES, KEY >> 32))
    expected = [
        math.sqrt(-2 * math.log((first + 0.5) / 2**32)) * turn(2 * math.pi * second / 2**32)
        for four in zip(*(word.tolist() for word in words), strict=True)
        for first, second, turn in [
            (four[0], four[1], math.cos), (four[0], four[1], math.sin),
            (four[2], four[3], math.cos), (four[2], four[3], math.sin),
        ]
    ]  # fmt: skip
    chosen = torch.tensor(expected, dtype=torch.float64).view(rows * columns, 4)
    here = chosen.gather(1, (column % 4).unsqueeze(1)).view(values.shape)
    # Half a unit of fp32 of rounding, and nothing beside it: float64's errors are 2^-29 of that.
    assert ((values.double() - here).abs() <= here.abs() * 2**-24 * (1 + 2**-20)).all()


def test_values_are_normal() -> None:
    values = drawn((500, 1000)).double().flatten()
    count = values.numel()
    # Six standard deviations of each estimate: 1, 2, 6 and 96 over the count are their variances.
    moments = {1: (0.0, 1), 2: (1.0, 2), 3: (0.0, 15), 4: (3.0, 96)}
    for power, (expected, variance) in moments.items():
        assert abs(values.pow(power).mean() - expected) < 6 * math.sqrt(variance / count), power
    # Kolmogorov and Smirnov's statistic: above 3/√n once in 10^7 times.
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    uniform = torch.special.ndtr(values.sort().values)
    assert (uniform - steps).abs().max() < 3 / math.sqrt(count)
    assert 4.2 < values.abs().max() < 6.8


def test_values_are_independent_of_their_neighbours_and_of_other_weights() -> None:
    shape = (200, 1024)
    values = drawn(shape).double()
    count = values.numel()
    # A key of the next number, and one that differs in the highest bit alone.
    others = [drawn(shape, KEY + 1).double(), drawn(shape, KEY ^ 1 << 63).double()]
    along_row = [values.roll(lag, 1) for lag in (1, 2, 3, 4)]
    for other in [*others, *along_row, values.roll(1, 0), values.roll((1, 1), (0, 1))]:
        for power in (1, 2):  # squares: neighbours by Box and Muller share a radius
            one, two = (each.pow(power) - (power - 1) for each in (values, other))
            correlation = (one * two).mean() / (one.square().mean() * two.square().mean()).sqrt()
            assert abs(correlation) < 6 / math.sqrt(count)


def test_a_gpu_draws_what_the_host_draws() -> None:
    shape = (1000, 1023)
    here, there = drawn(shape), torch.empty(shape, device="cuda" if torch.cuda.is_available() else "cpu")
    with patch.object(philox_module, "_CHUNK_ON_CPU", 1 << 20):  # without a GPU: as large parts as one draws at a time
        normal_(there, shape, (0, 0), KEY, 1.0)
    differ = here != there.cpu()
    assert differ.sum() <= 1e-6 * here.numel()
    torch.testing.assert_close(there.cpu(), here, rtol=2**-22, atol=0.0)


@pytest.mark.full
@pytest.mark.parametrize("chunk", [4, 30, 1 << 16])
@pytest.mark.parametrize("shape", [(37,), (9, 14), (6, 4, 10), (2, 3, 4, 7)])
def test_any_box_of_any_shape_has_the_values_of_the_whole(shape: tuple[int, ...], chunk: int) -> None:
    whole = drawn(shape)
    with patch.object(philox_module, "_CHUNK_ON_CPU", chunk):
        for axis in range(len(shape)):
            for begin in range(shape[axis]):
                offsets = [begin if place == axis else 0 for place in range(len(shape))]
                expected = whole.narrow(axis, begin, shape[axis] - begin)
                # Within other memory, so that what is drawn beside the box would show.
                around = torch.full(shape, math.nan)
                box = around.narrow(axis, begin, shape[axis] - begin)
                normal_(box, shape, offsets, KEY, 1.0)
                assert torch.equal(box, expected)
                assert around.narrow(axis, 0, begin).isnan().all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stacked_projections_have_their_own_deviations_in_any_shard(axis: int) -> None:
    spec = WeightSpec((24, 3, 32), Role.DOWN_PROJECTION, (1.0, 0.5, 0.25), ("q", "k", "v"), axis=1)
    alike = WeightSpec((24, 3, 32), Role.DOWN_PROJECTION, (1.0,), ("q", "k", "v"), axis=1)
    whole, plain = torch.empty(spec.shape), torch.empty(spec.shape)
    initialize_(whole, (0, 0, 0), "w", spec, 7)
    initialize_(plain, (0, 0, 0), "w", alike, 7)
    assert torch.equal(whole, plain * torch.tensor([1.0, 0.5, 0.25]).view(1, 3, 1))
    size = spec.shape[axis] // (3 if axis == 1 else 4)
    for begin in range(0, spec.shape[axis], size):
        expected = whole.narrow(axis, begin, size)
        shard = torch.full(expected.shape, math.nan)
        initialize_(shard, [begin if place == axis else 0 for place in range(3)], "w", spec, 7)
        assert torch.equal(shard, expected)


def test_names_and_seeds_have_values_of_their_own() -> None:
    spec = WeightSpec((8, 16), Role.HEAD, (0.02,), ("w",))
    found = []
    for name, seed in (("a", 1), ("b", 1), ("a", 2)):
        values = torch.empty(spec.shape)
        initialize_(values, (0, 0), name, spec, seed)
        found.append(values)
    for one, two in ((0, 1), (0, 2), (1, 2)):
        assert not found[one].eq(found[two]).any()


def test_what_is_drawn_takes_the_scratch_of_a_chunk() -> None:
    drawn_at_once = []

    def counted(words: philox_module.Words, key: tuple[int, int]) -> philox_module.Words:
        drawn_at_once.append(words[0].numel() * 4)
        return philox(words, key)

    box = torch.empty(2, 512, 1000)
    with patch.object(philox_module, "philox", counted), patch.object(philox_module, "_CHUNK_ON_CPU", 1 << 12):
        normal_(box, (8, 512, 4000), (3, 0, 1001), KEY, 1.0)
    assert max(drawn_at_once) <= (1 << 12) * 1.01
    assert sum(drawn_at_once) <= box.numel() * 1.01
