"""All operations of the API, as methods of the blocking client and of the one for asyncio."""

from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from types import NoneType
from typing import Any

from boost_core.config import JobSpec
from boost_core.messages import Drill, Profile, Scores
from boost_core.plan.machine import MeasuredProfile
from boost_core.plan.report import PresetList
from boost_core.plan.run_cost import RunConditions
from boost_core.plan.search import PlanSearch
from service.client.calls import Async, Blocking, Call, Stream, create, get, operation, path_of, plain, request, stream
from service.jobs.model import Cancellation, CancelRequest, EventKind, JobPage, JobRecord
from service.jobs.patch import JobPatch
from service.jobs.states import JobState
from service.models import jobs as models
from service.models.access import AuditPage, Identity, KeyList, NewKey, Tenant, TenantList
from service.models.cluster import NodeList, ProfileList, Queue, QueueList, StoredProfile, Versions
from service.models.datasets import Dataset, DatasetDetail, DatasetList, DatasetRequest
from service.models.sweeps import Sweep, SweepDetail, SweepList, SweepRequest, SweepTrialList

Fields = Mapping[str, Any]  # of a body, which the service validates


def _service(_: object) -> tuple[object, ...]:
    return ()


def _job(_: object, job_id: str) -> tuple[object, ...]:
    return "jobs", job_id


def _checkpoint(_: object, job_id: str, step: int) -> tuple[object, ...]:
    return "jobs", job_id, "checkpoints", step


def _queue(_: object, name: str) -> tuple[object, ...]:
    return "queues", name


def _dataset(_: object, name: str) -> tuple[object, ...]:
    return "datasets", name


def _sweep(_: object, name: str) -> tuple[object, ...]:
    return "sweeps", name


