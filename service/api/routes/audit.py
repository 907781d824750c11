"""The audit log."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from service.api.auth import Admin
from service.api.deps import ContextDep
from service.api.errors import problem_responses
from service.models.audit import AuditPage
from service.models.identity import TenantName

router = APIRouter(prefix="/v1/audit", tags=["audit"])

_LARGEST_ID = 2**63 - 1  # what a database can compare


class AuditQuery(BaseModel):
    """Which entries to list."""

    model_config = ConfigDict(extra="forbid")

    tenant: TenantName | None = Field(None, description="Only of this tenant.")
    after: int = Field(0, ge=0, le=_LARGEST_ID, description="next_after of the previous page.")
    limit: int = Field(100, ge=1, le=500, description="Maximum number of results.")


@router.get("", responses=problem_responses(HTTPStatus.UNPROCESSABLE_ENTITY))
def list_entries(query: Annotated[AuditQuery, Query()], _who: Admin, context: ContextDep) -> AuditPage:
    """List the audit log, oldest entries first."""
    return context.audit.page(query.tenant, query.after, query.limit)
