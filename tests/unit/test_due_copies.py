"""Which copies of the state are due: a checkpoint stays so until the store has it or a later one."""

import pytest

from boost_core.train.checkpoint_manager import DueCopies


def due(memory_every: int | None = None) -> DueCopies:
    return DueCopies(steps=25, store_every_steps=10, memory_every_steps=memory_every)


def test_a_checkpoint_that_was_not_written_stays_due() -> None:
    copies = due(memory_every=4)
    copies.reached(10)
    assert (copies.store, copies.memory, copies.requested) == (10, False, True)
    copies.memory = copies.requested = False  # copied for everything that is due
    copies.stored(-1)  # the store has failed
    copies.reached(11)
    assert (copies.store, copies.requested) == (10, False)
    copies.reached(12)  # for memory; and for the store, as the state is copied anyway
    assert (copies.store, copies.memory, copies.requested) == (10, True, True)
    copies.memory = copies.requested = False  # copied for everything that is due
    copies.stored(12)
    assert (copies.store, copies.memory, copies.requested) == (0, False, False)


def test_what_is_put_off_is_wanted_after_the_next_step() -> None:
    copies = due()
    copies.reached(10)
    assert copies.after(11)
    copies.memory = copies.requested = False  # copied for everything that is due
    assert [step for step in range(11, 26) if copies.after(step)] == [20, 25]


def test_the_last_step_is_kept_everywhere() -> None:
    copies = due(memory_every=4)
    copies.reached(25)
    assert (copies.store, copies.memory) == (25, True)


@pytest.mark.parametrize(
    ("step", "stored_step", "store"),
    [(0, 0, 0), (9, None, 0), (10, None, 10), (17, None, 10), (17, 10, 0), (17, 9, 10), (17, 17, 0), (25, None, 25),
     (25, 20, 25), (25, 25, 0), (30, 0, 30)],
)  # fmt: skip
def test_what_is_due_after_resuming(step: int, stored_step: int | None, store: int) -> None:
    copies = due()
    copies.resumed(step, stored_step)
    assert (copies.store, copies.requested) == (store, store > 0)