class Api:
    """The operations of the API, by resource, which both clients have in common."""

    # Jobs.

    @operation
    def submit(self, spec: JobSpec | Fields, *, idempotency_key: str | None = None) -> Call[JobRecord]:
        """Submit a job; a mapping is validated by the service.

        Args:
            spec: The job.
            idempotency_key: Repeated requests with one key create only one job; a new key if ``None``.
        """
        return create(path_of("jobs"), JobRecord, plain(spec), idempotency_key)

    @operation
    def dry_run(self, spec: JobSpec | Fields) -> Call[models.DryRun]:
        """Check and plan a job without submitting it."""
        return Call("POST", path_of("jobs", "dry-run"), models.DryRun, body=plain(spec), repeatable=True)

    @operation
    def list(
        self, states: Collection[JobState | str] = (), limit: int = 100, cursor: str | None = None, *,
        queue: str | None = None, name: str | None = None, tenant: str | None = None, submitted_by: str | None = None,
        group: str | None = None, tags: Collection[str] = (), search: str | None = None,
    ) -> Call[JobPage]:  # fmt: skip
        """Return one page of jobs, newest first.

        Args:
            states: Only jobs in one of these states; if empty, in any.
            limit: Maximum number of results.
            cursor: The ``next_cursor`` of the previous page.
            queue: Only jobs in this queue.
            name: Only jobs whose name contains this.
            tenant: Only this tenant's jobs; for operators.
            submitted_by: Only jobs submitted with the key of this name.
            group: Only jobs of this group.
            tags: Only jobs with all of these tags.
            search: Only jobs with this in their name, group, tags or notes.
        """
        filters = {"queue": queue, "name": name, "tenant": tenant, "submitted_by": submitted_by, "group": group}
        lists = {"state": [*states], "tag": [*tags]}
        return get(path_of("jobs"), JobPage, limit=limit, cursor=cursor, search=search, **filters, **lists)

    get = request("GET", _job, "", JobRecord, "Return one job.")
    job_plan = request(
        "GET", _job, "plan", models.PlanAnswer,
        "Return what a job needs in each of its layouts, by the figures that it was submitted with.",
    )  # fmt: skip

    @operation
    def patch(self, job_id: str, changes: JobPatch | Fields, *, if_match: str | None = None) -> Call[JobRecord]:
        """Change a job's name, priority, limits of replicas or GPUs, group, tags, notes, or how it trains from here on.

        Args:
            job_id: The job.
            changes: The changes; a mapping is validated by the service.
            if_match: The ``etag`` of the record that the changes apply to; refused if it has changed since.
        """
        headers = {"If-Match": if_match} if if_match else {}
        # What is null is not what is missing.
        body = changes.model_dump(mode="json", exclude_unset=True) if isinstance(changes, JobPatch) else changes
        return Call("PATCH", path_of("jobs", job_id), JobRecord, body=body, headers=headers)

    cancel = request("DELETE", _job, "", JobRecord, "Request that a job be cancelled.")

    @operation
    def cancel_many(self, which: CancelRequest | Fields) -> Call[Cancellation]:
        """Request that up to 1,000 jobs be cancelled; a mapping is validated by the service.

        Args:
            which: Their ``ids``, or fields as in the API's list: ``state``, ``queue``, ``group``, ``tag`` and others.
        """
        return Call("POST", path_of("jobs", "cancel"), Cancellation, body=plain(which), repeatable=True)

    pause = request("POST", _job, "pause", JobRecord, "Request that a job be paused.")
    resume = request("POST", _job, "resume", JobRecord, "Resume a paused job.", repeatable=False)
    retry = request(
        "POST", _job, "retry", JobRecord,
        "Requeue a failed or cancelled job; it continues from its newest checkpoint.", repeatable=False,
    )  # fmt: skip

    @operation
    def clone(
        self, job_id: str, changes: Fields | None = None, *, from_checkpoint: bool = False,
        from_weights: bool = False, idempotency_key: str | None = None,
    ) -> Call[JobRecord]:  # fmt: skip
        """Submit a copy of a job, with changes.

        Args:
            job_id: The job to copy.
            changes: Changes to its spec, as a JSON merge patch.
            from_checkpoint: Continue from its newest checkpoint, with its optimizer and step.
            from_weights: Start at step 0 from the weights of its newest checkpoint.
            idempotency_key: As for ``submit``.
        """
        origin = {"from_checkpoint": from_checkpoint, "from_weights": from_weights}
        body = models.CloneRequest(changes=dict(changes or {}), **origin)
        return create(path_of("jobs", job_id, "clone"), JobRecord, plain(body), idempotency_key)

    @operation
    def drill(self, job_id: str, drill: Drill | Fields, *, idempotency_key: str | None = None) -> Call[JobRecord]:
        """Inject one fault into a running job; a mapping is validated by the service."""
        return create(path_of("jobs", job_id, "drills"), JobRecord, plain(drill), idempotency_key)

    @operation
    def profile(self, job_id: str, profile: Profile | Fields, *, idempotency_key: str | None = None) -> Call[JobRecord]:
        """Trace some steps of a job; events of kind ``profile`` say where the traces are."""
        return create(path_of("jobs", job_id, "profiles"), JobRecord, plain(profile), idempotency_key)

    @operation
    def record_evaluation(
        self, job_id: str, scores: Scores | Fields, *, idempotency_key: str | None = None
    ) -> Call[JobRecord]:
        """Record the scores of one of a job's checkpoints on tasks; a mapping is validated by the service."""
        return create(path_of("jobs", job_id, "evaluations"), JobRecord, plain(scores), idempotency_key)

    evaluations = request(
        "GET", _job, "evaluations", models.EvaluationList,
        "Return the evaluations of a job's checkpoints on tasks, newest first.",
    )  # fmt: skip

    @operation
    def metrics(
        self, job_id: str, points: int = 500, *, from_step: int | None = None, to_step: int | None = None,
        ranks: bool | None = None,
    ) -> Call[models.MetricsHistory]:  # fmt: skip
        """Return a job's metrics over its steps at about ``points`` points; ``ranks=False`` omits the ranks' times."""
        path = path_of("jobs", job_id, "metrics")
        return get(path, models.MetricsHistory, points=points, from_step=from_step, to_step=to_step, ranks=ranks)

    @operation
    def diff(self, job_id: str, other_id: str) -> Call[models.SpecDiff]:
        """Return the fields in which the specs of two jobs differ."""
        return get(path_of("jobs", job_id, "diff", other_id), models.SpecDiff)

    @operation
    def compare(
        self, job_ids: Collection[str] = (), *, group: str | None = None, tags: Collection[str] = (),
        search: str | None = None, tenant: str | None = None, sort: models.Result | str | None = None,
        descending: bool = False,
    ) -> Call[models.Comparison]:  # fmt: skip
        """Return jobs' results side by side, with the fields in which their specs differ.

        Args:
            job_ids: The jobs.
            group: Also the jobs of this group.
            tags: Of the group, or else of all jobs, those with all of these tags.
            search: Likewise, those with this in their name, group, tags or notes.
            tenant: Whose group; for operators.
            sort: The result to sort by, the lowest first; if ``None``, as requested.
            descending: The highest first.
        """
        which = {"job": [*job_ids], "group": group, "tag": [*tags], "search": search, "tenant": tenant}
        return get(path_of("jobs", "compare"), models.Comparison, **which, sort=sort, descending=descending)

    @operation
    def compare_curves(
        self, job_ids: Collection[str] = (), metric: str = "loss", axis: models.Axis | str = models.Axis.STEP, *,
        points: int | None = None, low: float | None = None, high: float | None = None, group: str | None = None,
        tags: Collection[str] = (), search: str | None = None, tenant: str | None = None,
    ) -> Call[models.Curves]:  # fmt: skip
        """Return a curve of each of several jobs, with the lowest and highest value of each point.

        Args:
            job_ids: The jobs.
            metric: What of them, for example ``loss``, ``tokens_per_second`` or ``validation_loss/books``.
            axis: What x is.
            points: Maximum number of points of each curve.
            low: Only from here on the axis.
            high: Only up to here.
            group: Also the jobs of this group.
            tags: Of the group, or else of all jobs, those with all of these tags.
            search: Likewise, those with this in their name, group, tags or notes.
            tenant: Whose group; for operators.
        """
        which = {"job": [*job_ids], "group": group, "tag": [*tags], "search": search, "tenant": tenant}
        shown = {"metric": metric, "axis": axis, "points": points, "low": low, "high": high}
        return get(path_of("jobs", "compare", "curves"), models.Curves, **which, **shown)

    trackers = request(
        "GET", _job, "trackers", models.TrackerList,
        "Return where else a job's curves go, such as MLflow or Weights & Biases, and how far each tracker is.",
    )  # fmt: skip

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
        self, job_id: str, rank: int | None = None, level: str | Collection[str] = (), since: datetime | None = None,
        after: int = 0, follow: bool = True,
    ) -> Stream:  # fmt: skip
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

    # Identities, keys and the audit log.

    whoami = request("GET", _service, "whoami", Identity, "Return the key's tenant, name and scopes.")

    @operation
    def create_key(self, request: models.KeyRequest | Fields, *, idempotency_key: str | None = None) -> Call[NewKey]:
        """Create a key; for operators. It is shown only in this answer.

        A repeated request with the same ``idempotency_key`` gives the same key a new secret.
        """
        return create(path_of("keys"), NewKey, plain(request), idempotency_key)

    keys = request("GET", _service, "keys", KeyList, "Return all keys; for operators.")

    @operation
    def revoke_key(self, key_id: str) -> Call[None]:
        """Revoke a key; for operators."""
        return Call("DELETE", path_of("keys", key_id), NoneType, repeatable=True)

    @operation
    def audit(self, tenant: str | None = None, after: int | None = None, limit: int | None = None) -> Call[AuditPage]:
        """Return entries of the audit log, in order; for operators.

        Args:
            tenant: Only this tenant's requests.
            after: Only entries with ids above this.
            limit: Maximum number of results.
        """
        return get(path_of("audit"), AuditPage, tenant=tenant, after=after, limit=limit)

    # A job's checkpoints.

    checkpoints = request(
        "GET", _job, "checkpoints", models.CheckpointList, "Return a job's committed checkpoints, newest first."
    )
    checkpoint = request("GET", _checkpoint, "", models.CheckpointDetail, "Return one checkpoint with its files.")
    pin = request("PUT", _checkpoint, "pin", models.Checkpoint, "Keep a checkpoint, regardless of retention.")
    unpin = request("DELETE", _checkpoint, "pin", models.Checkpoint, "Return a checkpoint to the job's retention.")
    delete_checkpoint = request(
        "DELETE", _checkpoint, "", NoneType, "Delete a checkpoint that is neither pinned nor needed by a job."
    )

    # What jobs share: queues, tenants, nodes and profiles.

    queues = request("GET", _service, "queues", QueueList, "Return all queues.")
    queue = request("GET", _queue, "", Queue, "Return one queue.")

    @operation
    def put_queue(self, name: str, settings: models.QueueSettings | Fields) -> Call[Queue]:
        """Create a queue or set an existing one's limits; for operators."""
        return Call("PUT", path_of("queues", name), Queue, body=plain(settings), repeatable=True)

    delete_queue = request("DELETE", _queue, "", NoneType, "Delete a queue that has no unfinished jobs; for operators.")
    tenants = request("GET", _service, "tenants", TenantList, "Return all tenants; for operators.")

    @operation
    def put_tenant(self, name: str, settings: models.TenantSettings | Fields) -> Call[Tenant]:
        """Create a tenant or set an existing one's quota; for operators."""
        return Call("PUT", path_of("tenants", name), Tenant, body=plain(settings), repeatable=True)

    nodes = request("GET", _service, "nodes", NodeList, "Return the cluster's nodes, as the scheduler last saw them.")
    profiles = request("GET", _service, "profiles", ProfileList, "Return the measured profiles of all kinds of GPU.")

    @operation
    def stored_profile(self, kind: str, precision: str | None = None) -> Call[StoredProfile]:
        """Return the measured profile of a kind of GPU; by default at bf16, or else at another precision."""
        return get(path_of("profiles", kind), StoredProfile, precision=precision)

    @operation
    def put_profile(self, kind: str, profile: MeasuredProfile | Fields) -> Call[StoredProfile]:
        """Store the measured profile of a kind of GPU at the profile's precision; for operators."""
        return Call("PUT", path_of("profiles", kind), StoredProfile, body=plain(profile), repeatable=True)

    @operation
    def delete_profile(self, kind: str, precision: str | None = None) -> Call[None]:
        """Delete the measured profiles of a kind of GPU, or only one precision's; for operators."""
        return Call("DELETE", path_of("profiles", kind), NoneType, params={"precision": precision}, repeatable=True)

    # Datasets.

    @operation
    def create_dataset(self, request: DatasetRequest | Fields) -> Call[Dataset]:
        """Build a dataset. One that failed or was cancelled continues with the remaining files."""
        return Call("POST", path_of("datasets"), Dataset, body=plain(request))

    datasets = request("GET", _service, "datasets", DatasetList, "Return the tenant's datasets.")
    dataset = request("GET", _dataset, "", DatasetDetail, "Return one dataset, with its lineage.")
    delete_dataset = request("DELETE", _dataset, "", NoneType, "Forget a dataset that no active job names; files stay.")

    @operation
    def cancel_dataset(self, name: str, tenant: str | None = None) -> Call[Dataset]:
        """Stop building a dataset; for operators also another tenant's."""
        return Call("POST", path_of("datasets", name, "cancel"), Dataset, params={"tenant": tenant}, repeatable=True)

    # Sweeps.

    @operation
    def create_sweep(self, request: SweepRequest | Fields) -> Call[Sweep]:
        """Begin a sweep; a mapping is validated by the service. Beginning the same again returns it."""
        return Call("POST", path_of("sweeps"), Sweep, body=plain(request), repeatable=True)

    @operation
    def sweeps(self, limit: int = 100) -> Call[SweepList]:
        """Return the tenant's sweeps, newest first, at most ``limit``."""
        return get(path_of("sweeps"), SweepList, limit=limit)

    sweep = request("GET", _sweep, "", SweepDetail, "Return one sweep, with how much each field matters.")
    sweep_trials = request("GET", _sweep, "trials", SweepTrialList, "Return a sweep's trials, in order.")
    stop_sweep = request("POST", _sweep, "stop", Sweep, "Stop a sweep; its trials save a checkpoint and end.")

    # What helps before a job is submitted.

    @operation
    def plan(
        self, spec: JobSpec | Fields, search: PlanSearch | None = None, conditions: RunConditions | None = None
    ) -> Call[models.PlanAnswer]:
        """Return a job's memory, throughput and time in each layout; with a search, also the best ways to train it."""
        further = {"search": search, "conditions": conditions}
        body = plain(spec) | {name: plain(value) for name, value in further.items() if value is not None}
        return Call("POST", path_of("plans"), models.PlanAnswer, body=body, repeatable=True)

    presets = request("GET", _service, "presets", PresetList, "Return the published models.")
    examples = request("GET", _service, "examples", models.JobExampleList, "Return example job files.")
    versions = request("GET", _service, "versions", Versions, "Return the versions of the service and what it runs on.")


class Client(Api, Blocking, AbstractContextManager["Client"]):
    """A client of a BOOST service.

    Every method raises ``ApiError`` when the service refuses, and ``ServiceUnreachable`` when it does not answer.
    A request that may safely reach the service twice is retried when the connection fails or the service answers
    429 or 503. Requests that create something are among these: all tries carry the same Idempotency-Key.
    """


class AsyncClient(Api, Async, AbstractAsyncContextManager["AsyncClient"]):
    """``Client`` for asyncio: the same methods, awaited; ``events`` and ``logs`` are asynchronous iterators."""
