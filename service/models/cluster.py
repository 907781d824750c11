"""What jobs share, as the API shows it: nodes, queues, scrape targets, versions, and profiles of kinds of GPU."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from boost_core.plan.machine import Basis, Fitted, MeasuredProfile


class NodeJob(BaseModel):
    """A job of the requesting tenant with ranks on a node."""

    id: str = Field(description="The job's ID.")
    name: str = Field(description="The job's name.")
    ranks: int = Field(description="Number of its ranks on the node.")


class NodeDataset(BaseModel):
    """A dataset that is being built, partly on a node."""

    name: str | None = Field(description="The dataset's name; null if it is another tenant's.")
    cpus: float = Field(description="CPUs that it holds there: neither free nor of a job's ranks, at most its own.")


class Node(BaseModel):
    """One node of the cluster."""

    node_id: str = Field(description="Ray's node ID.")
    labels: dict[str, str] = Field(description="Its labels, which jobs' node_labels are matched against.")
    total: dict[str, float] = Field(description="Total of each resource.")
    free: dict[str, float] = Field(description="Free amount of each resource.")
    draining: bool = Field(description="Whether it is draining; nothing new is placed on it.")
    unusable: str | None = Field(
        None, description="Why no rank can run on it, such as another version of the trainer; null: ranks can."
    )
    jobs: list[NodeJob] = Field(description="Jobs of the requesting tenant on it; operators see all jobs.")
    other_ranks: int = Field(description="Ranks of other tenants' jobs on it.")
    dataset: NodeDataset | None = Field(None, description="Dataset that is being built on it, if any.")


class NodeList(BaseModel):
    """The nodes, as the scheduler last saw them."""

    seen_at: datetime | None = Field(description="When the nodes were last observed; null if never.")
    nodes: list[Node] = Field(description="Ordered by ID.")


DEFAULT_QUEUE = "default"

QueueName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class Queue(BaseModel):
    """A queue: its limits and their usage."""

    name: str = Field(description="Its name, as used in job files.")
    description: str = Field(description="What it is for.")
    gpus: float | None = Field(description="Maximum number of GPUs that its jobs may hold at a time; null: no limit.")
    cpus: float | None = Field(description="Maximum number of CPUs that its jobs may hold at a time; null: no limit.")
    used_gpus: float = Field(description="GPUs that its jobs hold now.")
    used_cpus: float = Field(description="CPUs that its jobs hold now.")
    jobs: dict[str, int] = Field(description="Number of its jobs by state.")


class QueueList(BaseModel):
    """All queues."""

    queues: list[Queue] = Field(description="Ordered by name.")


class TargetLabels(BaseModel):
    """Labels that distinguish the series of a rank."""

    job_id: str = Field(description="The job.")
    job_name: str = Field(description="The job's name.")
    tenant: str = Field(description="The job's tenant.")
    rank: str = Field(description="The rank in its gang.")
    tensor_parallel_rank: str = Field(description="Its place in its tensor parallel group.")
    pipeline_parallel_rank: str = Field(description="Its place in its pipeline.")
    data_parallel_rank: str = Field(description="Its replica.")
    context_parallel_rank: str = Field(description="Its place among the ranks that share its sequences.")
    node: str = Field(description="Ray's node ID.")


class TargetGroup(BaseModel):
    """One rank."""

    targets: list[str] = Field(description="host:port of its metrics.")
    labels: TargetLabels


class Versions(BaseModel):
    """Versions of the service and its dependencies; null for what is not installed where the API runs."""

    service: str = Field(description="Version of BOOST Service.")
    api: str = Field(description="Version of the API, as in its paths.")
    python: str = Field(description="Version of Python.")
    ray: str | None = Field(description="Version of Ray.")
    torch: str | None = Field(description="Version of PyTorch.")
    ray_dashboard_url: str | None = Field(None, description="URL of the Ray cluster's dashboard, if configured.")
    database: Literal["sqlite", "postgresql"] = Field(description="Kind of database that the jobs are kept in.")


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
    def for_record(self) -> "StoredProfile":
        """The part that a job keeps: no name, and only what its predictions depend on."""
        profile = self.profile.model_copy(update={"cases": ()})
        return self.model_copy(update={"stored_by": None, "profile": profile})


def basis_of(
    stored: StoredProfile | None, fitted: Fitted | None, node_gpus: int | None, node_memory_bytes: int | None
) -> Basis:
    """Return what times are predicted from: a kind's stored profile, the jobs that ran on it, and its nodes."""
    profile = None if stored is None else stored.profile
    return Basis(profile=profile, fitted=fitted, node_gpus=node_gpus, node_memory_bytes=node_memory_bytes)


class ProfileList(BaseModel):
    """All profiles."""

    profiles: list[StoredProfile] = Field(description="Ordered by kind and precision.")
