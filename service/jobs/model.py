"""The record of a job and its events, as the API shows them and the scheduler reads them."""

import hashlib
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import to_json

from boost_core import messages
from boost_core.config import JobSpec, Layout
from boost_core.config.base import FieldProblem, raise_problems, spelled
from boost_core.config.job import MOST_TAGS, Label
from boost_core.plan.machine import Basis, Fitted
from service.jobs.goodput import Goodput
from service.jobs.states import TERMINAL_STATES, JobState, Reason
from service.models.access import TenantName
from service.models.cluster import QueueName, StoredProfile, basis_of

GANG_LOST = "gang_lost"  # in fault_counts
NODES = "nodes"  # the snapshot of the cluster's nodes
MOST_CANCELLED = 1_000  # jobs by one request

_TAG_DIGITS = 16


_SETS: dict[frozenset[str], set[str]] = {}


def one_set(names: Collection[str]) -> set[str]:
    """The same set for the same names of fields, which nobody may change: each record's own would be a third of it."""
    return _SETS.setdefault(frozenset(names), set(names))


class RestartRecord(messages.RestartReport):
    """One resumption of training after an interruption."""

    time: datetime = Field(description="When the first step after it finished.")


class JobRecord(BaseModel):
    """One job, as of now."""

    model_config = ConfigDict(frozen=True)

    id: str = Field(description="Sorts by time of submission, for example job-01jd3x…")
    tenant: str = Field(description="The job's tenant.")
    submitted_by: str = Field(description="Name of the API key used to submit it.")
    cloned_from: str | None = Field(None, description="The job it was cloned from.")
    queue: str = Field(description="The queue it waits in and whose quota it uses.")
    name: str
    spec: JobSpec
    state: JobState
    reason: Reason = Field(description="Why the job is in this state.")
    message: str = Field(description="The same in words: what happened, or what the job waits for.")
    waiting_for: str | None = Field(
        None,
        description="What a QUEUED job waits for. While nothing is scheduled: why, also for a SCHEDULING one, and "
        "for one whose gang has not been seen (last_seen).",
    )
    last_seen: datetime | None = Field(
        None,
        description="When the scheduler last saw the job's gang, if that is over 30 seconds ago: state, message and "
        "figures are as of then. Null: they are current.",
    )
    attempt: int = Field(description="Number of gangs started for this job so far.")
    cancel_requested: bool
    pause_requested: bool = Field(False, description="Whether the user has asked to pause it.")
    checkpoint_url: str = Field(description="Folder of this job's checkpoints.")
    submitted_at: datetime
    queued_at: datetime = Field(description="When it was submitted or last retried.")
    # Number of that submission or retry among all jobs', which determines its place in the queue, whatever clocks say;
    # ``None`` from a replica of a release before. Not shown: it would tell a tenant how many jobs others submit.
    arrival: int | None = Field(None, exclude=True)
    waiting_since: datetime | None = Field(
        None, description="When it last became QUEUED or SCHEDULING; null in other states."
    )
    started_at: datetime | None = Field(description="When the first gang started training.")
    finished_at: datetime | None
    progress: messages.StepReport | None = Field(description="The newest step.")
    progress_at: datetime | None = Field(None, description="When the newest step was done.")
    evaluation: messages.EvaluationReport | None = Field(description="The newest evaluation.")
    checkpoint: messages.CheckpointReport | None = Field(description="The newest committed checkpoint.")
    checkpoint_at: datetime | None = Field(None, description="When the newest checkpoint was committed.")
    shape: messages.ShapeReport | None = Field(None, description="Layout and nodes of the newest gang.")
    spare: messages.SpareReport | None = Field(
        None,
        description="The newest gang's spare copy: its step, and the node outside the gang that keeps it, as of a few "
        "seconds ago; null, or with a step of null, if there is none.",
    )
    comparison: messages.ComparisonReport | None = Field(
        None, description="Memory and step seconds of the newest gang that has done two steps, compared with its plan."
    )
    profile: StoredProfile | None = Field(
        None,
        description="Profile of its kind of GPU that was stored when it was submitted; its layouts are chosen and its "
        "steps predicted from it; null: from data sheets.",
    )
    fitted: Fitted | None = Field(
        None,
        description="Times of jobs that had run before it was submitted, relative to their predictions, which correct "
        "its own; null: none had run.",
    )
    node_gpus: int | None = Field(
        None,
        description="GPUs per node for which its layouts are chosen and its steps predicted: the size of the suitable "
        "nodes that had most of the GPUs when it was submitted; null: none was seen, and 8 are assumed.",
    )
    node_memory_bytes: int | None = Field(
        None,
        description="Memory that Ray reserved for workers on the largest of these nodes; layouts that need more host "
        "memory are not used; null: host memory is not checked.",
    )
    commands: list[messages.WorkerCommand] = Field(
        [], description="Drills and profiles that have not been delivered to the gang yet."
    )
    steers: list[messages.Steer] = Field(
        [], description="Changes of values that were requested while it trained and that its gang has not made yet."
    )
    restarts: list[RestartRecord] = Field([], description="The newest 50 restarts, oldest first.")
    restart_counts: dict[messages.Cause, int] = Field({}, description="Number of restarts by cause.")
    fault_counts: dict[str, int] = Field(
        {}, description="Number of faults by kind; gang_lost: gangs that were gone with their supervisor."
    )
    goodput: Goodput = Field(
        default_factory=lambda values: Goodput(since=values["submitted_at"], booked_until=values["submitted_at"]),
        description="How the job's time was spent.",
    )
    traceparent: str | None = Field(None, exclude=True)  # the request that submitted it, for spans of what follows
    version: int = Field(description="Increases with every write.")

    @cached_property
    def as_json(self) -> bytes:
        """The record as the API shows it."""
        return self.model_dump_json().encode()

    @cached_property
    def etag(self) -> str:
        """HTTP's entity tag of what a user can change: the spec. Progress does not alter it."""
        spec = self.requested_spec.model_dump_json(exclude={"steered"})
        return f'"{hashlib.sha256(spec.encode()).hexdigest()[:_TAG_DIGITS]}"'

    def with_values(self, values: Mapping[str, Any]) -> "JobRecord":
        """The record with other values; what has been worked out of this one, such as its JSON, is left behind."""
        fields = {name: getattr(self, name) for name in JobRecord.model_fields}
        return JobRecord.model_construct(one_set(self.model_fields_set.union(values)), **{**fields, **values})

    @property
    def requested_spec(self) -> JobSpec:
        """The spec once its gang has made all changes of values that were requested."""
        return self.spec.with_steering(self.steers[-1].steering) if self.steers else self.spec

    @property
    def basis(self) -> Basis:
        """What its seconds are predicted by."""
        return basis_of(self.profile, self.fitted, self.node_gpus, self.node_memory_bytes)

    @property
    def queue_order(self) -> tuple[int, bool, int, datetime, str]:
        """What jobs are sorted by: priority, then arrival. Those that arrived at once share a number."""
        return -self.spec.priority, self.arrival is None, self.arrival or 0, self.queued_at, self.id

    @property
    def finished(self) -> bool:
        """Whether the job has ended."""
        return self.state in TERMINAL_STATES

    @property
    def spare_step(self) -> int | None:
        """The step of the spare copy with which the gang could continue without its nodes; ``None`` without one."""
        return self.spare.step if self.spare is not None and self.has_gang else None

    @property
    def has_gang(self) -> bool:
        """Whether the newest gang runs, or was about to be started."""
        starting = self.state is JobState.SCHEDULING and self.reason is Reason.GANG_STARTING
        return starting or self.state is JobState.RUNNING

    @property
    def has_workers(self) -> bool:
        """Whether there is a gang that has workers or was about to be started; one that has lost all of them waits."""
        return self.has_gang and self.reason is not Reason.WAITING_FOR_RESOURCES

    @property
    def keeps(self) -> bool:
        """Whether the newest gang has given its resources back, and only keeps the last step's state for the store."""
        return self.shape is not None and self.shape.keeps

    @property
    def allocated(self) -> dict[str, float]:
        """What is allocated to the newest gang while it runs, by Ray's names of resources."""
        if not self.has_workers or self.keeps:
            return {}
        ranks, each = self.present_layout.world_size, self.spec.resources
        return {"GPU": ranks * each.gpus_per_worker, "CPU": ranks * each.cpus_per_worker}

    @property
    def present_layout(self) -> Layout:
        """The newest gang's layout; that of the spec before there was one."""
        return Layout.of(self.shape or self.spec.parallelism)


