"""Operations on jobs."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from boost_core.config import JobSpec
from boost_core.messages import Drill, Profile, Scores
from service.client.calls import Call, Stream, create, get, operation, path_of, plain, stream
from service.jobs.model import EventKind, JobPage, JobRecord
from service.jobs.patch import JobPatch
from service.jobs.states import JobState
from service.models.evaluations import EvaluationList
from service.models.metrics import MetricsHistory
from service.models.plans import PlanAnswer
from service.models.requests import CloneRequest, DryRun
from service.models.trackers import TrackerList


class JobCalls:
    """Operations on jobs."""

    @operation
    def submit(self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> Call[JobRecord]:
        """Submit a job; a mapping is validated by the service.

        Args:
            spec: The job.
            idempotency_key: Repeated requests with one key create only one job; a new key if ``None``.
        """
        return create(path_of("jobs"), JobRecord, plain(spec), idempotency_key)

    @operation
    def dry_run(self, spec: JobSpec | Mapping[str, Any]) -> Call[DryRun]:
        """Check and plan a job without submitting it."""
        return Call("POST", path_of("jobs", "dry-run"), DryRun, body=plain(spec), repeatable=True)

    @operation
    def list(
        self,
        states: Collection[JobState | str] = (),
        limit: int = 100,
        cursor: str | None = None,
        *,
        queue: str | None = None,
        name: str | None = None,
        tenant: str | None = None,
        submitted_by: str | None = None,
    ) -> Call[JobPage]:
        """Return one page of jobs, newest first.

        Args:
            states: Only jobs in one of these states; if empty, in any.
            limit: Maximum number of results.
            cursor: The ``next_cursor`` of the previous page.
            queue: Only jobs in this queue.
            name: Only jobs whose name contains this.
            tenant: Only this tenant's jobs; for operators.
            submitted_by: Only jobs submitted with the key of this name.
        """
        filters = {"queue": queue, "name": name, "tenant": tenant, "submitted_by": submitted_by}
        return get(path_of("jobs"), JobPage, state=[*states], limit=limit, cursor=cursor, **filters)

    @operation
    def get(self, job_id: str) -> Call[JobRecord]:
        """Return one job."""
        return get(path_of("jobs", job_id), JobRecord)

    @operation
    def job_plan(self, job_id: str) -> Call[PlanAnswer]:
        """Return what a job needs in each of its layouts, by the figures that it was submitted with."""
        return get(path_of("jobs", job_id, "plan"), PlanAnswer)

    @operation
    def patch(
        self, job_id: str, changes: JobPatch | Mapping[str, Any], *, if_match: str | None = None
    ) -> Call[JobRecord]:
        """Change a job's name, priority, or limits of replicas or GPUs; a mapping is validated by the service.

        Args:
            job_id: The job.
            changes: The changes.
            if_match: The ``etag`` of the record that the changes apply to; refused if it has changed since.
        """
        headers = {"If-Match": if_match} if if_match else {}
        return Call("PATCH", path_of("jobs", job_id), JobRecord, body=plain(changes), headers=headers)

    @operation
    def cancel(self, job_id: str) -> Call[JobRecord]:
        """Request that a job be cancelled."""
        return Call("DELETE", path_of("jobs", job_id), JobRecord, repeatable=True)

    @operation
    def pause(self, job_id: str) -> Call[JobRecord]:
        """Request that a job be paused."""
        return Call("POST", path_of("jobs", job_id, "pause"), JobRecord, repeatable=True)

    @operation
    def resume(self, job_id: str) -> Call[JobRecord]:
        """Resume a paused job."""
        return Call("POST", path_of("jobs", job_id, "resume"), JobRecord)

    @operation
    def retry(self, job_id: str) -> Call[JobRecord]:
        """Requeue a failed or cancelled job; it continues from its newest checkpoint."""
        return Call("POST", path_of("jobs", job_id, "retry"), JobRecord)

    @operation
    def clone(
        self,
        job_id: str,
        changes: Mapping[str, Any] | None = None,
        *,
        from_checkpoint: bool = False,
        from_weights: bool = False,
        idempotency_key: str | None = None,
    ) -> Call[JobRecord]:
        """Submit a copy of a job, with changes.

        Args:
            job_id: The job to copy.
            changes: Changes to its spec, as a JSON merge patch.
            from_checkpoint: Continue from its newest checkpoint, with its optimizer and step.
            from_weights: Start at step 0 from the weights of its newest checkpoint.
            idempotency_key: As for ``submit``.
        """
        body = CloneRequest(changes=dict(changes or {}), from_checkpoint=from_checkpoint, from_weights=from_weights)
        return create(path_of("jobs", job_id, "clone"), JobRecord, plain(body), idempotency_key)

    @operation
    def drill(
        self, job_id: str, drill: Drill | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[JobRecord]:
        """Inject one fault into a running job; a mapping is validated by the service."""
        return create(path_of("jobs", job_id, "drills"), JobRecord, plain(drill), idempotency_key)

    @operation
    def profile(
        self, job_id: str, profile: Profile | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[JobRecord]:
        """Trace some steps of a job; events of kind ``profile`` say where the traces are."""
        return create(path_of("jobs", job_id, "profiles"), JobRecord, plain(profile), idempotency_key)

    @operation
    def record_evaluation(
        self, job_id: str, scores: Scores | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[JobRecord]:
        """Record the scores of one of a job's checkpoints on tasks; a mapping is validated by the service."""
        return create(path_of("jobs", job_id, "evaluations"), JobRecord, plain(scores), idempotency_key)

    @operation
    def evaluations(self, job_id: str) -> Call[EvaluationList]:
        """Return the evaluations of a job's checkpoints on tasks, newest first."""
        return get(path_of("jobs", job_id, "evaluations"), EvaluationList)

    @operation
    def metrics(
        self, job_id: str, points: int = 500, *, from_step: int | None = None, to_step: int | None = None
    ) -> Call[MetricsHistory]:
        """Return a job's metrics over its steps, downsampled to about ``points`` points."""
        path = path_of("jobs", job_id, "metrics")
        return get(path, MetricsHistory, points=points, from_step=from_step, to_step=to_step)

    @operation
    def trackers(self, job_id: str) -> Call[TrackerList]:
        """Return where else a job's curves go, such as MLflow or Weights & Biases, and how far each tracker is."""
        return get(path_of("jobs", job_id, "trackers"), TrackerList)

    @stream
    def events(self, job_id: str, after: int = 0, follow: bool = True, kinds: Collection[EventKind] = ()) -> Stream:
        """Yield a job's events with IDs above ``after``, in order and exactly once; reconnect when needed.

        Args:
            job_id: The job.
            after: The last event already seen.
            follow: Continue until the job ends; otherwise stop after the existing events.
            kinds: Only events of these kinds; if empty, of any.
        """
        return Stream(job_id, "events", after, follow, {"kind": [*kinds]})

    @stream
    def logs(
        self,
        job_id: str,
        rank: int | None = None,
        level: str | Collection[str] = (),
        since: datetime | None = None,
        after: int = 0,
        follow: bool = True,
    ) -> Stream:
        """Yield the logs of a job's ranks, as events of kind ``log``; reconnect when the connection is lost.

        Args:
            job_id: The job.
            rank: Only this rank's lines.
            level: Only lines of this level, or of one of these; if empty, of any.
            since: Only lines from this time on.
            after: The last event already seen.
            follow: Continue until the job ends; otherwise stop after the existing lines.
        """
        levels = [level] if isinstance(level, str) else [*level]
        params = {"rank": rank, "level": levels, "since": since.astimezone().isoformat() if since else None}
        return Stream(job_id, "logs", after, follow, params)
