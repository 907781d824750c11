"""A gang's life on plain values: what its controller decides about what happens to it."""

import gc
import tracemalloc
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause, Drill, Fault, InterruptionReport, LogLine, Profile, Steer
from service.gang.assignment import End, RankEnd
from service.gang.control import port
from service.gang.control.controller import (
    MOST_FAILED_STARTS,
    SAVE_AGAIN_SECONDS,
    SECONDS_TO_SEND_AGAIN,
    SILENT_SECONDS,
    STOP_SECONDS,
    GangController,
)
from service.gang.control.controller import START_SECONDS as STARTING_SECONDS
from service.gang.control.record import GangRecord
from service.gang.status import GangPhase, Orders
from tests.benchmarks.observations import Trained
from tests.jobs import tiny_job
from tests.unit.fake_gang import LOST_CONNECTION, START_SECONDS, FakeGang

HALTED, STORED, FINISHED = RankEnd(End.HALTED), RankEnd(End.STORED), RankEnd(End.FINISHED)
PAUSE = Orders(None, (), Cause.PAUSED)


def job(**changes: Any) -> JobSpec:
    sections: dict[str, Any] = {
        "training": {"steps": 100, "global_batch_size": 12, "evaluate_every_steps": 100},
        "elasticity": {"data_parallel_size": {"min": 1, "max": 3}},
        "fault_tolerance": {"memory_copy_every_steps": 1, "hang_seconds": 10, "hang_factor": 10, "max_restarts": 2},
    }
    return tiny_job("corpus", "checkpoints", **sections | changes)  # type: ignore[arg-type]


def layout(data: int) -> Layout:
    return Layout(2, 1, data)


def orders(data: int) -> Orders:
    return Orders(layout(data), tuple(layout(each) for each in range(1, data + 1)), Cause.LIMITS_CHANGED)


def a_gang(data: int = 2, nodes: str = "ab", **changes: Any) -> FakeGang:
    """One that has done three steps."""
    gang = FakeGang(job(**changes), orders(data), nodes)
    gang.wait(START_SECONDS + 1)
    gang.train(3)
    return gang


def formed(gang: FakeGang) -> list[tuple[str, int | None]]:
    """The nodes of each generation's ranks, and the step that it went on from in memory."""
    nodes = [each.nodes for each in (report.report for report in gang.record.status(0).reports) if each.kind == "shape"]
    starts = [start.recovery and start.recovery.step for start in gang.of(port.StartTraining)]
    return [("".join(each), step) for each, step in zip(nodes, starts, strict=True)]


def finish(gang: FakeGang) -> port.Finish:
    (end,) = gang.of(port.Finish)
    return end


def test_a_job_is_trained_to_its_last_step() -> None:
    gang = a_gang()
    assert [type(decision).__name__ for decision in gang.decisions] == [
        "StartReplica", "StartReplica", "Prepare", "StartTraining",
    ]  # fmt: skip
    assert formed(gang) == [("aabb", None)]
    assert gang.training is not None and gang.training.assignments[0].owner_of == (2, 3, 0, 1), (
        "copies are on the other node"
    )
    gang.end(FINISHED)
    assert finish(gang) == port.Finish(GangPhase.SUCCEEDED, "trained up to step 100")
    assert gang.controller.handle(gang.observed(), gang.events[-1][1]) == [], "it has ended"


def test_ranks_are_told_what_to_recompute() -> None:
    gang = a_gang(parallelism={"tensor_parallel_size": 2, "recompute": "auto"})
    assert gang.training is not None
    of_ranks = [each.spec for each in gang.training.assignments]
    of_replicas = [each.spec for each in gang.of(port.StartReplica)]
    assert {spec.parallelism.recompute for spec in of_ranks + of_replicas} == {"none"}


