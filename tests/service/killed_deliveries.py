"""Deliveries to a tracker that are killed at each point where they have done something, while more comes.

``python -m tests.service.killed_deliveries DATABASE_URL HOME JOB KIND ROUNDS``. A program of its own because it forks.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import event

from service.jobs.store import JobStore
from service.jobs.trackers import TrackerStore
from service.settings import Settings
from service.trackers.forwarder import deliver
from service.trackers.opening import open_tracker
from tests.service.records import a_step
from tests.service.tracking import report


class Points:
    """Kills the process when it has done so many things."""

    def __init__(self, kill_at: int) -> None:
        self._left = kill_at

    def at(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            done = call(*arguments, **named)
            self.at()
            return done

        return called


def deliver_until(store: JobStore, settings: Settings, job_id: str, kind: str, kill_at: int) -> None:
    points = Points(kill_at)
    event.listen(store.engine, "commit", points.at)  # just before it
    os.pwrite = points.after(os.pwrite)
    httpx.Client.send = points.after(httpx.Client.send)
    progress = TrackerStore(store.engine)
    tracked = progress.one(job_id, kind)
    deliver(store, progress, tracked, open_tracker(settings, kind, store.get(job_id)))


def in_process(store: JobStore, *arguments: Any) -> bool:
    """Deliver in a process of its own; say whether it was killed."""
    store.engine.dispose()  # the child has connections of its own
    child = os.fork()
    if child == 0:
        code = 1
        try:
            deliver_until(store, *arguments)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def main(database_url: str, home: str, job_id: str, kind: str, rounds: str) -> None:
    """Write how many deliveries were killed; the job has done a step for each by then, and one more."""
    store, settings, killed, step = JobStore(database_url), Settings(home=Path(home), auth=False), 0, 0
    for _ in range(int(rounds)):
        kill_at = 1
        while True:
            step += 1
            report(store, store.get(job_id), a_step(step))
            if not in_process(store, settings, job_id, kind, kill_at):
                break
            killed, kill_at = killed + 1, kill_at + 1
    sys.stdout.write(f"{killed} {step}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
