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
    stored_by: str | None = Field(
        None, description="Name of the key that it was stored with; null in what others than operators read."
    )
    profile: MeasuredProfile = Field(description="As boost bench profile wrote it; without its cases in jobs.")

    @property
    def anonymous(self) -> "StoredProfile":
        """The same without the name of an operator's key."""
        return self.model_copy(update={"stored_by": None})

    @property
    def for_record(self) -> "StoredProfile":
        """What of it a job keeps: no name, and nothing that its predictions do not depend on."""
        return self.anonymous.model_copy(update={"profile": self.profile.model_copy(update={"cases": ()})})


def basis_of(stored: StoredProfile | None, fitted: Fitted | None, node_gpus: int | None) -> Basis:
    """What seconds are predicted by: what is stored of a kind, the jobs that ran on it, and its nodes' size."""
    return Basis(profile=None if stored is None else stored.profile, fitted=fitted, node_gpus=node_gpus)


class ProfileList(BaseModel):
    """All profiles."""

    profiles: list[StoredProfile] = Field(description="Ordered by kind and precision.")