def test_survivors_of_a_killed_worker_go_on_at_once_and_grow_back() -> None:
    gang = a_gang()
    killed = gang.members[1].number
    gang.lose(1)
    assert gang.of(port.ReplaceWorker) == [port.ReplaceWorker(killed)]
    gang.wait(0.5)
    assert formed(gang)[1:] == [("bb", 3)]
    assert gang.causes == [Cause.WORKER_LOST]
    gang.train(3)
    assert gang.of(port.HaltTraining) == [port.HaltTraining(gang.training.workers, store=False)]
    gang.end(HALTED)
    gang.wait(0.5)
    assert formed(gang)[2:] == [("aabb", 6)]
    assert gang.causes == [Cause.WORKER_LOST, Cause.WORKER_BACK]
    assert len(gang.of(port.StartReplica)) == 2, "its resources stay reserved"


def test_a_lost_node_is_left_for_another_one() -> None:
    gang = a_gang()
    gang.lose_node("a")
    gang.wait(0.5)
    assert gang.causes == [Cause.NODE_LOST]
    assert gang.record.status(0).reports[-2].report.kind == "shape"
    assert gang.of(port.RemoveReplica) == [port.RemoveReplica(1)]
    assert formed(gang)[1:] == [("bb", 3)]
    assert gang.of(port.StartReplica)[-1].selector == {"ray.io/node-id": "!in(a)"}
    gang.nodes.add("c")
    gang.train(4)
    gang.end(HALTED)
    gang.wait(0.5)
    assert formed(gang)[2] == ("bbcc", 7)


def test_nodes_that_were_cut_off_for_a_moment_are_used_again() -> None:
    for nodes in ("a", "ab"):
        gang = a_gang(data=len(nodes), nodes=nodes, training={"steps": 1000, "global_batch_size": 12})
        gang.lose_node("a")
        gang.nodes.add("a")  # the cluster has not noticed
        gang.wait(1)
        assert gang.causes == [Cause.NODE_LOST]
        if nodes == "a":
            gang.wait(310)
            assert formed(gang)[1:] == [("aa", None)], "it does not wait for another node for ever"
        else:
            while not gang.of(port.HaltTraining) and gang.step < 320:
                gang.train()
            gang.end(HALTED)
            gang.wait(1)
            assert formed(gang)[2][0] == "bbaa"


def test_with_all_copies_lost_it_starts_from_the_store() -> None:
    gang = a_gang(data=1, nodes="a")
    gang.lose_node("a")
    gang.nodes.add("b")
    gang.wait(START_SECONDS + 1)
    assert formed(gang) == [("aa", None), ("bb", None)]


@pytest.mark.parametrize("node", [True, False])
def test_state_that_is_lost_while_it_is_loaded_is_looked_for_in_memory_once_more(node: bool) -> None:
    gang = a_gang(fault_tolerance={"memory_copy_every_steps": 1, "hang_seconds": 600, "max_restarts": 9})
    if node:
        gang.lose_node("a")
    else:
        gang.lose(1)
    gang.wait(START_SECONDS + 1)
    for again in (1, 2):
        gang.end(RankEnd(End.STATE_LOST, "worker 1 is gone"))
        prepared = len(gang.of(port.Prepare))
        while len(gang.of(port.Prepare)) == prepared:
            gang.wait(0.5)
        gang.wait(1)
        assert (gang.of(port.Prepare)[-1].owners == ()) == (again == 2)
    assert [step for _, step in formed(gang)[-3:]] == [3, 3, None]


def test_a_hang_leaves_the_stacks_of_all_and_kills_who_does_not_answer() -> None:
    gang = a_gang()
    stuck = gang.members[2]
    stuck.stuck = True
    gang.wait(9)
    assert gang.of(port.DumpStacks) == []
    gang.wait(0.5)
    assert gang.of(port.KillWorkers) == [port.KillWorkers((stuck.number,), stopped=True)]
    logs = [each.report for each in gang.record.status(0).reports if isinstance(each.report, LogLine)]
    assert [log.message for log in logs if log.level == "ERROR"] == [
        "in a step", "in a step", "the process does not answer", "in a step",
    ]  # fmt: skip
    gang.end(None, 2)
    gang.end(LOST_CONNECTION, 0, 1, 3)
    assert gang.of(port.ReplaceWorker) == [port.ReplaceWorker(stuck.number)]
    gang.wait(0.5)
    assert gang.causes == [Cause.HANG]
    assert formed(gang)[1:] == [("aa", 3)]


