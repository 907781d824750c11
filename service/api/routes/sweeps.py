"""Sweeps: trials of a job with other values of some fields, chosen, judged and pruned by the service."""

import asyncio
import errno
import weakref
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from http import HTTPStatus
from subprocess import CalledProcessError
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection

from boost_core.config.base import ResourceName, StoreUnusable
from service.api.admission import admitted, record_job
from service.api.auth import Reader, Submitter
from service.api.deps import Context, ContextDep
from service.api.errors import BODY_REFUSED, CONFLICT, GUARDED, INVALID, NOT_FOUND, InvalidJob
from service.api.limits import StoreAccess
from service.api.requests import CSV, StrictRoute, in_format
from service.jobs import sweep_study
from service.jobs.model import JobRecord, Owner
from service.models.jobs import AnswerFormat
from service.models.problems import FieldError
from service.models.sweeps import IllegalTrial, Sweep, SweepDetail, SweepList, SweepRequest, SweepTrialList
from service.security.secrets import SecretUnusable

# What submits the job of a trial: of a sweep, by number, with parameters; writes more in the same transaction.
Submit = Callable[[Sweep, int, Mapping[str, Any], Callable[[Connection], None]], JobRecord]

router = APIRouter(prefix="/v1/sweeps", tags=["sweeps"], route_class=StrictRoute, responses=GUARDED)

SweepPath = Annotated[ResourceName, Path(description="The sweep.")]

_MOST_SPACE_BYTES = 2**15  # Optuna stores it with each trial, and each service holds that in memory
_MOST_REPORTED = 10  # combinations that make no job
_CHECK_SECONDS = 20.0  # for looking at stores and searching layouts; clients wait for a minute
_MORE_SECONDS = 10.0  # for the spec of each trial alone; a thousand large ones take a minute
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EMFILE, errno.ENFILE}  # of disks, NFS, us


@router.post("", status_code=HTTPStatus.CREATED, responses=BODY_REFUSED | CONFLICT)
async def create_sweep(request: SweepRequest, who: Submitter, context: ContextDep) -> Sweep:
    """Begin a sweep; beginning the same again returns it. Its trials become jobs in the group of its name."""
    if (size := len(request.model_dump_json(include={"space"}).encode())) > _MOST_SPACE_BYTES:
        message = f"the choices of all fields take {size} bytes, but {_MOST_SPACE_BYTES} is the limit; leave some out"
        raise InvalidJob([FieldError(field="space", message=message)])
    gpus = request.job.resources.gpus_per_worker or any(path.startswith("resources") for path in request.space)
    if request.search != "grid" and not (gpus or request.budget.trials or request.budget.tokens):
        message = "the job takes no GPUs (resources.gpus_per_worker=0), so this never ends; set budget.trials or tokens"
        raise InvalidJob([FieldError(field="budget.gpu_hours", message=message, value=request.budget.gpu_hours)])
    now = asyncio.get_running_loop().time
    errors, until = list[FieldError](), now() + _CHECK_SECONDS
    for parameters in request.combinations():
        if now() >= until + _MORE_SECONDS:
            break
        try:
            spec = await context.plans.run(who.tenant, partial(request.trial, 0, parameters))
            if now() < until:  # else stores and searches have taken long; the rest is checked when it is submitted
                await admitted(spec, context, who.tenant, lambda _: True, pins=False)
        except (IllegalTrial, InvalidJob) as error:
            illegal = IllegalTrial(parameters, error.errors) if isinstance(error, InvalidJob) else error
            errors.append(FieldError(field="space", message=str(illegal)))
        if len(errors) == _MOST_REPORTED:
            break
    if errors:
        raise InvalidJob(errors)
    return await run_in_threadpool(context.sweeps.create, request, Owner(who.tenant, who.name))


@router.get("", responses=INVALID)
def list_sweeps(
    who: Reader, context: ContextDep, limit: Annotated[int, Query(ge=1, le=500, description="Maximum number.")] = 100
) -> SweepList:
    """List the tenant's sweeps, newest first."""
    return SweepList(sweeps=list(context.sweeps.list(who.tenant, limit)))


@router.get("/{name}", responses=NOT_FOUND | CONFLICT)
def show_sweep(name: SweepPath, who: Reader, context: ContextDep) -> SweepDetail:
    """Show one sweep, with its best trial and how much each field matters."""
    sweep = context.sweeps.get(name, who.tenant)
    return SweepDetail(**dict(sweep), importance=context.studies.importance(sweep.id, sweep.spec))


@router.get("/{name}/trials", response_model=SweepTrialList, responses=NOT_FOUND | CONFLICT | CSV)
def list_trials(name: SweepPath, who: Reader, context: ContextDep, format: AnswerFormat = "json") -> Response:  # noqa: A002
    """List a sweep's trials with their parameters and values, as JSON or CSV."""
    sweep = context.sweeps.get(name, who.tenant)
    trials, jobs = context.studies.trials(sweep.id), context.store.of_sweep(sweep.id)
    return in_format(SweepTrialList(trials=sweep_study.all_shown(sweep.spec, trials, jobs)), format)


@router.post("/{name}/stop", status_code=HTTPStatus.ACCEPTED, responses=NOT_FOUND | CONFLICT)
def stop_sweep(name: SweepPath, who: Submitter, context: ContextDep) -> Sweep:
    """Stop a sweep: no more trials start, and those under way save a checkpoint and end."""
    return context.sweeps.request_stop(name, who.tenant)


def _may_pass(error: BaseException | None) -> bool:
    """Whether a job was refused because a store, disk, secret or search could not be used for now."""
    match error:
        case StoreUnusable() | SecretUnusable():
            return True
        case CalledProcessError():
            return error.returncode < 0  # by a signal, as if memory is short
        case OSError(errno=number) if number in _PASSING:
            return True
    return error is not None and _may_pass(error.__cause__)


def trial_submitter(context: Context) -> Submit:
    """Return what submits the jobs of trials from one thread outside the server, by the same rules as for requests.

    Args:
        context: The service's parts.
    """
    # The server's own access to stores belongs to its event loop. This one is as lasting: threads that hang keep their
    # tenants' slots from one call to the next, so their number is bounded.
    loop, apart = asyncio.new_event_loop(), copy(context)
    apart.stores = StoreAccess(context.settings.store_seconds)

    def submit(
        sweep: Sweep, number: int, parameters: Mapping[str, Any], alongside: Callable[[Connection], None]
    ) -> JobRecord:
        owner, trial = Owner(sweep.tenant, sweep.submitted_by), (sweep.id, number)
        record = partial(record_job, context=context, owner=owner, trial=trial, alongside=alongside)
        try:
            return loop.run_until_complete(admitted(sweep.spec.trial(number, parameters), apart, sweep.tenant, record))
        except InvalidJob as error:
            if _may_pass(error) or any(each.field.endswith(".credentials") for each in error.errors):  # of a tracker
                raise
            raise IllegalTrial(parameters, error.errors) from error

    weakref.finalize(submit, loop.close)
    return submit
