"""The scheduler's decisions, as tables."""

import pytest

from boost_core.config import Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.messages import Cause
from service.gang.status import NodeCapacity, Orders
from service.jobs.states import JobState, Reason
from service.models.cluster import StoredProfile
from service.scheduler.cluster_snapshot import Explain, Gang, ResizePolicy, Wait
from service.scheduler.decisions import decide
from service.scheduler.demand import Demand
from tests.scheduling import LONG, STARTING, WAITING, job, messages, nodes, running, summary, trains
from tests.service.records import PROFILE


@pytest.mark.parametrize(
    ("jobs", "capacities", "expected"),
    [
        ([], nodes(2), []),
        ([job("a", 2)], nodes(2), ["Admit a", "Launch a 1x2"]),
        ([job("a", 1), job("b", 1)], nodes(2), ["Admit a", "Launch a 1x1", "Admit b", "Launch b 1x1"]),
        # The head waits for others and holds back those behind it, even one that would fit.
        ([running("a", 1), job("b", 2), job("c", 1)], nodes(2, free=[1]), ["Admit b", "Wait b", "Explain c"]),
        ([running("a", 1), job("b", 2), job("c", 1, *WAITING)], nodes(2, free=[1]), ["Admit b", "Wait b", "Wait c"]),
        # A job that can never fit does not.
        ([job("a", 3), job("b", 2)], nodes(2), ["Admit a", "Wait a", "Admit b", "Launch b 1x2"]),
        # A worker must fit whole on one node; so must a tensor parallel group, and a replica if asked for.
        ([job("a", 1, cpus=3)], nodes(2, 2), ["Admit a", "Wait a"]),
        ([job("a", 3, cpus=2)], nodes(3, 5), ["Admit a", "Launch a 1x3"]),
        ([job("a", 4, cpus=2)], nodes(3, 5), ["Admit a", "Wait a"]),
        ([job("a", 2, tensor=2)], nodes(3, 3), ["Admit a", "Launch a 2x2"]),
        ([job("a", 1, tensor=4)], nodes(3, 3), ["Admit a", "Wait a"]),
        ([job("a", 1, tensor=4), job("b", 2)], nodes(3, 1), ["Admit a", "Wait a", "Admit b", "Launch b 1x2"]),
        # Ray's numbers lag: a gang just launched still shows as free.
        ([job("a", 2, *STARTING), job("b", 1)], nodes(2), ["Admit b", "Wait b"]),
        # What others hold on a shared cluster is not free either.
        ([job("a", 2)], nodes(2, free=[1]), ["Admit a", "Wait a"]),
        # One that waits is not admitted again.
        ([job("a", 2, *WAITING)], nodes(2), ["Launch a 1x2"]),
        ([job("a", 1, gpus=1)], nodes(2), ["Admit a", "Wait a"]),
        ([job("a", 1)], [], ["Admit a", "Wait a"]),
        ([job("a", 8, cpus=0.1)], nodes(0.8), ["Admit a", "Launch a 1x8"]),
        # A higher priority comes first, and of equals who came first.
        (
            [job("a", 1), job("b", 1, priority=1), job("c", 1, priority=1)], nodes(2),
            ["Admit b", "Launch b 1x1", "Admit c", "Launch c 1x1", "Admit a", "Wait a"],
        ),
        # What is paused, or is to be, is no concern.
        ([job("a", 1).model_copy(update={"pause_requested": True})], nodes(2), []),
        ([job("a", 1, JobState.PAUSED, Reason.PAUSED_BY_USER)], nodes(2), []),
        # The best of its layouts that fits now.
        ([job("a", 1, up_to=4)], nodes(2, 1), ["Admit a", "Launch a 1x3"]),
        ([job("a", 1, tensor=2, up_to=4)], nodes(3, 3), ["Admit a", "Launch a 2x2"]),
        ([job("a", 2, up_to=4), job("b", 1)], nodes(5), ["Admit a", "Launch a 1x4", "Admit b", "Launch b 1x1"]),
        ([job("a", 2, up_to=4)], nodes(1), ["Admit a", "Wait a"]),
        ([job("a", 1, tensor=2, layouts=[[2, 1], [1, 1]], up_to=1)], nodes(1, 1), ["Admit a", "Launch a 1x1"]),
        # Nothing new comes to a node that drains.
        ([job("a", 1)], nodes(2, draining=True), ["Admit a", "Wait a"]),
        ([job("a", 1)], nodes(2, unusable="has no torch"), ["Admit a", "Wait a"]),
    ],
)  # fmt: skip
def test_the_queue(jobs, capacities, expected) -> None:
    assert summary(decide(jobs, capacities)) == expected