@pytest.mark.parametrize(("goes_on", "hangs"), [(False, True), (True, False)])
def test_a_line_in_the_log_is_no_progress_and_what_says_that_it_goes_on_is(goes_on: bool, hangs: bool) -> None:
    """A thread that retries to save logs for ever."""
    gang = a_gang()
    for _ in range(10):
        gang.say(LogLine(rank=0, level="WARNING", message="the next try is in 16 s"), going_on="" if goes_on else None)
        gang.wait(2)
    assert bool(gang.of(port.DumpStacks)) == hangs
    assert gang.causes == [Cause.HANG] * hangs


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_worker_is_asked_before_it_is_given_up(answers: bool) -> None:
    gang = a_gang(fault_tolerance={"hang_seconds": 600, "max_restarts": 2})
    silent = gang.members[3]
    silent.stuck = True  # it says nothing
    for _ in range(int(SILENT_SECONDS) - 1):
        gang.say()
        gang.wait(1)
    assert gang.of(port.Probe) == []
    silent.stuck = not answers
    gang.wait(2)
    assert [probe.workers for probe in gang.of(port.Probe)] == [(silent.number,)]
    assert gang.of(port.KillWorkers) == ([] if answers else [port.KillWorkers((silent.number,), stopped=True)])
    assert gang.causes == ([] if answers else [Cause.WORKER_LOST])


def test_a_rank_that_does_not_stop_is_replaced() -> None:
    gang = a_gang()
    straggler = gang.members[3].number
    gang.end(RankEnd(End.FAILED, "disk"), 0)
    gang.end(LOST_CONNECTION, 1, 2)
    assert gang.of(port.AbortTraining) == [port.AbortTraining(gang.training.workers[1:])]
    gang.wait(STOP_SECONDS - 0.5)
    assert gang.of(port.ReplaceWorker) == []
    gang.wait(0.5)
    assert gang.of(port.ReplaceWorker) == [port.ReplaceWorker(straggler)]
    assert gang.causes == [Cause.ERROR]
    assert gang.record.status_text[1] == "rank 0: disk"


def test_a_node_that_goes_without_a_word_is_no_fault_of_the_job() -> None:
    gang = a_gang()
    gang.nodes.remove("a")
    for worker in gang.members[:2]:
        worker.alive = False
    gang.end(LOST_CONNECTION, 2, 3)  # of those on it nothing is heard, not even that they have ended
    gang.wait(STOP_SECONDS + 1)
    assert gang.causes == [Cause.NODE_LOST]
    assert formed(gang)[1:] == [("bb", 3)]


@pytest.mark.parametrize("end", [RankEnd(End.FAILED, "no memory for a copy"), LOST_CONNECTION])
def test_who_fails_at_a_halt_is_the_reason_and_not_who_has_halted(end: RankEnd) -> None:
    gang = a_gang()
    gang.tell(orders(1))
    gang.end(HALTED, 0, 1, 2)
    gang.end(end, 3)
    reports = [each.report for each in gang.record.status(0).reports]
    (why,) = [report.message for report in reports if isinstance(report, InterruptionReport)]
    assert why == f"rank 3: {end.message}"


@pytest.mark.parametrize("how", [End.FAILED, End.LASTING])
def test_the_error_of_a_rank_is_the_reason_though_it_takes_long_to_end(how: End) -> None:
    """The others wait for it in a collective: without a word from it they would be taken for hanging."""
    gang = a_gang()
    gang.fail(1, RankEnd(how, "out of memory"))
    assert gang.of(port.AbortTraining) == [port.AbortTraining(gang.training.workers)]
    failed_at = gang.now
    gang.end(LOST_CONNECTION, 0, 2, 3)
    gang.wait(STOP_SECONDS)
    assert gang.now == failed_at + STOP_SECONDS
    if how is End.LASTING:
        assert finish(gang) == port.Finish(GangPhase.FAILED, "out of memory")
    else:
        assert gang.causes == [Cause.ERROR]
        assert gang.record.status_text[1] == "rank 1: out of memory"
    assert gang.of(port.DumpStacks) == []