class Owner(NamedTuple):
    """Who submits a job.

    Attributes:
        tenant: Whose job it is.
        name: Name of the API key.
    """

    tenant: str = "default"
    name: str = "anonymous"


@dataclass(frozen=True)
class JobFilter:
    """Which jobs; what is ``None`` does not matter.

    Attributes:
        states: In one of these.
        tenant: Of this tenant.
        queue: Of this queue.
        name: With this in their name, in whichever case.
        submitted_by: Submitted with the key of this name.
        group: Of this group.
        tags: With all of these tags, in whichever case.
        text: With this in their name, group, tags or notes, in whichever case.
        ids: With one of these ids.
        cancellable: Whether only those that have not ended and are not being cancelled.
    """

    states: Collection[JobState] | None = None
    tenant: str | None = None
    queue: str | None = None
    name: str | None = None
    submitted_by: str | None = None
    group: str | None = None
    tags: Collection[str] = ()
    text: str | None = None
    ids: Collection[str] | None = None
    cancellable: bool = False


SearchText = Annotated[  # SQLite looks for what is before a NUL
    str, StringConstraints(max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$"), spelled("text without control characters")
]


class JobSelection(BaseModel):
    """Which jobs, as requests say it."""

    model_config = ConfigDict(extra="forbid")

    state: list[JobState] = Field(
        [], fail_fast=True, description="Only jobs in one of these states; all if none is given."
    )
    queue: QueueName | None = Field(None, description="Only jobs of this queue.")
    name: SearchText | None = Field(None, description="Only jobs whose name contains this, as for search.")
    submitted_by: SearchText | None = Field(None, description="Only jobs submitted with the key of this name.")
    tenant: TenantName | None = Field(None, description="Only jobs of this tenant; operators see all tenants' jobs.")
    group: Label | None = Field(None, description="Only jobs of this group.")
    tag: list[Label] = Field([], max_length=MOST_TAGS, fail_fast=True, description="Only jobs with all of these tags.")
    search: SearchText | None = Field(
        None, description="Only jobs with this in their name, group, tags or notes, in whichever case."
    )

    def filter_for(self, tenant: str | None) -> JobFilter:
        """The filter for the jobs of a tenant that the sender may see; ``None``: of all."""
        described = self.queue, self.name, self.submitted_by, self.group, self.tag, self.search
        return JobFilter(self.state or None, tenant, *described)


JobId = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,64}$")]


