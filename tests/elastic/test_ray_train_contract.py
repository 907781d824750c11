"""What a gang leans on and Ray Train does not promise, on the version that is pinned."""

import hashlib
import inspect
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import ScalingPolicy
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.worker_group import (
    RayTrainWorker,
    WorkerGroup,
    WorkerGroupState,
    WorkerGroupStateBuilder,
)
from ray.train.v2._internal.state.state_actor import get_or_create_state_actor, get_state_actor
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray.util.state import list_actors

from boost_core.messages import LogLine
from service.gang.assignment import ON_THE_HEAD, End, GangContext, Message, RankEnd
from service.gang.control.port import Finish
from service.gang.ray.private_api import node_table
from service.gang.ray.supervisor import Supervisor
from service.gang.ray_train.mirror import (
    GangScalingPolicy,
    GangTrainController,
    GangWorkerGroup,
    KeptGroupState,
    KeptGroupStateBuilder,
    RunState,
    TrainRun,
)
from service.gang.ray_train.rank_worker import BROKEN_UP, CALLS_AT_ONCE, RankFailed, RankWorker
from service.gang.status import GangPhase, JobTag
from service.gang.worker.rank_metrics import SupervisorReporter
from service.logs import LogFormat
from service.security.access import Access
from tests.elastic.ray_cluster import Nodes
from tests.elastic.test_ray_contract import within
from tests.idle_rank import Rank, assigned
from tests.jobs import tiny_job

SOURCES = {  # of what is overridden, and of what calls it
    "TrainController.__init__": "b631a49d50b1",
    "TrainController.run": "356ad0bf0049",
    "TrainController._run_control_loop_iteration": "871d332c670f",
    "TrainController._step": "0a500d496e95",
    "TrainController._execute_resize_decision": "fdf9a7ba6fdf",
    "TrainController._execute_failure_decision": "cf2d9a8012d7",
    "TrainController._get_retry_state": "5c64fa936088",
    "TrainController._shutdown": "a723ff76fbf8",
    "TrainController._shutdown_worker_group": "a66d87e31baf",
    "TrainController._start_worker_group": "4cd5f350d092",
    "TrainController._poll_workers": "eb70de21750e",
    "TrainController._is_training_succeeded": "f03e81734b29",
    "ScalingPolicy.make_decision_for_non_running_worker_group": "d22b2a097ab8",
    "ScalingPolicy.make_decision_for_running_worker_group": "f610a0e66d82",
    "ScalingPolicy._get_num_workers_for_resource_request": "dacb233aa51a",
    "ScalingPolicy.after_controller_start": "be1d56274cca",
    "ScalingPolicy.before_controller_shutdown": "56aa92f6361a",
    "ScalingPolicy.before_controller_abort": "8563ce4ed619",
    "ScalingPolicy._cancel_resource_request": "13df5de73903",
    "WorkerGroup.__init__": "59b52247ec9e",
    "WorkerGroup._start": "3d300069da85",
    "WorkerGroup._start_impl": "1f4c2b9acf4c",
    "WorkerGroup._create_workers": "394f20be2cc3",
    "WorkerGroup._create_placement_group": "40ff9d2169ce",
    "WorkerGroup._init_train_context_on_workers": "ef1e7879cd7c",
    "WorkerGroup.shutdown": "80888b2c096e",
    "WorkerGroup.abort": "c7eaec91b9a5",
    "WorkerGroup.poll_status": "c349bde66237",
    "WorkerGroup._poll_workers_and_collect_errors": "3a75ea0d538c",
    "WorkerGroupStateBuilder.build": "46b1cf1a60fd",
    "WorkerGroupStateBuilder.shutdown": "b318f3ce4ce4",
    "WorkerGroupState.shutdown": "74f2efbaa4f4",
    "RayTrainWorker.__init__": "711893045982",
    "RayTrainWorker.run_train_fn": "4495575c58cf",
    "RayTrainWorker.poll_status": "703b285a0c2d",
    "RayTrainWorker.init_train_context": "9b0f2f48a6f5",
    "SynchronizationActor.broadcast_from_rank_zero": "954b6033b34d",
    "TrainContext.report": "a3134ab706d4",
    "TrainContext._wait_then_report": "b263a3661097",
    "TrainContext._sync_checkpoint_dir_name_across_ranks": "9b2f2c96c399",
    "ReportCallbackHandler.after_worker_group_poll_status": "202003c712d1",
    "ReportCallbackHandler.after_worker_group_start": "8ad2d0cbf7d0",
    "ReportCallbackHandler.set_required_ranks": "1b175e77035e",
    "CheckpointManager._maybe_load_state_from_storage": "2238e7835fe6",
    "CheckpointManager._write_state_to_storage": "665f3d14d43c",
    "CheckpointManager.register_checkpoint": "a0079d0937c2",
    "StorageContext.__init__": "689cf47fed3a",
    "StorageContext._create_validation_file": "1705a8d6f4a5",
    "StorageContext._check_validation_file": "79e7218a1b01",
    "StateManagerCallback.after_controller_start": "8a2a0cedcf44",
    "StateManagerCallback.after_controller_state_update": "d6614f973f3f",
    "StateManagerCallback.before_worker_group_start": "1e71a9d6cfa4",
    "StateManagerCallback.after_worker_group_start": "e05eb9631f3e",
    "StateManagerCallback.before_worker_group_shutdown": "35551cdd95e4",
    "StateManagerCallback.before_worker_group_abort": "0c5b6ec52bb4",
    "DataParallelTrainer.__init__": "501d3d12111e",
    "DataParallelTrainer.fit": "5d2b8d40bfcb",
    "DataParallelTrainer._create_default_callbacks": "9148f79c7a2b",
    "DataParallelTrainer._initialize_and_run_controller": "ea57ec449832",
}  # fmt: skip
CLASSES = [
    CheckpointManager, DataParallelTrainer, RayTrainWorker, ReportCallbackHandler, ScalingPolicy, StateManagerCallback,
    StorageContext, TrainContext, TrainController, WorkerGroup, WorkerGroupState, WorkerGroupStateBuilder,
    SynchronizationActor.__ray_metadata__.modified_class,
]  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_overridden_is_what_it_was_when_it_was_read(name: str) -> None:
    """After a change of Ray: read what has changed, see that our methods still hold, and take the new digest."""
    (owner,) = (each for each in CLASSES if each.__name__ == name.split(".")[0])
    source = inspect.getsource(getattr(owner, name.split(".")[1]))
    assert hashlib.sha256(source.encode()).hexdigest()[:12] == SOURCES[name]


