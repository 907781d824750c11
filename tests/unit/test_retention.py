import pytest

from boost_core.checkpoint.folder import prunable

STEPS = [100, 200, 300, 400, 450]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (None, None, []),
        (1, None, [100, 200, 300, 400]),
        (2, None, [100, 200, 300]),
        (9, None, []),
        (1, 200, [100, 300]),
        (2, 1000, [100, 200, 300]),
    ],
)
def test_what_may_go(keep_last: int | None, keep_every: int | None, gone: list[int]) -> None:
    assert prunable(STEPS, keep_last, keep_every) == gone
    assert prunable([], keep_last, keep_every) == []


def test_what_is_damaged_does_not_count_among_the_newest() -> None:
    assert prunable(STEPS, 1, None, damaged={450}) == [100, 200, 300]
    assert prunable(STEPS, 2, None, damaged={450, 300}) == [100]
    assert prunable(STEPS, 2, None, damaged={200, 300, 400, 450}) == []
    assert prunable(STEPS, 1, None, damaged=STEPS) == []


def test_what_is_pinned_stays_and_counts_among_the_newest() -> None:
    assert prunable(STEPS, 2, None, {200, 450}) == [100, 300]
    assert prunable(STEPS, 1, 200, set(STEPS)) == []