def labelled(name: str, cpus: float, **labels: str) -> NodeCapacity:
    return NodeCapacity(name, {"CPU": cpus, "GPU": 4}, {"CPU": cpus, "GPU": 4}, labels)


H100, L4 = labelled("h", 4, **{ACCELERATOR_LABEL: "H100"}), labelled("l", 4, **{ACCELERATOR_LABEL: "L4"}, zone="b")


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([job("a", 4, accelerator_type="H100")], ["Admit a", "Launch a 1x4"]),
        ([job("a", 5, accelerator_type="H100")], ["Admit a", "Wait a"]),
        ([job("a", 4, accelerator_type="H100", node_labels={"zone": "b"})], ["Admit a", "Wait a"]),
        ([job("a", 1, accelerator_type="A100")], ["Admit a", "Wait a"]),
        # Only those are held back that could use the same nodes.
        (
            [running("a", 2, accelerator_type="H100"), job("b", 4, accelerator_type="H100"), job("c", 6),
             job("d", 4, node_labels={"zone": "b"})],
            ["Admit b", "Wait b", "Explain c", "Admit d", "Launch d 1x4"],
        ),
        # A gang just started takes room of its own kind of node only, though Ray does not show it yet.
        (
            [job("a", 4, *STARTING, accelerator_type="L4"), job("b", 4, accelerator_type="H100"),
             job("c", 1, accelerator_type="L4")],
            ["Admit b", "Launch b 1x4", "Admit c", "Wait c"],
        ),
        ([job("a", 4, *STARTING, accelerator_type="L4"), job("b", 5)], ["Admit b", "Wait b"]),
    ],
)  # fmt: skip
def test_labels(jobs, expected) -> None:
    assert summary(decide(jobs, [H100, L4])) == expected


@pytest.mark.parametrize(
    ("gangs", "jobs", "capacities", "expected"),
    [
        # Only as far as needed, the lowest priority first, and of equals the newest.
        ({"a": trains(4)}, [running("a", 1, up_to=4)], [0, 2], ["Resize a 1x3 PREEMPTED"]),
        (
            {"a": trains(2), "b": trains(2)}, [running("a", 1, up_to=4), running("b", 1, up_to=4)],
            [0, 2], ["Resize b 1x1 PREEMPTED"],
        ),
        (
            {"a": trains(2), "b": trains(2)}, [running("a", 1, up_to=4, priority=-1), running("b", 1, up_to=4)],
            [0, 2], ["Resize a 1x1 PREEMPTED"],
        ),
        (
            {"a": trains(3), "b": trains(2)}, [running("a", 1, up_to=4), running("b", 1, up_to=4)],
            [0, 1], ["Resize b 1x1 PREEMPTED", "Resize a 1x2 PREEMPTED"],
        ),
        # Never below the smallest; what is missing then is paused, and others need not shrink as far.
        (
            {"a": trains(2), "b": trains(3)}, [running("a", 2), running("b", 2, up_to=4)],
            [0, 0], ["Pause b"],
        ),
        (
            {"a": trains(3), "b": trains(3)}, [running("a", 2, up_to=4), running("b", 2, up_to=4)],
            [0, 0], ["Pause b"],
        ),
        (
            {"a": trains(4), "b": trains(1)}, [running("a", 3, up_to=4), running("b", 1)],
            [0, 0], ["Pause b", "Resize a 1x3 PREEMPTED"],
        ),
        # Not those of the same priority, and nobody where it is to no avail.
        ({"a": trains(4)}, [running("a", 1, up_to=4, priority=5)], [0, 2], []),
        (
            {"a": trains(4), "b": trains(2)}, [running("a", 4, priority=5), running("b", 1, up_to=2)],
            [0, 0], [],
        ),
        # Nor again while room is being made.
        ({"a": trains(4, target=Layout(1, 1, 3))}, [running("a", 1, up_to=4)], [0, 2], []),
        ({"a": trains(4, target=None)}, [running("a", 4)], [0, 2], []),
        ({"a": trains(2, target=None), "b": trains(4)}, [running("a", 2), running("b", 1, up_to=4)],
         [0, 0], ["Resize b 1x3 PREEMPTED"]),
        # A gang that starts is left alone.
        ({"a": Gang(None, Layout(1, 1, 4))}, [job("a", 1, *STARTING, up_to=4)], [0, 2], []),
    ],
)  # fmt: skip
def test_a_higher_priority_gets_room(gangs, jobs, capacities, expected) -> None:
    capacities = nodes(3, 3, free=capacities)
    *actions, wait = decide([*jobs, job("z", 3, *WAITING, priority=5)], capacities, gangs)
    assert isinstance(wait, Wait)
    assert summary(actions) == expected


