import math
from functools import partial

import pytest

from boost_core.hardware import LINKS, Link
from boost_core.plan.throughput import collective_seconds, fit

LINK = Link(1e-5, 2e-6, 1e9, "a test's")
seconds = partial(collective_seconds, LINK)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    whole, ranks = 4e6, 4
    halves = seconds("reduce_scatter", ranks, whole) + collective_seconds(LINK, "all_gather", ranks, whole / ranks)
    assert seconds("all_reduce", ranks, whole) == pytest.approx(halves - LINK.base_seconds)


def test_a_ring_of_four() -> None:
    # Six steps; six quarters of a megabyte through each link.
    assert seconds("all_reduce", 4, 1e6) == pytest.approx(1e-5 + 6 * 2e-6 + 1.5e-3)
    assert seconds("all_to_all", 4, 1e6, calls=3) == pytest.approx(3 * (1e-5 + 3 * 2e-6) + 0.75e-3)


def test_one_rank_has_nobody_to_send_to() -> None:
    assert seconds("all_reduce", 1, 1e9) == 0


def test_a_collective_that_has_no_model() -> None:
    with pytest.raises(ValueError, match=r"'broadcast'.*all_reduce"):
        seconds("broadcast", 2, 1)


def test_named_links_are_ordered_as_they_are_sold() -> None:
    times = [
        collective_seconds(LINKS[name], "all_reduce", 4, 1e8) for name in ("nvlink-h200", "nvlink-a100", "fabric-200g")
    ]
    assert times == sorted(times)


def test_a_fit_finds_what_made_the_times() -> None:
    sizes = [1 << power for power in range(10, 28, 2)]
    wobble = [1.05 if index % 2 else 0.95 for index in range(len(sizes))]
    times = [seconds("all_reduce", 4, size) * factor for size, factor in zip(sizes, wobble, strict=True)]
    fitted = fit(4, sizes, times)
    assert fitted.base_seconds + 6 * fitted.hop_seconds == pytest.approx(1e-5 + 6 * 2e-6, rel=0.1)
    assert fitted.bytes_per_second == pytest.approx(1e9, rel=0.1)


def test_noise_makes_no_negative_figures() -> None:
    flat = fit(2, [1024, 4096, 16384], [3e-4, 2e-4, 1e-4])
    assert (flat.bytes_per_second, flat.hop_seconds) == (math.inf, 0)
    assert 1e-4 < flat.base_seconds < 3e-4
    steep = fit(2, [1024, 4096, 16384], [1e-5, 9e-5, 9e-4])
    assert steep.base_seconds == 0
    assert collective_seconds(steep, "all_reduce", 2, 4096) == pytest.approx(4096 / steep.bytes_per_second)


def test_one_size_makes_no_line() -> None:
    with pytest.raises(ValueError, match="two or more sizes"):
        fit(2, [8, 8], [1.0, 1.0])