def test_the_error_of_a_rank_is_the_reason_though_its_process_goes_with_it() -> None:
    gang = a_gang()
    gang.fail(1, RankEnd(End.FAILED, "out of memory"))
    gang.lose(1)
    assert gang.causes == [Cause.ERROR]
    assert gang.record.status_text[1] == "rank 1: out of memory"


def test_a_process_whose_gpu_failed_is_replaced_and_a_node_where_it_fails_again_is_avoided() -> None:
    gang = a_gang(nodes="abc")
    for node, times in (("a", 1), ("a", 2)):
        rank = next(rank for rank, worker in enumerate(gang.members) if worker.node == node)
        broken, survivors = gang.members[rank].number, [each for each in range(4) if each != rank]
        end = RankEnd(End.DEVICE, "CUDA error: uncorrectable ECC error encountered", reusable=False)
        gang.fail(rank, end)
        gang.end(end, rank)
        gang.end(LOST_CONNECTION, *survivors)
        faults = [each.report for each in gang.record.status(0).reports if each.report.kind == "fault"]
        assert [fault.what for fault in faults] == [Fault.DEVICE] * times
        if times == 1:
            assert gang.of(port.ReplaceWorker) == [port.ReplaceWorker(broken)]
            assert faults[0].message == "GPU none of host a failed: CUDA error: uncorrectable ECC error encountered"
        gang.wait(START_SECONDS + 1)
        gang.train(3)
        if gang.of(port.HaltTraining):  # it grows back
            gang.end(HALTED)
            gang.wait(0.5)
            gang.train(3)
    assert "2 gangs have ended like this there, so node a is avoided for 60 s" in faults[1].message
    assert [nodes for nodes, _ in formed(gang)][-1] == "bbcc"


def test_an_order_to_shrink_and_to_grow_loses_no_step() -> None:
    gang = a_gang()
    gang.tell(orders(1))
    gang.wait(0.5)
    assert gang.of(port.HaltTraining) == [port.HaltTraining(gang.training.workers, store=False)]
    gang.wait(2)
    assert len(gang.of(port.HaltTraining)) == 1, "it is told once"
    gang.end(HALTED)
    gang.wait(1)
    assert formed(gang)[1:] == [("aa", 3)]
    assert gang.of(port.RemoveReplica) == [port.RemoveReplica(2)], "once the gang has its state"
    gang.tell(orders(2))
    gang.train(4)
    gang.end(HALTED)
    gang.wait(0.5)
    assert formed(gang)[2:] == [("aabb", 7)]
    assert gang.causes == [Cause.LIMITS_CHANGED, Cause.LIMITS_CHANGED]


def test_a_pause_goes_through_the_store() -> None:
    gang = a_gang()
    gang.tell(PAUSE)
    gang.wait(0.5)
    assert gang.of(port.HaltTraining) == [port.HaltTraining(gang.training.workers, store=True)]
    gang.end(STORED)
    gang.wait(0.5)
    assert finish(gang) == port.Finish(GangPhase.PAUSED, "paused after step 3")


def test_a_pause_that_the_store_refuses_is_tried_again_later() -> None:
    gang = a_gang()
    gang.tell(PAUSE)
    gang.wait(0.5)
    gang.end(HALTED)
    gang.wait(0.5)
    assert formed(gang)[1:] == [("aabb", 3)]
    for _ in range(int(SAVE_AGAIN_SECONDS) - 1):
        gang.train()
    assert len(gang.of(port.HaltTraining)) == 1
    gang.train(2)
    assert len(gang.of(port.HaltTraining)) == 2
    gang.end(STORED)
    gang.wait(0.5)
    assert finish(gang).phase is GangPhase.PAUSED