def test_the_list_of_runs_is_started_as_ray_train_does() -> None:
    """After a change: start it in the same way in ``mirror._start_state_actor``, and take the new digest."""
    source = inspect.getsource(get_or_create_state_actor)
    assert hashlib.sha256(source.encode()).hexdigest()[:12] == "f1ef61857944"


OURS = [
    GangTrainController, TrainRun, GangScalingPolicy, GangWorkerGroup, KeptGroupState,
    KeptGroupStateBuilder, RankWorker, RunState,
]  # fmt: skip


@pytest.mark.parametrize("ours", OURS)
def test_all_that_is_overridden_is_held_to_its_source(ours: type) -> None:
    theirs = ours.__mro__[1]
    own = {name for name in vars(ours).keys() & vars(theirs).keys() if callable(getattr(ours, name))}
    overridden = {f"{theirs.__name__}.{name}" for name in own if not name.startswith("__")}
    assert overridden and overridden <= SOURCES.keys()


def test_a_rank_whose_gang_breaks_up_before_it_trains_is_free_for_the_next() -> None:
    rank = Rank()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(rank.train, assigned(1), None, {}, None)
        assert within(5, lambda: rank._generations)
        rank.abort()
        assert first.result(5) == RankEnd(End.CONNECTION, BROKEN_UP)
        with pytest.raises(RankFailed):  # Ray Train starts it all the same
            rank._train(1)
        second = thread.submit(rank.train, assigned(2), None, {}, None)
        assert within(5, lambda: 2 in rank._generations)
        rank.stop(RankEnd(End.HALTED))
        assert rank._train(2) == second.result(5) == RankEnd(End.HALTED)


def test_a_failed_rank_is_an_error_for_ray_train_and_an_end_for_the_gang() -> None:
    rank, failed = Rank(), RankEnd(End.FAILED, "no text is in the corpus")
    with ThreadPoolExecutor(1) as thread:
        end = thread.submit(rank.train, assigned(1), None, {}, None)
        assert within(5, lambda: rank._generations)
        rank.stop(failed)
        with pytest.raises(RankFailed, match="no text is in the corpus"):
            rank._train(1)
        assert end.result(5) == failed


