"""Training with an S3 server behind a proxy that hangs, refuses, cuts, shortens or redirects its calls."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest

from boost_core.checkpoint import saver
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.messages import Report
from boost_core.train import Membership, checkpoint_manager, train
from tests.distributed.recording import Recorder, losses, train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.pairwise import pairwise
from tests.ranks import Ranks
from tests.s3 import BUCKET, S3Server, s3_server
from tests.store_proxy import Call, Fault, StoreProxy, store_proxy

CALL_SECONDS = 1.0
WAIT_SECONDS = 0.5
SLACK_SECONDS = 3.0  # this machine may be busy; without limits it would be minutes
STEP_SECONDS = 0.02

FAILING_LATER = (Fault.BUSY, Fault.REDIRECT)
RESUMING_FAULTS = (Fault.HANG, Fault.CUT, Fault.SHORT, Fault.DENIED)
FILES = ("manifest.json", ".metadata", "__0_0.distcp")


@dataclass
class Run:
    reports: list[Report]
    warnings: list[str] = field(default_factory=list)
    longest_step: float = 0.0

    @property
    def faults(self) -> list[str]:
        return [report.message for report in self.reports if report.kind == "fault"]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server, patch.dict(os.environ, server.environment):
        fsspec.filesystem("s3").clear_instance_cache()
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[StoreProxy]:
    with store_proxy(s3.environment["AWS_ENDPOINT_URL"]) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def a_job(corpus: Path, name: str, steps: int, every: int, ranks: int = 1, **checkpoint: object) -> JobSpec:
    return tiny_job(
        corpus, f"s3://{BUCKET}/{name}", training={"steps": steps, "evaluate_every_steps": 1000},
        parallelism={"tensor_parallel_size": ranks},
        checkpoint={"every_steps": every, "store_wait_seconds": WAIT_SECONDS, **checkpoint},
    )  # fmt: skip


def trained(environment: dict[str, str], spec: JobSpec) -> Run:
    """Train as a rank, with short deadlines for the store."""
    recorder, run, ends = Recorder(), Run([]), list[float]()

    def after_step(_: object) -> None:
        run.longest_step = max(run.longest_step, *(time.monotonic() - end for end in ends[-1:]), 0.0)
        time.sleep(STEP_SECONDS)
        ends.append(time.monotonic())

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: run.warnings.append(record.getMessage())
    logging.getLogger("boost_core").addHandler(handler)
    options = {"call_seconds": CALL_SECONDS}
    try:
        with (
            patch.dict(os.environ, environment), patch.dict(fsspec.config.conf, {"s3": options}),
            patch.object(saver, "RETRY_SECONDS", (0.2,)), patch.object(checkpoint_manager, "RETRY_SECONDS", 0.2),
        ):  # fmt: skip
            fsspec.get_filesystem_class("s3").clear_instance_cache()
            train(spec, recorder, Membership(after_step=after_step))
    finally:
        logging.getLogger("boost_core").removeHandler(handler)
    run.reports = recorder.reports
    return run


def at(proxy: StoreProxy, s3: S3Server) -> dict[str, str]:
    return s3.environment | {"AWS_ENDPOINT_URL": proxy.url}


@pytest.fixture(scope="module")
def undisturbed(ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict]:
    """Losses on a disk of so many steps, with so many ranks."""

    @cache
    def losses_of(steps: int, size: int) -> dict[int, float]:
        spec = a_job(corpus, "unused", steps, 1000, size)
        on_disk = spec.checkpoint.model_copy(update={"url": str(tmp_path_factory.mktemp("undisturbed"))})
        reports, *_ = ranks.run(size, train_and_record, spec.model_copy(update={"checkpoint": on_disk}))
        return losses(reports)

    return losses_of


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [Fault.HANG, *(pytest.param(each, marks=pytest.mark.nightly) for each in FAILING_LATER)]
)
def test_a_store_that_fails_in_whole_holds_no_step_and_is_told_of(
    s3: S3Server, proxy: StoreProxy, ranks: Ranks, corpus: Path, undisturbed, fault: Fault
) -> None:
    spec = a_job(corpus, f"whole-{fault}", 120, 5)
    folder = CheckpointFolder(spec.checkpoint.url)
    began: list[float] = []

    def fails_for_a_while(_: Call) -> Fault | None:
        if not began and folder.steps():
            began.append(time.monotonic())
        return fault if began and time.monotonic() < began[0] + 3.5 else None

    proxy.fault = fails_for_a_while
    (run,) = ranks.run(1, trained, at(proxy, s3), spec)
    assert run.longest_step < WAIT_SECONDS + SLACK_SECONDS
    assert losses(run.reports) == undisturbed(120, 1)
    assert folder.steps()[0] == 5 and folder.steps()[-1] == 120 and folder.damage(120) == []
    assert any(f"of s3://{BUCKET}/whole-{fault}/step-" in message for message in run.faults), run.faults
    cause = {Fault.HANG: "within 1 s", Fault.BUSY: "SlowDown", Fault.REDIRECT: "redirects to http://127.0.0.1:9,"}[
        fault
    ]
    assert any(cause in message for message in run.faults), run.faults


@pytest.mark.parametrize("fault", [pytest.param(Fault.CUT, marks=pytest.mark.nightly), Fault.SHORT])
@pytest.mark.nightly
def test_what_cannot_be_read_is_named_and_stepped_over(
    s3: S3Server, proxy: StoreProxy, ranks: Ranks, corpus: Path, fault: Fault
) -> None:
    environment = at(proxy, s3)
    ranks.run(2, trained, environment, a_job(corpus, f"read-{fault}", 6, 3, ranks=2))
    proxy.fault = lambda call: fault if call == Call("get_object", f"read-{fault}/step-00000006/__1_0.distcp") else None
    run, _ = ranks.run(2, trained, environment, a_job(corpus, f"read-{fault}", 8, 3, ranks=2))
    assert run.reports[0].resumed_from == f"s3://{BUCKET}/read-{fault}/step-00000003"
    (named,) = [line for line in run.warnings if "skipped" in line]
    assert "step-00000006/__1_0.distcp" in named, named
    assert sorted(losses(run.reports)) == [4, 5, 6, 7, 8]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [Fault.HANG, pytest.param(Fault.BUSY, marks=pytest.mark.nightly)])
def test_a_store_that_is_away_as_a_whole_is_waited_for(
    s3: S3Server, proxy: StoreProxy, ranks: Ranks, corpus: Path, fault: Fault
) -> None:
    environment = at(proxy, s3)
    ranks.run(1, trained, environment, a_job(corpus, f"away-{fault}", 6, 3))
    began: list[float] = []

    def fails_once_listed(call: Call) -> Fault | None:
        if call.operation == "get_object" and not began:
            began.append(time.monotonic())
        return fault if began and time.monotonic() < began[0] + 4 else None

    proxy.fault = fails_once_listed
    (run,) = ranks.run(1, trained, environment, a_job(corpus, f"away-{fault}", 8, 3))
    assert run.reports[0].resumed_from == f"s3://{BUCKET}/away-{fault}/step-00000006"
    assert any("cannot be read; retrying in" in line for line in run.warnings), run.warnings


@pytest.mark.nightly
def test_nothing_needs_to_be_deleted_to_save(s3: S3Server, proxy: StoreProxy, ranks: Ranks, corpus: Path) -> None:
    proxy.fault = lambda call: Fault.DENIED if call.operation.startswith("delete") else None
    spec = a_job(corpus, "kept", 8, 2, keep_last=1, store_wait_seconds=60)
    (run,) = ranks.run(1, trained, at(proxy, s3), spec)
    folder = CheckpointFolder(spec.checkpoint.url)
    assert folder.steps() == [2, 4, 6, 8] and run.faults == []
    (line,) = [line for line in run.warnings if "cannot be removed" in line]
    assert "step-00000002/committed: AccessDenied: Access Denied; this takes s3:DeleteObject" in line

    # What was begun before is emptied, and then written.
    [folder._filesystem.rm_file(folder._file(8, name)) for name in ("committed", "manifest.json")]
    folder._filesystem.pipe_file(folder._file(8, "__7_0.distcp"), b"left over")
    (again,) = ranks.run(1, trained, at(proxy, s3), spec)
    assert again.reports[0].step == 6 and folder.steps() == [2, 4, 6, 8]
    assert [folder.damage(step) for step in folder.steps()] == [[]] * 4


@pytest.mark.nightly
def test_each_call_of_a_save_may_fail_in_each_way(
    s3: S3Server, proxy: StoreProxy, ranks: Ranks, corpus: Path, undisturbed
) -> None:
    """Each save has another fault at another call, on either rank; the loss of each step is as ever."""
    pairs = [*itertools.product(range(14), Fault)]
    spec = a_job(corpus, "sweep", 120, 1, ranks=2)
    state = {"next": 0, "count": 0}

    def fault_at(call: Call) -> Fault | None:
        """A fault for one call after some others that went well."""
        if "/step-" not in call.key:
            return None
        index, fault = pairs[state["next"] % len(pairs)]
        state["count"] += 1
        if state["count"] <= index:
            return None
        state["next"], state["count"] = state["next"] + 1, 0
        return fault

    proxy.fault = fault_at
    run, _ = ranks.run(2, trained, at(proxy, s3), spec)
    assert losses(run.reports) == undisturbed(120, 2)
    assert run.longest_step < WAIT_SECONDS + SLACK_SECONDS
    folder = CheckpointFolder(spec.checkpoint.url)
    assert folder.steps()[-1] == 120 and folder.damage(120) == []


@pytest.mark.nightly
def test_each_call_of_a_resume_may_fail_in_each_way(
    s3: S3Server, proxy: StoreProxy, ranks: Ranks, corpus: Path
) -> None:
    """Once costs no step; for good, the file is named, and the checkpoint before it is resumed from."""
    environment = at(proxy, s3)
    ranks.run(1, trained, environment, a_job(corpus, "resumes", 6, 3))
    folder = CheckpointFolder(f"s3://{BUCKET}/resumes")
    spec = a_job(corpus, "resumes", 7, 100)
    all_ways = list(itertools.product(("head_object", "get_object"), FILES, RESUMING_FAULTS))
    for operation, name, fault in pairwise(all_ways, iter):
        bad, met = Call(operation, f"resumes/step-00000006/{name}"), list[Call]()

        def once(call: Call, bad=bad, met=met, fault=fault) -> Fault | None:
            if call != bad or met:
                return None
            met.append(call)
            return fault

        proxy.fault = once
        (run,) = ranks.run(1, trained, environment, spec)
        assert run.reports[0].resumed_from == folder.step_url(6), (bad, fault, run.warnings)
        assert met, bad
        folder.remove(7)
        proxy.fault = lambda call, bad=bad, fault=fault: fault if call == bad else None
        (run,) = ranks.run(1, trained, environment, spec)
        assert run.reports[0].resumed_from == folder.step_url(3), (bad, fault, run.warnings)
        assert any(f"step-00000006/{name}" in line for line in run.warnings if "skipped" in line), run.warnings
        assert sorted(losses(run.reports)) == [4, 5, 6, 7]
        folder.remove(7)
