"""What tenants and queues may hold, as tables of decisions."""

from datetime import timedelta

import pytest

from boost_core.config import Layout
from service.gang.status import NodeCapacity
from service.jobs.states import JobState, Reason
from service.scheduler.cluster_snapshot import Gang, Wait
from service.scheduler.decisions import decide
from service.scheduler.quotas import Limits
from tests.scheduling import SOME_DAY, STARTING, WAITING, job, messages, nodes, running, summary, trains

RIPE = {"a": 5.0, "b": 5.0}
EIGHT_AND_ONE = [*nodes(8), NodeCapacity("node-z", {"CPU": 1}, {"CPU": 1}, {"zone": "z"})]


def tenants(**cpus: float) -> Limits:
    return Limits(tenants={name: {"CPU": amount} for name, amount in cpus.items()})


A, B = {"tenant": "a"}, {"tenant": "b"}


@pytest.mark.parametrize(
    ("jobs", "limits", "expected"),
    [
        ([job("j", 4, **A)], tenants(a=4), ["Admit j", "Launch j 1x4"]),
        ([job("j", 4, **A)], Limits(queues={"default": {"CPU": 4}}), ["Admit j", "Launch j 1x4"]),
        ([job("j", 4, **A)], Limits(queues={"other": {"CPU": 1}}), ["Admit j", "Launch j 1x4"]),
        ([job("j", 4, **A)], Limits(tenants={"a": {"GPU": 0}}), ["Admit j", "Launch j 1x4"]),  # it draws on no GPU
        ([job("j", 1, cpus=0.1, **A), job("k", 2, cpus=0.1, **A)], tenants(a=0.3),
         ["Admit j", "Launch j 1x1", "Admit k", "Launch k 1x2"]),
        # An elastic one starts smaller.
        ([job("j", 1, up_to=8, **A)], tenants(a=3), ["Admit j", "Launch j 1x3"]),
        ([job("j", 1, up_to=8, **A)], Limits({"a": {"CPU": 6}}, {"default": {"CPU": 2}}),
         ["Admit j", "Launch j 1x2"]),
        # What counts is what gangs hold, are to hold, or may take by themselves.
        ([job("j", 2, *STARTING, **A), job("k", 1, **A)], tenants(a=2), ["Admit k", "Wait k"]),
        # One that waits for its quota holds back those that draw on the same, however small, and nobody else.
        (
            [running("j", 2, **A), job("k", 3, **A), job("l", 1, **A), job("m", 4, **B)], tenants(a=4),
            ["Admit k", "Wait k", "Explain l", "Admit m", "Launch m 1x4"],
        ),
        (
            [running("j", 2, **A), job("k", 3, **A), job("l", 1, queue="q", **A), job("m", 1, queue="q", **B)],
            Limits({"a": {"CPU": 4}}, {"q": {"CPU": 1}}),
            ["Admit k", "Wait k", "Explain l", "Admit m", "Launch m 1x1"],
        ),
        (
            [running("j", 2, queue="q", **A), job("k", 3, queue="q", **A), job("l", 1, **A), job("m", 1, queue="q")],
            Limits(queues={"q": {"CPU": 4}}),
            ["Admit k", "Wait k", "Admit l", "Launch l 1x1", "Explain m"],
        ),
        # It keeps what it has found in its tenant's quota while it waits for its queue's, and not the other way round.
        (
            [running("j", 2, queue="q", **B), job("k", 3, queue="q", **A), job("l", 2, **A), job("m", 1, **A)],
            Limits({"a": {"CPU": 4}}, {"q": {"CPU": 4}}),
            ["Admit k", "Wait k", "Admit l", "Wait l", "Explain m"],
        ),
        # A job that an empty quota could not hold holds back nobody.
        ([job("j", 5, **A), job("k", 4, **A)], tenants(a=4), ["Admit j", "Wait j", "Admit k", "Launch k 1x4"]),
        ([job("j", 1, **A), job("k", 1, **B)], tenants(a=0), ["Admit j", "Wait j", "Admit k", "Launch k 1x1"]),
        # One that waits for nodes keeps its quota, too.
        (
            [running("j", 6, **B), job("k", 4, **A), job("l", 1, node_labels={"zone": "z"}, **A)], tenants(a=4),
            ["Admit k", "Wait k", "Admit l", "Wait l"],
        ),
        # The lowered quota of a gang that runs is no reason to disturb it.
        ([running("j", 4, **A), job("k", 1, **A)], tenants(a=2), ["Admit k", "Wait k"]),
    ],
)  # fmt: skip
def test_starts(jobs, limits: Limits, expected) -> None:
    assert summary(decide(jobs, EIGHT_AND_ONE, limits=limits)) == expected


