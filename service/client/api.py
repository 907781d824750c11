"""All operations of the API, the blocking client, and the one for asyncio."""

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse, connect_sse

from boost_core.config import JobSpec
from boost_core.messages import Drill, Profile, Scores
from boost_core.plan.machine import MeasuredProfile
from boost_core.plan.report import PresetList
from boost_core.plan.run_cost import RunConditions
from boost_core.plan.search import PlanSearch
from service.client.calls import (
    RETRY_SECONDS,
    TIMEOUT_SECONDS,
    ApiError,
    Awaiting,
    Blocking,
    Call,
    RetryPolicy,
    ServiceUnreachable,
    Stream,
    create,
    get,
    operation,
    options_of_httpx,
    path_of,
    plain,
    request,
    stream,
)
from service.jobs.model import Cancellation, CancelRequest, EventKind, JobEvent, JobPage, JobRecord
from service.jobs.patch import JobPatch
from service.jobs.states import JobState
from service.models import jobs as models
from service.models.access import AuditPage, Identity, KeyList, NewKey, Tenant, TenantList
from service.models.cluster import NodeList, ProfileList, Queue, QueueList, StoredProfile, Versions
from service.models.datasets import Dataset, DatasetDetail, DatasetList, DatasetRequest
from service.models.sweeps import Sweep, SweepDetail, SweepList, SweepRequest, SweepTrialList


def _service(_: object) -> tuple[object, ...]:
    return ()


def _job(_: object, job_id: str) -> tuple[object, ...]:
    return (job_id,)


def _checkpoint(_: object, job_id: str, step: int) -> tuple[object, ...]:
    return job_id, step


def _named(_: object, name: str) -> tuple[object, ...]:
    return (name,)


