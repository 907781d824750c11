"""Gangs on a real Ray: two CPUs, two workers, the real trainer."""

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.train.v2._internal.state.state_actor import get_state_actor
from ray.util.state import list_actors

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause, Drill, Report
from boost_core.plan.machine import Basis
from service.gang.ray import gangs as handles
from service.gang.ray.gangs import NAMESPACE, RayGangs
from service.gang.status import GangPhase, GangReport, GangStatus, JobTag, Orders, PollRequest, PollResult
from service.scheduler.cluster_snapshot import Wait
from service.scheduler.decisions import decide
from tests.jobs import tiny_job, write_corpus
from tests.processes import name_of, started_by
from tests.service.records import PROFILE, a_step
from tests.unit.test_decisions import job as waiting_job

PATIENCE_SECONDS = 180
ENDLESS = {"steps": 1_000_000, "evaluate_every_steps": 1000}


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayGangs]:
    gangs = RayGangs(None, 2, tmp_path_factory.mktemp("secrets"))
    gangs.connect()
    yield gangs
    started = [process for process in started_by(os.getpid()) if "ray" in name_of(process)]
    gangs.close()
    assert psutil.wait_procs(started, timeout=10)[1] == []


def a_tag(job_id: str) -> JobTag:
    return JobTag(job_id, 1, "tiny-test", "lab", "alice")


MEASURED = PROFILE.model_copy(update={"precision": "fp32"})