def test_a_waiting_gang_of_higher_priority_gets_room_after_a_while() -> None:
    jobs = [running("a", 1, up_to=4), running("z", 2, priority=5)]
    for seconds, expected in ((1, []), (LONG, ["Resize a 1x1 PREEMPTED"])):
        lost = Gang(None, Layout(1, 1, 2), waiting=True, unchanged_seconds=seconds)
        assert summary(decide(jobs, nodes(3, free=[0]), {"a": trains(3), "z": lost})) == expected


def test_scattered_room_is_waited_for_and_then_cleared_gang_by_gang() -> None:
    jobs = [running("a", 1), running("b", 1, up_to=4), job("z", 1, *WAITING, tensor=4, priority=5)]
    capacities, gangs = nodes(4, 4, free=[2, 2]), {"a": trains(1), "b": trains(3)}
    assert summary(decide(jobs, capacities, gangs)) == ["CapacityObserved z", "Wait z"]
    later = decide(jobs, capacities, gangs, {"z": 5.0})
    assert summary(later) == ["CapacityObserved z", "Resize b 1x1 PREEMPTED", "Wait z"]
    assert later[-1].message == (
        "needs 4 × {CPU: 1} in groups of 4; 4 of 8 CPU free: tp 4 needs 4 workers on one node; the largest has 2; "
        "b makes room"
    )
    small = {"a": trains(1), "b": trains(1)}
    assert summary(decide(jobs, nodes(4, 4, free=[3, 3]), small, {"z": 5.0})) == [
        "CapacityObserved z",
        "Pause b",
        "Wait z",
    ]


def test_what_others_hold_on_a_shared_cluster_is_made_up_for_after_a_while() -> None:
    jobs, gangs = [running("a", 1, up_to=4), job("z", 2, *WAITING, priority=5)], {"a": trains(4)}
    for free, expected in ((1, ["Resize a 1x3 PREEMPTED"]), (0, ["Resize a 1x2 PREEMPTED"])):
        assert summary(decide(jobs, nodes(7, free=[free]), gangs)) == ["CapacityObserved z", "Wait z"]
        later = summary(decide(jobs, nodes(7, free=[free]), gangs, {"z": 5.0}))
        assert later == ["CapacityObserved z", *expected, "Wait z"]


RIPE = {"a": 5.0}


@pytest.mark.parametrize(
    ("gang", "room_seconds", "expected"),
    [
        (trains(1), {}, ["CapacityObserved a"]),
        (trains(1), {"a": 4.9}, ["CapacityObserved a"]),
        (trains(1), RIPE, ["Resize a 1x4 NODE_JOINED"]),
        (trains(1, unchanged_seconds=29.0), RIPE, ["CapacityObserved a"]),
        (trains(1, unchanged_seconds=29.0, limits_changed=True), {}, ["Resize a 1x4 LIMITS_CHANGED"]),
        # Not while it starts, waits, makes room or has lost workers that may come back.
        (Gang(None, Layout(1, 1, 1)), RIPE, []),
        (trains(2, target=Layout(1, 1, 1)), RIPE, []),
        (trains(1, target=Layout(1, 1, 2)), RIPE, []),
        (trains(2, target=None), RIPE, []),
        (trains(4), RIPE, []),
    ],
)  # fmt: skip
def test_growth(gang: Gang, room_seconds, expected) -> None:
    assert summary(decide([running("a", 1, up_to=4)], nodes(4), {"a": gang}, room_seconds)) == expected


