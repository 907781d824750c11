"""Writes to a job: pure functions from its newest record to new values and events."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from boost_core import messages
from boost_core.config.base import FieldProblem, raise_problems
from boost_core.config.job import MOST_STEERED, Steering, door_problems
from boost_core.plan.resolve import ChosenLayouts
from service.jobs.goodput import book
from service.jobs.model import GANG_LOST, JobRecord, RestartRecord
from service.jobs.observations import observation
from service.jobs.patch import JobPatch, apply
from service.jobs.queries import NEXT_ARRIVAL
from service.jobs.states import TERMINAL_STATES, WAITING_STATES, JobState, Reason, next_state
from service.jobs.tables import spec_columns

# Whose newest report is a column of the job.
_NEWEST = frozenset({"progress", "evaluation", "checkpoint", "shape", "spare", "comparison"})
_DATED = frozenset({"progress", "checkpoint"})  # whose newest report's time is one, too
_MOST_RESTARTS = 50
MOST_COMMANDS = 20  # that a gang has not been given yet, which a record holds

NumberedReport = tuple[int, datetime, messages.Report]  # sequence number in the gang's life, time, report


class AlreadyFinished(ValueError):
    """The job has ended, so it cannot be changed."""

    def __init__(self, record: JobRecord, verb: str) -> None:
        super().__init__(f"job {record.id} has already {record.state} and cannot be {verb}")


class WrongState(ValueError):
    """The request is not possible in the job's state."""

    def __init__(self, record: JobRecord, remedy: str) -> None:
        super().__init__(f"job {record.id} is {record.state} ({record.reason}); {remedy}")


class TakenBack(RuntimeError):
    """A job's user has withdrawn the pause since it was decided."""


class Outdated(ValueError):
    """The job has been changed in the meantime."""


class Overtaken(RuntimeError):
    """Another writer was faster with one of several jobs."""


@dataclass(frozen=True)
class Write:
    """What is written of a job, by columns; models are stored as JSON.

    Attributes:
        values: New values of its own.
        events: The events stored with it.
        observed: Its times relative to their prediction.
    """

    values: dict[str, Any]
    events: Sequence[dict[str, Any]] = ()
    observed: Sequence[dict[str, Any]] = ()


def changed(record: JobRecord, reason: Reason, message: str, attempt: int) -> Write | None:
    """Move a job to the state that a reason leads to; ``None`` if nothing changes.

    Raises:
        IllegalTransition: The reason leads nowhere from the job's state.
    """
    state = next_state(record.state, reason)
    # Without anything that databases cannot store, such as bytes of a file name that are not text.
    message = message.encode(errors="replace").decode().replace("\0", "\ufffd")
    if (record.state, record.reason, record.message, record.attempt) == (state, reason, message, attempt):
        return None  # passes repeat reasons that lead from a state to itself
    now = datetime.now(UTC)
    values: dict[str, Any] = {"state": state, "reason": reason, "message": message, "attempt": attempt}
    values["goodput"] = book(record.goodput, now, reason)
    values["waiting_since"] = (record.waiting_since or now) if state in WAITING_STATES else None
    if record.shape and record.keeps and attempt != record.attempt:  # the new gang gets all resources
        values["shape"] = record.shape.model_copy(update={"keeps": False})
    if attempt != record.attempt:
        values["spare"] = None  # the previous gang may have been killed without reporting
    if state is not JobState.QUEUED:
        values["waiting_for"] = None
    if state is not JobState.RUNNING:
        values["commands"] = []  # they were for the gang that was training when they were requested
    elif record.started_at is None:
        values["started_at"] = now
    if state in TERMINAL_STATES:
        values["finished_at"] = now
    if reason is Reason.GANG_LOST:
        values["fault_counts"] = dict(Counter(record.fault_counts) + Counter([GANG_LOST]))
    data = {"state": state, "reason": reason, "message": message}
    return Write(values, [{"job_id": record.id, "attempt": attempt, "kind": "state", "time": now, "data": data}])