def test_growth_stays_within_quotas_and_out_of_those_that_a_job_waits_for() -> None:
    gangs = {"a": trains(2), "b": trains(2)}
    jobs = [running("a", 1, up_to=8, **A), running("b", 1, up_to=4, **B)]

    def grown(*more, **limits) -> list[str]:
        return summary(decide([*jobs, *more], nodes(12, free=[8]), gangs, RIPE, limits=tenants(**limits)))

    assert grown(a=6) == ["Resize a 1x6 NODE_JOINED", "Resize b 1x4 NODE_JOINED"]
    assert grown(a=3, b=3) == ["Resize a 1x3 NODE_JOINED", "Resize b 1x3 NODE_JOINED"]
    assert grown(a=1) == ["Resize b 1x4 NODE_JOINED"]  # lowered; nobody is disturbed
    assert grown(job("c", 4, **A), a=4) == ["Admit c", "Wait c", "Resize b 1x4 NODE_JOINED"]
    shared = Limits(queues={"default": {"CPU": 6}})
    assert summary(decide(jobs, nodes(12, free=[8]), gangs, RIPE, limits=shared)) == ["Resize a 1x4 NODE_JOINED"]
    # Room that is kept until a gang's turn comes is kept in the quota, too.
    assert summary(decide(jobs, nodes(12, free=[8]), gangs, {"b": 5.0}, limits=shared)) == ["CapacityObserved a"]


def test_limits_that_a_user_raises_and_layouts_that_nodes_force_stay_within_quotas() -> None:
    raised = running("a", 3, up_to=8, **A)
    assert summary(decide([raised], nodes(8, free=[7]), {"a": trains(1)}, limits=tenants(a=2))) == []
    assert summary(decide([raised], nodes(8, free=[7]), {"a": trains(1)}, limits=tenants(a=4))) == [
        "Resize a 1x4 LIMITS_CHANGED"
    ]
    pulled_apart = running("a", 1, tensor=4, up_to=8, layouts=[[4, 1], [2, 1]], **A)
    smaller = decide([pulled_apart], nodes(2, 2, 2, 2, free=[0] * 4), {"a": trains(1, 4)}, limits=tenants(a=4))
    assert summary(smaller) == ["Resize a 2x2 NODE_LOST"]


@pytest.mark.parametrize(
    ("gangs", "jobs", "expected"),
    [
        # Only as far as needed; who shrinks comes before who pauses; others' gangs are left alone.
        ({"a": trains(4)}, [running("a", 1, up_to=4, **A)], ["Resize a 1x3 PREEMPTED"]),
        ({"a": trains(4)}, [running("a", 4, **A)], ["Pause a"]),
        ({"a": trains(4), "b": trains(4)}, [running("a", 4, **A), running("b", 1, up_to=4, **B)], ["Pause a"]),
        (
            {"a": trains(2), "b": trains(2)}, [running("a", 2, **A), running("b", 1, up_to=4, **A)],
            ["Resize b 1x1 PREEMPTED"],
        ),
        # Not those of the same priority, and nobody where it is to no avail.
        ({"a": trains(4)}, [running("a", 1, up_to=4, priority=5, **A)], []),
        ({"a": trains(4), "b": trains(1)}, [running("a", 4, priority=5, **A), running("b", 1, **A)], []),
        # Nor again while room is being made.
        ({"a": trains(4, target=Layout(1, 1, 3))}, [running("a", 1, up_to=4, **A)], []),
        ({"a": trains(4, target=None)}, [running("a", 4, **A)], []),
    ],
)  # fmt: skip
def test_a_higher_priority_gets_room_in_its_quota(gangs, jobs, expected) -> None:
    *actions, wait = decide(
        [*jobs, job("z", 2, *WAITING, priority=5, **A)], nodes(20, free=[12]), gangs, limits=tenants(a=5)
    )
    assert isinstance(wait, Wait)
    assert summary(actions) == expected


