"""What a supervisor knows of its job's life: reports until they are read, and the restart under way. Pure."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import count, islice
from typing import Literal

from boost_core.config import Layout
from boost_core.messages.reports import (
    PLANNED_CAUSES,
    Cause,
    CheckpointReport,
    InterruptionReport,
    LogLine,
    Report,
    RestartReport,
    ShapeReport,
    StartReport,
    StepReport,
)
from service.gang.assignment import WorkerPlace
from service.gang.control.port import Moment
from service.gang.status import GangPhase, GangReport, GangStatus

REPORTS_A_POLL = 1000
UNREAD_REPORTS = 100_000  # some 100 MB; the oldest go first when nobody reads for long


class Interruption:
    """From a gang's last step to the next gang's first, told part by part.

    Args:
        cause: Why.
        message: The same for people.
        step: Steps done.
        since: When the last sign of the gang was seen, on the monotonic clock.
    """

    def __init__(self, cause: Cause, message: str, step: int, since: float) -> None:
        self.cause, self.message, self.step = cause, message, step
        self._began = self._mark = since
        self._parts: dict[str, float] = {}
        self._waited = 0.0

    def is_overtaken_by(self, cause: Cause) -> bool:
        """Whether a fault has come into the way of a planned change."""
        return self.cause in PLANNED_CAUSES and cause not in PLANNED_CAUSES

    def reached(self, part: str, now: float) -> None:
        """A part has come to its end; told again, it goes on from where it was."""
        self._parts[part] = self._parts.get(part, 0.0) + now - self._mark
        self._mark = now

    def waited(self, seconds: float) -> None:
        """So much of it was spent without the resources that the smallest gang needs."""
        self._waited += seconds

    def report(self, resumed: StartReport, now: float) -> RestartReport:
        """All of it, at the end of the first step."""
        self.reached("first_step", now)
        source: Literal["memory", "storage", "start"] = "start"
        if resumed.resumed_from is not None:
            source = "memory" if resumed.resumed_from == "memory" else "storage"
        return RestartReport(
            cause=self.cause,
            message=self.message,
            step=self.step,
            resumed_step=resumed.step,
            recovered_from=source,
            seconds=now - self._began,
            waiting_seconds=min(self._waited, now - self._began),
            parts=self._parts,
        )


class GangRecord:
    """Keeps reports in order until they are read, and adds to the ranks' what only the supervisor knows.

    Args:
        now: The time.
        supervisor: Ray's id of the supervisor's actor.
        changed: Called when there is more to tell.

    Attributes:
        now: The time, which goes on when it is told to.
        step: Steps done.
        stored_step: That of the newest checkpoint; -1 without one.
        last_sign: When the gang was heard to do something last.
    """

    def __init__(self, now: Moment, supervisor: str | None = None, changed: Callable[[], None] = lambda: None) -> None:
        self.now, self._supervisor, self._changed = now, supervisor, changed
        self._phase, self._message = GangPhase.STARTING, "starts"
        self._layout: Layout | None = None
        self._reports: deque[GangReport] = deque(maxlen=UNREAD_REPORTS)
        self._sequence = count(1)
        self._told: tuple[GangPhase, str] | None = None  # at the last poll
        self._interruption: Interruption | None = None
        self._start: StartReport | None = None
        self._copy_is_due = False
        self.step, self.stored_step, self.last_sign = 0, -1, now.seconds
        self._store_failed_at: float | None = None  # of the last checkpoint, for the first time

    @property
    def waited_seconds(self) -> float:
        """How long the store has been waited for with the last checkpoint."""
        return 0.0 if self._store_failed_at is None else self.now.seconds - self._store_failed_at

    @property
    def said(self) -> tuple[GangPhase, str]:
        """The phase, and the same for people."""
        return self._phase, self._message

    @property
    def started(self) -> bool:
        """Whether the gang that was formed last has its state."""
        return self._start is not None

    @property
    def settled(self) -> bool:
        """Whether it needs nothing of the gangs before it any more, should it break."""
        return self._start is not None and not self._copy_is_due

    def take(self, reports: list[tuple[datetime, Report]], kept_step: int | None) -> None:
        """Take reports of a rank of the present gang.

        Args:
            reports: With their times.
            kept_step: The newest step whose state is in the memory of two processes for each rank.
        """
        if kept_step is not None:
            self._copy_is_due = False
        if any(not isinstance(report, LogLine) for _, report in reports):
            self.last_sign = self.now.seconds
        for moment, report in reports:
            self._heard(moment, report)
            self._keep(moment, report)

    def _heard(self, moment: datetime, report: Report) -> None:
        match report:
            case StartReport():
                self._start = report
                self._copy_is_due &= report.step > 0  # before the first step there is nothing to lose
                self.step = report.step
                if self._interruption:
                    self._interruption.reached("start", self.now.seconds - report.load_seconds)
                    self._interruption.reached("load", self.now.seconds)
                self.say(GangPhase.TRAINING, f"{self._layout}: {_workers(report.world_size)} training")
            case StepReport():
                self.step = report.step
                if self._interruption and self._start:
                    restart = self._interruption.report(self._start, self.now.seconds)
                    self._interruption = None
                    self._keep(moment, restart)
            case CheckpointReport():
                self.stored_step = max(self.stored_step, report.step)

    def formed(self, layout: Layout, places: Sequence[WorkerPlace], makes_copies: bool, keeps: bool = False) -> None:
        """A gang has been formed, and is told to train.

        Args:
            layout: Its layout.
            places: Where each rank is.
            makes_copies: Whether its ranks keep copies for each other.
            keeps: Whether they have neither CPUs nor GPUs, and only keep the state.
        """
        self._layout, self._start, self._copy_is_due = layout, None, makes_copies
        self._keep(
            self.now.utc,
            ShapeReport(
                **layout.sizes,
                nodes=[place.node for place in places],
                metrics_endpoints=[place.metrics for place in places],
                supervisor=self._supervisor,
                keeps=keeps,
            ),
        )
        if self._phase is GangPhase.STARTING:
            self._message = f"{layout}: {_workers(layout.world_size)} loading the data and the model"

    def interrupted(self, cause: Cause, message: str, detected: float) -> None:
        """The gang stops. Of several causes before the next step the first fault counts, or else the first.

        Args:
            cause: Why.
            message: The same for people.
            detected: When that was known, on the monotonic clock.
        """
        if self._interruption is None and self._start is not None:
            self._interruption = Interruption(cause, message, self.step, min(self.last_sign, detected))
            self._interruption.reached("detect", detected)
            self._start = None  # a step reported after this is not the next gang's first
            self._keep(self.now.utc, InterruptionReport(cause=cause, message=message, step=self.step))
        elif self._interruption and self._interruption.is_overtaken_by(cause):
            self._interruption.cause, self._interruption.message = cause, message
        self.say(GangPhase.RECOVERING, message)

    def saving(self, failure: str) -> None:
        """The store does not take the last checkpoint.

        Args:
            failure: What it says.
        """
        if self._start is None:  # it is heard only now that the gang stops
            return
        self._store_failed_at = self._store_failed_at or self.now.seconds
        self.say(GangPhase.SAVING, f"all steps are done; waits for the store: {failure}")

    def reached(self, part: str) -> None:
        """A part of the interruption, if there is one, has come to its end."""
        if self._interruption:
            self._interruption.reached(part, self.now.seconds)

    def waited(self, seconds: float) -> None:
        """The gang cannot be formed for want of resources, for so much longer."""
        if self._interruption:
            self._interruption.waited(seconds)

    def say(self, phase: GangPhase, message: str) -> None:
        """Set the status."""
        self._phase, self._message = phase, message
        self._changed()

    def log(self, level: str, message: str, rank: int = 0) -> None:
        """Add a line to the job's log."""
        self.add(LogLine(rank=rank, level=level, message=message))

    def add(self, report: Report) -> None:
        """Add a report of the supervisor's own."""
        self._keep(self.now.utc, report)

    def status(self, after_sequence: int) -> GangStatus:
        """The status with reports after ``after_sequence``; those up to it are forgotten."""
        while self._reports and self._reports[0].sequence <= after_sequence:
            self._reports.popleft()
        more = len(self._reports) > REPORTS_A_POLL
        phase = GangPhase.TRAINING if more else self._phase
        self._told = phase, self._message
        return GangStatus(phase, self._message, list(islice(self._reports, REPORTS_A_POLL)), self._layout)

    def has_more(self, after_sequence: int) -> bool:
        """Whether there is more to tell than was told last.

        Args:
            after_sequence: The newest report that was told.
        """
        unread = bool(self._reports) and self._reports[-1].sequence > after_sequence
        return unread or self._told != (self._phase, self._message)

    def _keep(self, moment: datetime, report: Report) -> None:
        self._reports.append(GangReport(next(self._sequence), moment, report))
        self._changed()


def _workers(count: int) -> str:
    return "1 worker is" if count == 1 else f"{count} workers are"