def cancelled(record: JobRecord, why: str | None = None) -> Write | None:
    """Request that a job be cancelled, or cancel it if no gang has to be ended first.

    Args:
        record: The job.
        why: Why, for a job without a gang; ``None``: its user wanted it.

    Raises:
        AlreadyFinished: The job has SUCCEEDED or FAILED.
    """
    if record.state in (JobState.SUCCEEDED, JobState.FAILED):
        raise AlreadyFinished(record, "cancelled")
    if record.finished:
        return None
    requested = {"cancel_requested": True}
    if record.state in (JobState.QUEUED, JobState.PAUSED):
        message = why or f"cancelled while it was {record.state.lower()}"
        return _at_once(record, Reason.CANCELLED_BY_USER, message, requested)
    return None if record.cancel_requested else Write(requested)


def paused(record: JobRecord) -> Write | None:
    """Request that a job be paused, or pause it if no gang has to be ended first.

    Raises:
        AlreadyFinished: The job has ended.
    """
    if record.finished:
        raise AlreadyFinished(record, "paused")
    if record.state is JobState.PAUSED:
        return None
    requested = {"pause_requested": True}
    if not record.has_gang:
        return _at_once(record, Reason.PAUSED_BY_USER, "paused by its user", requested)
    return None if record.pause_requested else Write(requested)


def resumed(record: JobRecord) -> Write | None:
    """Put a paused job back in the queue, or withdraw a requested pause.

    Raises:
        AlreadyFinished: The job has ended.
        WrongState: It is not paused, and no pause was requested.
    """
    if record.finished:
        raise AlreadyFinished(record, "resumed")
    taken_back = {"pause_requested": False}
    if record.state is JobState.PAUSED:
        return _at_once(record, Reason.RESUMED_BY_USER, "waits for its turn", taken_back)
    if not record.pause_requested:
        raise WrongState(record, "only a paused job can be resumed")
    return Write(taken_back)


def retried(record: JobRecord) -> Write | None:
    """Put a job that has failed or was cancelled back in the queue, behind the others.

    Raises:
        WrongState: It has neither failed nor been cancelled.
    """
    if record.state not in (JobState.FAILED, JobState.CANCELLED):
        raise WrongState(record, "only a job that has FAILED or was CANCELLED can be retried; another can be cloned")
    fresh = {"cancel_requested": False, "pause_requested": False, "finished_at": None}
    queued = {"queued_at": datetime.now(UTC), "arrival": NEXT_ARRIVAL}
    return _at_once(record, Reason.RETRIED_BY_USER, "waits for its turn", fresh | queued)


def patched(
    record: JobRecord, changes: JobPatch, expected: str | None = None, chosen: ChosenLayouts | None = None,
    by: str = "anonymous",
) -> Write | None:  # fmt: skip
    """Change a job's spec; ``None`` if nothing changes.

    Args:
        record: The job.
        changes: The changes.
        expected: The entity tag that the job must have; ``None`` for any.
        chosen: Layouts chosen for the changed job, and why.
        by: Name of the key with which it is changed.

    Raises:
        AlreadyFinished: The job has ended, and more than its group, tags and notes would change.
        Outdated: It has another tag.
        WrongState: It has no step left to do, or has been steered too often.
        pydantic.ValidationError: The changed job is not legal; names the fields of the spec.
    """
    fields = changes.model_dump(exclude_none=True).keys()
    if record.finished and not (fields and fields <= {"group", "tags", "notes"}):
        raise AlreadyFinished(record, "changed, except for its group, tags and notes")
    if expected is not None and expected != record.etag:
        raise Outdated(f"job {record.id} has been changed since; read it again: its ETag is now {record.etag}")
    before = record.requested_spec
    spec, differences = apply(changes, before, chosen.sizes if chosen else None, record.basis)
    values, events = dict[str, Any](), [event(record, "patch", differences)] if differences else []
    if spec.steering != before.steering:
        raise_problems("JobSpec", door_problems(spec.training))
        done = record.progress.step if record.progress else 0
        if done >= record.spec.training.steps:
            raise WrongState(record, f"it has done all of its {done} steps; clone it from its checkpoint to train on")
        if spec.training.steps <= done:
            problem = f"step {done} is done already; use {done + 1} or more, or cancel the job"
            raise_problems("JobSpec", [FieldProblem(("training", "steps"), spec.training.steps, problem)])
        number = len(record.spec.steered) + len(record.steers) + 1
        if number > MOST_STEERED:
            raise WrongState(record, f"it has been steered {MOST_STEERED} times; clone it from its checkpoint")
        steer = messages.Steer(number=number, by=by, requested_at=datetime.now(UTC), steering=spec.steering)
        if record.attempt:  # its gang says from which step on it holds
            values["steers"] = [*record.steers, steer]
        else:
            report = steer.made(before, 0)[1].model_copy(update={"number": 0})
            events.append(event(record, report.kind, report))
    if not values and not events:
        return None
    if record.attempt:
        spec = spec.model_copy(update={section: getattr(record.spec, section) for section in Steering.model_fields})
    if spec != record.spec:
        values |= spec_columns(spec)
    if chosen:
        events.append(event(record, "layouts", chosen))
    return Write(values, events)