class Api:
    """What both clients have in common: how they are made, and the operations of the API, by resource.

    Args:
        base_url: URL of the service, for example ``http://127.0.0.1:8900``.
        api_key: API key; ``None`` for a service without authentication.
        verify: Whether to verify the service's certificate, or a CA bundle to verify it with.
        retry_seconds: How long to retry a request; 0: never.
        timeout: Seconds to wait for the service to send something.

    Attributes:
        retry_seconds: As given; what begins later takes what it is then.

    Raises:
        ValueError: An argument is invalid.
    """

    _http: Any
    _connect: type[Any]

    def __init__(
        self, base_url: str, *, api_key: str | None = None, verify: bool | str | Path = True,
        retry_seconds: float = RETRY_SECONDS, timeout: float = TIMEOUT_SECONDS,
    ) -> None:  # fmt: skip
        self._base_url, self.retry_seconds = base_url, retry_seconds
        self._http = self._connect(**options_of_httpx(base_url, api_key, verify, timeout))

    # Jobs.

    @operation
    def submit(self, spec: JobSpec | Mapping[str, Any], *, idempotency_key: str | None = None) -> Call[JobRecord]:
        """Submit a job; a mapping is validated by the service.

        Args:
            spec: The job.
            idempotency_key: Repeated requests with one key create only one job; a new key if ``None``.
        """
        return create(path_of("jobs"), JobRecord, plain(spec), idempotency_key)

    @operation
    def dry_run(self, spec: JobSpec | Mapping[str, Any]) -> Call[models.DryRun]:
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

    get = request("GET", "jobs/{}", _job, JobRecord, "Return one job.")
    job_plan = request(
        "GET", "jobs/{}/plan", _job, models.PlanAnswer,
        "Return what a job needs in each of its layouts, by the figures that it was submitted with.",
    )  # fmt: skip

    @operation
    def patch(
        self, job_id: str, changes: JobPatch | Mapping[str, Any], *, if_match: str | None = None
    ) -> Call[JobRecord]:
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

    cancel = request("DELETE", "jobs/{}", _job, JobRecord, "Request that a job be cancelled.")

    @operation
    def cancel_many(self, which: CancelRequest | Mapping[str, Any]) -> Call[Cancellation]:
        """Request that up to 1,000 jobs be cancelled; a mapping is validated by the service.

        Args:
            which: Their ``ids``, or fields as in the API's list: ``state``, ``queue``, ``group``, ``tag`` and others.
        """
        return Call("POST", path_of("jobs", "cancel"), Cancellation, body=plain(which), repeatable=True)

    pause = request("POST", "jobs/{}/pause", _job, JobRecord, "Request that a job be paused.")
    resume = request("POST", "jobs/{}/resume", _job, JobRecord, "Resume a paused job.", repeatable=False)
    retry = request(
        "POST", "jobs/{}/retry", _job, JobRecord,
        "Requeue a failed or cancelled job; it continues from its newest checkpoint.", repeatable=False,
    )  # fmt: skip

    @operation
    def clone(
        self, job_id: str, changes: Mapping[str, Any] | None = None, *, from_checkpoint: bool = False,
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

    evaluations = request(
        "GET", "jobs/{}/evaluations", _job, models.EvaluationList,
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
        "GET", "jobs/{}/trackers", _job, models.TrackerList,
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

    whoami = request("GET", "whoami", _service, Identity, "Return the key's tenant, name and scopes.")

    @operation
    def create_key(
        self, request: models.KeyRequest | Mapping[str, Any], *, idempotency_key: str | None = None
    ) -> Call[NewKey]:
        """Create a key; for operators. It is shown only in this answer.

        A repeated request with the same ``idempotency_key`` gives the same key a new secret.
        """
        return create(path_of("keys"), NewKey, plain(request), idempotency_key)

    keys = request("GET", "keys", _service, KeyList, "Return all keys; for operators.")

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
        "GET", "jobs/{}/checkpoints", _job, models.CheckpointList, "Return a job's committed checkpoints, newest first."
    )
    checkpoint = request(
        "GET", "jobs/{}/checkpoints/{}", _checkpoint, models.CheckpointDetail, "Return one checkpoint with its files."
    )
    pin = request(
        "PUT",
        "jobs/{}/checkpoints/{}/pin",
        _checkpoint,
        models.Checkpoint,
        "Keep a checkpoint, regardless of retention.",
    )
    unpin = request(
        "DELETE",
        "jobs/{}/checkpoints/{}/pin",
        _checkpoint,
        models.Checkpoint,
        "Return a checkpoint to the job's retention.",
    )
    delete_checkpoint = request(
        "DELETE",
        "jobs/{}/checkpoints/{}",
        _checkpoint,
        NoneType,
        "Delete a checkpoint that is neither pinned nor needed by a job.",
    )

    # What jobs share: queues, tenants, nodes and profiles.

    queues = request("GET", "queues", _service, QueueList, "Return all queues.")
    queue = request("GET", "queues/{}", _named, Queue, "Return one queue.")

    @operation
    def put_queue(self, name: str, settings: models.QueueSettings | Mapping[str, Any]) -> Call[Queue]:
        """Create a queue or set an existing one's limits; for operators."""
        return Call("PUT", path_of("queues", name), Queue, body=plain(settings), repeatable=True)

    delete_queue = request(
        "DELETE", "queues/{}", _named, NoneType, "Delete a queue that has no unfinished jobs; for operators."
    )
    tenants = request("GET", "tenants", _service, TenantList, "Return all tenants; for operators.")

    @operation
    def put_tenant(self, name: str, settings: models.TenantSettings | Mapping[str, Any]) -> Call[Tenant]:
        """Create a tenant or set an existing one's quota; for operators."""
        return Call("PUT", path_of("tenants", name), Tenant, body=plain(settings), repeatable=True)

    nodes = request("GET", "nodes", _service, NodeList, "Return the cluster's nodes, as the scheduler last saw them.")
    profiles = request("GET", "profiles", _service, ProfileList, "Return the measured profiles of all kinds of GPU.")

    @operation
    def stored_profile(self, kind: str, precision: str | None = None) -> Call[StoredProfile]:
        """Return the measured profile of a kind of GPU; by default at bf16, or else at another precision."""
        return get(path_of("profiles", kind), StoredProfile, precision=precision)

    @operation
    def put_profile(self, kind: str, profile: MeasuredProfile | Mapping[str, Any]) -> Call[StoredProfile]:
        """Store the measured profile of a kind of GPU at the profile's precision; for operators."""
        return Call("PUT", path_of("profiles", kind), StoredProfile, body=plain(profile), repeatable=True)

    @operation
    def delete_profile(self, kind: str, precision: str | None = None) -> Call[None]:
        """Delete the measured profiles of a kind of GPU, or only one precision's; for operators."""
        return Call("DELETE", path_of("profiles", kind), NoneType, params={"precision": precision}, repeatable=True)

    # Datasets.

    @operation
    def create_dataset(self, request: DatasetRequest | Mapping[str, Any]) -> Call[Dataset]:
        """Build a dataset. One that failed or was cancelled continues with the remaining files."""
        return Call("POST", path_of("datasets"), Dataset, body=plain(request))

    datasets = request("GET", "datasets", _service, DatasetList, "Return the tenant's datasets.")
    dataset = request("GET", "datasets/{}", _named, DatasetDetail, "Return one dataset, with its lineage.")
    delete_dataset = request(
        "DELETE", "datasets/{}", _named, NoneType, "Forget a dataset that no active job names; files stay."
    )

    @operation
    def cancel_dataset(self, name: str, tenant: str | None = None) -> Call[Dataset]:
        """Stop building a dataset; for operators also another tenant's."""
        return Call("POST", path_of("datasets", name, "cancel"), Dataset, params={"tenant": tenant}, repeatable=True)

    # Sweeps.

    @operation
    def create_sweep(self, request: SweepRequest | Mapping[str, Any]) -> Call[Sweep]:
        """Begin a sweep; a mapping is validated by the service. Beginning the same again returns it."""
        return Call("POST", path_of("sweeps"), Sweep, body=plain(request), repeatable=True)

    @operation
    def sweeps(self, limit: int = 100) -> Call[SweepList]:
        """Return the tenant's sweeps, newest first, at most ``limit``."""
        return get(path_of("sweeps"), SweepList, limit=limit)

    sweep = request("GET", "sweeps/{}", _named, SweepDetail, "Return one sweep, with how much each field matters.")
    sweep_trials = request("GET", "sweeps/{}/trials", _named, SweepTrialList, "Return a sweep's trials, in order.")
    stop_sweep = request("POST", "sweeps/{}/stop", _named, Sweep, "Stop a sweep; its trials save a checkpoint and end.")

    # What helps before a job is submitted.

    @operation
    def plan(
        self, spec: JobSpec | Mapping[str, Any], search: PlanSearch | None = None,
        conditions: RunConditions | None = None,
    ) -> Call[models.PlanAnswer]:  # fmt: skip
        """Return a job's memory, throughput and time in each layout; with a search, also the best ways to train it."""
        body = {} if search is None else {"search": plain(search)}
        if conditions is not None:
            body["conditions"] = plain(conditions)
        return Call("POST", path_of("plans"), models.PlanAnswer, body=plain(spec) | body, repeatable=True)

    presets = request("GET", "presets", _service, PresetList, "Return the published models.")
    examples = request("GET", "examples", _service, models.JobExampleList, "Return example job files.")
    versions = request("GET", "versions", _service, Versions, "Return the versions of the service and what it runs on.")


# The clients, and how both read a stream across connections.


class StreamEndedEarly(ConnectionError):
    """The service ended a stream before the job had ended, as it does when it stops."""


class EventStreamReader:
    """One stream across all its connections: each event is taken once.

    Args:
        stream: The stream to read.
        base_url: URL of the service.
        seconds: How long to keep trying while nothing arrives.

    Attributes:
        look: The request for the job, which tells whether more events may follow.
    """

    def __init__(self, stream: Stream, base_url: str, seconds: float) -> None:
        self._stream, self._base_url, self._seconds = stream, base_url, seconds
        self._after = stream.after
        self._patience: RetryPolicy | None = None
        self.look = get(path_of("jobs", stream.job_id), JobRecord)

    @property
    def request(self) -> dict[str, Any]:
        """The arguments for httpx-sse's ``connect_sse`` for the next connection."""
        path = path_of("jobs", self._stream.job_id, self._stream.part)
        call = get(path, NoneType, **self._stream.params, follow=self._stream.follow)
        return call.request | {"headers": {"Last-Event-ID": str(self._after)}}

    def take(self, sent: ServerSentEvent) -> JobEvent | None:
        """Return the event that was received; ``None`` if the message only keeps the connection alive."""
        self._patience = None
        if not sent.data:
            return None
        event = JobEvent.model_validate_json(sent.data)
        self._after = event.id
        return event

    def pause_after(self, failure: Exception) -> float:
        """Return how many seconds to wait before the next connection.

        Raises:
            ApiError: The service refuses the stream, or has done so for too long.
            ServiceUnreachable: The service has been unreachable for too long.
        """
        self._patience = self._patience or RetryPolicy(self._base_url, self._seconds)
        return self._patience.pause_after(failure)


BROKEN_OFF = (httpx.TransportError, ServiceUnreachable, StreamEndedEarly, ApiError)

_Answer = TypeVar("_Answer")


class Client(Api, Blocking, AbstractContextManager["Client"]):
    """A client of a BOOST service.

    Every method raises ``ApiError`` when the service refuses, and ``ServiceUnreachable`` when it does not answer.
    A request that may safely reach the service twice is retried when the connection fails or the service answers
    429 or 503. Requests that create something are among these: all tries carry the same Idempotency-Key.
    """

    _http: httpx.Client
    _connect = httpx.Client

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._base_url, self.retry_seconds, call.repeatable)
        while True:
            try:
                return call.read(self._http.request(**call.request))
            except (httpx.TransportError, ApiError) as failure:
                pause = patience.pause_after(failure)
            time.sleep(pause)

    def listen(self, stream: Stream) -> Iterator[JobEvent]:
        """Receive a stream; reconnect when the connection is lost."""
        reading = EventStreamReader(stream, self._base_url, self.retry_seconds)
        job_finished = self.perform(reading.look).finished
        while True:
            try:
                with connect_sse(self._http, **reading.request) as source:
                    if not source.response.is_success:
                        source.response.read()
                        raise ApiError.of(source.response)
                    for sent in source.iter_sse():
                        if event := reading.take(sent):
                            yield event
                # A connection opened before the job ended may have been closed by a service that was stopping.
                if job_finished or not stream.follow:
                    return
                job_finished = self.perform(reading.look).finished
                if job_finished:
                    continue
                raise StreamEndedEarly("the stream ended early")
            except BROKEN_OFF as failure:
                pause = reading.pause_after(failure)
            time.sleep(pause)


