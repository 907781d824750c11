"""Datasets: built by the service, and used by jobs by name."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from fastapi.concurrency import run_in_threadpool

from boost_core.config.training import DatasetName
from service.api.admission import if_dataset_fits
from service.api.auth import Reader, Submitter
from service.api.deps import ContextDep
from service.api.errors import BODY_REFUSED, CONFLICT, GUARDED, NOT_FOUND
from service.api.requests import StrictRoute
from service.jobs.datasets import DatasetNotFound
from service.jobs.model import Owner
from service.models.access import Scope, TenantName
from service.models.datasets import Dataset, DatasetDetail, DatasetList, DatasetRequest

router = APIRouter(prefix="/v1/datasets", tags=["datasets"], route_class=StrictRoute, responses=GUARDED)

DatasetPath = Annotated[DatasetName, Path(description="The dataset.")]


@router.post("", status_code=HTTPStatus.CREATED, responses=BODY_REFUSED | CONFLICT)
async def create_dataset(request: DatasetRequest, who: Submitter, context: ContextDep) -> Dataset:
    """Build a dataset. One that failed or was cancelled continues with the remaining files."""
    await if_dataset_fits(request, context, who.tenant)
    root, owner = context.settings.checkpoint_root, Owner(who.tenant, who.name)
    return await run_in_threadpool(context.datasets.create, request, root, owner)


@router.get("")
def list_datasets(who: Reader, context: ContextDep) -> DatasetList:
    """List the tenant's datasets."""
    return DatasetList(datasets=list(context.datasets.list(who.tenant)))


@router.get("/{name}", responses=NOT_FOUND)
def show_dataset(name: DatasetPath, who: Reader, context: ContextDep) -> DatasetDetail:
    """Show one dataset with its full lineage."""
    return context.datasets.get(name, who.tenant)


@router.post("/{name}/cancel", responses=NOT_FOUND | CONFLICT)
def cancel_dataset(
    name: DatasetPath, who: Submitter, context: ContextDep,
    tenant: Annotated[TenantName | None, Query(description="Its tenant; default: one's own. For operators.")] = None,
) -> Dataset:  # fmt: skip
    """Stop building a dataset. Created again, it continues with the remaining files."""
    if tenant not in (None, who.tenant) and not who.may(Scope.ADMIN):
        raise DatasetNotFound(name)
    return context.datasets.cancel(name, tenant or who.tenant)


@router.delete("/{name}", status_code=HTTPStatus.NO_CONTENT, response_class=Response, responses=NOT_FOUND | CONFLICT)
def delete_dataset(name: DatasetPath, who: Submitter, context: ContextDep) -> None:
    """Delete the record of a dataset that no active job uses. Its files stay where they are."""
    context.datasets.delete(name, who.tenant)