def test_gangs_grow_in_the_order_of_the_queue_and_into_what_nobody_waits_for() -> None:
    gangs, ripe = {"a": trains(1), "b": trains(1)}, {"a": 5.0, "b": 5.0}
    jobs = [running("a", 1, up_to=4), running("b", 1, up_to=4, priority=1)]
    capacities = nodes(5, free=[3])
    assert summary(decide(jobs, capacities, gangs, ripe)) == ["Resize b 1x4 NODE_JOINED"]
    # Though a gang's turn has not come, its room is kept.
    assert summary(decide(jobs, capacities, gangs, {"a": 5.0})) == ["CapacityObserved b"]
    assert summary(decide([*jobs, job("c", 4)], capacities, gangs, ripe)) == ["Admit c", "Wait c"]
    # Who can never be served waits for nothing that is here.
    never = summary(decide([*jobs, job("c", 6)], capacities, gangs, ripe))
    assert never == ["Admit c", "Wait c", "Resize b 1x4 NODE_JOINED"]


def test_growth_keeps_the_layout_unless_another_is_much_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = {Layout(1, 1, 1): 1.0, Layout(1, 1, 2): 0.9, Layout(2, 1, 1): 0.8, Layout(2, 1, 2): 0.5}
    monkeypatch.setattr(Demand, "seconds", lambda _, layout: predicted[layout])
    one = running("a", 1, up_to=2, layouts=[[1, 1], [2, 1]], batches=2)

    def grown(cpus: float) -> list[str]:
        return summary(decide([one], nodes(cpus, free=[cpus - 1]), {"a": trains(1)}, RIPE))

    assert grown(2) == ["Resize a 1x2 NODE_JOINED"]  # 0.9 / 0.8 is no 20 %
    assert grown(5) == ["Resize a 2x2 NODE_JOINED"]
    predicted[Layout(1, 1, 2)] = 0.96
    predicted[Layout(2, 1, 1)] = predicted[Layout(2, 1, 2)] = 0.9
    assert grown(5) == []  # 4 %, and 11 %


@pytest.mark.parametrize(
    ("gang", "one", "capacities", "expected"),
    [
        # Lowered to what the nodes could take; a gang that lost workers otherwise keeps its target.
        (trains(3), running("a", 1, up_to=4), nodes(2, free=[0]), ["Resize a 1x2 NODE_LOST"]),
        (trains(2, target=Layout(1, 1, 3)), running("a", 1, up_to=4), nodes(3, free=[1]), []),
        (trains(2, target=Layout(1, 1, 3)), running("a", 1, up_to=4), nodes(2, free=[0]), ["Resize a 1x2 NODE_LOST"]),
        (trains(1, 4), running("a", 1, tensor=4, up_to=1, layouts=[[4, 1], [2, 1]]), nodes(2, 2, free=[0, 0]),
         ["Resize a 2x1 NODE_LOST"]),
        (trains(3), running("a", 3, up_to=4), nodes(2, free=[0]), []),  # it will wait
        (trains(3), running("a", 1, up_to=4), nodes(2, free=[0]) + nodes(1, free=[0], draining=True),
         ["Resize a 1x2 NODE_DRAINED"]),
        # The job's limits have changed; a gang whose new ones do not fit goes on as it is.
        (trains(4), running("a", 1, up_to=2), nodes(4, free=[0]), ["Resize a 1x2 LIMITS_CHANGED"]),
        (trains(1), running("a", 2, up_to=4), nodes(4, free=[3]), ["Resize a 1x4 LIMITS_CHANGED"]),
        (trains(1), running("a", 2, up_to=4), nodes(2, free=[0]), []),
        (trains(1, 2), running("a", 1, layouts=[[1, 1]], up_to=2), nodes(2, free=[0]),
         ["Resize a 1x2 LIMITS_CHANGED"]),
        (Gang(None, Layout(1, 1, 4), waiting=True), running("a", 1, up_to=2), nodes(4, free=[4]),
         ["Resize a 1x2 LIMITS_CHANGED"]),
        # A gang without workers looks for them by itself.
        (Gang(None, Layout(1, 1, 4), waiting=True), running("a", 1, up_to=4), nodes(4, free=[2]), []),
        (Gang(None, Layout(1, 1, 2), waiting=True), running("a", 1, up_to=4), nodes(4, free=[4]),
         ["Resize a 1x4 NODE_JOINED"]),
        (Gang(None, Layout(1, 1, 4), waiting=True), running("a", 4), nodes(2), []),
        (Gang(None, None, waiting=True), running("a", 4), nodes(4), []),
    ],
)  # fmt: skip
def test_targets_that_cannot_be_kept(gang: Gang, one, capacities, expected) -> None:
    assert summary(decide([one], capacities, {"a": gang})) == expected


