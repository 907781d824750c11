"""The record of a job and its events, as the API shows them and the scheduler reads them."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from boost_core.config import JobSpec
from boost_core.config.reports import CheckpointReport, EvaluationReport, StepReport
from service.jobs.states import TERMINAL_STATES, JobState, Reason


class JobRecord(BaseModel):
    """One job, as of now."""

    model_config = ConfigDict(frozen=True)

    id: str = Field(description="Sortable by time of submission, for example job-01jd3x…")
    name: str
    spec: JobSpec
    state: JobState
    reason: Reason = Field(description="Why the job is in this state.")
    message: str = Field(description="The same for people: what happened, or what the job waits for.")
    attempt: int = Field(description="Gangs started for this job so far.")
    cancel_requested: bool
    checkpoint_url: str = Field(description="Folder of this job's checkpoints.")
    submitted_at: datetime
    started_at: datetime | None = Field(description="When the first gang began to train.")
    finished_at: datetime | None
    progress: StepReport | None = Field(description="The newest step.")
    evaluation: EvaluationReport | None = Field(description="The newest evaluation.")
    checkpoint: CheckpointReport | None = Field(description="The newest committed checkpoint.")
    version: int = Field(description="Goes up with every write.")

    @property
    def finished(self) -> bool:
        """Whether the job has come to its end."""
        return self.state in TERMINAL_STATES


class JobPage(BaseModel):
    """Some of the jobs, the newest first."""

    jobs: list[JobRecord]
    next_cursor: str | None = Field(description="Give this as cursor to see older jobs; null when there are none.")


class JobEvent(BaseModel):
    """Something that happened to a job. Ids grow over all jobs; clients resume after the last one they saw."""

    model_config = ConfigDict(frozen=True)

    id: int
    job_id: str
    kind: Literal["state", "started", "progress", "evaluation", "checkpoint", "log"]
    time: datetime
    data: dict[str, Any] = Field(
        description="For kind=state: state, reason, message. Else the trainer's report, see boost_core.config.reports."
    )
