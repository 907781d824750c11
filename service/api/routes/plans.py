"""What jobs would take, before they are submitted, and what there is to choose from."""

import platform
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from fastapi import APIRouter

from boost_core import __version__
from boost_core.plan.report import PresetList, plan, presets
from boost_core.plan.search_process import SearchFailed, TooLong, search_apart
from boost_core.plan.search_report import SearchReport
from service.api.auth import Reader
from service.api.deps import ContextDep
from service.api.errors import InvalidJob, problem_responses
from service.api.job_examples import job_examples
from service.api.requests import StrictRoute
from service.api.searches import Searches
from service.models.examples import JobExampleList
from service.models.plans import PlanAnswer, PlanRequest
from service.models.problems import FieldError
from service.models.versions import Versions

_SEARCH_SECONDS = 20.0

router = APIRouter(prefix="/v1", tags=["plans"], route_class=StrictRoute)
_searches = Searches()


@router.post(
    "/plans", responses=problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
)
def make_plan(request: PlanRequest, who: Reader) -> PlanAnswer:
    """Plan a job: its legal layouts, and the memory, communication and time of each. Data is not read.

    With `search`, also the best layouts, micro-batches, schedules, ZeRO stages and recomputation for some GPUs.
    """
    return PlanAnswer(**dict(plan(request)), search=_found(request, who.tenant))


def _found(request: PlanRequest, tenant: str) -> SearchReport | None:
    """What is searched for.

    Raises:
        InvalidJob: The profile does not go with the job, it takes too long, or it fails.
        RateLimited: The tenant's other search is under way, or too many of others are.
    """
    asked = request.search
    if asked is None:
        return None
    try:
        asked.machine(request)
    except ValueError as error:
        raise InvalidJob([FieldError(field="search.profile", message=str(error))]) from error
    with _searches.one_of(tenant):
        try:
            return search_apart(request.job, asked, _SEARCH_SECONDS)
        except (TooLong, SearchFailed) as error:
            raise InvalidJob([FieldError(field="search", message=str(error))]) from error


@router.get("/presets")
def list_presets(_who: Reader) -> PresetList:
    """List the published models that a job file can name as preset."""
    return presets()


@router.get("/examples")
def list_examples(_who: Reader) -> JobExampleList:
    """List job files to begin with, as the web page offers them."""
    return job_examples()


@router.get("/versions")
def show_versions(_who: Reader, context: ContextDep) -> Versions:
    """Versions of the service and of what it runs on."""
    database: Literal["sqlite", "postgresql"] = (
        "postgresql" if context.store.engine.dialect.name == "postgresql" else "sqlite"
    )
    return Versions(
        service=__version__,
        api="v1",
        python=platform.python_version(),
        ray=_installed("ray"),
        torch=_installed("torch"),
        ray_dashboard_url=context.settings.ray_dashboard_url,
        database=database,
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