class Gang:
    """One attempt of a job and all it has reported so far."""

    def __init__(self, gangs: RayGangs, job_id: str, spec: JobSpec) -> None:
        self.gangs, self.job_id = gangs, job_id
        self.reports: list[Report] = []
        self.sequences = [0]
        self.status = GangStatus(GangPhase.STARTING, "", [])
        self.orders = Orders(Layout.of(spec.parallelism), tuple(spec.layouts()), Cause.LIMITS_CHANGED)
        gangs.launch(a_tag(job_id), spec, self.orders, Basis(profile=MEASURED))

    def until(self, done: Callable[["Gang"], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not done(self):
            assert time.monotonic() < deadline, (self.status, self.reports[-20:])
            self.poll()
            time.sleep(0.1)

    def poll(self) -> None:
        (status,) = self.gangs.poll([PollRequest((self.job_id, 1), self.sequences[-1], self.orders)])
        assert isinstance(status, GangStatus), status
        self.status = status
        self.sequences += [report.sequence for report in status.reports]
        self.reports += [report.report for report in status.reports]

    def of(self, kind: str) -> list[Report]:
        return [report for report in self.reports if report.kind == kind]

    def pids(self) -> list[int]:
        """Of the workers of its newest start, by rank."""
        lines = [line for line in self.of("log") if "pid" in line.message][-2:]
        return [
            int(line.message.rpartition("pid ")[2].rstrip(")")) for line in sorted(lines, key=lambda line: line.rank)
        ]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(gang: Gang) -> bool:
    return gang.status.phase in (GangPhase.SUCCEEDED, GangPhase.FAILED)


def trained(steps: int) -> Callable[[Gang], bool]:
    return lambda gang: any(report.step >= steps for report in gang.of("progress"))


@pytest.fixture
def start(gangs: RayGangs, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Gang]]:
    name = f"job-{request.node.name.strip('_')}"
    corpus = write_corpus(tmp_path / "corpus")
    yield lambda **changes: Gang(gangs, name, tiny_job(corpus, tmp_path / "checkpoints", **changes))
    gangs.end(name, 1)
    assert freed_within(gangs, 10)


def freed_within(gangs: RayGangs, seconds: float) -> bool:
    """Whether all CPUs, placement groups and actors of gangs are gone in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        living = [("state", "!=", "DEAD"), ("ray_namespace", "=", NAMESPACE)]
        alive = list_actors(address=ray.get_runtime_context().gcs_address, filters=living)
        if not groups and not alive and gangs.nodes()[0].free.get("CPU") == 2:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.nightly
def test_no_other_machine_or_user_can_reach_a_gang_on_the_embedded_ray(
    gangs: RayGangs, start: Callable[..., Gang]
) -> None:
    gang = start(training=ENDLESS)
    gang.until(trained(1))
    processes = [psutil.Process(), *started_by(os.getpid())]
    sockets = [(process.pid, each) for process in processes for each in process.net_connections("inet")]
    listening = {(pid, each.laddr.ip) for pid, each in sockets if each.status == psutil.CONN_LISTEN}
    assert {pid for pid, _ in listening} > set(gang.pids()), "the ranks' own sockets are among them"
    assert {address for _, address in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, listening
    assert gangs._folder is not None
    assert stat.S_IMODE(gangs._folder.path.stat().st_mode) == 0o700, "Ray's own folder in it is open to everybody"


@pytest.mark.nightly
def test_reports_arrive_complete_and_in_order(gangs: RayGangs, start: Callable[..., Gang], tmp_path: Path) -> None:
    gang = start(training={"steps": 30})
    gangs.launch(a_tag(gang.job_id), tiny_job(tmp_path, tmp_path), gang.orders)  # again starts nothing
    assert gangs.alive() == {(gang.job_id, 1)}
    gang.until(ended)
    assert (gang.status.phase, gang.status.message) == (GangPhase.SUCCEEDED, "trained up to step 30")
    assert gang.sequences == list(range(len(gang.sequences)))
    assert [report.step for report in gang.of("progress")] == list(range(1, 31))
    assert [report.step for report in gang.of("checkpoint")] == list(range(3, 31, 3))
    assert gang.of("evaluation")[-1].step == 30
    assert {report.provenance for report in gang.of("comparison")} == {"measured"}, "the profile reaches the ranks"
    assert {line.rank for line in gang.of("log")} == {0, 1}
    assert (tmp_path / "checkpoints" / "step-00000030").is_dir()


class Answers:
    """A supervisor of the release before: it can be polled, and not watched."""

    def poll(self, after_sequence: int, orders: Orders) -> GangStatus:
        reports = [GangReport(number, datetime.now(UTC), a_step(number)) for number in range(after_sequence + 1, 4)]
        return GangStatus(GangPhase.TRAINING, f"has {orders.target}", reports)


class Fails(Answers):
    def poll(self, after_sequence: int, orders: Orders) -> GangStatus:
        raise ValueError("no such orders")


class Stalls(Answers):
    """Answers its first poll when it is told to, and all others at once."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def poll(self, after_sequence: int, orders: Orders) -> GangStatus:
        while not self._file.exists():
            time.sleep(0.05)
        return super().poll(after_sequence, orders)


@pytest.mark.nightly
def test_a_gang_that_is_sick_keeps_no_other_waiting(gangs: RayGangs, tmp_path: Path) -> None:
    orders, go_on = Orders(Layout(1, 1, 1), (), Cause.WORKER_BACK), tmp_path / "go-on"
    actors = {"answers": Answers, "fails": Fails, "stalls": Stalls, "dies": Answers}
    started = [
        ray.remote(actor).options(name=f"job-{name}-1", num_cpus=0).remote(*([go_on] if actor is Stalls else []))
        for name, actor in actors.items()
    ]
    for actor in started:
        ray.get(actor.__ray_ready__.remote())

    def polled(after: int) -> dict[str, PollResult]:
        requests = [PollRequest((f"job-{name}", 1), after, orders) for name in [*actors, "missing"]]
        return dict(zip([*actors, "missing"], gangs.poll(requests), strict=True))

    first = polled(0)
    assert [report.sequence for report in first["answers"].reports] == [1, 2, 3]
    assert "no such orders" in str(first["fails"])
    assert first["stalls"] == GangStatus(GangPhase.STARTING, "waiting for the gang's supervisor to answer", [])
    assert isinstance(first["dies"], GangStatus)
    assert first["missing"] is None
    ray.kill(started[3])
    until(lambda: polled(0)["dies"] is None)
    begun = time.monotonic()
    for _ in range(5):
        assert polled(0)["stalls"].phase is GangPhase.STARTING
    assert time.monotonic() - begun < 5 * handles.POLL_SECONDS, "its answer was waited for once"
    go_on.touch()
    until(lambda: polled(2)["stalls"].phase is GangPhase.TRAINING)
    assert [report.sequence for report in polled(2)["stalls"].reports] == [3]
    assert gangs.wait_for_updates(0) == set()
    for actor in started[:3]:
        ray.kill(actor)
    until(lambda: not gangs.alive())


@pytest.mark.nightly
def test_who_waits_for_updates_hears_of_a_step_at_once(gangs: RayGangs, start: Callable[..., Gang]) -> None:
    gang = start(training=ENDLESS)
    gang.until(trained(3))
    for _ in range(3):
        known = len(gang.reports)
        while len(gang.reports) == known:  # the first may be of a step that was read just before
            assert gangs.wait_for_updates(PATIENCE_SECONDS) == {(gang.job_id, 1)}
            gang.poll()


@pytest.mark.nightly
def test_end_frees_everything(gangs: RayGangs, start: Callable[..., Gang]) -> None:
    gang = start(training=ENDLESS)
    gang.until(trained(5))
    table = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    assert [group["bundles"] for group in table] == [{0: {"CPU": 2.0}}]
    assert gangs.nodes()[0].free.get("CPU", 0) == 0
    pids = gang.pids()
    assert len(set(pids)) == 2
    workers = [psutil.Process(pid) for pid in pids]
    deadline = time.monotonic() + 5
    gangs.end(gang.job_id, 1)
    assert freed_within(gangs, deadline - time.monotonic())
    _, left = psutil.wait_procs(workers, timeout=max(0, deadline - time.monotonic()))
    assert not left
    assert gangs.poll([PollRequest((gang.job_id, 1), 0, gang.orders)]) == [None]
    assert gangs.alive() == set()
    gangs.end(gang.job_id, 1)  # harmless


@pytest.mark.nightly
def test_a_supervisor_that_fails_says_why_and_leaves_nothing(gangs: RayGangs, start: Callable[..., Gang]) -> None:
    gang = start(training=ENDLESS)
    gang.until(trained(5))

    def overload(supervisor: Any) -> None:
        def observe() -> None:
            raise TimeoutError("the head is busy")

        supervisor._executor.observe = observe

    gangs._handles[gang.job_id, 1].actor.__ray_call__.remote(overload)
    gang.until(lambda gang: gang.status.phase is GangPhase.RECOVERING)
    assert gang.status.message == "the gang's supervisor failed: TimeoutError: the head is busy"
    until(lambda: gangs.poll([PollRequest((gang.job_id, 1), gang.sequences[-1], gang.orders)]) == [None])
    assert freed_within(gangs, 10)


@pytest.mark.nightly
def test_a_killed_worker_is_replaced(start: Callable[..., Gang]) -> None:
    gang = start(training={"steps": 60}, checkpoint={"every_steps": 50})
    gang.until(trained(20))
    os.kill(gang.pids()[1], signal.SIGKILL)
    gang.until(ended)
    assert gang.status.phase is GangPhase.SUCCEEDED, gang.status.message
    first, second = gang.of("started")
    assert first.resumed_from is None
    assert second.resumed_from == "memory"
    assert second.step >= 10
    steps = [report.step for report in gang.of("progress")]
    assert steps[-1] == 60
    assert set(steps) == set(range(1, 61))
    (restart,) = gang.of("restart")
    assert (restart.cause, restart.recovered_from) == (Cause.WORKER_LOST, "memory")
    assert restart.message == "rank 1 was lost: its process was killed, crashed, or ran out of memory"
    assert second.step == restart.resumed_step <= restart.step
    run, (broken, whole) = train_run(gang)
    assert (run.status, run.status_detail) == ("FINISHED", "trained up to step 60")
    assert (broken.attempt_id, broken.status, whole.attempt_id, whole.status) == ("1.1", "ERRORED", "1.2", "FINISHED")
    before, after = ([worker.pid for worker in attempt.workers] for attempt in (broken, whole))
    assert before[0] == after[0] and before[1] != after[1], "the survivor's process lives on"


def train_run(gang: Gang) -> tuple[Any, list[Any]]:
    """What Ray Train's list of runs has of it, and its attempts."""
    actor = get_state_actor()
    attempts = ray.get(actor.get_train_run_attempts.remote())[gang.job_id]
    return ray.get(actor.get_train_runs.remote())[gang.job_id], list(attempts.values())


@pytest.mark.full
def test_the_message_of_a_failure_is_its_root_cause(start: Callable[..., Gang]) -> None:
    gang = start(checkpoint={"continue_from": "/nowhere/at-all"})
    gang.until(ended)
    assert gang.status.phase is GangPhase.FAILED
    assert gang.status.message == (
        "checkpoint.continue_from: no committed checkpoint is at '/nowhere/at-all'; check the URL"
    )
    assert any("Traceback" in line.message for line in gang.of("log"))
    assert not gang.of("interruption")
    run, (attempt,) = train_run(gang)
    assert (run.status, run.status_detail, attempt.status) == ("ERRORED", gang.status.message, "ERRORED")


@pytest.mark.nightly
def test_drills_bring_about_what_they_say(gangs: RayGangs, start: Callable[..., Gang]) -> None:
    gang = start(
        training=ENDLESS, checkpoint={"every_steps": 10},
        # What else the machine does may make a rank half as slow again, the drill makes it many times as slow.
        fault_tolerance={
            "memory_copy_every_steps": 5, "hang_seconds": 8, "max_restarts": 9, "slow_rank_factor": 3,
        },
    )  # fmt: skip
    gang.until(trained(20))

    def drill(**how: Any) -> None:
        gangs.ask(gang.job_id, 1, Drill(**how))

    drill(kind="delay_rank", rank=1, steps=30, seconds=0.3)  # far longer than what else a machine may do meanwhile
    gang.until(lambda gang: gang.of("fault"))
    (slow,) = gang.of("fault")
    assert (slow.what, slow.rank) == ("slow_rank", 1)
    assert 0 < slow.share <= 1  # how much depends on what else the machine does
    gang.until(trained(gang.of("progress")[-1].step + 30))  # no step is late any more, and checkpoints come often
    drill(kind="fill_store", seconds=6)
    gang.until(lambda gang: any("the store is full, by a drill" in line.message for line in gang.of("log")))
    step = gang.of("progress")[-1].step + 30
    drill(kind="kill_rank", rank=1, at_step=step)
    gang.until(lambda gang: gang.of("restart"))
    assert gang.of("restart")[0].step >= step - 1
    gang.until(trained(step + 10))
    drill(kind="hang_rank", rank=0)
    gang.until(lambda gang: len(gang.of("restart")) == 2)
    killed, hung = gang.of("restart")
    assert (killed.cause, hung.cause) == (Cause.WORKER_LOST, Cause.HANG)
    # Copies in memory wait for a failing store, so that a checkpoint may be the newer one after the first fault.
    assert killed.recovered_from in ("memory", "storage")
    assert hung.recovered_from == "memory", hung
    assert any("training_step" in line.message and line.rank == 1 for line in gang.of("log") if line.level == "ERROR")


@pytest.mark.nightly
def test_a_job_that_fails_again_and_again_ends_with_the_cause(gangs: RayGangs, start: Callable[..., Gang]) -> None:
    gang = start(training=ENDLESS, fault_tolerance={"max_restarts": 1})
    for steps in (5, 30):
        gang.until(trained(steps))
        gangs.ask(gang.job_id, 1, Drill(kind="kill_rank", rank=1))
        gang.until(lambda gang, steps=steps: len(gang.of("interruption")) == (1 if steps == 5 else 2))
    gang.until(ended)
    assert gang.status.phase is GangPhase.FAILED
    assert gang.status.message == (
        "2 faults within 3600 s are more than fault_tolerance.max_restarts = 1 allows; the last one: rank 1 was lost: "
        "its process was killed, crashed, or ran out of memory"
    )


@pytest.mark.nightly
def test_another_layout_goes_through_the_store_and_loses_no_step(start: Callable[..., Gang]) -> None:
    gang = start(training=ENDLESS, elasticity={"data_parallel_size": {"max": 2}, "layouts": [[2, 1], [1, 1]]})
    gang.until(trained(10))
    gang.orders = Orders(Layout(1, 1, 2), (Layout(1, 1, 1), Layout(1, 1, 2)), Cause.LIMITS_CHANGED)
    gang.until(lambda gang: gang.of("restart") and gang.status.layout == Layout(1, 1, 2))
    restart = gang.of("restart")[0]
    assert (restart.recovered_from, restart.resumed_step) == ("storage", restart.step)
    steps = [report.step for report in gang.of("progress")]
    assert steps == list(range(1, steps[-1] + 1))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own for the checkpoints, too small for any."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def saving(gang: Gang) -> bool:
    assert not ended(gang), gang.status
    return gang.status.phase is GangPhase.SAVING


@pytest.mark.nightly
def test_a_job_waits_for_the_store_with_its_last_checkpoint(full_disk: Path, start: Callable[..., Gang]) -> None:
    gang = start(fault_tolerance={"max_restarts": 1})
    gang.until(saving)
    assert gang.status.message == (
        f"all steps are done; waiting for the store: {full_disk}/step-00000008 cannot be written: "
        "rank 0: OSError: [Errno 28] No space left on device"
    )
    assert not gang.of("interruption"), "it is no fault of the gang's"
    os.kill(gang.pids()[1], signal.SIGKILL)
    gang.until(lambda gang: len(gang.of("started")) == 2)
    assert (gang.of("started")[1].resumed_from, gang.of("started")[1].step) == ("memory", 8)
    gang.orders = Orders(
        None, (), Cause.PAUSED
    )  # which is over as soon as the checkpoint is there, and the job with it
    gang.until(saving)
    subprocess.run(["mount", "-o", "remount,size=64m", full_disk], check=True)
    gang.until(ended)
    assert (gang.status.phase, gang.status.message) == (GangPhase.SUCCEEDED, "trained up to step 8")
    assert [report.step for report in gang.of("checkpoint")] == [8]
    folder = CheckpointFolder(str(full_disk))
    assert folder.steps() == [8]
    assert folder.damage(8) == []


@pytest.mark.nightly
def test_who_waits_for_the_store_gives_the_workers_back(
    gangs: RayGangs, full_disk: Path, start: Callable[..., Gang], tmp_path: Path
) -> None:
    gang = start(checkpoint={"final_save_timeout_seconds": 60})
    gang.until(saving)
    trained = set(gang.pids())
    shutil.rmtree(tmp_path / "corpus")  # which nobody needs any more
    gang.until(lambda gang: gangs.nodes()[0].free.get("CPU") == 2 and not any(map(psutil.pid_exists, trained)))
    assert gang.of("shape")[-1].keeps
    assert gang.of("interruption")[-1].cause is Cause.WAITING_FOR_STORE
    gang.until(saving)
    os.kill(gang.pids()[0], signal.SIGKILL)
    gang.until(lambda gang: len(gang.of("started")) == 3)
    assert {(report.resumed_from, report.step) for report in gang.of("started")[1:]} == {("memory", 8)}
    subprocess.run(["mount", "-o", "remount,size=64m", full_disk], check=True)
    gang.until(ended)
    assert (gang.status.phase, gang.status.message) == (GangPhase.SUCCEEDED, "trained up to step 8")
    assert CheckpointFolder(str(full_disk)).damage(8) == []


@pytest.mark.nightly
def test_a_job_that_has_waited_for_the_store_too_long_fails(start: Callable[..., Gang], tmp_path: Path) -> None:
    blocked = tmp_path / "checkpoints"
    blocked.write_text("a file")
    gang = start(checkpoint={"final_save_timeout_seconds": 5})
    gang.until(ended)
    assert gang.status.phase is GangPhase.FAILED
    assert gang.status.message.startswith(
        f"the last checkpoint, {blocked}/step-00000008 cannot be written: NotADirectoryError: [Errno 20]"
    )
    assert "final_save_timeout_seconds = 5 s; fix the store and retry the job" in gang.status.message
    assert not gang.of("interruption")


@pytest.mark.full
def test_what_does_not_fit_waits_with_a_message(gangs: RayGangs) -> None:
    *_, decision = decide([waiting_job("job-large", 8)], gangs.nodes())
    assert isinstance(decision, Wait)
    assert decision.message == "needs 8 × {CPU: 1}; the cluster has 2 CPU in all, room for 2; waits for nodes to join"
