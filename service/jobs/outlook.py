"""How current the record is: what it says of a gang is as of the scheduler's newest look at it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from service.jobs.model import JobRecord
from service.jobs.states import WAITING_STATES

STALE_SECONDS = 30.0  # since a gang was last seen; then its record counts as old


@dataclass(frozen=True)
class Outlook:
    """What one service knows of the scheduler, whichever service schedules.

    Attributes:
        problem: Why jobs are not being scheduled; ``None`` if they are.
        last_pass: When the newest good pass of the scheduler was; ``None`` if none is known.
        unseen: By job, gangs that good passes have not seen for ``STALE_SECONDS``, and when one last did, if known.
    """

    problem: str | None = None
    last_pass: datetime | None = None
    unseen: Mapping[str, datetime | None] = field(default_factory=dict)

    def of(self, job: JobRecord) -> JobRecord:
        """A job's record that says what of it may no longer be true, and why nothing happens; else the same one."""
        if self.problem is not None:
            seen, why = self.last_pass, self.problem
            if not job.has_gang and job.state in WAITING_STATES:
                return job.with_values({"waiting_for": f"nothing is scheduled at present: {self.problem}"})
        elif job.id in self.unseen:
            seen, why = self.unseen[job.id], "its gang does not answer the scheduler"
        else:
            return job
        if not job.has_gang:
            return job
        seen = seen or job.progress_at or job.waiting_since or job.queued_at
        if datetime.now(UTC) - seen < timedelta(seconds=STALE_SECONDS):
            return job
        return job.with_values({"last_seen": seen, "waiting_for": why})
