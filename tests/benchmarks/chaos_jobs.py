"""The jobs of the chaos: what their users do with them, and what is looked at when all is over."""

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import select
from sqlalchemy.orm import Session

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from service.client import ApiError, Client, ServiceUnreachable
from service.jobs.model import JobRecord
from service.jobs.states import TERMINAL_STATES, JobState
from service.jobs.store import JobStore
from service.jobs.tables import EventRow
from tests.jobs import tiny_job
from tests.s3 import BUCKET

ENDLESS, STEPS, LONGER_STEPS = 1_000_000, 6, 150
TURNS = (  # what is done with jobs, again and again
    "paused and resumed", "left alone", "cancelled while it runs", "left alone", "bound to fail", "left alone",
    "cancelled at once", "left alone", "paused and resumed", "left alone",
)  # fmt: skip
ENDS = {
    "left alone": JobState.SUCCEEDED,
    "paused and resumed": JobState.SUCCEEDED,
    "cancelled while it runs": JobState.CANCELLED,
    "cancelled at once": JobState.CANCELLED,
    "bound to fail": JobState.FAILED,
}

Answer = TypeVar("Answer")


class Users:
    """People with jobs, who ask another replica when one does not answer.

    Args:
        urls: Of the replicas.
        corpus: What they train on.
    """

    def __init__(self, urls: Sequence[str], corpus: Path) -> None:
        self._clients = [Client(url, retry_seconds=0, timeout=10) for url in urls]
        self._corpus = corpus
        self.asked = self.asked_again = 0
        self.records: dict[str, JobRecord] = {}

    def submit(self, name: str, kind: str) -> None:
        spec = self._spec(name, kind)
        self.records[name] = self._ask(lambda client: client.submit(spec, idempotency_key=name))

    def see_through(self, kinds: Mapping[str, str]) -> None:
        """Do with jobs what is to be done, until all have ended."""
        while unfinished := [name for name in kinds if not self.records[name].finished]:
            for name in unfinished:
                with contextlib.suppress(ApiError):  # it has changed meanwhile: look again
                    self._act(self.records[name], kinds[name])
                self.records[name] = self.get(self.records[name].id)
            time.sleep(0.5)

    def get(self, job_id: str) -> JobRecord:
        return self._ask(lambda client: client.get(job_id))

    def names(self) -> Counter[str]:
        """The names of all jobs that the service knows, each as often as it has one."""
        names: Counter[str] = Counter()
        page = self._ask(lambda client: client.list())
        while True:
            names.update(job.name for job in page.jobs)
            if (cursor := page.next_cursor) is None:
                return names
            page = self._ask(partial(Client.list, cursor=cursor))

    def _act(self, job: JobRecord, kind: str) -> None:
        steps = job.progress.step if job.progress else 0
        runs = job.state is JobState.RUNNING and steps >= 2
        if kind == "cancelled at once" or (kind == "cancelled while it runs" and runs):
            if not job.cancel_requested:
                self._ask(lambda client: client.cancel(job.id))
        elif kind == "paused and resumed":
            if runs and job.attempt == 1 and not job.pause_requested:
                self._ask(lambda client: client.pause(job.id))
            elif job.state is JobState.PAUSED:
                self._ask(lambda client: client.resume(job.id))

    def _ask(self, request: Callable[[Client], Answer]) -> Answer:
        while True:
            self.asked += 1
            try:
                return request(random.choice(self._clients))
            except ServiceUnreachable:
                pass
            except ApiError as refusal:
                if refusal.status != 503:
                    raise
            self.asked_again += 1
            time.sleep(0.3)

    def _spec(self, name: str, kind: str) -> JobSpec:
        steps = {"paused and resumed": LONGER_STEPS, "cancelled while it runs": ENDLESS}.get(kind, STEPS)
        nowhere = {"resume_from": f"s3://{BUCKET}/nowhere"} if kind == "bound to fail" else {}
        return tiny_job(
            self._corpus,
            "unused",
            name=name,
            parallelism={"tensor_parallel_size": 1},
            training={"steps": steps, "evaluate_every_steps": ENDLESS},
            checkpoint={"url": None, "every_steps": max(3, steps // 3) if steps < ENDLESS else 50, **nowhere},
            fault_tolerance={"max_restarts": 0},  # nothing that happens here is a fault of a gang
        )


class Findings:
    """What is wrong with jobs after all.

    Args:
        store: The record.
    """

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.wrong: list[str] = []

    def look_at(self, job: JobRecord, kind: str) -> None:
        """Add what is wrong with a job."""
        events = self._events(job.id)
        states = [event.data["state"] for event in events if event.kind == "state"]
        ends = [state for state in states if state in TERMINAL_STATES]
        self._expect(job, "ends", ends, [ENDS[kind]])
        starts = sorted({event.attempt for event in events if event.kind == "started"})
        self._expect(job, "attempts", starts, list(range(1, 1 + len(starts))))
        for attempt in {event.attempt for event in events}:
            of_gang = [event for event in events if event.attempt == attempt and event.sequence is not None]
            numbers = [event.sequence for event in of_gang]
            self._expect(job, f"reports of attempt {attempt}", numbers, list(range(1, 1 + len(numbers))))
        done = 0
        for attempt in starts:  # each goes on where the one before was, or where that had last saved
            steps = [event.data["step"] for event in events if event.kind == "progress" and event.attempt == attempt]
            first = steps[0] if steps and steps[0] <= done else done + 1
            self._expect(job, f"steps of attempt {attempt}", steps, list(range(first, first + len(steps))))
            done = steps[-1] if steps else done
        if ENDS[kind] is JobState.SUCCEEDED:
            self._expect(job, "last step", done, job.spec.training.steps)
        self._look_at_checkpoints(job, [event.data["step"] for event in events if event.kind == "checkpoint"])

    def _look_at_checkpoints(self, job: JobRecord, told: list[int]) -> None:
        stored = CheckpointFolder(job.checkpoint_url).steps()
        if job.state is JobState.CANCELLED:  # its gang may have been ended before it told of the last
            self._expect(job, "checkpoints", [step for step in told if step not in stored], [])
        else:
            self._expect(job, "checkpoints", stored, told)
        self._expect(job, "newest checkpoint", job.checkpoint and job.checkpoint.step, told[-1] if told else None)

    def _expect(self, job: JobRecord, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            self.wrong.append(f"{job.id} ({job.name}): {what}: {found} instead of {expected}; {job.message}")

    def _events(self, job_id: str) -> list[EventRow]:
        query = select(EventRow).where(EventRow.job_id == job_id).order_by(EventRow.id)
        with Session(self._store.engine) as session:
            return list(session.scalars(query))
