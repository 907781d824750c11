"""Every state that a user can bring a job into, reached and left again: a real server with keys, on a real Ray."""

import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from service.accounts.keys import KeyStore
from service.client import ApiError, Client
from service.jobs.database import migrate
from service.jobs.model import JobRecord
from service.jobs.states import TRANSITIONS, JobState, Reason
from service.models.access import Scope
from tests.jobs import tiny_job, write_corpus
from tests.service.serving import Server

pytestmark = pytest.mark.nightly

ENDLESS = {"steps": 1_000_000, "evaluate_every_steps": 1000}
# What happens to a job that its user does not bring about: losses, defects, a store that is full.
NOT_THE_USERS = {Reason.GANG_LOST, Reason.RESTARTS_EXHAUSTED, Reason.WAITING_FOR_STORE}
# Transitions that take a moment which a user cannot choose, or the loss of all workers.
BY_CHANCE = {
    (JobState.SCHEDULING, Reason.TRAINING_FAILED),
    (JobState.RUNNING, Reason.RESUMED_BY_USER),
    (JobState.RUNNING, Reason.WAITING_FOR_RESOURCES),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("shared") / "home"
    home.mkdir()
    migrate(f"sqlite:///{home}/boost.db")
    server = Server(home, BOOST_ALLOWED_PREFIXES=str(home.parent))
    yield server
    server.end(signal.SIGTERM)


def client_of(server: Server, tenant: str, *scopes: Scope) -> Client:
    home = server.environment["BOOST_HOME"]
    key = KeyStore(f"sqlite:///{home}/boost.db").create(f"{tenant}'s", tenant, list(scopes), None)
    return Client(server.url, api_key=key.key)


class Journey:
    """Jobs on one service that has room for one gang at a time."""

    def __init__(self, server: Server, client: Client, folder: Path) -> None:
        self.server, self.client, self.folder = server, client, folder
        self.corpus = write_corpus(folder / "corpus")
        self.jobs: list[str] = []

    def submit(self, name: str, steps: int | None = None, **changes: Any) -> str:
        training = ENDLESS if steps is None else {"steps": steps}
        spec = tiny_job(self.corpus, self.folder / "checkpoints", training=training, name=name, **changes)
        job = self.client.submit(spec)
        self.jobs.append(job.id)
        return job.id

    def until(self, job_id: str, state: JobState, reason: Reason | None = None) -> JobRecord:
        self.server.until(lambda: self._is(job_id, state, reason))
        return self.client.get(job_id)

    def _is(self, job_id: str, state: JobState, reason: Reason | None) -> bool:
        job = self.client.get(job_id)
        return job.state is state and reason in (None, job.reason)

    def trained(self, job_id: str, steps: int) -> None:
        self.server.until(lambda: (newest := self.client.get(job_id).progress) and newest.step >= steps)

    def transitions(self) -> set[tuple[JobState, Reason]]:
        """From which state which reasons have led on, over all jobs."""
        found = set()
        for job_id in self.jobs:
            changes = [event.data for event in self.client.events(job_id, follow=False) if event.kind == "state"]
            found |= {(JobState(before["state"]), Reason(after["reason"])) for before, after in pairwise(changes)}
        return found


def test_every_state_is_reached_and_left(server: Server, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path(server.environment["BOOST_HOME"]).parent / "lab"
    server.until(lambda: (answer := server.answers("/readyz")) and answer.is_success)
    with client_of(server, "lab", Scope.SUBMIT) as client:
        journey = Journey(server, client, folder)
        _behind_another_job(journey)
        _on_the_way(journey)
        _to_the_end(journey)
        expected = {
            (state, reason)
            for reason, changes in TRANSITIONS.items()
            for state in changes
            if reason not in NOT_THE_USERS and (state, reason) not in BY_CHANCE
        }
        assert journey.transitions() >= expected
        assert {state for state, _ in journey.transitions()} == set(JobState) - {JobState.SUCCEEDED}


def _behind_another_job(journey: Journey) -> None:
    """Jobs that wait: QUEUED and SCHEDULING."""
    client = journey.client
    first = journey.submit("first")
    journey.until(first, JobState.RUNNING)
    head, behind = journey.submit("head"), journey.submit("behind")
    waiting = journey.until(head, JobState.SCHEDULING, Reason.WAITING_FOR_RESOURCES)
    assert "needs 2 × {CPU: 1}" in waiting.message and first in waiting.message
    journey.server.until(lambda: client.get(behind).waiting_for)
    assert client.get(behind).state is JobState.QUEUED
    for job_id in (head, behind):
        assert client.pause(job_id).state in (JobState.PAUSED, JobState.SCHEDULING)
        journey.until(job_id, JobState.PAUSED)
        assert client.resume(job_id).state is JobState.QUEUED
    journey.until(head, JobState.SCHEDULING)
    for job_id in (behind, head):
        client.cancel(job_id)
        journey.until(job_id, JobState.CANCELLED)
        assert client.retry(job_id).state is JobState.QUEUED
    client.pause(behind)
    client.cancel(behind)
    journey.until(behind, JobState.CANCELLED)
    client.cancel(head)
    client.cancel(first)
    for job_id in (head, first):
        journey.until(job_id, JobState.CANCELLED)


def _on_the_way(journey: Journey) -> None:
    """Jobs that train: a pause, a fault, room for another, a cancellation, and on from the checkpoint each time."""
    client = journey.client
    job_id = journey.submit("long")
    journey.trained(job_id, 10)
    client.pause(job_id)
    journey.until(job_id, JobState.PAUSED)
    client.resume(job_id)
    journey.until(job_id, JobState.RUNNING)
    client.drill(job_id, {"kind": "kill_rank", "rank": 1})
    journey.server.until(lambda: client.get(job_id).restarts)
    journey.until(job_id, JobState.RUNNING, Reason.GANG_STARTED)
    urgent = journey.submit("urgent", steps=12, priority=10)
    journey.until(urgent, JobState.SUCCEEDED)
    assert (JobState.RUNNING, Reason.PAUSED_FOR_PRIORITY) in journey.transitions()
    journey.until(job_id, JobState.RUNNING)
    client.cancel(job_id)
    saved = journey.until(job_id, JobState.CANCELLED).checkpoint
    assert saved is not None
    client.retry(job_id)
    again = journey.until(job_id, JobState.RUNNING)
    assert again.finished_at is None
    start = [event.data for event in client.events(job_id, follow=False) if event.kind == "started"][-1]
    assert start["step"] >= saved.step
    assert start["resumed_from"].startswith(again.checkpoint_url)
    journey.trained(job_id, start["step"] + 1)
    client.cancel(job_id)
    journey.until(job_id, JobState.CANCELLED)


def _to_the_end(journey: Journey) -> None:
    """A job that fails and is retried; one that has succeeded can only be cloned."""
    client = journey.client
    fragile = journey.submit("fragile", steps=150, fault_tolerance={"max_restarts": 0}, checkpoint={"every_steps": 5})
    journey.trained(fragile, 10)
    client.drill(fragile, {"kind": "kill_rank", "rank": 0})
    failed = journey.until(fragile, JobState.FAILED)
    assert "max_restarts = 0" in failed.message
    client.retry(fragile)
    done = journey.until(fragile, JobState.SUCCEEDED)
    assert (done.progress.step, done.checkpoint.step) == (150, 150)
    with pytest.raises(ApiError, match="another can be cloned") as refused:
        client.retry(fragile)
    assert refused.value.code == "wrong-state"
    longer = client.clone(fragile, {"training": {"steps": 155}}, from_checkpoint=True)
    journey.jobs.append(longer.id)
    assert (longer.cloned_from, longer.tenant, longer.submitted_by) == (fragile, "lab", "lab's")
    done = journey.until(longer.id, JobState.SUCCEEDED)
    assert done.progress.step == 155
    assert client.metrics(longer.id).samples[-1].step == 155
    assert client.checkpoints(fragile).checkpoints[0].step == 150


def test_a_tenant_sees_only_its_own(server: Server) -> None:
    with client_of(server, "lab", Scope.READ) as own, client_of(server, "others", Scope.SUBMIT) as other:
        jobs = own.list().jobs
        assert jobs
        assert other.list().jobs == []
        for ask in (other.get, other.cancel, other.pause, other.retry, other.checkpoints, other.metrics):
            with pytest.raises(ApiError) as refused:
                ask(jobs[0].id)
            assert refused.value.code == "job-not-found"
        with pytest.raises(ApiError) as refused:
            own.cancel(jobs[0].id)
        assert refused.value.code == "forbidden"