def commanded(record: JobRecord, command: messages.WorkerCommand) -> Write:
    """Request a drill or profile from a job's gang.

    Raises:
        WrongState: The job is not RUNNING, or too many wait to be given to its gang.
        pydantic.ValidationError: The gang has no such rank.
    """
    drill, layout = isinstance(command, messages.Drill), record.present_layout
    if record.state is not JobState.RUNNING:
        raise WrongState(record, f"a {'drill' if drill else 'profile'} needs a job that is RUNNING")
    field, ranks = ("rank", [command.rank]) if isinstance(command, messages.Drill) else ("ranks", command.ranks)
    problem = f"is not a rank of a gang of {layout}; use 0 to {layout.world_size - 1}"
    wrong = [FieldProblem((field,), rank, f"{rank} {problem}") for rank in ranks if rank >= layout.world_size]
    raise_problems(type(command).__name__, wrong)
    if len(record.commands) == MOST_COMMANDS:
        raise WrongState(record, f"{MOST_COMMANDS} drills and profiles wait for its gang; try again in some seconds")
    # A drill is stored as an event now; a profile is reported once it is ready.
    return Write({"commands": [*record.commands, command]}, [event(record, "drill", command)] if drill else [])


def reported(record: JobRecord, attempt: int, reports: Sequence[NumberedReport]) -> tuple[JobRecord, Write]:
    """Store a gang's reports as events, and their contents with the job, which is returned as it is then.

    Args:
        record: The job.
        attempt: Number of the gang.
        reports: In order.
    """
    spec, goodput, values = record.spec, record.goodput, dict[str, Any]()
    events, observed = list[dict[str, Any]](), list[dict[str, Any]]()
    restarts, faults = list[RestartRecord](), Counter[str]()
    for number, time, report in reports:
        kind, numbered = report.kind, {"job_id": record.id, "attempt": attempt, "sequence": number}
        events.append({**numbered, "kind": kind, "time": time, "data": report})
        goodput = book(goodput, time, report)
        if kind in _NEWEST:
            values[kind] = report
        if kind in _DATED:
            values[f"{kind}_at"] = time
        match report:
            case messages.SteeredReport():
                spec = report.applied_to(spec)
                values["spec"] = spec_columns(spec)["spec"]
                values["steers"] = [steer for steer in record.steers if steer.number > len(spec.steered)]
            case messages.RestartReport():
                restarts.append(RestartRecord(time=time, **report.model_dump()))
            case messages.FaultReport():
                faults[report.what] += 1
            case messages.ComparisonReport() if ratios := observation(record, report, time):
                observed.append(ratios)
    if restarts:
        values["restarts"] = [*record.restarts, *restarts][-_MOST_RESTARTS:]
        counts = Counter(record.restart_counts) + Counter(restart.cause for restart in restarts)
        values["restart_counts"] = dict(counts)
    if faults:
        values["fault_counts"] = dict(Counter(record.fault_counts) + faults)
    values["goodput"] = goodput
    after = record.with_values({**values, "spec": spec, "version": record.version + 1})
    return after, Write(values, events, observed)


def add_fault(record: JobRecord, fault: messages.FaultReport) -> Write:
    """Store a fault that was not reported by a gang."""
    counts = Counter(record.fault_counts) + Counter([fault.what])
    return Write({"fault_counts": dict(counts)}, [event(record, fault.kind, fault)])


def _at_once(record: JobRecord, reason: Reason, message: str, values: dict[str, Any]) -> Write | None:
    write = changed(record, reason, message, record.attempt)
    return write and replace(write, values=write.values | values)


def event(record: JobRecord, kind: str, data: Any) -> dict[str, Any]:
    """An event of a job's newest gang, now, by columns."""
    return {"job_id": record.id, "attempt": record.attempt, "kind": kind, "time": datetime.now(UTC), "data": data}