@pytest.mark.parametrize("in_time", [True, False])
def test_a_pause_waits_for_lost_workers_for_as_long_as_they_may_take_to_start(in_time: bool) -> None:
    gang = FakeGang(job(), replace(orders(2), allowed=(layout(2),)), "ab")
    gang.wait(START_SECONDS + 1)
    gang.train(3)
    gang.lose_node("b")
    gang.tell(PAUSE)
    gang.wait(STARTING_SECONDS - 10)
    if in_time:
        gang.nodes.add("c")
        gang.wait(START_SECONDS + 1)
        assert formed(gang)[1:] == [("aacc", 3)]
        assert gang.of(port.HaltTraining) == [port.HaltTraining(gang.training.workers, store=True)]
        return
    gang.wait(8)
    assert gang.of(port.Finish) == [], "its state is in memory"
    gang.wait(4)
    assert finish(gang) == port.Finish(GangPhase.PAUSED, "paused after step 3; its steps after 0 will be repeated")


def test_a_node_that_goes_away_is_left_when_another_is_ready() -> None:
    gang = a_gang(data=1)
    gang.leaving["a"] = None
    gang.wait(START_SECONDS)
    assert gang.of(port.HaltTraining) == []
    gang.train(2)
    assert gang.of(port.HaltTraining) == [port.HaltTraining(gang.training.workers, store=False)]
    gang.end(HALTED)
    gang.wait(0.5)
    assert formed(gang)[1:] == [("bb", 5)]
    assert gang.causes == [Cause.NODE_DRAINED]


def test_a_mistake_of_the_job_ends_it_unless_a_worker_was_lost() -> None:
    gang = a_gang()
    gang.end(RankEnd(End.LASTING, "ValueError: no such file"))
    assert finish(gang) == port.Finish(GangPhase.FAILED, "ValueError: no such file")
    gang = a_gang()
    gang.end(None, 1)
    gang.end(RankEnd(End.LASTING, "KeyError: 1"), 0, 2, 3)
    assert gang.causes == [Cause.WORKER_LOST]


def test_too_many_faults_end_the_job() -> None:
    gang = a_gang()
    for fault in range(3):
        gang.lose(0)
        gang.wait(START_SECONDS + 1)
        if fault < 2:
            gang.end(HALTED)
            gang.train(2)
    assert finish(gang).message == (
        "3 faults within 3600 s are more than fault_tolerance.max_restarts = 2 allows; the last one: rank 0 was lost: "
        "its process was killed, crashed, or ran out of memory"
    )


def test_a_fault_that_repeats_at_once_is_waited_for_and_takes_other_processes() -> None:
    gang = a_gang(fault_tolerance={"max_restarts": 4})
    failed = RankEnd(End.FAILED, "PermissionError: Access Denied")

    def fail() -> list[port.StartTraining]:
        gang.end(failed, 0)
        gang.end(LOST_CONNECTION, 1, 2, 3)
        gang.wait(0.5)
        return gang.of(port.StartTraining)

    assert len(fail()) == 2, "after steps it goes on at once"
    assert gang.of(port.ReplaceWorker) == []
    for again, (pause, left) in enumerate([(1, "2 more restarts"), (2, "1 more restart"), (4, "0 more restarts")]):
        first = gang.members[0].number
        assert len(fail()) == again + 2
        assert gang.of(port.ReplaceWorker)[-1] == port.ReplaceWorker(first), "another process"
        assert gang.record.status_text == (
            GangPhase.RECOVERING,
            f"restarts in {pause} s, as it made no progress since the previous fault ({left} allowed): "
            "rank 0: PermissionError: Access Denied",
        )
        gang.wait(pause + START_SECONDS)
        assert len(gang.of(port.StartTraining)) == again + 3
    gang.train(1)  # beyond the fault
    fail()
    assert "5 faults" in finish(gang).message


def test_a_job_can_be_paused_while_its_restart_waits() -> None:
    gang = FakeGang(job(), orders(2), "ab")
    gang.wait(START_SECONDS + 1)
    gang.end(RankEnd(End.FAILED, "NoSuchBucket"), 0)
    gang.end(LOST_CONNECTION, 1, 2, 3)
    gang.wait(0.5)
    assert gang.record.status_text[1].startswith("restarts in 1 s, ")
    gang.tell(PAUSE)
    gang.wait(0.5)
    assert finish(gang).phase is GangPhase.PAUSED