def test_the_quota_of_a_gang_that_waits_for_workers_is_its_own() -> None:
    lost = {"a": Gang(None, Layout(1, 1, 4), waiting=True)}
    jobs = [running("a", 4, node_labels={"zone": "z"}, **A), job("b", 1, **A)]
    assert summary(decide(jobs, nodes(4), lost, limits=tenants(a=4))) == ["Admit b", "Wait b"]
    assert summary(decide(jobs, nodes(4), lost, limits=tenants(a=5))) == ["Admit b", "Launch b 1x1"]


def test_of_equals_who_is_in_the_queue_for_longest_comes_first() -> None:
    again = job("a", 2).model_copy(update={"queued_at": SOME_DAY + timedelta(seconds=1)})
    assert summary(decide([again, job("b", 2)], nodes(3))) == ["Admit b", "Launch b 1x2", "Admit a", "Wait a"]
    first = job("c", 2).model_copy(update={"queued_at": SOME_DAY - timedelta(seconds=1)})
    assert summary(decide([job("b", 3), first], nodes(3)))[:2] == ["Admit c", "Launch c 1x2"]


@pytest.mark.parametrize(
    ("jobs", "limits", "message"),
    [
        ([running("job-j", 6, **A), job("job-k", 4, **A)], tenants(a=8),
         "needs 4 CPU; tenant a may hold 8 and holds 6"),
        ([running("job-j", 6, **A), job("job-k", 4, **A)], Limits(queues={"default": {"CPU": 8}}),
         "needs 4 CPU; queue default may hold 8 and holds 6"),
        ([running("job-j", 6, **A), job("job-k", 4, **A), job("job-l", 1, **A)], tenants(a=8),
         "needs 1 CPU; tenant a may hold 8 and holds 6; behind job-k"),
        ([running("job-j", 6, **A), *(job(f"job-k{number}", 4, **A) for number in range(5))], tenants(a=8),
         "needs 4 CPU; tenant a may hold 8 and holds 6; behind job-k0 and 3 more"),
        ([job("job-k", 9, **A)], tenants(a=8.5), "needs 9 CPU; tenant a may hold 8.5; waits for a higher quota"),
        ([job("job-k", 2, gpus=1, **A)], Limits(tenants={"a": {"GPU": 1}}),
         "needs 2 GPU; tenant a may hold 1; waits for a higher quota"),
        ([running("job-j", 6), job("job-k", 7, **A), job("job-l", 2, **A)], tenants(a=8),
         "needs 2 CPU; tenant a may hold 8 and holds 0, 7 kept for job-k"),
    ],
)  # fmt: skip
def test_messages_say_what_a_job_waits_for(jobs, limits: Limits, message: str) -> None:
    *_, (_, said) = messages(decide(jobs, nodes(12, gpus=4), limits=limits))
    assert said == message


def test_who_makes_room_is_said() -> None:
    jobs = [running("a", 4, **A), job("z", 2, *WAITING, priority=5, **A)]
    *_, wait = decide(jobs, nodes(20, free=[16]), {"a": trains(4)}, limits=tenants(a=5))
    assert wait.message == "needs 2 CPU; tenant a may hold 5 and holds 4; a makes room"


def test_jobs_that_stay_in_the_queue_are_explained_and_others_are_told_by_their_state() -> None:
    jobs = [running("j", 2), job("k", 2), job("l", 2), job("m", 2, JobState.SCHEDULING, Reason.WAITING_FOR_RESOURCES)]
    said = summary(decide(jobs, nodes(2, free=[0])))
    assert said == ["Admit k", "Wait k", "Explain l", "Wait m"]


def test_a_gang_that_waits_for_workers_gives_up_its_part_of_a_quota_for_a_higher_priority() -> None:
    lost = {"low": Gang(None, Layout(1, 1, 4), waiting=True)}  # there are no nodes for it
    high, low = job("high", 2, priority=1, **A), running("low", 4, tenant="a", node_labels={"zone": "y"})
    assert summary(decide([high, low], nodes(4), lost, limits=tenants(a=4))) == ["Admit high", "Pause low", "Wait high"]
    given = {"low": Gang(None, None, waiting=True)}
    assert summary(decide([high, low], nodes(4), given, limits=tenants(a=4))) == ["Admit high", "Launch high 1x2"]
    same = job("high", 2, **A)
    assert "Pause low" not in summary(decide([same, low], nodes(4), lost, limits=tenants(a=4)))
    assert summary(decide([high, low], nodes(4), lost, limits=tenants(a=6))) == ["Admit high", "Launch high 1x2"]
