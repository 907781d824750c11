"""What a supervisor knows of its job's life: reports not yet read, and the restart in progress. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count, islice

from boost_core import messages
from boost_core.config import Layout
from service.gang.assignment import WorkerPlace
from service.gang.control.port import Moment
from service.gang.status import GangPhase, GangReport, GangStatus

REPORTS_A_POLL = 1000
UNREAD_REPORTS = 100_000  # about 100 MB; the oldest are dropped if they are not read for long


@dataclass
class Interruption:
    """The time from a gang's last step to the next gang's first, part by part.

    Attributes:
        cause: Why the gang was interrupted.
        message: The same, human-readable.
        step: Steps done.
        began: When the gang last showed a sign of life, on the monotonic clock.
        mark: When the present part began.
        parts: Seconds by part.
        waited: Seconds that were spent waiting for the resources of the smallest gang.
    """

    cause: messages.Cause
    message: str
    step: int
    began: float
    mark: float
    parts: dict[str, float] = field(default_factory=dict)
    waited: float = 0.0


class GangRecord:
    """Keeps reports in order until they are read, and adds what only the supervisor knows.

    Args:
        now: The present time.
        supervisor: Ray's ID of the supervisor's actor.
        changed: Called when there is news.

    Attributes:
        now: The present time, which the caller advances.
        step: Steps done.
        most_steps: Most steps done so far, including those that a fault has undone.
        stored_step: Step of the newest checkpoint; -1 if there is none.
        last_sign: When the gang last showed a sign of life.
        start: The newest gang's report that it has its state; ``None`` before that.
        status_text: The phase, and the same human-readable.
    """

    def __init__(self, now: Moment, supervisor: str | None = None, changed: Callable[[], None] = lambda: None) -> None:
        self.now, self._supervisor, self._changed = now, supervisor, changed
        self.status_text = GangPhase.STARTING, "starts"
        self._layout: Layout | None = None
        self._reports: deque[GangReport] = deque(maxlen=UNREAD_REPORTS)
        self._sequence = count(1)
        self._polled_text: tuple[GangPhase, str] | None = None  # at the last poll
        self._interruption: Interruption | None = None
        self.start: messages.StartReport | None = None
        self._copy_is_due = False
        self.step, self.most_steps, self.stored_step, self.last_sign = 0, 0, -1, now.seconds
        self._store_failed_at: float | None = None  # when the store first refused the last checkpoint

    @property
    def waited_seconds(self) -> float:
        """How long the store has been waited for to take the last checkpoint."""
        return 0.0 if self._store_failed_at is None else self.now.seconds - self._store_failed_at

    @property
    def settled(self) -> bool:
        """Whether the gang no longer needs anything of earlier gangs, should it break up."""
        return self.start is not None and not self._copy_is_due

    def take(self, reports: list[tuple[datetime, messages.Report]], kept_step: int | None) -> None:
        """Add reports of a rank of the present gang.

        Args:
            reports: The reports with their times.
            kept_step: The newest step whose state two processes have in memory for each rank.
        """
        if kept_step is not None:
            self._copy_is_due = False
        if any(not isinstance(report, messages.LogLine) for _, report in reports):
            self.last_sign = self.now.seconds
        for moment, report in reports:
            match report:
                case messages.StartReport():
                    self.start = report
                    self._copy_is_due &= report.step > 0  # before the first step there is nothing to lose
                    self.step = report.step
                    self.reached("start", self.now.seconds - report.load_seconds)
                    self.reached("load")
                    self.say(GangPhase.TRAINING, f"{self._layout}: {_workers(report.world_size)} training")
                case messages.StepReport():
                    self.step, self._store_failed_at = report.step, None
                    self.most_steps = max(self.most_steps, report.step)
                    if (interruption := self._interruption) and self.start:
                        self.reached("first_step")
                        self._interruption = None
                        origin, seconds = self.start.resumed_from, self.now.seconds - interruption.began
                        restart = messages.RestartReport(
                            cause=interruption.cause,
                            message=interruption.message,
                            step=interruption.step,
                            resumed_step=self.start.step,
                            recovered_from="memory" if origin == "memory" else "storage" if origin else "start",
                            seconds=seconds,
                            waiting_seconds=min(interruption.waited, seconds),
                            parts=interruption.parts,
                        )
                        self.add(restart, moment)
                case messages.CheckpointReport():
                    self.stored_step = max(self.stored_step, report.step)
            self.add(report, moment)

    def formed(self, layout: Layout, places: Sequence[WorkerPlace], makes_copies: bool, keeps: bool = False) -> None:
        """Record that a gang has been formed and starts training.

        Args:
            layout: Its layout.
            places: Where each rank runs.
            makes_copies: Whether its ranks keep copies for each other.
            keeps: Whether they only keep the state, without CPUs and GPUs.
        """
        self._layout, self.start, self._copy_is_due = layout, None, makes_copies
        nodes, endpoints = [place.node for place in places], [place.metrics for place in places]
        shape = messages.ShapeReport(
            **layout.sizes, nodes=nodes, metrics_endpoints=endpoints, supervisor=self._supervisor, keeps=keeps
        )
        self.add(shape)
        if self.status_text[0] is GangPhase.STARTING:
            message = f"{layout}: {_workers(layout.world_size)} loading the data and the model"
            self.status_text = GangPhase.STARTING, message

    def interrupted(self, cause: messages.Cause, message: str, detected: float) -> None:
        """Record that the gang stops. Of several causes before the next step, the first fault counts, else the first.

        Args:
            cause: Why it stops.
            message: The same, human-readable.
            detected: When this was detected, on the monotonic clock.
        """
        planned = messages.PLANNED_CAUSES
        if self._interruption is None and self.start is not None:
            since = min(self.last_sign, detected)
            self._interruption = Interruption(cause, message, self.step, since, since)
            self.reached("detect", detected)
            self.start = None  # a step reported after this is not the next gang's first
            self.add(messages.InterruptionReport(cause=cause, message=message, step=self.step))
        elif self._interruption and self._interruption.cause in planned and cause not in planned:
            self._interruption.cause, self._interruption.message = cause, message
        self.last_sign = self.now.seconds
        self.say(GangPhase.RECOVERING, message)

    def saving(self, failure: str) -> None:
        """Record that the store does not take the last checkpoint.

        Args:
            failure: The store's error.
        """
        if self.start is None:  # it is heard only now that the gang stops
            return
        self._store_failed_at = self._store_failed_at or self.now.seconds
        self.say(GangPhase.SAVING, f"all steps are done; waiting for the store: {failure}")

    def reached(self, part: str, at: float | None = None) -> None:
        """Record the end of a part of the interruption, if there is one; if recorded again, its time adds up.

        Args:
            part: The part.
            at: When it ended, on the monotonic clock; ``None``: now.
        """
        if interruption := self._interruption:
            at = self.now.seconds if at is None else at
            interruption.parts[part] = interruption.parts.get(part, 0.0) + at - interruption.mark
            interruption.mark = at

    def waited(self, seconds: float) -> None:
        """Record further time during which the gang could not be formed for lack of resources."""
        if self._interruption:
            self._interruption.waited += seconds

    def say(self, phase: GangPhase, message: str) -> None:
        """Set the status."""
        self.status_text = phase, message
        self._changed()

    def log(self, level: str, message: str, rank: int = 0) -> None:
        """Add a line to the job's log."""
        self.add(messages.LogLine(rank=rank, level=level, message=message))

    def add(self, report: messages.Report, at: datetime | None = None) -> None:
        """Add a report: the supervisor's own, made now, or a rank's with its time."""
        if report.kind == "ranks":  # the times of thousands of ranks every two seconds, of which the newest are kept
            self._reports = deque((each for each in self._reports if each.report.kind != "ranks"), UNREAD_REPORTS)
        self._reports.append(GangReport(next(self._sequence), at or self.now.utc, report))
        self._changed()

    def status(self, after_sequence: int) -> GangStatus:
        """Return the status with the reports after ``after_sequence``; those up to it are dropped."""
        while self._reports and self._reports[0].sequence <= after_sequence:
            self._reports.popleft()
        phase, message = self.status_text
        if len(self._reports) > REPORTS_A_POLL:
            phase = GangPhase.TRAINING
        self._polled_text = phase, message
        return GangStatus(phase, message, list(islice(self._reports, REPORTS_A_POLL)), self._layout)

    def has_more(self, after_sequence: int) -> bool:
        """Whether there is news since the last poll.

        Args:
            after_sequence: The newest report that was read.
        """
        unread = bool(self._reports) and self._reports[-1].sequence > after_sequence
        return unread or self._polled_text != self.status_text


def _workers(count: int) -> str:
    return "1 worker is" if count == 1 else f"{count} workers are"