def test_a_worker_lost_while_the_gang_is_formed_is_replaced() -> None:
    gang = a_gang(data=1)
    gang.tell(orders(2))
    gang.train(4)
    first = gang.members[0]
    gang.end(HALTED)
    first.alive = False
    gang.wait(0.5)
    assert gang.of(port.ReplaceWorker) == [port.ReplaceWorker(first.number)]
    assert gang.record.status_text[1] == "a worker was lost while the gang was formed: ActorDiedError"
    gang.wait(0.5)
    assert formed(gang)[-1] == ("bb", 7)


def test_a_node_lost_while_the_gang_is_formed_is_no_fault_of_the_job() -> None:
    gang = a_gang(data=1, fault_tolerance={"memory_copy_every_steps": 1, "max_restarts": 0})
    gang.tell(orders(2))
    gang.train(4)
    gang.end(HALTED)
    gang.nodes.remove(gang.members[0].node)
    for worker in gang.members:
        worker.alive = False
    gang.wait(2)
    assert gang.of(port.Finish) == []
    assert formed(gang)[-1][0] == "bb"


def test_workers_that_end_again_and_again_as_they_start_end_the_job_in_the_end() -> None:
    gang = FakeGang(job(), orders(1), "a")
    gang.fail_starts = True
    gang.wait(MOST_FAILED_STARTS * (START_SECONDS + 1))
    assert len(gang.of(port.ReplaceWorker)) == 2 * (MOST_FAILED_STARTS - 1)
    problem = f"a worker ended {MOST_FAILED_STARTS} times while starting: out of memory"
    assert gang.record.status_text == (
        GangPhase.WAITING, f"waits for 2 × {{CPU: 1}}; node a is avoided for 60 s: {problem}",
    )  # fmt: skip
    assert gang.of(port.Finish) == []
    gang.wait(60 + 120 + 3 * MOST_FAILED_STARTS * (START_SECONDS + 1))
    assert finish(gang).message == problem


def test_a_node_on_which_workers_end_as_they_start_is_left_for_another_one() -> None:
    gang = FakeGang(job(), orders(1), "ab")
    gang.bad_nodes.add("a")
    gang.wait((MOST_FAILED_STARTS + 1) * (START_SECONDS + 1))
    assert gang.of(port.StartReplica)[-1].selector == {"ray.io/node-id": "!in(a)"}
    assert formed(gang) == [("bb", None)]
    gang.train(100)
    assert gang.of(port.Finish) == [], "it trains where it can"


def test_a_node_on_which_workers_hang_as_they_start_is_left_for_another_one() -> None:
    gang = FakeGang(job(), orders(1), "ab")
    gang.start_seconds["a"] = 10_000
    gang.wait(STARTING_SECONDS + START_SECONDS + 3)
    assert gang.record.status_text[0] is GangPhase.TRAINING
    assert formed(gang) == [("bb", None)]
    logs = [each.report.message for each in gang.record.status(0).reports if isinstance(each.report, LogLine)]
    assert "2 workers did not start within 180 s" in logs[0]


def test_a_node_that_the_scheduler_finds_unusable_is_left_while_workers_start() -> None:
    gang = FakeGang(job(), orders(1), "ab")
    gang.wait(START_SECONDS / 2)
    assert gang.of(port.RemoveReplica) == []
    gang.tell(replace(orders(1), unusable=("a",)))
    gang.wait(START_SECONDS + 2)
    assert gang.of(port.RemoveReplica) == [port.RemoveReplica(1)]
    assert formed(gang) == [("bb", None)]
    gang.tell(replace(orders(1), unusable=("b",)))
    gang.train(3)
    assert len(gang.of(port.RemoveReplica)) == 1, "workers that are up can evidently run there"


def waiting_for_the_store() -> FakeGang:
    gang = a_gang(training={"steps": 3, "global_batch_size": 12}, checkpoint={"final_save_timeout_seconds": 200})
    for _ in range(19):
        gang.say(going_on="disk full")
        gang.wait(1)
    assert gang.record.status_text[0] is GangPhase.SAVING
    assert gang.of(port.MeasureMemory) == []
    return gang


