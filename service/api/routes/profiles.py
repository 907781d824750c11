"""Profiles of kinds of GPU: measured per precision, stored by operators, used for every job's predictions."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.exceptions import RequestValidationError

from boost_core.config.job import AcceleratorType
from boost_core.plan.machine import MeasuredProfile, ProfilePrecision
from service.accounts.keys import Principal
from service.api.auth import Admin, Reader
from service.api.deps import ContextDep
from service.api.errors import problem_responses
from service.api.requests import StrictRoute
from service.models.access import Scope
from service.models.cluster import ProfileList, StoredProfile

router = APIRouter(prefix="/v1/profiles", tags=["profiles"], route_class=StrictRoute)

KindPath = Annotated[AcceleratorType, Path(description="Ray's name for the kind of GPU, for example H100.")]
PrecisionQuery = Annotated[ProfilePrecision | None, Query(description="Only the profile measured at this precision.")]

_NOT_FOUND = problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)


def shown(stored: StoredProfile, who: Principal) -> StoredProfile:
    """A profile as shown to a principal: only operators see the names of operators' keys."""
    return stored if who.may(Scope.ADMIN) else stored.anonymous


@router.get("")
def list_profiles(who: Reader, context: ContextDep) -> ProfileList:
    """List the profiles of all kinds of GPU."""
    return ProfileList(profiles=[shown(stored, who) for stored in context.profiles.list()])


@router.get("/{kind}", responses=_NOT_FOUND)
def show_profile(kind: KindPath, who: Reader, context: ContextDep, precision: PrecisionQuery = None) -> StoredProfile:
    """Show the profile of one kind of GPU; by default the one in bf16 if there are several."""
    return shown(context.profiles.get(kind, precision), who)


@router.put(
    "/{kind}", responses=problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
)
def put_profile(kind: KindPath, profile: MeasuredProfile, who: Admin, context: ContextDep) -> StoredProfile:
    """Store the profile of a kind of GPU, replacing any profile of the same precision."""
    try:
        profile.refuse_other_kind(kind)
    except ValueError as error:
        fault = {"type": "value_error", "loc": ("body", "device"), "msg": str(error), "input": profile.device}
        raise RequestValidationError([fault]) from error
    return context.profiles.put(kind, profile, who.name)


@router.delete("/{kind}", status_code=HTTPStatus.NO_CONTENT, responses=_NOT_FOUND)
def delete_profile(kind: KindPath, _who: Admin, context: ContextDep, precision: PrecisionQuery = None) -> None:
    """Delete the profiles of a kind of GPU, or only one precision's; its jobs are then planned from data sheets."""
    context.profiles.delete(kind, precision)