def test_nodes_are_lost_under_several_gangs() -> None:
    """The last in the queue gives up its way back first, as far as it takes, and what it trains at never."""
    jobs = [running("a", 1, up_to=4), running("b", 1, up_to=4)]
    four = {"target": Layout(1, 1, 4), "unchanged_seconds": 1.0}
    gangs = {"a": trains(2, **four), "b": trains(1, **four)}
    assert summary(decide(jobs, nodes(7, free=[4]), gangs)) == ["Resize b 1x3 NODE_LOST"]
    assert summary(decide(jobs, nodes(4, free=[1]), gangs)) == ["Resize b 1x1 NODE_LOST", "Resize a 1x3 NODE_LOST"]


def test_a_gang_does_not_wait_for_ever_for_room_that_is_of_no_use() -> None:
    jobs = [running("a", 1, tensor=4, up_to=2), job("b", 2, *WAITING)]
    for seconds, expected in (
        (59.0, ["Wait b"]),
        (60.0, ["Resize a 4x1 NODE_LOST", "Launch b 1x2"]),
    ):
        gangs = {"a": trains(1, 4, target=Layout(4, 1, 2), unchanged_seconds=seconds)}
        assert summary(decide(jobs, nodes(4, 4, free=[0, 2]), gangs)) == expected


def test_of_gangs_that_have_too_few_workers_each_the_last_lets_go() -> None:
    jobs = [running("a", 4), running("b", 4), running("c", 1)]
    stuck = {"a": trains(4, stalled_seconds=LONG), "b": trains(4, stalled_seconds=LONG), "c": trains(1)}
    assert summary(decide(jobs, nodes(5, free=[0]), stuck)) == ["Pause b"]
    assert summary(decide(jobs, nodes(9, free=[0]), stuck)) == []
    assert summary(decide(jobs, nodes(5, free=[0]), stuck | {"a": trains(4)})) == []
    # Nor do two wait for each other that have lost a node before they trained.
    new = {name: Gang(None, Layout(1, 1, 4), stalled_seconds=LONG) for name in "ab"}
    assert summary(decide(jobs, nodes(5, free=[0]), stuck | new)) == ["Pause b"]


def test_a_gang_without_workers_comes_before_who_came_after_it() -> None:
    lost = {"a": Gang(None, Layout(1, 1, 2), waiting=True)}
    jobs = [running("a", 2), job("b", 1)]
    assert summary(decide(jobs, nodes(2), lost)) == ["Admit b", "Wait b"]  # two are for a
    assert summary(decide(jobs, nodes(2, free=[1]), lost)) == ["Explain b"]  # held back, too, until a has its two
    assert summary(decide(jobs, nodes(1), lost)) == ["Admit b", "Launch b 1x1"]  # a is not served by this cluster


def test_orders() -> None:
    spec = running("a", 1, up_to=4, layouts=[[1, 1], [2, 1]]).spec
    three, smaller = Layout(1, 1, 3), (Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 1, 3))
    assert Gang(Layout(1, 1, 1), three, Cause.NODE_JOINED).orders(spec) == Orders(three, smaller, Cause.NODE_JOINED)
    assert Gang(three, three, Cause.NODE_JOINED).orders(spec) == Orders(three, smaller, Cause.WORKER_BACK)
    assert Gang(three, None, Cause.PREEMPTED).orders(spec) == Orders(None, (), Cause.PREEMPTED)


def test_the_policy_is_the_operators() -> None:
    calm = ResizePolicy(cooldown_seconds=2000, settle_seconds=5)
    assert summary(decide([running("a", 1, up_to=4)], nodes(4), {"a": trains(1)}, RIPE, calm)) == ["CapacityObserved a"]


