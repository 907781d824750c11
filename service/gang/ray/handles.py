"""Talking to the supervisors of many gangs at once, from the scheduler's process."""

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from service.gang.status import GangKey, GangPhase, GangStatus, Orders, PollRequest, PollResult

POLL_SECONDS = 1.0
_LONGEST_GAP = 5.0  # between two polls, so that a scheduler that was held up itself does not take gangs for silent
_SILENT = GangStatus(GangPhase.STARTING, "waiting for the gang's supervisor to answer", [])


@dataclass
class _Handle:
    """The handle of one supervisor.

    Attributes:
        actor: Ray's handle.
        answer: The answer to a poll, until it is read.
        watch: The long poll in flight, which returns when the supervisor has news; ``None`` if there is none.
        silent_seconds: How long it has not answered.
        silent_at: When it was last seen not to answer, on the monotonic clock; ``None`` if it answered then.
    """

    actor: Any
    answer: Any = None
    watch: Any = None
    silent_seconds: float = 0.0
    silent_at: float | None = None

    def silence(self) -> GangStatus:
        """Take note that it does not answer now."""
        now = time.monotonic()
        if self.silent_at is not None:
            self.silent_seconds += min(now - self.silent_at, _LONGEST_GAP)
        self.silent_at = now
        return replace(_SILENT, silent_seconds=self.silent_seconds)


class SupervisorHandles:
    """The supervisors of all gangs, each looked up once. For use by one thread."""

    def __init__(self) -> None:
        self._handles: dict[GangKey, _Handle] = {}
        self._ended_watches: queue.SimpleQueue[tuple[GangKey, Any]] = queue.SimpleQueue()

    def add(self, gang: GangKey, actor: Any, orders: Orders) -> None:
        """Add a supervisor that is being started. That takes seconds, so its first answer is not waited for."""
        self._handles[gang] = _Handle(actor, actor.poll.remote(0, orders))

    def find(self, gang: GangKey) -> Any | None:
        """Return a gang's supervisor; ``None`` if there is none."""
        handle = self._find(gang)
        return handle and handle.actor

    def forget(self, gang: GangKey) -> None:
        """Stop talking to a gang's supervisor."""
        self._handles.pop(gang, None)

    def poll(self, requests: Sequence[PollRequest]) -> list[PollResult]:
        """Ask all supervisors once, and then wait for their answers, at most a second in total.

        One that does not answer in time is neither asked nor waited for again until its answer arrives.
        """
        asked = [answer for request in requests if (answer := self._ask(request)) is not None]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=POLL_SECONDS)
        handles = [self._handles.get(request.gang) for request in requests]
        answers = [handle.answer for handle in handles if handle]
        there = set(ray.wait(answers, num_returns=len(answers), timeout=0)[0]) if answers else set()
        return [
            self._result(request, handle, handle.answer in there) if handle else None
            for request, handle in zip(requests, handles, strict=True)
        ]

    def wait_for_updates(self, seconds: float) -> set[GangKey]:
        """Wait at most ``seconds`` for supervisors with news since their last poll, and return their gangs."""
        deadline = time.monotonic() + seconds
        updated: set[GangKey] = set()
        while True:
            left = 0.0 if updated else deadline - time.monotonic()
            try:
                gang, watch = self._ended_watches.get(timeout=max(0.0, left))
            except queue.Empty:
                return updated
            handle = self._handles.get(gang)
            if handle and handle.watch is watch:
                handle.watch = None  # the next poll starts another one
                if watch.exception() is None and watch.result():
                    updated.add(gang)

    def _find(self, gang: GangKey) -> _Handle | None:
        if gang not in self._handles:
            try:
                self._handles[gang] = _Handle(ray.get_actor(name_of(gang)))
            except ValueError:  # Ray raises this if there is none
                return None
        return self._handles[gang]

    def _ask(self, request: PollRequest) -> Any | None:
        """Send a request, unless the supervisor is gone or has not answered the last one."""
        handle = self._find(request.gang)
        if handle is None or handle.answer is not None:
            return None
        if handle.watch is not None and handle.watch.done():
            handle.watch = None  # the answer will tell why it ended
        handle.answer = handle.actor.poll.remote(request.after_sequence, request.orders)
        return handle.answer

    def _result(self, request: PollRequest, handle: _Handle, is_there: bool) -> PollResult:
        if not is_there:
            return handle.silence()
        answer, handle.answer = handle.answer, None
        try:
            status: GangStatus = ray.get(answer)
        except ActorUnavailableError:
            return handle.silence()
        except RayActorError:
            self.forget(request.gang)
            return None
        except Exception as error:
            return error
        handle.silent_seconds, handle.silent_at = 0.0, None
        # A late answer belongs to an older request.
        fresh = [report for report in status.reports if report.sequence > request.after_sequence]
        self._watch(request.gang, handle, fresh[-1].sequence if fresh else request.after_sequence)
        return status if len(fresh) == len(status.reports) else replace(status, reports=fresh)

    def _watch(self, gang: GangKey, handle: _Handle, told: int) -> None:
        # A supervisor started by the previous release cannot be watched, only polled.
        if handle.watch is None and hasattr(handle.actor, "wait_for_update"):
            handle.watch = handle.actor.wait_for_update.remote(told).future()
            handle.watch.add_done_callback(lambda ended: self._ended_watches.put((gang, ended)))


def name_of(gang: GangKey) -> str:
    """Return the name of a gang's supervisor in Ray."""
    job_id, attempt = gang
    return f"{job_id}-{attempt}"
