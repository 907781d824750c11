"""How a GPU's events and the host's clock become one step, with both played: what is measured on CPU needs no play."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from boost_core.parallel import communicator
from boost_core.parallel.communicator import CommunicationLedger, Part, StepClock, StepParts, Totals


@dataclass
class FakeEvent:
    """Recorded by the host at one time, reached by the device at another, in seconds since the device began."""

    reached: float

    def elapsed_time(self, later: "FakeEvent") -> float:
        return 1000 * (later.reached - self.reached)


class Played:
    """A host whose clock stands, and a device that reaches events when it is told to."""

    def __init__(self) -> None:
        self.now, self.reaches = 100.0, 0.0  # the host's clock, and the device's at the next event
        self.ledger = CommunicationLedger()
        self.clock = StepClock(self.ledger, torch.device("cuda"))

    def event(self) -> FakeEvent:
        return FakeEvent(self.reaches)

    def host(self, now: float) -> None:
        self.now = now

    def enter(self, part: Part, reached: float) -> None:
        self.reaches = reached
        self.clock.enter(part)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(communicator, "timed_event", played.event)
    monkeypatch.setattr(communicator, "time", SimpleNamespace(perf_counter=lambda: played.now))
    return played


def a_step(played: Played, began: float, device: float) -> StepParts:
    """Of 10 s: the batch comes after 1, the loss after 9. ``device`` is the device's time at the step's beginning."""
    clock = played.clock
    played.host(began)
    clock.begin()
    played.host(began + 1)
    clock.has_batch()
    played.enter(Part.FORWARD, device + 2)
    played.enter(Part.BACKWARD, device + 4)
    played.enter(Part.OPTIMIZER, device + 8)
    played.reaches = device + 9
    played.host(began + 9)
    assert clock.values(torch.tensor([1.5])) == [1.5]
    played.host(began + 10)
    played.reaches = device + 11.5  # the update, which the host does not wait for
    return clock.end()


def test_events_are_set_on_the_hosts_clock(played: Played) -> None:
    parts = a_step(played, began=100, device=0)
    assert vars(parts) == pytest.approx(
        {"data": 1, "other": 1, "forward": 2, "backward": 4, "optimizer": 2, "exposed_communication": 0}
    )
    assert parts.seconds == pytest.approx(10)


def test_the_parts_of_a_replayed_step_are_those_of_the_events_that_it_was_captured_with(played: Played) -> None:
    clock = played.clock
    with clock.recorded() as parts:
        for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER):
            clock._host_is_ahead = True
            played.enter(part, 0)
    for device in (0.0, 10.0):
        played.host(100 + device)
        clock.begin()
        played.host(101 + device)
        played.reaches = device + 1.5
        clock.has_batch()
        for (_, event), reached in zip(parts, (2, 4, 8), strict=True):  # a replay records them anew
            event.reached = device + reached  # type: ignore[attr-defined]
        clock.replay(parts, timed=True)
        assert played.ledger.part is Part.OPTIMIZER
        played.reaches = device + 9
        played.host(109 + device)
        clock.values(torch.tensor([1.5]))
        played.host(110 + device)
        found = clock.end()
        clock._updated = None
        assert vars(found) == pytest.approx(
            {"data": 1, "other": 1, "forward": 2, "backward": 4, "optimizer": 2, "exposed_communication": 0}
        )


def test_a_replay_without_events_is_divided_as_the_newest_with_them(played: Played) -> None:
    clock, ledger = played.clock, played.ledger
    with ledger.recorded(timed=False), clock.recorded() as without:
        clock._host_is_ahead = True
        played.enter(Part.FORWARD, 0)
    assert not without and ledger.timed
    with clock.recorded() as parts:
        for part in (Part.FORWARD, Part.BACKWARD, Part.OPTIMIZER):
            clock._host_is_ahead = True
            played.enter(part, 0)
    found = []
    for timed, began, times in ((True, 100, 1), (False, 120, 2)):
        played.host(began)
        clock.begin()
        played.host(began + 1)
        clock.has_batch()
        for (_, event), reached in zip(parts, (2, 4, 8), strict=True):
            event.reached = reached  # type: ignore[attr-defined]
        clock.replay(parts, timed)
        played.reaches = 9 if timed else 10_000.0
        played.host(began + 1 + 8 * times)
        clock.values(torch.tensor([1.5]))
        played.host(began + 2 + 8 * times)
        found.append(vars(clock.end()))
        clock._updated = None
    common = {"data": 1, "exposed_communication": 0}
    assert found[0] == pytest.approx({**common, "other": 1, "forward": 2, "backward": 4, "optimizer": 2})
    assert found[1] == pytest.approx({**common, "other": 2, "forward": 4, "backward": 8, "optimizer": 3})


def test_an_update_that_goes_on_is_the_next_steps(played: Played) -> None:
    a_step(played, began=100, device=0)
    parts = a_step(played, began=110, device=10)
    # It ended 1.5 s after the step began, 0.5 s after the batch was there.
    assert vars(parts) == pytest.approx(
        {"data": 1, "other": 0.5, "forward": 2, "backward": 4, "optimizer": 2.5, "exposed_communication": 0}
    )


def test_an_update_that_ended_between_the_steps_is_no_ones(played: Played) -> None:
    a_step(played, began=100, device=0)
    parts = a_step(played, began=200, device=100)
    assert (parts.optimizer, parts.seconds) == (pytest.approx(2), pytest.approx(10))


def test_what_was_waited_for_is_taken_out_of_its_part(played: Played) -> None:
    played.ledger.waited(Totals(), Part.BACKWARD, 1.5)
    played.ledger.waited(Totals(), Part.OTHER, 0.25)
    parts = a_step(played, began=100, device=0)
    assert vars(parts) == pytest.approx(
        {"data": 1, "other": 0.75, "forward": 2, "backward": 2.5, "optimizer": 2, "exposed_communication": 1.75}
    )
    assert parts.seconds == pytest.approx(10)


def test_what_held_one_timed_replay_up_does_not_count_in_the_replays_after_it(played: Played) -> None:
    clock, ledger = played.clock, played.ledger
    with clock.recorded() as parts:
        clock._host_is_ahead = True
        played.enter(Part.BACKWARD, 0)
    found = []
    for began, waited in ((100, 1), (200, 1), (300, 50), (400, None)):
        ledger.clear()
        played.host(began)
        clock.begin()
        clock.has_batch()
        parts[0][1].reached = 0  # type: ignore[attr-defined]
        clock.replay(parts, timed=waited is not None)
        ledger.waited(Totals(), Part.BACKWARD, 50 if waited is None else waited)  # as of the newest with events
        played.reaches = 10 if waited in (1, None) else 59
        played.host(began + played.reaches)
        clock.values(torch.tensor([1.5]))
        found.append(clock.end())
        clock._updated = None
    assert [each.exposed_communication for each in found] == pytest.approx([1, 1, 50, 1])
    assert [each.seconds for each in found] == pytest.approx([10, 10, 59, 10])
