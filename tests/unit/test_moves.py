"""What a gang does next, as tables, and what holds for any view."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boost_core.config import Layout
from boost_core.messages import Cause
from service.gang.control.policy import (
    Action,
    Form,
    Halt,
    Keep,
    Pause,
    Replica,
    ReplicaSet,
    View,
    next_action,
    replica_set,
)
from service.gang.control.port import WorkerStatus
from service.gang.status import Orders

WORKERS = WorkerStatus(1), WorkerStatus(2)
LEAVING, URGENT = "drained", "preempted"  # nodes
STATES: dict[str, dict[str, Any]] = {  # of a replica, in a letter
    "-": {},
    "p": {"workers": WORKERS},
    "r": {"workers": WORKERS, "ready": True},
    "d": {"workers": WORKERS, "ready": True, "nodes": {LEAVING}},
    "u": {"workers": WORKERS, "ready": True, "nodes": {URGENT}},
    "o": {"workers": WORKERS, "ready": True, "layout": Layout(1, 1, 1)},  # of another layout
    "q": {"layout": Layout(1, 1, 1)},
    "k": {"workers": WORKERS, "ready": True, "keeps": True},
    "s": {"workers": WORKERS, "keeps": True},
}
NUMBERS_OF_REPLICAS = (1, 2, 4)


def layout(data: int) -> Layout:
    return Layout(2, 1, data)


def replicas(states: str) -> list[Replica]:
    """Numbered from 1."""
    usual = {"layout": Layout(2, 1, 1), "selector": {}, "keeps": False}
    return [Replica(**{"number": number, **usual, **STATES[state]}) for number, state in enumerate(states, 1)]


def view(
    states: str, target: int | None, gang: Layout | None = None, *, members: tuple[int, ...] = (), settled: bool = True,
    stored: bool = False, most: int = 0, cause: Cause = Cause.LIMITS_CHANGED, finishing: bool = False,
    keeping: bool = False,
) -> View:  # fmt: skip
    allowed = tuple(layout(data) for data in NUMBERS_OF_REPLICAS if target and data <= target)
    return View(
        orders=Orders(layout(target) if target else None, allowed, cause),
        replicas=replicas(states),
        members=members,
        settled=bool(members) and settled,
        layout=gang,
        stored=stored,
        most=most,
        finishing=finishing,
        keeping=keeping,
        leaving={LEAVING, URGENT},
        urgent={URGENT},
    )


def trains(states: str, target: int | None, data: int, **others) -> View:
    """A gang of the first replicas."""
    return view(states, target, layout(data), members=tuple(range(1, data + 1)), **others)


ACTIONS: dict[str, tuple[View, Action]] = {
    "the first gang waits for a place": (view("----", 4), Keep(waiting=True)),
    "and for processes": (view("p---", 4), Keep()),
    "it is formed when all are ready": (view("rrrr", 4), Form((1, 2, 3, 4), layout(4))),
    "it waits for replicas that are being started": (view("rrpp", 4), Keep()),
    "not for those without a place": (view("rr--", 4), Form((1, 2), layout(2))),
    "nor for more than it needs": (view("prr", 2), Form((2, 3), layout(2))),
    "numbers that are not allowed are skipped": (view("rrr-", 4), Form((1, 2), layout(2))),
    "after a fault the survivors go on at once": (view("rrp-", 4, layout(4)), Form((1, 2), layout(2))),
    "as many of them as are allowed": (view("rprr", 4, layout(4)), Form((1, 3), layout(2))),
    "without survivors it waits for processes": (view("pp", 2, layout(2)), Keep()),
    "or for a place": (view("--", 2, layout(2)), Keep(waiting=True)),
    "nobody is asked who will go away": (view("drr", 2, layout(2)), Form((2, 3), layout(2))),
    "alone, it waits for others": (view("d-", 2, layout(2)), Keep(waiting=True)),
    "a gang that is as ordered goes on": (trains("rr", 2, 2), Keep()),
    "so does one that cannot grow yet": (trains("rrp-", 4, 2), Keep()),
    "or not to a number that is allowed": (trains("rrr", 4, 2), Keep()),
    "it grows into what is ready": (trains("rrrr", 4, 2, most=2), Halt(Cause.LIMITS_CHANGED)),
    "it grows back": (trains("rrrr", 4, 2, most=4), Halt(Cause.WORKER_BACK)),
    "not before it has its state": (trains("rrrr", 4, 2, settled=False), Keep()),
    "it shrinks": (trains("rrrr", 2, 4, cause=Cause.PREEMPTED), Halt(Cause.PREEMPTED)),
    "even before it has its state": (trains("rr", 1, 2, settled=False), Halt(Cause.LIMITS_CHANGED)),
    "another layout goes through the store": (
        view("oo--", 2, Layout(1, 1, 2), members=(1, 2)), Halt(Cause.LIMITS_CHANGED, store=True),
    ),
    "then it waits for a place": (view("oo--", 2, Layout(1, 1, 2), stored=True), Keep(waiting=True)),
    "for processes": (view("p-", 2, Layout(1, 1, 2), stored=True), Keep()),
    "and forms of the new layout": (view("oorr", 2, Layout(1, 1, 2), stored=True), Form((3, 4), layout(2))),
    "a drained node is left when some can stay": (trains("rd", 2, 2), Halt(Cause.NODE_DRAINED)),
    "or another is ready": (trains("dr", 1, 1), Halt(Cause.NODE_DRAINED)),
    "with nowhere to go it stays as long as it can": (trains("d-", 1, 1), Keep()),
    "then it leaves its state in the store": (trains("u-", 1, 1), Halt(Cause.NODE_DRAINED, store=True)),
    "not when another is ready": (trains("ur", 1, 1), Halt(Cause.NODE_DRAINED)),
    "a drained node of others is none of its business": (trains("rru", 4, 2), Keep()),
    "a pause goes through the store": (trains("rr", None, 2), Halt(Cause.PAUSED, store=True)),
    "then all ends": (view("rr", None, layout(2), stored=True), Pause()),
    "also before the first gang": (view("rp", None), Pause()),
    "with its last checkpoint a gang ends anyway": (trains("rr", None, 2, finishing=True), Keep()),
    "whatever layout it is to have": (view("oo", 2, Layout(1, 1, 2), members=(1, 2), finishing=True), Keep()),
    "nor does it grow for that": (trains("rrrr", 4, 2, finishing=True), Keep()),
    "but it shrinks": (trains("rrrr", 2, 4, finishing=True), Halt(Cause.LIMITS_CHANGED)),
    "and leaves a node": (trains("dr", 1, 1, finishing=True), Halt(Cause.NODE_DRAINED)),
    "if there is another": (trains("u-", 1, 1, finishing=True), Keep()),
    "it holds what it has until others can keep the state": (
        trains("rrks", 2, 2, finishing=True, keeping=True), Keep(),
    ),
    "then it stops for them": (
        trains("rrkk", 2, 2, finishing=True, keeping=True), Halt(Cause.WAITING_FOR_STORE),
    ),
    "which take it over": (view("rrkk", 2, layout(2), keeping=True), Form((3, 4), layout(2))),
    "and keep it": (view("kk", 2, layout(2), members=(1, 2), finishing=True, keeping=True), Keep()),
    "those that are left take it over from those that are lost": (
        view("ks", 2, layout(2), keeping=True), Form((1,), layout(1)),
    ),
    "what has lost it trains again": (view("rk", 1, layout(1)), Form((1,), layout(1))),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "action"), ACTIONS.values(), ids=ACTIONS)
def test_next_action(seen: View, action: Action) -> None:
    assert next_action(seen) == action


REPLICA_SETS: dict[str, tuple[View, ReplicaSet]] = {
    "as many are started as are ordered": (view("", 4), ReplicaSet(4, ())),
    "those that there are count": (view("rp--", 4), ReplicaSet(0, ())),
    "what is lost is replaced": (trains("rr", 4, 2), ReplicaSet(2, ())),
    "and what will go away": (trains("rd", 2, 2), ReplicaSet(1, ())),
    "nothing more is for a last checkpoint": (trains("rr", 4, 2, finishing=True), ReplicaSet(0, ())),
    "but a place for what will go away": (trains("rd", 4, 2, finishing=True), ReplicaSet(1, ())),
    "what is left over goes": (trains("rrrr", 2, 2), ReplicaSet(0, (3, 4))),
    "what is not up goes first": (trains("rr-p", 3, 2), ReplicaSet(0, (4,))),
    "then the youngest": (trains("rrprr", 4, 2), ReplicaSet(0, (3,))),
    "but none that trains": (view("rrrr", 2, layout(2), members=(3, 4)), ReplicaSet(0, (1, 2))),
    "even if it will go away": (trains("dr", 1, 1), ReplicaSet(0, ())),
    "once it trains no more it goes": (view("dr", 1, layout(1), members=(2,)), ReplicaSet(0, (1,))),
    "none that may have state goes before a gang has it": (
        view("rrrr", 2, layout(2), members=(3, 4), settled=False), ReplicaSet(0, ()),
    ),
    "nor between gangs": (view("drro-", 1, layout(2)), ReplicaSet(0, (5,))),
    "what is not up has none": (trains("rr-p", 2, 2, settled=False), ReplicaSet(0, (3, 4))),
    "what is in the store may go": (view("oorr-", 2, Layout(1, 1, 2), stored=True), ReplicaSet(0, (1, 2, 5))),
    "another layout takes the place of the old": (view("oo", 2, Layout(1, 1, 2), stored=True), ReplicaSet(2, (1, 2))),
    "before the first gang there is nothing to keep": (view("oqd", 2), ReplicaSet(2, (1, 2, 3))),
    "those that are to keep the state are started beside the gang": (
        trains("rr", 2, 2, finishing=True, keeping=True), ReplicaSet(2, ()),
    ),
    "the gang goes when they have it": (
        view("rrkk", 2, layout(2), members=(3, 4), finishing=True, keeping=True), ReplicaSet(0, (1, 2)),
    ),
    "and not before": (
        view("rrkk", 2, layout(2), members=(3, 4), settled=False, finishing=True, keeping=True), ReplicaSet(0, ()),
    ),
    "nothing is started or given up to pause": (trains("rrp", None, 2), ReplicaSet(0, ())),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "wanted"), REPLICA_SETS.values(), ids=REPLICA_SETS)
def test_replica_set(seen: View, wanted: ReplicaSet) -> None:
    assert replica_set(seen) == wanted


@st.composite
def views(draw: st.DrawFn) -> View:
    states = draw(st.text("-prduoq", max_size=7))
    gang = draw(st.none() | st.sampled_from([layout(1), layout(2), layout(4), Layout(1, 1, 2)]))
    numbers = st.sets(st.sampled_from(range(1, len(states) + 1))) if states and gang else st.just(set())
    seen = view(
        states, draw(st.none() | st.integers(1, 5)), gang, members=tuple(sorted(draw(numbers))),
        settled=draw(st.booleans()), most=draw(st.integers(0, 5)),
    )  # fmt: skip
    return replace(seen, stored=not seen.members and draw(st.booleans()))


@given(views())
def test_a_gang_is_formed_of_ready_replicas_in_a_shape_that_is_allowed(seen: View) -> None:
    action = next_action(seen)
    if isinstance(action, Form):
        chosen = [replica for replica in seen.replicas if replica.number in action.members]
        assert not seen.members
        assert len(chosen) == len(action.members) == action.layout.dp
        assert all(replica.ready and not replica.nodes for replica in chosen)
        assert {replica.layout for replica in chosen} == {action.layout.per_replica}
        assert action.layout in {*seen.orders.allowed, seen.orders.target}


@given(views())
def test_what_is_started_and_given_up_leads_to_as_many_as_ordered(seen: View) -> None:
    wanted, target = replica_set(seen), seen.orders.target
    assert set(wanted.give_up) <= {replica.number for replica in seen.replicas} - set(seen.members)
    if target is None:
        return
    left = [replica for replica in seen.replicas if replica.number not in wanted.give_up]
    usable = [replica for replica in left if replica.layout == target.per_replica and not replica.nodes]
    assert len(usable) + wanted.start >= target.dp
    if seen.settled or seen.stored:
        others = {replica.number for replica in left} - set(seen.members)
        assert len(others & {replica.number for replica in usable}) + wanted.start <= target.dp
        assert others <= {replica.number for replica in usable}