class CancelRequest(JobSelection):
    """Which jobs to cancel: those with some ids, or those that a list with the same fields would show."""

    ids: Annotated[list[JobId], Field(fail_fast=True)] | None = Field(
        None, min_length=1, max_length=MOST_CANCELLED, description="The jobs' ids; no other field may come with them."
    )

    @model_validator(mode="after")
    def _names_jobs(self) -> Self:
        given, problems = self.model_dump(exclude_defaults=True), []
        if not given:
            fields = ", ".join(JobSelection.model_fields)
            problem = f"would cancel all jobs; give the jobs' ids, or at least one of {fields}"
            problems.append(FieldProblem(("ids",), None, problem))
        elif self.ids and len(given) > 1:
            problems.append(FieldProblem(("ids",), None, f"come without other fields; leave out {next(iter(given))}"))
        problems += [FieldProblem((name,), "", "is empty; leave it out") for name, each in given.items() if each == ""]
        raise_problems("CancelRequest", problems)
        return self

    def filter_for(self, tenant: str | None) -> JobFilter:
        """The filter for these jobs, as far as they belong to a tenant and, unless named, can be cancelled."""
        return replace(super().filter_for(tenant), ids=self.ids, cancellable=self.ids is None)


class Cancellation(BaseModel):
    """What a request to cancel many jobs has done."""

    cancelled: int = Field(description="Jobs that it cancelled: CANCELLED now, or in seconds if workers have to end.")
    ended: int = Field(description="Jobs that had ended, or were being cancelled, already.")
    not_found: list[str] = Field(description="Ids of no job; other tenants' jobs are as if they did not exist.")
    remaining: bool = Field(description="Whether more jobs are to be cancelled: send the same request again.")


