import subprocess
import time

import pytest

from boost_core.messages import FaultReport, Profile, ProfileReport, Report
from service.jobs.model import JobRecord
from service.jobs.store import JobStore
from tests.service.command_line import Boost, boost_at, process
from tests.service.conftest import RunningApi
from tests.service.records import a_fault, a_spec, a_step, an_interruption, finish, numbered, start


@pytest.fixture
def boost(api: RunningApi) -> Boost:
    return boost_at(api.url)


def a_profile(url: str, rank: int = 0) -> ProfileReport:
    return ProfileReport(step=4, steps=3, rank=rank, url=url, bytes=2**19)


def test_profile(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    assert boost("profile", job.id).exit_code == 1
    start(store, job.id)
    asked = boost("profile", job.id, "--steps", "2", "--rank", "0", "--rank", "1")
    assert asked.stdout.startswith(f"2 step(s) of {job.id} will be traced"), asked.output
    assert store.take_commands(job.id) == [Profile(steps=2, ranks=(0, 1))]
    refused = boost("profile", job.id, "--rank", "2")
    assert (refused.exit_code, "ranks: 2 is not a rank" in refused.stderr) == (2, True)


def waits_for_profile(store: JobStore, api: RunningApi, job: JobRecord, *reports: Report) -> subprocess.Popen[str]:
    """A command that waits for a profile of both ranks, of a job that has had one before and then reports."""
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_profile("before", rank=1)))
    waiting = process("profile", job.id, "--rank", "0", "--rank", "1", "--wait", BOOST_URL=api.url)
    deadline = time.monotonic() + 60
    while not store.take_commands(job.id):
        assert waiting.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    store.append_reports(job.id, 1, numbered(*reports, first=2))
    return waiting


@pytest.mark.full
def test_waiting_for_a_profile_prints_where_its_traces_are(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    waiting = waits_for_profile(store, api, job, a_profile("one", rank=1), a_fault(), a_profile("nought", rank=0))
    output, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, output) == (0, "one\nnought\n")


@pytest.mark.full
@pytest.mark.parametrize(
    ("report", "says"),
    [
        (
            FaultReport(what="profile", step=4, rank=1, message="there is no profile of rank 1: the disk is full"),
            "step 4  profile: there is no profile of rank 1: the disk is full; incomplete profiles are lost",
        ),
        (an_interruption(), "interrupted by WORKER_LOST"),
    ],
)
def test_waiting_for_a_profile_that_will_not_come(api: RunningApi, store: JobStore, report: Report, says: str) -> None:
    waiting = waits_for_profile(store, api, store.create(a_spec(), "/checkpoints"), a_profile("nought"), report)
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert says in output


@pytest.mark.full
def test_waiting_for_a_profile_ends_with_the_job(api: RunningApi, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    waiting = waits_for_profile(store, api, job, a_profile("nought"))
    finish(store, job.id)
    output, _ = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert "the job ended before the steps of rank 1 were traced" in output


@pytest.mark.full
def test_events_say_where_a_trace_is(boost, store: JobStore) -> None:
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    store.append_reports(job.id, 1, numbered(a_step(5), a_profile("s3://runs/job-1/profiles/rank-0.json.gz")))
    assert (
        boost("events", job.id)
        .stdout.splitlines()[-1]
        .endswith("  step 4  profile of 3 step(s) of rank 0: s3://runs/job-1/profiles/rank-0.json.gz (0.5 MiB)")
    )