class AsyncClient(Api, Awaiting, AbstractAsyncContextManager["AsyncClient"]):
    """``Client`` for asyncio: the same methods, awaited; ``events`` and ``logs`` are asynchronous iterators."""

    _http: httpx.AsyncClient
    _connect = httpx.AsyncClient

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._base_url, self.retry_seconds, call.repeatable)
        while True:
            try:
                return call.read(await self._http.request(**call.request))
            except (httpx.TransportError, ApiError) as failure:
                pause = patience.pause_after(failure)
            await asyncio.sleep(pause)

    async def listen(self, stream: Stream) -> AsyncGenerator[JobEvent, None]:
        """Receive a stream; reconnect when the connection is lost."""
        reading = EventStreamReader(stream, self._base_url, self.retry_seconds)
        job_finished = (await self.perform(reading.look)).finished
        while True:
            try:
                async with aconnect_sse(self._http, **reading.request) as source:
                    if not source.response.is_success:
                        await source.response.aread()
                        raise ApiError.of(source.response)
                    async for sent in source.aiter_sse():
                        if event := reading.take(sent):
                            yield event
                # A connection opened before the job ended may have been closed by a service that was stopping.
                if job_finished or not stream.follow:
                    return
                job_finished = (await self.perform(reading.look)).finished
                if job_finished:
                    continue
                raise StreamEndedEarly("the stream ended early")
            except BROKEN_OFF as failure:
                pause = reading.pause_after(failure)
            await asyncio.sleep(pause)