@pytest.mark.parametrize(
    ("jobs", "capacities", "message"),
    [
        ([running("job-a", 1), job("job-b", 2)], nodes(2, free=[1]),
         "needs 2 × {CPU: 1}; 1 of 2 CPU free; behind job-a"),
        ([job("job-a", 4, tensor=2)], nodes(4, 4, free=[3, 3]),
         "needs 8 × {CPU: 1} in groups of 2; 6 of 8 CPU free"),
        ([job("job-a", 2, tensor=2)], nodes(3, 3, free=[3, 1]),
         "needs 4 × {CPU: 1} in groups of 2; 4 of 6 CPU free: "
         "tp 2 × pp 1 × dp 2 needs 4 workers in groups of 2; there is room for 2"),
        ([job("job-c", 8)], nodes(2),
         "needs 8 × {CPU: 1}; the cluster has 2 CPU in all, room for 2; waits for nodes to join"),
        ([job("job-c", 8)], nodes(2) + nodes(9, unusable="has no torch"),
         "needs 8 × {CPU: 1}; the cluster has 2 CPU in all, room for 2; node node-0 is not used: it has no torch; "
         "waits for nodes to join"),
        ([job("job-c", 1, tensor=4)], nodes(2, 2),
         "needs 4 × {CPU: 1} in groups of 4; the cluster has 4 CPU in all, room for 4: "
         "tp 4 needs 4 workers on one node; the largest has 2; waits for nodes to join"),
        ([job("job-d", 1, gpus=1)], nodes(2),
         "needs 1 × {CPU: 1, GPU: 1}; the cluster has 2 CPU, 0 GPU in all, room for 0; waits for nodes to join"),
        ([job("job-d", 1, accelerator_type="H100")], nodes(2),
         "needs 1 × {CPU: 1} H100; the nodes with ray.io/accelerator-type=H100 have 0 CPU in all, room for 0; "
         "waits for nodes to join"),
        ([*(running(f"job-{index}", 1) for index in range(5)), job("job-z", 2)], nodes(6, free=[1]),
         "needs 2 × {CPU: 1}; 1 of 6 CPU free; behind job-0, job-1, job-2 and 2 more"),
        ([running("job-a", 1), job("job-b", 2), job("job-c", 1, *WAITING)], nodes(2, free=[1]),
         "needs 1 × {CPU: 1}; 1 of 2 CPU free; it might delay job-b, which comes before it"),
        ([running("job-a", 1, tenant="lab"), job("job-b", 2)], nodes(2, free=[1]),
         "needs 2 × {CPU: 1}; 1 of 2 CPU free; behind a job of another tenant"),
        ([*(running(f"job-{index}", 1, tenant="lab" if index < 2 else "default") for index in range(6)),
          job("job-z", 2)], nodes(7, free=[1]),
         "needs 2 × {CPU: 1}; 1 of 7 CPU free; behind job-2, job-3, job-4 and 1 more and 2 jobs of other tenants"),
        ([running("job-a", 1), job("job-b", 2, tenant="lab"), job("job-c", 1, *WAITING)], nodes(2, free=[1]),
         "needs 1 × {CPU: 1}; 1 of 2 CPU free; it might delay a job of another tenant, which comes before it"),
    ],
)  # fmt: skip
def test_messages_say_what_a_job_waits_for(jobs, capacities, message: str) -> None:
    *_, wait = decide(jobs, capacities)
    assert wait.message == message


def test_jobs_that_are_alike_are_explained_once_and_each_told_its_place() -> None:
    kinds = [1, 2, 1, 1, 2, 2, 1]
    jobs = [running("a", 1), *(job(f"j{number}", ranks) for number, ranks in enumerate(kinds))]
    actions = decide(jobs, nodes(1, free=[0]), {"a": trains(1)})
    explained = [action for action in actions if isinstance(action, Explain)]
    assert [[entry.job.id for entry in action.entries] for action in explained] == [["j2", "j3", "j6"]]
    ends = {each.id: message.partition("behind ")[2] for each, message in messages(explained)}
    assert ends == {"j2": "j0", "j3": "j0 and 1 more", "j6": "j0 and 2 more"}


def test_a_job_takes_the_layout_that_is_fastest_by_its_profile() -> None:
    """One small enough that a second GPU is worth its exchange only where products are slow."""
    few = job("a", 1, up_to=4, gpus=1, batches=4, accelerator_type="H100")
    measured = PROFILE.model_copy(update={"precision": "fp32"})
    stored = StoredProfile(kind="H100", stored_at=few.submitted_at, stored_by="ops", profile=measured)
    assert summary(decide([few], [H100])) == ["Admit a", "Launch a 1x1"]
    assert summary(decide([few.model_copy(update={"profile": stored})], [H100])) == ["Admit a", "Launch a 1x4"]