class Gang:
    """A supervisor that decides nothing by itself."""

    def __init__(self, job_id: str, folder: str) -> None:
        self._folder = folder
        tag = JobTag(job_id, 1, "cola", "lab", "alice", f"https://boost.example.org/jobs/{job_id}")
        self._run = TrainRun(tiny_job("unused", folder), GangContext(tag, Access(), range(0), LogFormat.TEXT))
        self._ranks: list[Any] = []
        self._trained: list[Any] = []

    broadcast_from_rank_zero = Supervisor.broadcast_from_rank_zero

    def start(self, *nodes: str) -> list[int]:
        """Ranks on nodes; their process ids."""
        actor: Any = ray.remote(Rank)
        started = [
            actor.options(
                num_cpus=1,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, False),
            ).remote()
            for node in nodes
        ]
        places = ray.get([rank.where.remote() for rank in started])
        for rank, place in zip(started, places, strict=True):
            self._ranks.append(SimpleNamespace(actor=rank, place=place, resources={"CPU": 1.0}))
        return [place.pid for place in places]

    def form(self, generation: int, *numbers: int) -> None:
        ranks = [self._ranks[number] for number in numbers]
        self._trained = [
            rank.actor.train.remote(assigned(generation, index), None, {}, None) for index, rank in enumerate(ranks)
        ]
        self._run.form(generation, ranks)

    def stop(self, number: int, end: RankEnd) -> None:
        ray.get(self._ranks[number].actor.stop.remote(end))

    def ends(self) -> list[RankEnd]:
        return ray.get(self._trained, timeout=90)

    def halted(self) -> None:
        self._run.halted()

    def kill(self, number: int) -> None:
        ray.kill(self._ranks[number].actor)

    def save(self, number: int, step: int) -> None:
        ray.get(self._ranks[number].actor.save.remote(step, self._folder))

    def finish(self, phase: GangPhase, message: str) -> tuple[str | None, str | None]:
        """The path of the run's last checkpoint, and its error."""
        self._run.finish(Finish(phase, message))
        result = self._run.result
        assert result is not None
        return result.checkpoint and result.checkpoint.path, result.error and str(result.error)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(3)
    yield nodes
    nodes.close()


def a_gang(job_id: str, folder: Path) -> Any:
    actor: Any = ray.remote(Gang)
    # As the real one, it answers ranks while its run ends.
    return actor.options(num_cpus=0, max_concurrency=4, resources=ON_THE_HEAD).remote(job_id, str(folder))


def run_of(job_id: str) -> Any:
    return ray.get(get_state_actor().get_train_runs.remote()).get(job_id)


def status(job_id: str) -> str | None:
    run = run_of(job_id)
    return run and run.status.value


def attempts(job_id: str) -> dict[str, Any]:
    return ray.get(get_state_actor().get_train_run_attempts.remote())[job_id]


