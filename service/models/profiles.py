"""Profiles of kinds of GPU, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from boost_core.plan.machine import Basis, Fitted, MeasuredProfile


class StoredProfile(BaseModel):
    """A measured profile of a kind of GPU at one precision, and who stored it."""

    model_config = ConfigDict(frozen=True)

    kind: str = Field(description="The kind of GPU by its name in Ray, as in resources.accelerator_type.")
    stored_at: datetime = Field(description="When it was stored.")
    stored_by: str | None = Field(
        None, description="Name of the key it was stored with; shown to operators only, null for others."
    )
    profile: MeasuredProfile = Field(description="As written by boost bench profile; without its cases in jobs.")

    @property
    def anonymous(self) -> "StoredProfile":
        """The profile without the name of an operator's key."""
        return self.model_copy(update={"stored_by": None})

    @property
    def for_record(self) -> "StoredProfile":
        """The part that a job keeps: no name, and only what its predictions depend on."""
        return self.anonymous.model_copy(update={"profile": self.profile.model_copy(update={"cases": ()})})


def basis_of(
    stored: StoredProfile | None, fitted: Fitted | None, node_gpus: int | None, node_memory_bytes: int | None
) -> Basis:
    """Return what times are predicted from: a kind's stored profile, the jobs that ran on it, and its nodes."""
    profile = None if stored is None else stored.profile
    return Basis(profile=profile, fitted=fitted, node_gpus=node_gpus, node_memory_bytes=node_memory_bytes)


class ProfileList(BaseModel):
    """All profiles."""

    profiles: list[StoredProfile] = Field(description="Ordered by kind and precision.")
