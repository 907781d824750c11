"""Profiles of kinds of GPU, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from boost_core.plan.fitted import Fitted
from boost_core.plan.measured import Basis, MeasuredProfile


class StoredProfile(BaseModel):
    """What was measured of a kind of GPU at one precision, and who has stored it."""

    model_config = ConfigDict(frozen=True)

    kind: str = Field(description="The kind of GPU by Ray's name, as in resources.accelerator_type.")
    stored_at: datetime = Field(description="When it was stored.")
    stored_by: str = Field(description="Name of the key that it was stored with.")
    profile: MeasuredProfile = Field(description="As boost bench profile wrote it.")


def basis_of(stored: StoredProfile | None, fitted: Fitted | None) -> Basis:
    """What seconds are predicted by, of what is stored of a kind and of the jobs that ran on it."""
    return Basis(profile=None if stored is None else stored.profile, fitted=fitted)


class ProfileList(BaseModel):
    """All profiles."""

    profiles: list[StoredProfile] = Field(description="Ordered by kind and precision.")