@pytest.mark.nightly
def test_a_run_goes_on_with_those_that_are_left(nodes: Nodes, tmp_path: Path) -> None:
    first, second, third = (node["NodeID"] for node in node_table() if node["Alive"] and node["Resources"].get("CPU"))
    gang = a_gang("job-1", tmp_path)
    pids = ray.get(gang.start.remote(first, first, second))

    def formed(generation: int, *numbers: int) -> Any:
        """The attempt, once it runs."""
        ray.get(gang.form.remote(generation, *numbers))
        # Ray Train's controller starts as a process of its own, which takes 20 seconds and more beside other tests.
        assert within(90, lambda: status("job-1") == "RUNNING" and f"1.{generation}" in attempts("job-1"))
        return attempts("job-1")[f"1.{generation}"]

    def stopped(end: RankEnd, *numbers: int) -> None:
        for number in numbers:
            ray.get(gang.stop.remote(number, end))

    attempt = formed(1, 2, 0, 1)
    assert [(rank.pid, rank.node_rank, rank.local_rank) for rank in attempt.workers] == [
        (pids[2], 0, 0), (pids[0], 1, 0), (pids[1], 1, 1),
    ]  # fmt: skip
    assert run_of("job-1").run_settings.train_loop_config["tenant"] == "lab"
    # A rank is killed, and the first of those that are left reports before they are formed again.
    os.kill(pids[1], signal.SIGKILL)
    assert within(20, lambda: status("job-1") == "RESTARTING")
    ray.get(gang.save.remote(2, 3))
    stopped(RankEnd(End.CONNECTION, "lost its connection"), 0, 2)
    attempt = formed(2, 2, 0)
    assert [rank.pid for rank in attempt.workers] == [pids[2], pids[0]], "the survivors' processes"
    assert attempts("job-1")["1.1"].status.value == "ERRORED"
    # They halt for another layout; one is given up, another joins. Nothing of that is a fault.
    stopped(RankEnd(End.HALTED), 0, 2)
    assert {end.how for end in ray.get(gang.ends.remote())} == {End.HALTED}
    ray.get(gang.halted.remote())
    ray.get(gang.kill.remote(2))
    assert not within(2, lambda: status("job-1") != "RUNNING")
    ray.get(gang.start.remote(first))
    formed(3, 0, 3)
    assert attempts("job-1")["1.2"].status.value == "FINISHED"
    # A node is lost with all ranks; the run waits for others.
    nodes.remove(first)
    assert within(60, lambda: status("job-1") == "RESTARTING")
    ray.get(gang.start.remote(third))
    formed(4, 4)
    ray.get(gang.save.remote(4, 6))
    stopped(RankEnd(End.FINISHED), 4)
    assert ray.get(gang.finish.remote(GangPhase.SUCCEEDED, "trained up to step 8")) == (
        f"{tmp_path}/step-00000006",
        None,
    )
    assert within(5, lambda: run_of("job-1").status_detail == "trained up to step 8")
    assert (status("job-1"), attempts("job-1")["1.4"].status.value) == ("FINISHED", "FINISHED")
    actors = [actor for actor in list_actors(address=nodes.address) if actor.state == "ALIVE"]
    (keeper,) = [psutil.Process(actor.pid) for actor in actors if actor.class_name == "TrainStateActor"]
    assert keeper.environ()["RAY_ADDRESS"] == nodes.address, "it finds its cluster, however many are on the machine"
    there = {actor.class_name for actor in actors}
    assert there <= {"Gang", "Rank", "TrainStateActor"}, "no barrier, coordinator, cleaner or watcher"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_run_ends_as_the_gang_does(nodes: Nodes, tmp_path: Path) -> None:
    failed, paused = a_gang("job-2", tmp_path), a_gang("job-3", tmp_path)
    ends = [
        failed.finish.remote(GangPhase.FAILED, "no text is in the corpus"),
        paused.finish.remote(GangPhase.PAUSED, "paused after step 3"),
    ]
    assert ray.get(ends) == [(None, "no text is in the corpus"), (None, None)]
    assert within(5, lambda: run_of("job-3").status_detail == "paused after step 3")
    assert (status("job-2"), run_of("job-2").status_detail) == ("ERRORED", "no text is in the corpus")
    assert status("job-3") == "ABORTED"
    assert run_of("job-2").end_time_ns <= time.time_ns()


class Inbox:
    """A supervisor that only notes who sends it what."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    def push(self, message: Message) -> None:
        self._messages.append(message)

    def take(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages


class ReportingRank(Rank):
    def __init__(self, supervisor: Any, number: int) -> None:
        super().__init__()
        self._supervisor, self._first = supervisor, None
        self._reporter = SupervisorReporter(self._push, number)
        self._worker.reporter = self._reporter

    def log(self, text: str) -> None:
        self._reporter.report(LogLine(rank=1, level="INFO", message=text))
        self._reporter.flush(60)


@pytest.mark.full
def test_the_first_rank_relays_signs_of_life_unless_it_is_gone_or_hangs(nodes: Nodes) -> None:
    inbox = ray.remote(Inbox).options(num_cpus=0).remote()
    actor: Any = ray.remote(ReportingRank).options(num_cpus=0, max_concurrency=CALLS_AT_ONCE)
    first, second = (actor.remote(inbox, number) for number in range(2))
    place, _ = ray.get([first.where.remote(), second.where.remote()])
    first.train.remote(assigned(1), None, {}, None)

    def received() -> list[tuple[int, list[int]]]:
        """Who has sent a message since the last call, and whose it brought."""
        return [(each.worker, [other.worker for other in each.others]) for each in ray.get(inbox.take.remote())]

    for generation, fault in enumerate((signal.SIGSTOP, signal.SIGKILL), start=1):
        second.train.remote(assigned(generation, 1), None, {}, first)
        if fault is signal.SIGSTOP:
            assert within(90, lambda: any(worker == 0 and others for worker, others in received()))
        os.kill(place.pid, fault)
        ray.get(second.log.remote("a report"), timeout=60)
        assert 1 in {worker for worker, _ in received()}, "it has arrived"
        assert within(60, lambda: (1, []) in received())
    ray.kill(second)
