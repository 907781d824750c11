"""What jobs would take, before they are submitted, and what there is to choose from."""

import platform
from http import HTTPStatus
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from fastapi import APIRouter

from boost_core import __version__
from boost_core.config import JobSpec
from boost_core.plan.report import Plan, PresetList, plan, presets
from service.api.auth import Reader
from service.api.deps import ContextDep
from service.api.errors import problem_responses
from service.api.requests import StrictRoute
from service.models.versions import Versions

router = APIRouter(prefix="/v1", tags=["plans"], route_class=StrictRoute)


@router.post(
    "/plans", responses=problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
)
def make_plan(spec: JobSpec, _who: Reader) -> Plan:
    """Plan a job: its legal layouts, and the memory, communication and time of each. Data is not read."""
    return plan(spec)


@router.get("/presets")
def list_presets(_who: Reader) -> PresetList:
    """List the published models that a job file can name as preset."""
    return presets()


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
