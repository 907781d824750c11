"""Observations of which nothing new follows are passed over; decisions are as if each were looked at in full."""

import random
from typing import Any

import pytest

from boost_core.messages import Drill
from service.gang.assignment import End, RankEnd
from service.gang.control import port
from service.gang.control.controller import GangController
from service.gang.status import Orders
from tests.unit.fake_gang import FakeGang
from tests.unit.test_controller import PAUSE, job, orders

STEPS, LIVES = 25, 50


class LooksAgain(GangController):
    """Looks at everything each time."""

    def _lasting_view(self) -> None:
        return None


def life(seed: int, controller: type[GangController]) -> list[Any]:
    """What is decided, with times, in a life that depends on nothing but the seed and the decisions."""
    chance = random.Random(seed)
    gang = FakeGang(job(), orders(chance.choice([1, 2, 3])), "abcd"[: chance.randint(2, 4)])
    gang.controller = controller(job(), orders(2), gang.record)
    decided: list[Any] = []
    for _ in range(STEPS):
        try:
            happen(gang, chance)
        except (LookupError, ValueError, AssertionError) as error:  # what the cluster that is played cannot do
            return [*decided, type(error)]
        decided.append((gang.now, list(gang.decisions), gang.record.status(0)))
    return decided


def happen(gang: FakeGang, chance: random.Random) -> None:
    """Something at random."""
    happens = chance.randrange(14)
    if happens < 4:
        gang.train(chance.randint(1, 3))
    elif happens < 6:
        gang.wait(chance.choice([0.5, 2.0, 8.0, 20.0, 40.0]))
    elif happens == 6:
        gang.tell(chance.choice([orders(1), orders(2), orders(3), PAUSE, Orders(None, (), orders(1).cause)]))
    elif happens == 7 and gang.members:
        gang.lose(chance.randrange(len(gang.members)))
    elif happens == 8 and gang.members:
        gang.lose_node(chance.choice(sorted({worker.node for worker in gang.members} & gang.nodes) or ["none"]))
    elif happens == 9:
        gang.leaving = chance.choice([{}, {"a": None}, {"b": gang.now + 30}])
    elif happens == 10 and gang.members:
        halts = gang.of(port.HaltTraining)
        gang.end(RankEnd(End.STORED) if halts else RankEnd(End.FAILED, "an error"))
    elif happens == 11:
        gang.fail_starts = chance.random() < 0.3
    elif happens == 12 and gang.members:
        gang.members[chance.randrange(len(gang.members))].stuck = True
    elif happens == 13 and gang.members:
        gang.tell(Drill(kind="drop_node", rank=0, seconds=chance.choice([5.0, 60.0])))
    if not gang.nodes or chance.random() < 0.1:
        gang.nodes |= {"a", "e"}


@pytest.mark.full
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, 5))])
def test_nothing_is_missed(part: int) -> None:
    lengths = []
    for seed in range(LIVES * part, LIVES * (part + 1)):
        expected = life(seed, LooksAgain)
        assert life(seed, GangController) == expected, seed
        lengths.append(len(expected))
    assert sum(lengths) > 10 * LIVES