def test_who_waits_for_the_store_gives_the_workers_back() -> None:
    gang = waiting_for_the_store()
    gang.say(going_on="disk full")
    gang.wait(3)
    assert [(each.keep_on, each.spec.resources) for each in gang.of(port.StartReplica)[2:]] == [
        (["a", "a"], job().resources), (["b", "b"], job().resources),
    ]  # fmt: skip
    gang.say(going_on="disk full")
    gang.wait(START_SECONDS)
    gang.end(HALTED)
    gang.wait(1)
    assert formed(gang)[1:] == [("aabb", 3)]
    assert gang.of(port.RemoveReplica) == [port.RemoveReplica(1), port.RemoveReplica(2)]
    assert gang.causes == [Cause.WAITING_FOR_STORE]
    assert gang.training.assignments[0].waited_seconds > 20


def test_it_keeps_its_workers_if_their_nodes_have_no_memory_for_others() -> None:
    gang = waiting_for_the_store()
    gang.free_memory = 1
    for _ in range(30):
        gang.say(going_on="disk full")
        gang.wait(1)
    assert len(gang.of(port.MeasureMemory)) == 1, "and asks for it now and then"
    assert len(gang.of(port.StartReplica)) == 2


def test_drills_and_profiles_reach_their_ranks() -> None:
    gang = a_gang()
    full, slow = Drill(kind="fill_store", rank=3, seconds=1), Drill(kind="delay_rank", rank=1, steps=1, seconds=1)
    profile, absent = Profile(ranks=(2, 0), steps=3), Drill(kind="kill_rank", rank=9)
    for command in (full, slow, profile, absent):
        gang.tell(command)
    gang.wait(0.5)
    sent = {(command.worker, command.command.kind) for command in gang.of(port.SendCommand)}
    zero, one, two, _ = gang.training.workers
    assert sent == {(zero, "fill_store"), (one, "delay_rank"), (two, "profile"), (zero, "profile")}
    assert (
        gang.record.status(0).reports[-1].report.message
        == "kill_rank skipped: rank 9 is gone; the gang has 4 ranks now"
    )


def test_changes_of_values_reach_all_ranks_once_and_the_gangs_after() -> None:
    gang = FakeGang(job(), orders(2), "ab")
    now, wanted = datetime(2026, 1, 31, tzinfo=UTC), job(optimizer={"learning_rate": 0.5}).steering
    first, second = (Steer(number=number, by="alice", requested_at=now, steering=wanted) for number in (1, 2))
    gang.tell(replace(orders(2), steers=(first,)))
    gang.wait(START_SECONDS + 1)
    gang.train(3)
    assert [each.steers for each in gang.training.assignments] == [(first,)] * 4
    assert gang.of(port.SendCommand) == []
    gang.tell(replace(orders(2), steers=(first, second)))
    gang.wait(1)
    gang.tell(replace(orders(2), steers=(first, second)))
    gang.wait(1)
    assert gang.of(port.SendCommand) == [port.SendCommand(worker, second) for worker in gang.training.workers]
    gang.say(first.made(job(), 3)[1])
    gang.train(1)
    gang.lose(1)
    gang.wait(0.5)
    assignment = gang.training.assignments[0]
    assert assignment.spec.optimizer.learning_rate == 0.5
    assert assignment.spec.at_step(3).optimizer.learning_rate == 0.01
    assert assignment.steers == (first, second)
    gang.tell(orders(2))
    gang.wait(1)
    assert len(gang.of(port.SendCommand)) == 4