class JobPage(BaseModel):
    """Some of the jobs, the newest first."""

    jobs: list[JobRecord]
    next_cursor: str | None = Field(description="Pass as cursor to get older jobs; null if there are none.")

    @property
    def as_json(self) -> bytes:
        """The page as the API shows it, put together from what is known of each job already."""
        jobs, last = [job.as_json for job in self.jobs], b'],"next_cursor":%b}' % to_json(self.next_cursor)
        if not jobs:
            return b'{"jobs":[' + last
        jobs[0] = b'{"jobs":[' + jobs[0]  # so that the page is copied once
        jobs[-1] += last
        return b",".join(jobs)


EventKind = Literal[
    "state", "started", "progress", "evaluation", "sample", "checkpoint", "shape", "interruption", "restart", "fault",
    "ranks", "profile", "spare", "log", "patch", "drill", "scores", "layouts", "comparison", "steered",
]  # fmt: skip
EVENT_KINDS: frozenset[str] = frozenset(get_args(EventKind))


class JobEvent(BaseModel):
    """Something that happened to a job. Ids grow over all jobs; clients resume after the last one they saw."""

    model_config = ConfigDict(frozen=True)

    id: int
    job_id: str
    # Clients read events of services that are newer than they are.
    kind: str = Field(json_schema_extra={"enum": list(get_args(EventKind))})
    time: datetime
    data: dict[str, Any] = Field(
        description="For kind=state: state, reason, message; for patch: each changed field's from and to; for drill: "
        "the request; for scores: a checkpoint's scores on tasks; for layouts: those that layouts=auto chose, "
        "and why. Otherwise the trainer's report, see boost_core.messages."
    )


# Job ids that sort by time of submission.

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # base 32 without letters that are easily misread
_TIME_DIGITS = 11  # 55 bits of microseconds: enough for a thousand years
_RANDOM_DIGITS = 5


def new_id(kind: Literal["job", "dataset", "sweep"]) -> str:
    """A new id: the kind, the time in microseconds, and random digits to distinguish simultaneous ids."""
    number = (time.time_ns() // 1_000) << (5 * _RANDOM_DIGITS) | secrets.randbits(5 * _RANDOM_DIGITS)
    places = reversed(range(_TIME_DIGITS + _RANDOM_DIGITS))
    return f"{kind}-" + "".join(_ALPHABET[(number >> (5 * place)) & 31] for place in places)


# Requests that take effect once, however often they are sent (Idempotency-Key).

KEPT = timedelta(days=7)


class IdempotencyKeyReused(ValueError):
    """A key was reused for another request."""


class TooManyJobs(ValueError):
    """A tenant has as many jobs that have not ended as it may."""


@dataclass(frozen=True)
class Request:
    """A request that may be repeated.

    Attributes:
        tenant: The sender's tenant.
        key: Its Idempotency-Key.
        fingerprint: Digest of its content.
    """

    tenant: str
    key: str
    fingerprint: str
