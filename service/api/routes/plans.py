"""Plans of jobs before they are submitted, presets, examples and versions."""

import platform
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.concurrency import run_in_threadpool

from boost_core import __version__
from boost_core.config.job import JobSpec, load_job, uneven_layouts
from boost_core.plan.machine import Basis, Machine, refuse_unfit_gpu
from boost_core.plan.report import PresetList, presets
from boost_core.plan.run_cost import RunConditions
from service.accounts.keys import Principal
from service.api.admission import conditions_of, planned, refuse_small_vocabulary
from service.api.auth import Reader, Requires
from service.api.deps import Context, ContextDep
from service.api.errors import BODY_REFUSED, GUARDED, InvalidJob, at_fault
from service.api.requests import StrictRoute
from service.api.routes.cluster import shown
from service.jobs.outlook import size_of_a_node
from service.models.access import Scope
from service.models.cluster import Versions
from service.models.jobs import JobExample, JobExampleList, PlanAnswer, PlanRequest
from service.models.problems import FieldError

_FOLDER = Path(__file__).parents[2] / "examples"  # job files that are installed with the service


router = APIRouter(prefix="/v1", tags=["plans"], route_class=StrictRoute, responses=GUARDED)


@router.post("/plans", responses=BODY_REFUSED)
async def make_plan(request: PlanRequest, who: Reader, context: ContextDep) -> PlanAnswer:
    """Plan a job: its legal layouts, and the memory, communication and time of each. Data is not read.

    A vocabulary smaller than that of a dataset that the job names is refused.

    With `search`, also find the best layouts, micro-batches, schedules, ZeRO stages and recomputation for a number of
    GPUs. Seconds are predicted from the search's profile, else from that of the job's kind of GPU, else from data
    sheets; the last two are corrected by the times of earlier jobs there, unless the search gives a network. The number
    of GPUs per node is the search's, else that of the nodes that the service sees, else what their kind usually has.
    Layouts that need more host memory than these nodes have, if that is known, do not fit.

    Checkpoints and failures are planned with the request's `conditions`; what it leaves out is the operator's price of
    a GPU-hour, the rate at which the largest recent checkpoint of the tenant was written to the same store, and the
    failures of Llama 3's training.
    """
    job, machine, conditions, found = await run_in_threadpool(_looked_up, request, who, context)
    return PlanAnswer(**dict(await planned(job, machine, context, who.tenant, conditions)), **found)


def _looked_up(
    request: PlanRequest, who: Principal, context: Context
) -> tuple[JobSpec, Machine, RunConditions, dict[str, Any]]:
    """All that a plan needs, and what the answer shows beside it."""
    job = JobSpec.model_construct(**{name: getattr(request, name) for name in JobSpec.model_fields})
    if problems := uneven_layouts(job):  # which only records of earlier jobs may have
        raise InvalidJob([*map(FieldError.of, problems)])
    named = {name for _, name, _ in job.data.datasets}
    refuse_small_vocabulary(job, context.datasets.some(named, who.tenant).values())
    search = request.search
    sent = search.profile if search else None
    stored = context.profiles.for_job(job) if sent is None else None
    profile = stored.profile if stored else sent
    seen = size_of_a_node(job, context.store, autoscaling=context.settings.autoscaling)
    node_gpus = (search.node_gpus if search else None) or seen.gpus
    node_memory = (search.node_memory_bytes if search else None) or seen.memory_bytes
    fitted = context.observations.for_job(job, profile, node_gpus, who.tenant) if sent is None else None
    basis = Basis(profile=profile, fitted=fitted, node_gpus=node_gpus, node_memory_bytes=node_memory)
    described = search is not None and search.cluster is not None and search.cluster.device is not None
    if not described:
        with at_fault("resources.accelerator_type", ValueError):
            refuse_unfit_gpu(job, profile)
    with at_fault("search.profile", ValueError):
        machine = basis.machine(job)
    report, conditions = None, conditions_of(job, context, who.tenant, request.conditions)
    if search is not None:
        known = {"profile": profile, "node_gpus": node_gpus, "node_memory_bytes": node_memory}
        requested = search.model_copy(update=known)
        corrections = fitted if search.cluster is None and search.network_gigabits is None else None
        report = context.searches.plans(job, requested, who.tenant, corrections, conditions)
    chosen = context.searches.layouts(job, who.tenant, basis) if job.lacks_layouts and not described else None
    if chosen is not None:
        job = job.with_layouts(chosen.sizes)
    profiled = shown(stored, who) if stored else None
    return job, machine, conditions, {"chosen": chosen, "search": report, "profile": profiled, "fitted": fitted}


@router.get("/presets")
def list_presets(_who: Reader) -> PresetList:
    """List the published models that a job file can use as a preset."""
    return presets()


@router.get("/examples", dependencies=[Depends(Requires(Scope.READ))])  # no parameter, so that it can be cached
@cache
def list_examples() -> JobExampleList:
    """List example job files to start from, as offered by the web page."""
    # Those that need no GPU first; each is described by the comment at the top of its file.
    files = sorted(_FOLDER.glob("*.yaml"), key=lambda file: (load_job(file).resources.gpus_per_worker, file.stem))
    examples = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
        description = " ".join(line.lstrip("# ") for line in comment)
        examples.append(JobExample(name=file.stem, description=description, text=text))
    return JobExampleList(examples=examples)


@router.get("/versions")
def show_versions(_who: Reader, context: ContextDep) -> Versions:
    """Show the versions of the service and its dependencies."""
    versions: dict[str, Any] = {"ray": None, "torch": None}
    for package in versions:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    versions |= {"service": __version__, "api": "v1", "python": platform.python_version()}
    dashboard, database = context.settings.ray_dashboard_url, context.store.engine.dialect.name
    return Versions(**versions, ray_dashboard_url=dashboard, database=database)