def test_a_change_of_values_that_a_rank_may_not_have_got_is_sent_again() -> None:
    gang = FakeGang(job(), orders(2), "ab")
    gang.wait(START_SECONDS + 1)
    gang.train(3)
    now, wanted = datetime(2026, 1, 31, tzinfo=UTC), job(optimizer={"learning_rate": 0.5}).steering
    steer = Steer(number=1, by="alice", requested_at=now, steering=wanted)
    gang.tell(replace(orders(2), steers=(steer,)))
    gang.wait(1)
    gang.train(round(SECONDS_TO_SEND_AGAIN))
    assert gang.of(port.SendCommand) == 2 * [port.SendCommand(worker, steer) for worker in gang.training.workers]
    gang.say(steer.made(job(), gang.step)[1])
    gang.train(round(2 * SECONDS_TO_SEND_AGAIN))
    assert len(gang.of(port.SendCommand)) == 8


def test_a_drill_for_a_later_step_is_not_lost_with_the_gang() -> None:
    gang = a_gang()
    drill, absent = (Drill(kind="kill_rank", rank=rank, at_step=5) for rank in (1, 2))
    gang.tell(drill)
    gang.tell(absent)
    gang.lose_node("b")
    gang.wait(1)
    gang.train(1)
    assert gang.of(port.SendCommand) == []
    gang.train(2)
    assert gang.of(port.SendCommand) == [port.SendCommand(gang.training.workers[1], drill)]
    logs = [each.report.message for each in gang.record.status(0).reports if isinstance(each.report, LogLine)]
    assert "kill_rank skipped: rank 2 is gone; the gang has 2 ranks now" in logs


def test_a_node_dropped_by_a_drill_is_gone_for_a_while() -> None:
    gang = a_gang()
    gang.tell(Drill(kind="drop_node", rank=0, at_step=5, seconds=20))
    gang.train(1)
    assert gang.of(port.KillWorkers) == []
    gang.train(1)
    assert gang.of(port.KillWorkers) == [port.KillWorkers(gang.training.workers[:2])]
    gang.lose(0, 1)
    gang.wait(0.5)
    assert gang.causes == [Cause.NODE_LOST]
    assert gang.of(port.RemoveReplica) == [port.RemoveReplica(1)]
    assert gang.of(port.StartReplica)[-1].selector == {"ray.io/node-id": "!in(a)"}


def test_workers_come_from_near_nodes_until_they_need_not() -> None:
    near = replace(orders(3), near=(("rack", "1"),))
    gang = FakeGang(job(), near, "ab")  # no node is there for the third replica
    gang.wait(START_SECONDS + 1)
    assert [each.selector for each in gang.of(port.StartReplica)] == [{"rack": "1"}] * 3
    gang.tell(orders(3))
    gang.wait(1.0)
    assert gang.of(port.RemoveReplica) == [port.RemoveReplica(3)], "the others stay where they are"
    assert [each.selector for each in gang.of(port.StartReplica)[3:]] == [{}]


def test_nothing_is_decided_before_a_question_is_answered() -> None:
    gang = FakeGang(job(), orders(2), "ab")
    gang.wait(START_SECONDS)
    _, moment = gang.events[-1]
    gang.now += 1
    (asked,) = gang.controller.handle(gang.observed(), replace(moment, seconds=gang.now))
    assert isinstance(asked, port.Prepare)
    for _ in range(3):
        gang.now += 1
        assert gang.controller.handle(gang.observed(), replace(moment, seconds=gang.now)) == []


def test_what_a_gang_decides_follows_from_its_events_alone() -> None:
    gang = a_gang()
    gang.lose_node("b")
    gang.nodes.add("c")
    gang.wait(0.5)
    gang.train(4)
    gang.end(HALTED)
    gang.wait(1)
    gang.train(3)
    gang.lose(2)
    gang.tell(PAUSE)
    gang.wait(2)
    gang.end(STORED)
    gang.wait(1)
    again = GangController(job(), orders(2), GangRecord(gang.events[0][1]))
    assert [decision for event, moment in gang.events for decision in again.handle(event, moment)] == gang.decisions
    assert finish(gang).phase is GangPhase.PAUSED


@pytest.mark.full
def test_a_gang_of_many_replicas_takes_no_more_than_2_kib_a_rank() -> None:
    Trained(8, 1)  # what is loaded and remembered once
    gc.collect()
    tracemalloc.start()
    try:
        gang = Trained(256, 1)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 256 * 2048, gang
